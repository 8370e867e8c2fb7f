"""Prompts as the very same tensors in each step of a run, so that results of a prompt are computed once.

ComfyUI repeats the prompts of a call for the batch, joins them and casts the result, all anew in each step. Here each
operation returns the tensor of an earlier step where its sources are the same objects, unchanged. A tensor that another
pack makes in between is a new source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import comfy.conds
import torch
from comfy.model_management import cast_to_device

from . import NotCopied

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

    from .device_inputs import Conds

KEPT_RESULTS = 32
"""Number of a run's latest results that are kept."""


@dataclass
class _Source:
    """A tensor as it was: its version, or its values if it has no versions and others may write to it."""

    tensor: torch.Tensor
    version: int | None
    values: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, alone: bool) -> _Source:
        counts = not tensor.is_inference()
        return cls(tensor, tensor._version if counts else None, None if counts or alone else tensor.clone())

    def is_still(self, tensor: torch.Tensor) -> bool:
        if tensor is not self.tensor or (self.version is not None and tensor._version != self.version):
            return False
        return self.values is None or torch.equal(tensor, self.values)


class SteadyTensors:
    """Results from tensors of a run, each computed once.

    They have versions, so that caches see whether a result was written to.

    Args:
        alone: True where no other pack takes part in the run, so that no other code writes to ComfyUI's tensors.
    """

    def __init__(self, alone: bool):
        self._alone = alone
        self._known: list[tuple[Hashable, list[_Source], torch.Tensor, int]] = []

    def get(
        self, how: Hashable, sources: Sequence[torch.Tensor], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return the result of ``compute``; the same object while the sources stay the same objects, unchanged.

        Args:
            how: key of the operation.
        """
        for name, seen, result, version in self._known:
            if name == how and len(seen) == len(sources) and result._version == version:
                if all(map(_Source.is_still, seen, sources)):
                    return result
        with torch.inference_mode(False), torch.no_grad():
            result = compute()
        if result.is_inference():  # a source, or a part of a source
            return result
        seen = [_Source.of(source, self._alone) for source in sources]
        self._known = [*self._known[1 - KEPT_RESULTS :], (how, seen, result, result._version)]
        return result

    def release(self) -> None:
        """Drop everything."""
        self._known.clear()


def steady(conds: Conds, tensors: SteadyTensors) -> Conds:
    """Return the conditionings with conditions that give the same tensor for the same prompts."""
    return [None if group is None else [_steady(cond, tensors) for cond in group] for group in conds]


def _steady(cond: dict, tensors: SteadyTensors) -> dict:
    held = cond.get("model_conds") or {}
    made = {name: _steady_kinds()[type(value)](value.cond, tensors) for name, value in held.items()
            if type(value) in _steady_kinds() and type(value.cond) is torch.Tensor and not value.cond.requires_grad}
    return {**cond, "model_conds": {**held, **made}} if made else cond


@functools.cache
def _steady_kinds() -> dict[type, type]:
    return {kind: _steady_kind(kind) for kind in (comfy.conds.CONDRegular, comfy.conds.CONDCrossAttn)}


def _steady_kind(kind: type) -> type:
    """Return a class of conditions that takes its results from ``SteadyTensors``."""

    class Steady(kind):
        def __init__(self, cond: torch.Tensor, tensors: SteadyTensors):
            super().__init__(cond)
            self._tensors = tensors

        def _copy_with(self, cond: torch.Tensor) -> Steady:
            return Steady(cond, self._tensors)

        def process_cond(self, batch_size: int, **kwargs: Any) -> Steady:
            def repeated() -> torch.Tensor:
                return kind(self.cond).process_cond(batch_size, **kwargs).cond

            return self._copy_with(self._tensors.get(("repeated", batch_size), [self.cond], repeated))

        def concat(self, others: Sequence[Any]) -> torch.Tensor:
            sources = [self.cond, *(other.cond for other in others)]
            return self._tensors.get("joined", sources, lambda: kind(self.cond).concat(others))

    return Steady


class SteadyPrompts(NotCopied):
    """Two wrappers for a model whose engine encodes a prompt once, see ``EngineHandle.encodes_prompts``.

    Args:
        tensors: returns those of the run that a call is part of; None while no engine encodes prompts.
    """

    def __init__(self, tensors: Callable[[], SteadyTensors | None]):
        self._tensors = tensors

    def join(
        self, executor: WrapperExecutor, model: Any, conds: Conds, x_in: torch.Tensor, timestep: Any, options: dict
    ) -> Any:
        """Let ComfyUI join prompts to steady tensors; a CALC_COND_BATCH wrapper."""
        tensors = self._tensors()
        given = conds if tensors is None else steady(conds, tensors)
        return executor(model, given, x_in, timestep, options)

    def cast(
        self, executor: WrapperExecutor, x: torch.Tensor, t: Any, c_concat: Any = None, c_crossattn: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Cast the prompts as ComfyUI is about to; an APPLY_MODEL wrapper."""
        tensors = self._tensors()
        if tensors is not None and type(c_crossattn) is torch.Tensor:
            prompts, device, dtype = c_crossattn, x.device, executor.class_obj.get_dtype_inference()
            c_crossattn = tensors.get((device, dtype), [prompts], lambda: cast_to_device(prompts, device, dtype))
        return executor(x, t, c_concat, c_crossattn, *args, **kwargs)
