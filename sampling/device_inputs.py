"""The conditionings of a run, and its table of sigmas, on the sampling device: copied once for the whole run.

ComfyUI keeps prompts in main memory and copies them to the device in each step. With dynamic VRAM, or where an engine
has the weights, it also keeps its table of sigmas there. Each copy waits until the GPU is
idle, and the GPU then rests until the next network has been started. Where several GPUs share a step, the others copy
prompts from the first one, which waits for nothing.

Those waits also kept progress, preview and interrupt close to the GPU's work. Here a call returns when the call before
it has ended on the GPU instead. The GPU then always has one whole call to do, and the host is no further ahead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import comfy.conds
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..sessions.cuda_capture import give_back_graph_memory
from . import NotCopied

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy.patcher_extension import WrapperExecutor

RUN = "hybrid_trt_run"
"""Key of a run's ``RunInputs`` in the model_options, which ComfyUI makes for each run."""

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
            if held is not None and not any(sampling is one for one, _ in moved):  # copies may share one
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
    """Tell whether a value is a condition of ComfyUI's own class with a plain tensor that needs no gradient."""
    return type(value) in _moved_kinds() and type(value.cond) is torch.Tensor and not value.cond.requires_grad
