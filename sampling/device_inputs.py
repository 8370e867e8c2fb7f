"""What a run's conditionings give the model, on the sampling device for the whole run.

ComfyUI keeps prompts in main memory and copies them to the device in each step, which waits there for all that the GPU
still has to do: it then idles until the next network has been started. Here a run copies them once.

Those waits were also what kept a step's progress, preview and interrupt close to what the GPU does. In their place a
call returns when the call before it has ended on the GPU, which then has one whole call to do: never idle, and the host
is as far ahead of it as before.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import comfy.conds
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..sessions.cuda_capture import give_back_graph_memory
from . import Shared

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

RUN = "hybrid_trt_run"
"""Key of a run's ``RunInputs`` in the model_options that ComfyUI makes for this run alone."""

Conds = Sequence[Sequence[dict] | None]


class RunInputs(Shared):
    """What one run of a sampler keeps: copies of tensors on the device, and the end of its latest call there."""

    def __init__(self) -> None:
        # by the tensor: conditionings that are made anew in each step hold the same prompt
        self._copies: Any = WeakTensorKeyDictionary()  # source -> (its version, its copy)
        self._ends: dict[torch.device, torch.cuda.Event] = {}

    def on_device(self, conds: Conds, device: torch.device) -> Conds:
        """The conditionings with their tensors on the device, bit for bit and of the same dtypes.

        The dicts given stay as they are, and so do the objects in them: some belong to a node's cached output.
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
            known = self._copies[source] = (written, source.to(device))
        return known[1]

    def pace(self, device: torch.device) -> None:
        """A call was given to the device: wait there for the call before it to end."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        end = self._ends.get(device)
        if end is None:
            end = self._ends[device] = torch.cuda.Event()
        else:
            end.synchronize()
        end.record(torch.cuda.current_stream(device))

    def give_back_graph_memory(self) -> None:
        """The run is over: what comes after it, the VAE most of all, may have what its graphs took."""
        for device in self._ends:
            give_back_graph_memory(device)

    def release(self) -> None:
        """Keep nothing any more, whoever still holds the run's options."""
        self._copies.clear()
        self._ends.clear()


def sample_on_device(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
    """An OUTER_SAMPLE wrapper: gives the run a ``RunInputs``, which ends with it."""
    options = executor.class_obj.model_options
    run = options[RUN] = RunInputs()
    try:
        result = executor(*args, **kwargs)
        run.give_back_graph_memory()
        return result
    finally:
        options.pop(RUN, None)
        run.release()


def call_on_device(
    executor: WrapperExecutor, model: Any, conds: Conds, x_in: torch.Tensor, timestep: torch.Tensor, model_options: dict
) -> Any:
    """A CALC_COND_BATCH wrapper: inside, conditionings are where the call computes, and the host keeps pace with it."""
    run: RunInputs | None = model_options.get(RUN)
    if run is None or "multigpu_clones" in model_options:
        return executor(model, conds, x_in, timestep, model_options)
    result = executor(model, run.on_device(conds, x_in.device), x_in, timestep, model_options)
    run.pace(x_in.device)
    return result


def _names_elsewhere(conds: Conds, device: torch.device) -> set[str]:
    """Names of conditions that are on another device in all conditionings of a call.

    Where they differ, ComfyUI does not batch these conditionings, which it would if all were on one device.
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
    """What is joined by ``torch.cat``. The values of a CONDConstant are compared, which would wait for a GPU."""
    return comfy.conds.CONDRegular, comfy.conds.CONDNoiseShape, comfy.conds.CONDCrossAttn


def _movable(value: Any) -> bool:
    """Whether it is ComfyUI's own kind of condition with a plain tensor, not one that gradients are wanted of."""
    return type(value) in _moved_kinds() and type(value.cond) is torch.Tensor and not value.cond.requires_grad
