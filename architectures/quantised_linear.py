"""Linear layers with ComfyUI's quantised weights, whose tensors are parameters that can be lifted, shared and replaced.

ComfyUI keeps such a weight as a tensor of a class of its own, which no tracer takes apart. Here its tensors lie on
the layer, and each call puts the weight together again. All else is the native layer: the same operations run in the
same order, so the result is equal to the bit.

Layers of ``fp8_e4m3fn_fast`` have plain fp8 weights and make such tensors in each call: a copy is of their own class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor

WEIGHT = "weight"
"""The quantised parameter; the parameters for its tensors have names that begin with it."""

INT8 = "TensorWiseINT8Layout"
"""The format whose kernel folds activations."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The kernel's numbers for dtypes."""


class QuantisedLinear(comfy.ops.mixed_precision_ops().Linear):
    """A native layer whose weight is put together from its parameters.

    Attributes:
        tensors: names of the weight's tensors, as torch's ``__tensor_flatten__`` gives them.
        context: the further data of the weight, also from ``__tensor_flatten__``.
        exact: True while it computes with the weight dequantised in float32, and does not quantise its input.
    """

    tensors: tuple[str, ...]
    context: Mapping[str, Any]
    exact = False

    @property
    def parts(self) -> frozenset[str]:
        """Names of the parameters that make the weight."""
        return frozenset(WEIGHT + name for name in self.tensors)

    @property
    def weight(self) -> torch.Tensor:
        parts = {name: self._parameters[WEIGHT + name] for name in self.tensors}
        weight = QuantizedTensor.__tensor_unflatten__(parts, self.context, None, None)
        return weight.to(dtype=torch.float32).dequantize() if self.exact else weight

    def _forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # contiguous: else a tracer finds a batched product, for which ComfyUI dequantises the weight
        return super()._forward(input if isinstance(input, QuantizedTensor) else input.contiguous(), weight, bias)

    def take(self, weight: QuantizedTensor) -> None:
        """Let a weight's tensors be the layer's parameters."""
        for name, tensor in tensors_of(weight).items():
            self._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)


def tensors_of(weight: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantised weight by the names of a layer's parameters."""
    names, _ = weight.__tensor_flatten__()
    return {WEIGHT + name: getattr(weight, name) for name in names}


def multiplies_in_fp8(layer: torch.nn.Module) -> bool:
    """Tell whether a layer multiplies in fp8 with plain weights: ``fp8_e4m3fn_fast``, or ``--fast`` on such a GPU."""
    fast = getattr(comfy.ops, "fp8_ops", None)  # later versions may have no such layers
    return fast is not None and isinstance(layer, fast.Linear) and layer.weight.dtype == torch.float8_e4m3fn


@contextlib.contextmanager
def computing_exactly(module: torch.nn.Module) -> Iterator[None]:
    """Let the quantised layers of a module compute in float32, which native's products approximate."""
    layers = [layer for layer in module.modules() if isinstance(layer, QuantisedLinear)]
    before = [layer._full_precision_mm for layer in layers]
    for layer in layers:
        layer.exact = layer._full_precision_mm = True
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.exact, layer._full_precision_mm = False, own


def linear_behind(linear: torch.nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``linear(activation(x))`` as ComfyUI computes it; ``activation`` is its name there.

    Newer versions of ComfyUI fold the activation into the int8 product behind it, by ``linear_input_act``. That calls a
    plain function of ComfyUI's kernels, which a tracer takes apart or cannot follow. The same kernel is an operation
    too, which stays whole in compiled code: the same rounding, and as few passes over memory.
    """
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
