"""Zeros of absent inputs: right, shared, and no more memory than the largest takes."""

from __future__ import annotations

import torch
from hybrid_trt.architectures.shapes import Dim, TensorSpec
from hybrid_trt.comfy_model.torch_kernels import strides_of
from hybrid_trt.sessions.made_inputs import Zeros

CPU = torch.device("cpu")


def spec(name: str, *rest: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, (Dim("B"), *rest))


SPECS = [spec("small", 4, 2, 2), spec("large", 4, 8, 8), spec("twin", 4, 2, 2),
         spec("half", 4, dtype="float16")]  # fmt: skip


def test_zeros_have_the_shape_dtype_and_layout_that_is_asked_for() -> None:
    zeros = Zeros(
        CPU, lambda shape: strides_of(shape, torch.channels_last if len(shape) == 4 else torch.contiguous_format)
    )
    found = zeros.of(SPECS, {"B": 2})
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
        "small": ((2, 4, 2, 2), torch.float32), "large": ((2, 4, 8, 8), torch.float32),
        "twin": ((2, 4, 2, 2), torch.float32), "half": ((2, 4), torch.float16),
    }  # fmt: skip
    assert not any(tensor.any() for tensor in found.values())
    assert found["large"].is_contiguous(memory_format=torch.channels_last)
    assert Zeros(CPU).of(SPECS, {"B": 2})["large"].is_contiguous()


def test_all_zeros_of_a_dtype_lie_in_the_memory_of_the_largest_and_come_again() -> None:
    zeros = Zeros(CPU)
    found = zeros.of(SPECS, {"B": 2})
    places = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found.values()}
    assert sorted(places.values()) == [2 * 4 * 2, 2 * 4 * 8 * 8 * 4]
    assert all(again is found[name] for name, again in zeros.of(SPECS, {"B": 2}).items())
    larger = zeros.of(SPECS[:1], {"B": 300})["small"]
    assert larger.shape == (300, 4, 2, 2)
    assert not larger.any()
    assert not found["large"].any()
