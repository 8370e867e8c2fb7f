"""Activations that newer versions of ComfyUI fold into the int8 product behind them, its ``linear_input_act``.

That calls a plain function of ComfyUI's kernels, which a tracer takes apart or cannot follow. The same kernel is an
operation too, which stays whole in what is compiled: the same rounding, and as few passes over memory.
"""

from __future__ import annotations

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor

INT8 = "TensorWiseINT8Layout"
"""The format whose kernel folds."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The kernel's numbers for dtypes."""


def linear_behind(linear: torch.nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``linear(activation(x))`` as ComfyUI computes it; ``activation`` is its name there."""
    weight = linear.weight
    if isinstance(weight, QuantizedTensor) and weight._layout_cls == INT8:
        weight, bias, *_ = comfy.ops.cast_bias_weight(
            linear, x, offloadable=True, compute_dtype=x.dtype, want_requant=True)  # fmt: skip
        if isinstance(weight, QuantizedTensor):  # else it has another dtype than the input, and is dequantised
            how = weight._params
            return torch.ops.comfy_kitchen.int8_linear(
                x, weight._qdata, how.scale, bias, _DTYPES.index(x.dtype), how.convrot, how.convrot_groupsize,
                activation)  # fmt: skip
    return comfy.ops.linear_input_act(linear, x, activation)
