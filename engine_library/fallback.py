"""Reasons for a native call although an engine was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..architectures.calls import UncoveredCall


@dataclass(frozen=True)
class _Facts:
    """Facts about a reason, see the attributes of ``Reason``."""

    advice: str
    meaning: str = "Same picture, normal speed"
    state: str = "unavailable"
    a_build_ends_it: bool = False
    lacks_engine: bool = False
    breaks_engine: bool = False
    ends_run: bool = False


class Reason(str, Enum):
    """Closed list of fallback reasons; users read the value.

    Attributes:
        advice: what users can do.
        meaning: the effect on the image, in words.
        state: the state of a node whose engine does not serve for this reason.
        lacks_engine: no engine could serve: the report counts it as missing.
        breaks_engine: the engine is left alone until it is built again. One that failed may have lacked memory.
        ends_run: one call leaves the rest of the run to native.
    """

    advice: str
    meaning: str
    state: str
    a_build_ends_it: bool
    lacks_engine: bool
    breaks_engine: bool
    ends_run: bool

    def __new__(cls, value: str, facts: _Facts) -> Reason:
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.__dict__.update(vars(facts))
        return reason

    NO_ENGINE = "no engine", _Facts(
        "press Build engine, or choose 'build first' or 'build meanwhile' on its node, and run",
        state="none", a_build_ends_it=True, lacks_engine=True,
    )
    NOT_WIRED = "no engine wired in", _Facts(
        "switch TRT UNet Engine on again, or wire its engine into TRT Sampler Patch",
    )
    BUILD_FAILED = "build failed", _Facts("fix what the message names and run again")
    BUILT_ELSEWHERE = "another machine builds it", _Facts(
        "nothing to do: it is used as soon as it is in the library", a_build_ends_it=True,
    )
    STALE_ENGINE = "outdated engine", _Facts(
        "build it again: it was made by another version, on another machine or for another GPU",
        state="stale", a_build_ends_it=True, lacks_engine=True,
    )
    BROKEN_ENGINE = "damaged engine", _Facts(
        "build it again: its files are missing or damaged",
        state="broken", a_build_ends_it=True, lacks_engine=True, breaks_engine=True, ends_run=True,
    )
    UNCHECKED = "not checked here", _Facts(
        "press Check engine, or choose 'build first' on the engine node, to have it compared with the normal model",
        state="unchecked", a_build_ends_it=True,
    )
    BACKEND_MISSING = "backend missing", _Facts(
        "install the backend that the message names, or choose another on the engine node",
    )
    WRONG_GPU = "wrong GPU", _Facts(
        "build an engine for this GPU, or choose a backend that supports it",
        a_build_ends_it=True, lacks_engine=True, breaks_engine=True, ends_run=True,
    )
    OTHER_MODEL = "engine of another model", _Facts("wire the same model into the engine node and the sampler patch")
    UNSUPPORTED_MODEL = "unsupported model", _Facts(
        "choose the backend that the message names; if it names none, there is nothing to do",
    )
    SHAPE_OUTSIDE_PROFILE = "size the engine was not built for", _Facts(
        "choose a wider Picture size on the engine node and build again",
    )
    WEIGHTS_PATCHED = "weights changed", _Facts(
        "put the LoRA before the engine node and build again, or set 'Engine is for' to any checkpoint and "
        "LoRA, or leave it: the normal model applies it",
    )
    MODEL_PATCHED = "changed by another node", _Facts("remove the node that does so if you want the engine")
    HOOKS = "LoRA tied to a prompt", _Facts("remove that LoRA's hook nodes if you want the engine")
    NOT_REACHED = "not called through TRT Sampler Patch", _Facts(
        "remove the node that computes the UNet by itself (DeepCache ...) if you want the engine",
        meaning="Same picture as that node makes without engines",
    )
    OTHER_KIND = "made for another kind of model", _Facts(
        "choose a ControlNet, or a prompt, for the kind of model that is sampled",
        meaning="The normal model runs: it leaves out what does not fit, or ends the prompt",
    )
    UNSUPPORTED_INPUT = "unsupported input", _Facts(
        "add the input that the message misses, or remove the one that it names, if you want the engine",
    )
    LARGER_THAN_GPU = "larger than the free GPU memory", _Facts(
        "free GPU memory if you want the engine: with more of it both are timed again", state="ready",
    )
    ENGINE_FAILED = "engine failed", _Facts("see the log for the error; run again to retry the engine", ends_run=True)


@dataclass(frozen=True)
class Fallback:
    """Reason with the particulars of one case, for example which shape did not fit.

    Attributes:
        sizes: sizes of a call that the engine was not built for, symbol -> size.
        uncovered: the call, where an engine of its own size would serve it.
        this_call_only: True if other calls of the run are still served.
        advice: what to do, where it is not what the reason usually wants.
    """

    reason: Reason
    detail: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    uncovered: UncoveredCall | None = None
    this_call_only: bool = False
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value

    def sentence(self, advice: str = "") -> str:
        """Say what happened, its effect on the image and what to do: ``advice``, or the reason's usual advice."""
        return f"{self}. {self.reason.meaning}; {advice or self.advice or self.reason.advice}."


class Unavailable(Exception):
    """Error of an engine that cannot be used; carries the fallback that says why."""

    def __init__(self, reason: Reason, detail: str = "", **particulars: Any):
        """``particulars``: other fields of ``Fallback``."""
        self.fallback = Fallback(reason, detail, **particulars)
        super().__init__(str(self.fallback))

    @classmethod
    def of(cls, fallback: Fallback) -> Unavailable:
        """Return the error that carries a fallback as it is."""
        error = cls(fallback.reason, fallback.detail)
        error.fallback = fallback
        return error


class BuildError(Exception):
    """Failure of a build; the text says what happened and what to do."""


class ValidationFailed(BuildError):
    """Verdict on an engine whose comparison with native failed."""
