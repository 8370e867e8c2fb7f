"""Linear layers with ComfyUI's quantised weights, whose tensors are parameters that can be lifted, shared and replaced.

ComfyUI keeps such a weight as one tensor of a class of its own, which no tracer takes apart. Here its tensors lie on
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
"""The parameter that is quantised; the parameters for its tensors are called after it."""


class QuantisedLinear(comfy.ops.mixed_precision_ops().Linear):
    """A native layer whose weight is put together from its parameters.

    Attributes:
        tensors: names of the weight's tensors, as torch's ``__tensor_flatten__`` gives them.
        context: what else makes the weight, as the same gives it.
        exact: True while it computes with its weight dequantised in float32, and does not quantise its input.
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
        # as its kernel takes it: else a tracer finds a batched product, for which ComfyUI dequantises the weight
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
    """Let all such layers of a module compute in float32: what native's quantised products come near."""
    layers = [layer for layer in module.modules() if isinstance(layer, QuantisedLinear)]
    before = [layer._full_precision_mm for layer in layers]
    for layer in layers:
        layer.exact = layer._full_precision_mm = True
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.exact, layer._full_precision_mm = False, own
