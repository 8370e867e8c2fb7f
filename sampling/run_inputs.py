"""The conditionings of a run on the sampling device, and prompts as the very same tensors in each step.

*On the device*: ComfyUI keeps prompts in main memory and copies them to the device in each step. With dynamic VRAM, or
where an engine has the weights, it also keeps its table of sigmas there. Each copy waits until the GPU is idle, and the
GPU then rests until the next network has been started. Here both are copied once for the whole run. Where several GPUs
share a step, the later ones copy prompts from the first one, which waits for nothing.

Those waits also kept progress, preview and interrupt close to the GPU's work. Here a call returns when the call before
it has ended on the GPU instead. The GPU then always has one whole call to do, and the host is no further ahead.

*The same tensors*: ComfyUI repeats the prompts of a call for the batch, joins them and casts the result, all anew in
each step. Here each operation returns the tensor of an earlier step where its sources are the same objects, unchanged.
So results of a prompt are computed once. A tensor that another pack makes in between is a new source.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import comfy.conds
import torch
from comfy.model_management import cast_to_device
from torch.utils.weak import WeakTensorKeyDictionary

from ..sessions.graph_memory import give_back_graph_memory
from . import NotCopied

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy.patcher_extension import WrapperExecutor

RUN = "hybrid_trt_run"
"""Key of a run's ``RunInputs`` in the model_options, which ComfyUI makes for each run."""

KEPT_RESULTS = 32
"""Number of a run's latest results that are kept."""

Conds = Sequence[Sequence[dict] | None]


class RunInputs(NotCopied):
    """Copies of a run's tensors on the device, and the end of its latest call there."""

    def __init__(self) -> None:
        # by tensor: conditionings that are made anew in each step hold the same prompt
        self._copies: Any = WeakTensorKeyDictionary()  # source -> (its version, its copy)
        self._ends: dict[torch.device, torch.cuda.Event] = {}

    def on_device(self, conds: Conds, device: torch.device) -> Conds:
        """Return the conditionings with their tensors on the device, bit for bit and of the same dtypes.

        The given dicts and their objects are not changed: some belong to a node's cached output.
        """
        names = _names_elsewhere(conds, device)
        if not names:
            return conds
        return [None if group is None else [self._moved(cond, names, device) for cond in group] for group in conds]

    def _moved(self, cond: dict, names: set[str], device: torch.device) -> dict:
        held = cond.get("model_conds") or {}
        moved = {name: held[name]._copy_with(self._copy(held[name].cond, device))
                 for name in names if name in held and _movable(held[name])}  # fmt: skip
        return {**cond, "model_conds": {**held, **moved}} if moved else cond

    def _copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        written = None if source.is_inference() else source._version
        known = self._copies.get(source)
        if known is None or known[0] != written or known[1].device != device:
            with torch.inference_mode(False):  # writes to the copy then show in its version
                known = self._copies[source] = (written, source.to(device))
        return known[1]

    def wait_for_previous_call(self, device: torch.device) -> None:
        """Wait until the call before the one that was just started has ended on the device."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        end = self._ends.get(device)
        if end is None:
            end = self._ends[device] = torch.cuda.Event()
        else:
            end.synchronize()
        end.record(torch.cuda.current_stream(device))

    def give_back_graph_memory(self) -> None:
        """Free the memory of the run's graphs, for the VAE above all."""
        for device in self._ends:
            give_back_graph_memory(device)

    def release(self) -> None:
        """Drop everything, although somebody may still hold the run's options."""
        self._copies.clear()
        self._ends.clear()


def sample_on_device(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
    """Give the run its ``RunInputs``, which end with it; an OUTER_SAMPLE wrapper."""
    options = executor.class_obj.model_options
    run = options[RUN] = RunInputs()
    try:
        with sigmas_on_device(executor.class_obj.model_patcher):
            result = executor(*args, **kwargs)
        run.give_back_graph_memory()
        return result
    finally:
        options.pop(RUN, None)
        run.release()


@contextlib.contextmanager
def sigmas_on_device(model: ModelPatcher) -> Iterator[None]:
    """Keep a model's table of sigmas on its sampling device, and the tables of its copies on other GPUs."""
    moved: list[tuple[torch.nn.Module, torch.device]] = []
    try:
        for patcher in (model, *model.get_additional_models_with_key("multigpu")):
            sampling = patcher.get_model_object("model_sampling")
            held = next(sampling.buffers(), None) if isinstance(sampling, torch.nn.Module) else None
            if held is not None and not any(sampling is known for known, _ in moved):  # copies may share one
                moved.append((sampling, held.device))
                _move(sampling, patcher.load_device)
        yield
    finally:
        for sampling, before in moved:
            _move(sampling, before)


def _move(sampling: torch.nn.Module, device: torch.device) -> None:
    with torch.inference_mode(False):  # the GPUs' threads are not in inference mode
        sampling.to(device)


def call_on_device(
    executor: WrapperExecutor, model: Any, conds: Conds, x_in: torch.Tensor, timestep: torch.Tensor, model_options: dict
) -> Any:
    """Put conditionings on the call's device, and keep the host one call ahead; a CALC_COND_BATCH wrapper."""
    run: RunInputs | None = model_options.get(RUN)
    if run is None:
        return executor(model, conds, x_in, timestep, model_options)
    result = executor(model, run.on_device(conds, x_in.device), x_in, timestep, model_options)
    run.wait_for_previous_call(x_in.device)
    return result


def _names_elsewhere(conds: Conds, device: torch.device) -> set[str]:
    """Return the names of conditions that are on another device in all conditionings of a call.

    Where devices differ ComfyUI does not batch these conditionings; once moved, it would.
    """
    places: dict[str, set[torch.device]] = {}
    for group in conds:
        for cond in group or ():
            held: Mapping[str, Any] = cond.get("model_conds") or {}
            for name, value in held.items():
                if _movable(value):
                    places.setdefault(name, set()).add(value.cond.device)
    return {name for name, found in places.items() if len(found) == 1 and device not in found}


@functools.cache
def _moved_kinds() -> tuple[type, ...]:
    """Return the classes that use ``torch.cat``. CONDConstant compares values, which would wait for a GPU."""
    return comfy.conds.CONDRegular, comfy.conds.CONDNoiseShape, comfy.conds.CONDCrossAttn


def _movable(value: Any) -> bool:
    return type(value) in _moved_kinds() and _is_plain(value.cond)


def _is_plain(value: Any) -> bool:
    """Tell whether a value is a plain tensor that needs no gradient."""
    return type(value) is torch.Tensor and not value.requires_grad


@dataclass
class _Source:
    """A tensor as it was: its version, or its values if it has no versions and other code may write to it."""

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
        alone: True if no other pack takes part in the run, so that nothing else writes to ComfyUI's tensors.
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
            if type(value) in _steady_kinds() and _is_plain(value.cond)}  # fmt: skip
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

        def concat(self, more: Sequence[Any]) -> torch.Tensor:
            sources = [self.cond, *(condition.cond for condition in more)]
            return self._tensors.get("joined", sources, lambda: kind(self.cond).concat(more))

    return Steady


class SteadyPrompts(NotCopied):
    """Two wrappers for a model whose engine encodes a prompt once, see ``EngineHandle.encodes_prompts``.

    Args:
        tensors: returns the tensors of the caller's run; None while no engine encodes prompts.
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
