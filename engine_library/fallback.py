"""Reasons for a native call although an engine was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..architectures.calls import UncoveredCall


class Reason(str, Enum):
    """Closed list of fallback reasons; users read the value, and what they can do in ``advice``."""

    NO_ENGINE = "no engine"
    NOT_WIRED = "no engine wired in"
    BUILD_FAILED = "build failed"
    BUILT_ELSEWHERE = "another machine builds it"
    STALE_ENGINE = "stale engine"
    BROKEN_ENGINE = "broken engine"
    UNCHECKED = "not checked here"
    BACKEND_MISSING = "backend missing"
    WRONG_GPU = "wrong GPU"
    OTHER_MODEL = "engine of another model"
    UNSUPPORTED_MODEL = "unsupported model"
    SHAPE_OUTSIDE_PROFILE = "size the engine was not built for"
    WEIGHTS_PATCHED = "weights patched"
    MODEL_PATCHED = "model patched"
    HOOKS = "hooks"
    NOT_REACHED = "not called through TRT Sampler Patch"
    OTHER_KIND = "made for another kind of model"
    UNSUPPORTED_INPUT = "unsupported input"
    ENGINE_FAILED = "engine failed"

    @property
    def advice(self) -> str:
        return _FACTS[self].advice

    @property
    def meaning(self) -> str:
        """The effect on the image, in words."""
        return _FACTS[self].meaning

    @property
    def state(self) -> str:
        """The state of a node whose engine does not serve for this reason."""
        return _FACTS[self].state

    @property
    def a_build_ends_it(self) -> bool:
        return _FACTS[self].a_build_ends_it

    @property
    def lacks_engine(self) -> bool:
        """Tell whether no engine could serve: the report counts it as missing."""
        return _FACTS[self].lacks_engine

    @property
    def breaks_engine(self) -> bool:
        """Tell whether the engine is left alone until it is built again. One that failed may have lacked memory."""
        return _FACTS[self].breaks_engine

    @property
    def ends_run(self) -> bool:
        """Tell whether one call leaves the rest of the run to native."""
        return _FACTS[self].ends_run


@dataclass(frozen=True)
class _Facts:
    """Facts about a reason, see the properties of ``Reason``."""

    advice: str
    meaning: str = "Same picture, normal speed"
    state: str = "unavailable"
    a_build_ends_it: bool = False
    lacks_engine: bool = False
    breaks_engine: bool = False
    ends_run: bool = False


_FACTS = {
    Reason.NO_ENGINE: _Facts(
        "press Build engine, or choose 'build first' or 'build meanwhile' on its node, and run",
        state="none", a_build_ends_it=True, lacks_engine=True,
    ),
    Reason.NOT_WIRED: _Facts("switch TRT UNet Engine on again, or wire its engine into TRT Sampler Patch"),
    Reason.BUILD_FAILED: _Facts("fix what the message names and run again"),
    Reason.BUILT_ELSEWHERE: _Facts("nothing to do: it is used as soon as it is in the library", a_build_ends_it=True),
    Reason.STALE_ENGINE: _Facts(
        "build it again: it was made by another version, on another machine or for another GPU",
        state="stale", a_build_ends_it=True, lacks_engine=True,
    ),
    Reason.BROKEN_ENGINE: _Facts(
        "build it again: its files are missing or damaged",
        state="broken", a_build_ends_it=True, lacks_engine=True, breaks_engine=True, ends_run=True,
    ),
    Reason.UNCHECKED: _Facts(
        "press Check engine, or choose 'build first' on the engine node, to have it compared with the normal model",
        state="unchecked", a_build_ends_it=True,
    ),
    Reason.BACKEND_MISSING: _Facts("install the backend that the message names, or choose another on the engine node"),
    Reason.WRONG_GPU: _Facts(
        "build an engine for this GPU, or choose a backend that supports it",
        a_build_ends_it=True, lacks_engine=True, breaks_engine=True, ends_run=True,
    ),
    Reason.OTHER_MODEL: _Facts("wire the same model into the engine node and the sampler patch"),
    Reason.UNSUPPORTED_MODEL: _Facts(
        "choose the backend that the message names; if it names none, there is nothing to do",
    ),
    Reason.SHAPE_OUTSIDE_PROFILE: _Facts("choose a wider Picture size on the engine node and build again"),
    Reason.WEIGHTS_PATCHED: _Facts(
        "put the LoRA before the engine node and build again, or set 'Engine is for' to any checkpoint and "
        "LoRA, or leave it: the normal model applies it",
    ),
    Reason.MODEL_PATCHED: _Facts("remove the node that does so if you want the engine"),
    Reason.HOOKS: _Facts("remove the hooks from the conditioning if you want the engine"),
    Reason.NOT_REACHED: _Facts(
        "remove the node that computes the UNet by itself (DeepCache ...) if you want the engine",
        meaning="Same picture as that node makes without engines",
    ),
    Reason.OTHER_KIND: _Facts(
        "choose a ControlNet, or a prompt, for the kind of model that is sampled",
        meaning="The normal model runs: it leaves out what does not fit, or ends the prompt",
    ),
    Reason.UNSUPPORTED_INPUT: _Facts(
        "add the input that the message misses, or remove the one that it names, if you want the engine",
    ),
    Reason.ENGINE_FAILED: _Facts("see the log for the error; run again to retry the engine", ends_run=True),
}


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
