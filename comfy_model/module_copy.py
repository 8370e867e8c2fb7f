"""Copies of native modules without the attributes that ComfyUI keeps on layers to load them.

``plain_copy`` has the structure alone, and computes in plain torch: no casting, streaming or patching per call.
``native_copy`` is another native module, with weights of its own.
"""

from __future__ import annotations

import copy as copying
from collections import OrderedDict
from collections.abc import Callable

import torch

from .changed_layers import left_by_forward, methods, replaced
from .comfyui_shims import is_of_loading
from .weight_formats import class_of_copy, tensors_of

Source = Callable[[str, torch.Tensor], torch.Tensor]
"""Name and native tensor of a parameter or buffer -> the tensor that the copy holds in its place. A quantised weight
has several parameters in a copy."""


class ReplacedForward(ValueError):
    """Another node replaced a method of a layer, or hooked into the layer. A copy would lose that."""


def plain_copy(
    module: torch.nn.Module,
    dtype: torch.dtype,
    parameter: Source,
    buffer: Source,
    kind_of: Callable[[type], type] = lambda kind: kind,
) -> torch.nn.Module:
    """Copy the structure of a module; its tensors come from ``parameter`` and ``buffer``.

    Layers cast weights of another dtype than ``dtype`` while they run, as ComfyUI's do. A layer whose class always
    casts goes on casting: a quantised model may give it an input in float32, while its weights are in half precision.
    The native module stays untouched, whatever state ComfyUI has loaded it in: only its structure is walked.

    Args:
        dtype: the dtype that the copy computes in.
        kind_of: class of a native layer -> class of its copy.

    Raises:
        ReplacedForward: a layer computes something else than its class.
    """
    return _copy(module, "", dtype, parameter, buffer, kind_of).eval().requires_grad_(False)


def native_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy of a native module that ComfyUI loads anew, wherever the weights are now."""
    held = [(layer.__dict__, name, value) for layer in module.modules() for name, value in layer.__dict__.items()
            if is_of_loading(name, value)]  # fmt: skip
    for attributes, name, _ in held:  # memory of ComfyUI's allocator cannot be copied
        del attributes[name]
    try:
        return copying.deepcopy(module)
    finally:
        for attributes, name, value in held:
            attributes[name] = value


def _copy(
    module: torch.nn.Module,
    name: str,
    dtype: torch.dtype,
    parameter: Source,
    buffer: Source,
    kind_of: Callable[[type], type],
) -> torch.nn.Module:
    if (what := replaced(module)) is not None:
        raise ReplacedForward(f"{name or type(module).__name__} has a {what}, which an engine would lose")
    kind, more = class_of_copy(module)
    kind = kind or kind_of(type(module))
    copy = kind.__new__(kind)
    torch.nn.Module.__init__(copy)
    machinery = set(copy.__dict__) | methods(type(module)) | left_by_forward(type(module))
    copy.__dict__.update(
        {k: v for k, v in module.__dict__.items() if k not in machinery and not is_of_loading(k, v)}
    )
    copy.__dict__.update(more)
    prefix = f"{name}." if name else ""
    copy._parameters = OrderedDict((k, None) for k, p in module._parameters.items() if p is None)
    for leaf, weight in module._parameters.items():
        for k, p in tensors_of(leaf, weight).items() if weight is not None else ():
            copy._parameters[k] = torch.nn.Parameter(parameter(prefix + k, p), requires_grad=False)
    copy._buffers = OrderedDict((k, None if b is None else buffer(prefix + k, b)) for k, b in module._buffers.items())
    copy._modules = OrderedDict(
        (k, None if m is None else _copy(m, prefix + k, dtype, parameter, buffer, kind_of))
        for k, m in module._modules.items()
    )
    if hasattr(module, "comfy_cast_weights"):
        other = any(p is not None and p.dtype != dtype for p in copy._parameters.values())
        copy.comfy_cast_weights = other or getattr(kind, "comfy_cast_weights", False)
        copy.weight_function, copy.bias_function = [], []
    if isinstance(getattr(module, "dtype", None), torch.dtype):
        copy.dtype = dtype
    return copy
