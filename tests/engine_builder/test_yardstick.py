"""Engines in half precision are held against float32, beside native: weights that amplify rounding fool nobody."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from builds import small_network
from compiling import COMPILES, Alone
from hybrid_trt.architectures.shapes import Dim, Range, TensorSpec, sample_inputs
from hybrid_trt.backends import LiveTask
from hybrid_trt.backends.torch_inductor import comparison, compile_kinds
from hybrid_trt.backends.torch_inductor.comparison import COMPILED_LIMITS
from hybrid_trt.backends.torch_inductor.compile_blocks import compile_blocks
from hybrid_trt.comfy_model.torch_kernels import results_in_float32
from hybrid_trt.engine_builder.worker import parity
from hybrid_trt.engine_library import BuildError, measurements
from hybrid_trt.engine_library.engine import relative_error

SPECS = [TensorSpec(name, "float16", (Dim("B"), 64)) for name in ("x", "out")]
SIZES = {"B": 4}


class Amplifying(torch.nn.Module):
    """Layers with weights that nobody scaled down: each one multiplies the rounding of those before it."""

    def __init__(self, gain: float = 3.0, depth: int = 6):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, dtype=torch.float16) for _ in range(depth))
        for layer in self.layers:
            layer.weight.data = (gain / 8 * torch.randn(64, 64, generator=generator)).half()
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return (x,)


class AsTuple(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x,)


def given() -> list[torch.Tensor]:
    return [*sample_inputs(SPECS[:1], SIZES, 1).values()]


def off(function: torch.nn.Module, distance: float) -> tuple[torch.Tensor]:
    """Results that are so far from float32."""
    (exact,) = results_in_float32(function, given())
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(4))
    return (exact + noise * (distance * exact.norm() / noise.norm()),)


def compared(function: torch.nn.Module, results: tuple, precision: str = "float16") -> dict:
    return comparison.compared(function, given(), results, [spec.name for spec in SPECS[1:]], SIZES, precision)


@pytest.mark.parametrize(("error", "native", "limit"), [
    (1.0, 2e-3, 2.4e-3),  # 1.2 times native's
    (1.0, 1e-5, 1e-3),  # the floor
    (1.0, 0.5, 0.6),
    (1.0, None, 1e-2),  # not known
    (1.0, float("inf"), 1e-2),  # native is not finite in half precision: it measures nothing
], ids=str)  # fmt: skip
def test_the_limit_is_natives_own_error_and_a_fifth(error: float, native: float | None, limit: float) -> None:
    found = measurements.judged(error, native, 1e-3, 1e-2)
    assert found["limit"] == pytest.approx(limit)
    assert measurements.over_limit([found, measurements.judged(limit, native, 1e-3, 1e-2)]) == found


def test_a_value_that_is_not_finite_is_over_every_limit() -> None:
    assert measurements.over_limit([measurements.judged(float("nan"), 0.5, 1e-3, 1e-2)])
    assert measurements.over_limit([measurements.judged(float("inf"), float("inf"), 1e-3, 1e-2)])


def test_float32_is_computed_with_the_same_weights_and_buffers() -> None:
    net = small_network()
    module, exact = (copy.deepcopy(net.module).half() for _ in range(2))
    module.dtype, exact.dtype = torch.float16, torch.float32
    exact.float()
    architecture = net.architecture()
    inputs = architecture.inputs(net.module, "float16")
    tensors = [*sample_inputs(inputs, {"B": 1, "H": 8, "W": 8, "T": 77}, 1).values()]
    (found,) = results_in_float32(architecture.function(module), tensors)
    with torch.inference_mode():
        (expected,) = architecture.function(exact)(*(tensor.float() for tensor in tensors))
    assert found.dtype == torch.float32
    assert relative_error(found, expected) <= 1e-6
    assert module.dtype == torch.float16
    assert {p.dtype for p in module.parameters()} == {torch.float16}
    norm = torch.nn.BatchNorm1d(64, affine=False).half().eval()
    norm.running_var.fill_(0.3)
    (result,) = results_in_float32(torch.nn.Sequential(norm, AsTuple()), given())
    assert relative_error(result, given()[0].double() / (norm.running_var.double() + norm.eps).sqrt()) <= 1e-6
    assert norm.running_var.dtype == torch.float16


def test_what_amplifies_rounding_passes_with_natives_error_and_not_with_more() -> None:
    function = Amplifying()
    with torch.inference_mode():
        own = relative_error(function(*given())[0], results_in_float32(function, given())[0])
    assert own > 1.5 * COMPILED_LIMITS["float16"], "the old limit would refuse all that is not native to the bit"
    found = compared(function, off(function, 1.1 * own))
    assert found["native_rel_err"] == pytest.approx(own)
    assert found["rel_err"] == pytest.approx(1.1 * own, rel=1e-3)
    with pytest.raises(BuildError, match=r"differs from the normal model by .*the normal model's own error is"):
        compared(function, off(function, 1.3 * own))


def test_what_rounds_little_is_held_to_little() -> None:
    function = Amplifying(0.5, 2)
    assert compared(function, off(function, 5e-4))["limit"] < 2e-3
    with pytest.raises(BuildError, match="differs from the normal model"):
        compared(function, off(function, 5e-3))  # which the old limit let pass


def test_without_memory_for_float32_native_is_compared_as_before() -> None:
    function = Amplifying()

    def no_memory(layer: torch.nn.Module, args: tuple) -> None:
        if args[0].dtype == torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = function.layers[2].register_forward_pre_hook(no_memory)
    with torch.inference_mode():
        native = function(*given())
    found = compared(function, native)
    assert found == {"rel_err": 0.0, "limit": COMPILED_LIMITS["float16"]}
    assert comparison.against([found]) == "the same weights run plainly on the same device"
    hook.remove()
    assert {p.dtype for p in function.parameters()} == {torch.float16}
    both = [found, compared(function, native)]
    assert comparison.against(both).startswith("the same weights in float32, beside native; where that took too")


def test_float32_is_judged_by_native_alone() -> None:
    function = Amplifying().float()
    inputs = [tensor.float() for tensor in given()]
    with torch.inference_mode():
        results = function(*inputs)
    found = comparison.compared(function, inputs, results, [spec.name for spec in SPECS[1:]], SIZES, "float32")
    assert found == {"rel_err": 0.0, "limit": COMPILED_LIMITS["float32"]}


@COMPILES
def test_what_inductor_made_of_an_amplifying_block_is_kept_with_both_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amplifying = Amplifying().state_dict()
    monkeypatch.setattr(compile_kinds, "draw_weights", lambda block, _: block.load_state_dict(amplifying, assign=True))
    many = {"B": Range(255, 256, 257)}  # so that chance does not decide whose error is the larger one
    task = LiveTask((SPECS[0],), (SPECS[1],), "float16", torch.device("cpu"), tmp_path, many)
    found = compile_blocks(Alone(Amplifying()).to("meta"), task, lambda *_: None)["parity"]
    assert found["native_rel_err"] > 1.5 * COMPILED_LIMITS["float16"]
    assert 0 < found["rel_err"] <= found["limit"] == pytest.approx(1.2 * found["native_rel_err"])
    assert found["against"] == "the same weights in float32, beside native"
    assert found["native_rel_err"] in [case["native_rel_err"] for case in found["cases"]]


def test_a_graph_is_judged_by_natives_error_at_the_first_size() -> None:
    """Half precision is slow on a CPU."""
    calls: list[torch.dtype] = []
    function = Amplifying()
    function.register_forward_pre_hook(lambda _module, args: calls.append(args[0].dtype))
    first, second = parity.reference_cases(function, SPECS[:1], [SIZES, {"B": 2}])
    assert calls == [torch.float32, torch.float16, torch.float32]
    assert first.native == second.native > 1e-3
