"""Ways in which torch runs these networks: memory layout, attention kernel, float32 to compare with, time on a GPU."""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

log = logging.getLogger(__name__)

WARM_CALLS, TIMED_CALLS = 3, 10
"""Numbers of calls: first calls without a clock, then calls whose median time counts."""


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Layouts of images and videos, by their dimensions."""


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the memory layout that networks compute in: channels_last on a GPU, where that is faster.

    It has the strides of a new tensor, also in dimensions of one element: from these strides torch and cuDNN choose
    the layout of a convolution's result for a single image.
    """
    layout = _layout(tensor.device, tensor.ndim)
    tensor = tensor.contiguous(memory_format=layout)
    strides = strides_of(tensor.shape, layout)
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def lay_out_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Lay a tensor out within its own memory where no other tensor has that memory; return it as ``laid_out`` does.

    New memory for each convolution of a model would leave holes in the old memory, which other sizes do not fill.
    """
    ready = laid_out(tensor)
    if ready.data_ptr() == tensor.data_ptr() or not _has_memory_alone(tensor):
        return ready
    with torch.inference_mode(tensor.is_inference()):
        place = tensor.as_strided(ready.shape, ready.stride())
        place.copy_(ready)
        tensor.data = place  # whoever holds this tensor object still sees its values
    return tensor.data


def _has_memory_alone(tensor: torch.Tensor) -> bool:
    """Tell whether no other tensor has its memory; False where this torch does not tell."""
    uses = getattr(torch._C, "_storage_Use_Count", None)
    if uses is None or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    alone = torch.empty(1)
    return uses(tensor.untyped_storage()._cdata) == uses(alone.untyped_storage()._cdata)


def empty_laid_out(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for a tensor as ``laid_out`` gives it."""
    return torch.empty_strided(shape, strides_laid_out(shape, device), dtype=dtype, device=device)


def strides_laid_out(shape: Sequence[int], device: torch.device) -> tuple[int, ...]:
    """Return the strides, in elements, that ``laid_out`` gives a tensor of this shape."""
    return strides_of(shape, _layout(device, len(shape)))


def strides_of(shape: Sequence[int], layout: torch.memory_format) -> tuple[int, ...]:
    """Return the strides, in elements, that torch gives a new tensor of this layout."""
    strides, step = [0] * len(shape), 1
    last = (1, *range(len(shape) - 1, 1, -1), 0) if layout in _CHANNELS_LAST.values() else None
    for dim in last or reversed(range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _layout(device: torch.device, dimensions: int) -> torch.memory_format:
    return _CHANNELS_LAST.get(dimensions, torch.contiguous_format) if device.type == "cuda" else torch.contiguous_format


ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""torch's kernels for attention, by our names. Attention that none of them can compute takes torch's plain way."""


def usual_attention(device: torch.device) -> str | None:
    """Return the kernel for attention that was not measured: cuDNN's on Hopper and later, else None: torch chooses."""
    later = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return "cudnn" if later else None


@contextlib.contextmanager
def best_attention(device: torch.device, first: str | None = None) -> Iterator[None]:
    """Let attention inside take the kernel ``first`` (a name in ``ATTENTION``; by default the usual) where it can."""
    first = first or usual_attention(device)
    if device.type != "cuda" or first is None:
        yield
        return
    order = [ATTENTION[first], *(kernel for name, kernel in ATTENTION.items() if name != first), SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Make cuDNN's convolutions of float32 inside exact; by default torch lets them round to TF32's ten bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextlib.contextmanager
def in_float32(function: torch.nn.Module) -> Iterator[None]:
    """Let a module compute in float32: each layer's weights are cast while it runs, and dropped again.

    Quantised layers compute with dequantised weights, and do not round their inputs. Weights that are read outside of
    their layer's forward are not cast, and torch refuses to mix the dtypes.
    """
    from ..architectures.quantised_linear import computing_exactly

    def cast(layer: torch.nn.Module, _args: tuple) -> None:
        own[layer] = dict(layer._parameters), dict(layer._buffers)
        for name, parameter in own[layer][0].items():
            if _is_narrow(parameter) and name not in getattr(layer, "parts", ()):
                layer._parameters[name] = torch.nn.Parameter(parameter.float(), requires_grad=False)
        for name, buffer in own[layer][1].items():
            if _is_narrow(buffer):
                layer._buffers[name] = buffer.float()

    def drop(layer: torch.nn.Module, _args: tuple, _result: object) -> None:
        put_back(layer, *own.pop(layer))

    def put_back(layer: torch.nn.Module, parameters: dict, buffers: dict) -> None:
        layer._parameters.update(parameters)
        layer._buffers.update(buffers)

    own: dict[torch.nn.Module, tuple[dict, dict]] = {}
    hooks, dtypes = [], {}
    for layer in function.modules():
        if any(map(_is_narrow, (*layer._parameters.values(), *layer._buffers.values()))):
            hooks += [layer.register_forward_pre_hook(cast), layer.register_forward_hook(drop)]
        if isinstance(getattr(layer, "dtype", None), torch.dtype):  # ComfyUI's networks cast to it inside
            dtypes[layer], layer.dtype = layer.dtype, torch.float32
    try:
        with computing_exactly(function):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, kept in own.items():  # layers whose forward failed
            put_back(layer, *kept)
        for layer, dtype in dtypes.items():
            layer.dtype = dtype


def _is_narrow(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float32


def results_in_float32(function: torch.nn.Module, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
    """Return a network's results in float32 on its inputs' device, or None where that fails.

    Weights are cast layer by layer, so this takes memory for a layer and its results.
    """
    try:
        with torch.inference_mode(), in_float32(function), without_tf32(), best_attention(given[0].device):
            return tuple(function(*(t.float() if t.is_floating_point() else t for t in given)))
    except RuntimeError as error:  # also for want of memory
        log.warning("Hybrid TRT: not compared with float32 (%s)", (str(error).strip().splitlines() or [""])[0])
        return None


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median milliseconds of a call on the GPU, the host's part included."""
    return statistics.median(each_call(call, WARM_CALLS, TIMED_CALLS))


def each_call(call: Callable[[], object], warm: int, timed: int) -> list[float]:
    """Return the milliseconds of ``timed`` calls by CUDA events, each call alone, after ``warm`` calls."""
    for _ in range(warm):
        call()
    times = []
    for _ in range(timed):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times
