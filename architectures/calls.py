"""Calls of a native network as calls of an engine: arguments, residuals, parts that run before."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .shapes import TensorSpec

if TYPE_CHECKING:
    import torch

Control = dict[str, list]
"""Residuals as ComfyUI passes them: list name (``input``, ``output``, ``middle``) -> a tensor or None in each place."""


class Unsupported(Exception):
    """A call that no engine of the family can serve; the text names what is in the way."""


class OtherKind(Unsupported):
    """A call that was made for another kind of network."""


@dataclass(frozen=True, slots=True)
class AsyncInputs:
    """Inputs of a call that are not computed yet.

    Attributes:
        names: which.
        stream: what computes them.
        ready: recorded there behind the last of them.
    """

    names: frozenset[str]
    stream: torch.cuda.Stream
    ready: torch.cuda.Event


@dataclass(slots=True)
class EngineCall:
    """One call of an engine in the place of a native one.

    Attributes:
        inputs: tensors by name, of any float dtype on any device: the engine's, and what its per-image passes take.
        finish: the engine's outputs by name -> what the native call would have returned, in fresh tensors.
        extras: of a per-image pass by its name, what its result depends on besides its tensor; compared, so hashable.
        residuals: names of the inputs that are a ControlNet's.
        late: those that another stream still computes, for a session that takes such; None where all are there.
    """

    inputs: dict[str, torch.Tensor]
    finish: Callable[[Mapping[str, torch.Tensor]], Any]
    extras: Mapping[str, Hashable] = field(default_factory=dict)
    residuals: frozenset[str] = frozenset()
    late: AsyncInputs | None = None


Binding = Callable[[Mapping[str, Any]], EngineCall]
"""A native call of one network, the arguments of its forward by name, as a call of the engine.

Raises:
    Unsupported: the call has something that no engine of the family takes.
"""


@dataclass(frozen=True)
class PerImagePass:
    """A part of a network that runs by itself, from its live weights, once per image and not in every step.

    Attributes:
        takes: the input that it depends on; a call gives it under this name.
        gives: names of the engine's inputs that it makes, in order.
        function: the input, and the call's extra for it where there is one -> a tensor for each of ``gives``.
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
        places: list name -> the tensor's name for each place, in the order in which native consumes the list; None
            where native adds what it finds and the engine has no input for it. A tensor may stand in several places.
        from_end: whether native consumes lists from their end (UNetModel pops) or from their start (transformers).
    """

    places: Mapping[str, Sequence[str | None]]
    from_end: bool = True

    def take(self, control: Mapping[str, Sequence] | None, batch: int) -> dict[str, torch.Tensor]:
        """Tensor name -> residual. ``control`` is only read: native would pop from its lists.

        One that ComfyUI made once for a whole batch is repeated, as adding it natively does.

        Raises:
            Unsupported: a residual acts where the engine takes none.
        """
        given: dict[str, torch.Tensor] = {}
        for kind, residuals in (control or {}).items():
            in_order = reversed(residuals) if self.from_end else residuals
            for name, residual in zip(self.places.get(kind, ()), in_order, strict=False):
                if residual is None:
                    continue
                if name is None:
                    raise Unsupported(f"a control acts on {kind} blocks for which the engine takes none")
                if batch > 1 and residual.shape[0] == 1:
                    residual = residual.expand(batch, *residual.shape[1:])
                given[name] = residual
        return given

    def give(self, outputs: Mapping[str, torch.Tensor], like: torch.Tensor) -> Control:
        """The lists that native would have returned, on the device and of the dtype of ``like``."""
        device, dtype = like.device, like.dtype
        step = -1 if self.from_end else 1
        return {
            kind: [outputs[name].to(device, dtype) for name in names[::step]] for kind, names in self.places.items()
        }
