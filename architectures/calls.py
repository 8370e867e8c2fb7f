"""Calls of a native network as calls of an engine: arguments, residuals, per-image passes; and what lacks an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .shapes import Picture, Profile, TensorSpec

if TYPE_CHECKING:
    import torch

    from . import Architecture

Control = dict[str, list]
"""Residuals as ComfyUI passes them: list name (``input``, ``output``, ``middle``) -> a tensor or None in each place."""


class Unsupported(Exception):
    """A call that no engine of the family can serve; the text names the obstacle in words of the workflow."""


class OtherKind(Unsupported):
    """A call that was made for another kind of network."""


def refuse_all_but(call: Mapping[str, Any], taken: Collection[str]) -> None:
    """Raise Unsupported where a call gives an argument that is not in ``taken``."""
    for name, value in call.items():
        if value is not None and name not in taken:
            raise not_done(name)


_CALLED = {
    "attention_mask": "a mask of the prompt",
    "clip_fea": "a picture by CLIP Vision",
    "context_latents": "reference images",
    "control": "a ControlNet",
    "denoise_mask": "a noise mask",
    "guidance": "guidance",
    "guiding_frame_index": "a guiding frame",
    "ref_latent": "a reference image",
    "ref_latents": "reference images",
    "reference_latent": "a reference image",
    "vace_context": "a control video",
}
"""Arguments as people know them."""


def not_done(name: str) -> Unsupported:
    """Return the error for an argument that engines of a family do not take."""
    words = f"{_CALLED[name]} ({name})" if name in _CALLED else f"an input named {name}"
    return Unsupported(f"{words}, which engines of this model do not do")


def prompt_of(call: Mapping[str, Any]) -> torch.Tensor:
    """Return the prompt's tokens; Unsupported where a call has none."""
    context = call.get("context")
    if context is None:
        raise Unsupported("no prompt, which this model needs")
    return context


@dataclass(frozen=True, slots=True)
class AsyncInputs:
    """Inputs of a call that are not computed yet.

    Attributes:
        names: of the inputs.
        stream: computes them.
        ready: recorded on the stream behind the last input.
    """

    names: frozenset[str]
    stream: torch.cuda.Stream
    ready: torch.cuda.Event


@dataclass(slots=True)
class EngineCall:
    """A call of an engine in the place of a native call.

    Attributes:
        inputs: tensors by name, of any float dtype on any device, for the engine and its per-image passes.
        finish: the engine's outputs by name -> the result of the native call, in fresh tensors.
        extras: a per-image pass's name -> further values that its result depends on; compared, so hashable.
        residuals: names of the inputs that are a ControlNet's residuals.
        late: inputs that another stream still computes, for a session that takes such; None where all are computed.
    """

    inputs: dict[str, torch.Tensor]
    finish: Callable[[Mapping[str, torch.Tensor]], Any]
    extras: Mapping[str, Hashable] = field(default_factory=dict)
    residuals: frozenset[str] = frozenset()
    late: AsyncInputs | None = None


Binding = Callable[[Mapping[str, Any]], EngineCall]
"""A native call, the arguments of the network's forward by name -> a call of the engine.

Raises:
    Unsupported: no engine of the family takes such a call.
"""


@dataclass(frozen=True)
class PerImagePass:
    """A part of a network that runs by itself, from its live weights, once per image and not in every step.

    Attributes:
        takes: its input; a call gives it under this name.
        gives: names of the engine's inputs that it makes, in order.
        function: the input, and the call's extra if any -> a tensor for each of ``gives``.
    """

    takes: TensorSpec
    gives: tuple[str, ...]
    function: torch.nn.Module

    @property
    def name(self) -> str:
        return self.takes.name


