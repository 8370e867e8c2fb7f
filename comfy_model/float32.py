"""A network in float32 with its half precision weights: it gives the results without rounding."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

from .torch_kernels import best_attention, without_tf32

log = logging.getLogger(__name__)


@contextlib.contextmanager
def in_float32(function: torch.nn.Module) -> Iterator[None]:
    """Let a module compute in float32: each layer's weights are cast while it runs, and dropped again.

    Quantised layers compute with dequantised weights, and do not round their inputs. A layer whose weights are read
    outside of its forward is not seen, and torch refuses to mix the dtypes.
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

    Weights are cast layer by layer, so this takes memory for one layer and its results.
    """
    try:
        with torch.inference_mode(), in_float32(function), without_tf32(), best_attention(given[0].device):
            return tuple(function(*(t.float() if t.is_floating_point() else t for t in given)))
    except RuntimeError as error:  # also for want of memory
        log.warning("Hybrid TRT: not compared with float32 (%s)", (str(error).strip().splitlines() or [""])[0])
        return None
