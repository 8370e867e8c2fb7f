"""Networks whose linear layers have ComfyUI's quantised weights, loaded by ComfyUI's own layers."""

from __future__ import annotations

import json
from typing import Any

import torch
from comfy.ops import fp8_ops, manual_cast, mixed_precision_ops
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from hybrid_trt.comfy_model.network import NativeNetwork
from small_networks import network

ON_CPU = frozenset({"float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8"})
"""Formats that ComfyUI dequantises on a CPU."""

FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"format": "float8_e4m3fn"},
    "fp8 e5m2": {"format": "float8_e5m2"},
    "fp8 with input scales": {"format": "float8_e4m3fn", "input_scale": 0.02},
    "int8": {"format": "int8_tensorwise"},
    "int8 rows": {"format": "int8_tensorwise", "per_channel": True},
    "int8 convrot": {"format": "int8_tensorwise", "per_channel": True, "convrot": True, "convrot_groupsize": 16},
    "nvfp4": {"format": "nvfp4"},
    "mxfp8": {"format": "mxfp8"},
}
"""Name -> ComfyUI's format and how its weights are made."""

FAST = "fp8_e4m3fn_fast"
"""Plain weights that ComfyUI multiplies in fp8; UNETLoader's name for them."""

UNSERVED: dict[str, dict[str, Any]] = {"w4a4": {"format": "convrot_w4a4"}, "w4a8": {"format": "asym_w4a8_int8"}}
"""Formats that no engine takes. Older versions of ComfyUI lack the second."""


def quantised(
    kind: str, layout: str, name: str, dtype: torch.dtype = torch.float32, disabled: frozenset[str] = ON_CPU
) -> NativeNetwork:
    """A random network of a layout with quantised linear layers, inside a real ComfyUI patcher."""
    plain = network(kind, layout, dtype).module
    net = network(kind, layout, dtype, operations=mixed_precision_ops(compute_dtype=dtype, disabled=disabled))
    linear = [path for path, layer in plain.named_modules() if isinstance(layer, torch.nn.Linear)]
    net.module.load_state_dict(quantised_state(plain.state_dict(), linear, name))
    net.module.eval().requires_grad_(False)
    return net


def plain_fp8(
    layout: str, dtype: torch.dtype = torch.float32, fast: bool = False, kind: str = "unet"
) -> NativeNetwork:
    """A random network with plain weights in fp8.

    Args:
        dtype: what it computes in.
        fast: whether its linear layers multiply in fp8, as those of ``fp8_e4m3fn_fast``.
    """
    net = network(kind, layout, dtype, operations=fp8_ops if fast else manual_cast)
    net.module.to(torch.float8_e4m3fn)
    return NativeNetwork(net.patcher, net.module, net.prefix, dtype, net.label, net.role)


def made(
    kind: str, name: str, layout: str, dtype: torch.dtype = torch.float32, disabled: frozenset[str] = ON_CPU
) -> NativeNetwork:
    """A network with weights of a format, or with those of ``FAST``."""
    if name == FAST:
        return plain_fp8(layout, dtype, fast=True, kind=kind)
    return quantised(kind, layout, name, dtype, disabled)


def quantised_state(state: dict[str, torch.Tensor], layers: list[str], name: str) -> dict[str, torch.Tensor]:
    """The weights of a file with these layers quantised, as ComfyUI saves them."""
    made = dict(state)
    how = dict((FORMATS | UNSERVED)[name])
    kind, input_scale = how.pop("format"), how.pop("input_scale", None)
    for path in layers:
        scale = {} if kind in ("mxfp8", "nvfp4") else {"scale": None if kind == "int8_tensorwise" else "recalculate"}
        layout = QUANT_ALGOS[kind]["comfy_tensor_layout"]
        weight = QuantizedTensor.from_float(made.pop(f"{path}.weight"), layout, **scale, **how)
        made |= weight.state_dict(f"{path}.weight")
        words = {"format": kind, **{k: v for k, v in how.items() if k.startswith("convrot")}}
        made[f"{path}.comfy_quant"] = torch.tensor(list(json.dumps(words).encode()), dtype=torch.uint8)
        if input_scale is not None:
            made[f"{path}.input_scale"] = torch.tensor(input_scale)
    return made