@dataclass(frozen=True)
class ResidualLayout:
    """Names of an engine's tensors for the residuals in ComfyUI's lists.

    Attributes:
        places: list name -> the tensor's name for each place, in the order in which native consumes the list. None
            for a place whose residual native adds and the engine does not take. A tensor may stand in several places.
        from_end: whether native consumes lists from their end (UNetModel pops) or from their start (transformers).
    """

    places: Mapping[str, Sequence[str | None]]
    from_end: bool = True

    def take(self, control: Mapping[str, Sequence] | None, batch: int) -> dict[str, torch.Tensor]:
        """Return tensor name -> residual. ``control`` is only read: native would pop from its lists.

        A residual that ComfyUI made once for a whole batch is expanded, as adding it natively does.

        Raises:
            Unsupported: a residual acts where the engine takes none.
        """
        given: dict[str, torch.Tensor] = {}
        expanded: dict[int, torch.Tensor] = {}  # a residual in several places stays the same object
        for kind, residuals in (control or {}).items():
            in_order = reversed(residuals) if self.from_end else residuals
            for name, residual in zip(self.places.get(kind, ()), in_order, strict=False):
                if residual is None:
                    continue
                if name is None:
                    raise Unsupported(f"a control that acts on {kind} blocks, which engines of this model do not do")
                if batch > 1 and residual.shape[0] == 1:
                    if id(residual) not in expanded:
                        expanded[id(residual)] = residual.expand(batch, *residual.shape[1:])
                    residual = expanded[id(residual)]
                given[name] = residual
        return given

    def give(self, outputs: Mapping[str, torch.Tensor], like: torch.Tensor) -> Control:
        """Return native's lists, on the device and of the dtype of ``like``."""
        device, dtype = like.device, like.dtype
        step = -1 if self.from_end else 1
        return {
            kind: [outputs[name].to(device, dtype) for name in names[::step]] for kind, names in self.places.items()
        }


Call = Mapping[str, int]
"""The sizes of a call, symbol -> size."""


@dataclass(frozen=True)
class UncoveredCall:
    """A call without an engine for it.

    Attributes:
        sizes: of the call, (symbol, size).
        words: the sizes for people.
        ran: how it ran instead: ``"graph"``, ``"eager"`` (both on live weights) or ``"native"``.
    """

    sizes: frozenset[tuple[str, int]]
    words: str
    ran: str


@dataclass(frozen=True)
class RequestedCalls:
    """The calls that a node wants engines for.

    Attributes:
        profile: the node's sizes.
        pictures: that the graph asks for, as far as they are known.
        seen: calls of the last run that had no engine, the most frequent first; None before a run.
    """

    profile: Profile
    pictures: Sequence[Picture] = ()
    seen: Sequence[Call] | None = None

    def wanted(self, architecture: Architecture) -> tuple[Call, ...]:
        """Return the calls that a run or the graph has shown; where neither can, the profile's best."""
        shown = (*(self.seen or ()), *self._sampled(architecture))
        return shown if shown or self.seen is not None else (self.profile.sizes("opt"),)

    def _sampled(self, architecture: Architecture) -> list[Call]:
        return [own for picture in self.pictures for own in architecture.calls(self.profile, picture)]

    def hold(self, architecture: Architecture, call: Call) -> bool:
        """Tell whether the node's sizes or the graph's pictures ask for a call."""
        sampled = self._sampled(architecture)
        ranges = self.profile.ranges
        return all(
            ranges[symbol].contains(size) or any(size == own[symbol] for own in sampled)
            for symbol, size in call.items()
            if symbol in ranges
        )


def serves_every_size(architecture: Architecture) -> bool:
    """Tell whether a network is compiled, in blocks: a single engine then serves all calls."""
    return bool(architecture.free)


def is_compiled(architecture: Architecture, call: Call) -> bool:
    """Tell whether compiled blocks serve a call. Sizes beyond those that its family names run uncompiled."""
    free = architecture.free
    return all(symbol in free and free[symbol].contains(size) for symbol, size in call.items())


EVERY_SIZE, ANY_SIZE = "every size", "any size"
"""Words for the sizes of compiled blocks, and of a call that lacks them."""


log = logging.getLogger(__name__)

APPLY_CONTROL = ("comfy.ldm.modules.diffusionmodules.openaimodel", "apply_control")
"""The module and name of ComfyUI's function that adds residuals in a UNet."""


def only_adds_residuals(function: Callable) -> bool:
    """Tell whether a function in the place of ComfyUI's ``apply_control`` only adds residuals that fit.

    Functions of other packs also resize residuals, which no engine does. It is tried on small tensors.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        picture, first, last = (torch.randn(2, 4, 6, 5, generator=generator) for _ in range(3))
        try:
            for name in ("input", "middle", "output"):
                lists: dict[str, list] = {"input": [], "middle": [], "output": [], name: [first, None, last]}
                expected = [picture + last, picture, picture + first, picture]
                if not all(torch.equal(function(picture.clone(), lists, name), result) for result in expected):
                    return False
            return torch.equal(function(picture.clone(), None, "middle"), picture)
        except Exception as error:
            log.debug("Hybrid TRT: another pack's apply_control raised %s", error)
            return False
