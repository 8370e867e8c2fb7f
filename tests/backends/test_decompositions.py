"""Our decompositions for Inductor compute what torch computes, and only where it was measured to help."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from compiling import COMPILES
from hybrid_trt.architectures.families.autoencoder import with_edges
from hybrid_trt.backends.torch_inductor import compiled, inductor_tuning
from hybrid_trt.backends.torch_inductor.free_dimensions import FreeDimensions
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3}


def image(*shape: int, dtype: torch.dtype = torch.float32, layout: torch.memory_format = torch.channels_last):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64) * 3 + 20
    return made.to(dtype).to(memory_format=layout)


def traced(function, *given: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, decomposition_table=inductor_tuning.TABLE, tracing_mode="fake")(*given)


def operations(graph: torch.fx.GraphModule) -> set[object]:
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 640, 32, 32), (1, 1280, 16, 16), (3, 96, 40, 24), (2, 96, 104, 60)], ids=str)
def test_a_group_norm_in_parts_is_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = image(*shape, dtype=dtype), *(torch.randn(shape[1]).to(dtype) for _ in range(2))
    result, mean, scale = inductor_tuning.group_norm_in_parts(
        x, weight, bias, shape[0], shape[1], shape[2] * shape[3], 32, 1e-5
    )
    expected = aten.native_group_norm(
        x.double(), weight.double(), bias.double(), shape[0], shape[1], shape[2] * shape[3], 32, 1e-5
    )
    assert result.dtype == dtype
    for got, wanted in zip((result, mean, scale), expected, strict=True):
        assert got.shape == wanted.shape
        assert (got.double() - wanted).abs().max() <= DTYPES[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (30.0, 1.0), (-200.0, 2.0), (3.0, 0.0)], ids=str)
def test_a_norm_far_from_zero_loses_no_more_than_its_input_was_rounded_by(
    mean: float, deviation: float, dtype: torch.dtype
) -> None:
    noise = torch.randn(2, 64, 64, 32, generator=torch.Generator().manual_seed(4))
    x = (noise * deviation + mean).to(dtype).to(memory_format=torch.channels_last)
    result, *_ = inductor_tuning.group_norm_in_parts(x, None, None, 2, 64, 2048, 8, 1e-5)  # no weight, no bias
    exact = torch.nn.functional.group_norm(x.double(), 8, eps=1e-5)
    assert (result.double() - exact).abs().max() <= max(torch.finfo(dtype).eps, 2e-5) * max(exact.abs().max(), 1)


def test_parts_divide_the_pixels_and_are_no_larger_than_one_program_sums() -> None:
    for pixels in (64, 63, 997, 1024, 13 * 19, 4096):
        for wide in (1, 10, 30, 80, 3000):
            rows = inductor_tuning.part_of(pixels, wide)
            assert pixels % rows == 0
            assert rows * wide <= inductor_tuning.MOST_SUMMED or rows == 1


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((1, 640, 16, 16), True), ((1, 320, 64, 64), True), ((1, 320, 8, 8), False), ((1, 320, 1024), False)],
    ids=["in tiles", "by lines", "one program does it", "no image"],
)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_a_norm_is_written_out_only_where_that_is_faster(
    shape: tuple[int, ...], parts: bool, layout: torch.memory_format
) -> None:
    given = image(*shape, layout=layout if len(shape) == 4 else torch.contiguous_format)
    graph = traced(lambda x: torch.nn.functional.group_norm(x, 32), given)
    assert (aten.native_group_norm.default not in operations(graph)) is parts


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@HALVES
@pytest.mark.parametrize(("ours", "torchs", "least"), [
    (inductor_tuning.gelu_by_a_power, torch.nn.functional.gelu, 3e-7),
    (inductor_tuning.silu_by_a_root, torch.nn.functional.silu, 6e-8)], ids=["gelu", "silu"])  # fmt: skip
def test_every_number_of_half_precision_has_its_gelu_and_its_silu(
    ours: Callable, torchs: Callable, least: float, dtype: torch.dtype
) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = numbers[numbers.isfinite()]
    result = ours(finite)
    assert result.dtype == dtype
    assert torch.allclose(result.double(), torchs(finite.double()), rtol=1.02 * torch.finfo(dtype).eps / 2, atol=least)
    assert ours(numbers[numbers.isnan()]).isnan().all()
    if torchs is torch.nn.functional.silu:
        ends = torch.tensor([-torch.inf, torch.inf]).to(dtype)
        assert torch.equal(ours(ends).float().nan_to_num(9), torchs(ends.float()).nan_to_num(9))


def linear(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x[None, :], x.expand(4, -1), x[:4])


@pytest.mark.parametrize(("function", "dtype", "written", "theirs", "ours"), [
    *((torch.nn.functional.silu, dtype, dtype is not torch.float32, aten.silu.default, aten.rsqrt.default)
      for dtype in (torch.bfloat16, torch.float32)),
    *((torch.nn.functional.gelu, dtype, dtype is not torch.float32, aten.gelu.default, aten.exp2.default)
      for dtype in (torch.float16, torch.float32)),
    (partial(torch.nn.functional.gelu, approximate="tanh"), torch.float16, False, aten.gelu.default, aten.exp2.default),
    *((linear, dtype, dtype is not torch.float32, aten.addmm.default, aten.mm.default)
      for dtype in (torch.float16, torch.bfloat16, torch.float32)),
])  # fmt: skip
def test_a_silu_a_gelu_and_a_bias_are_written_out_only_where_rounding_hides_the_difference(
    function: Callable, dtype: torch.dtype, written: bool, theirs: object, ours: object
) -> None:
    found = operations(traced(lambda x: function(x), torch.randn(8).to(dtype)))
    assert (ours in found) is written
    assert (theirs in found) is not written


@HALVES
def test_a_product_and_then_its_bias_are_torchs(dtype: torch.dtype) -> None:
    bias, a, b = (
        torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) for shape in ((24,), (40, 64), (64, 24))
    )
    given = [t.to(dtype) for t in (bias * 10, a, b)]
    result = inductor_tuning.bias_after_product(*given)
    exact = aten.addmm(*(t.double() for t in given))
    assert result.dtype == dtype
    assert (result.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def test_a_product_with_factors_stays_as_it_is() -> None:
    given = [torch.randn(4, 4).half() for _ in range(3)]
    assert inductor_tuning.bias_after_product(*given, alpha=0.5) is NotImplemented
    assert inductor_tuning.bias_after_product(*given, beta=2) is NotImplemented


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **named):
    """``convolution_as_product`` with these of its arguments, or those of the commonest convolution."""
    usual = dict(stride=[1, 1], padding=[1, 1], dilation=[1, 1], transposed=False, output_padding=[0, 0], groups=1)
    return (x, weight, bias, *(usual | named).values())


@HALVES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [((8, 8), (3, 3), [1, 1], [1, 1]), ((16, 16), (3, 3), [2, 2], [1, 1]), ((5, 9), (3, 3), [1, 1], [1, 1]),
     ((9, 7), (3, 3), [2, 2], [0, 0]), ((6, 8), (5, 1), [1, 2], [2, 0])],
    ids=["8x8", "halved", "5x9", "halved, odd, no border", "uneven"],
)  # fmt: skip
def test_a_convolution_of_few_pixels_is_torchs(
    size: tuple[int, int], kernel: tuple[int, int], stride: list[int], padding: list[int], bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    x, weight = image(2, 12, *size, dtype=dtype), image(20, 12, *kernel, dtype=dtype)
    given = convolution(x, weight, torch.randn(20).to(dtype) * 9 if bias else None, stride=stride, padding=padding)
    result = inductor_tuning.convolution_as_product(*given)
    exact = aten.convolution(*(t.double() if isinstance(t, torch.Tensor) else t for t in given))
    assert (result.shape, result.dtype) == (exact.shape, dtype)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert (result.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def test_the_kernels_of_a_convolution_of_few_pixels_are_not_copied() -> None:
    x, weight = image(2, 12, 8, 8, dtype=torch.float16), image(20, 12, 3, 3, dtype=torch.float16)
    graph = traced(lambda x, w: torch.nn.functional.conv2d(x, w, padding=1), x, weight)
    (copied,) = graph.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert copied.meta["val"].numel() == 128 * 108  # what each pixel sees
    assert aten.convolution.default not in operations(graph)


@pytest.mark.parametrize(
    ("size", "kernel", "named"),
    [((16, 17), 3, {}), ((8, 8), 1, {"padding": [0, 0]}), ((8, 8), 3, {"dilation": [2, 2]}), ((8, 8), 3, {"groups": 2}),
     ((8, 8), 3, {"transposed": True}), ((8, 8), 3, {"dtype": torch.float32})],
    ids=["more pixels", "of one pixel", "dilated", "in groups", "transposed", "full precision"],
)  # fmt: skip
def test_other_convolutions_are_left_to_cudnn(size: tuple[int, int], kernel: int, named: dict) -> None:
    named = dict(named)
    wide, dtype = 6 if "groups" in named else 12, {"dtype": named.pop("dtype", torch.float16)}
    x, weight = image(1, 12, *size, **dtype), image(12, wide, kernel, kernel, **dtype)
    assert inductor_tuning.convolution_as_product(*convolution(x, weight, None, **named)) is NotImplemented


def joined(
    device: str, read: Callable[[torch.Tensor], torch.Tensor] = lambda x: x * 2, mode: str = "real"
) -> torch.fx.GraphModule:
    """Channels of two images put together, traced as on a device: (2, 12, 8, 8).

    Args:
        read: what reads them.
        mode: ``symbolic`` leaves sizes free.
    """
    with FakeTensorMode() if mode == "real" else nullcontext():
        given = [torch.empty(2, channels, 8, 8, device="meta") for channels in (4, 8)]
    graph = make_fx(lambda a, b: read(torch.cat([a, b], 1)), tracing_mode=mode)(*given)
    for node in graph.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            shape = torch.empty_strided(value.shape, value.stride(), device="meta")
            node.meta["val"] = FakeTensor(FakeTensorMode(), shape, torch.device(device))
    return graph


def test_channels_put_together_lie_on_a_gpu_as_convolutions_read_them() -> None:
    graph = joined("cuda")
    inductor_tuning.change_layouts(graph)
    (cat,) = graph.graph.find_nodes(op="call_function", target=aten.cat.default)
    (reader,) = cat.users
    assert reader.args == (cat, (768, 1, 96, 12))
    (multiplied,) = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert multiplied.args[0] is reader
    a, b = (torch.randn(2, channels, 8, 8) for channels in (4, 8))
    assert torch.equal(graph(a, b), torch.cat([a, b], 1) * 2)
    on_cpu = joined("cpu")
    before = str(on_cpu.graph)
    inductor_tuning.change_layouts(on_cpu)
    assert str(on_cpu.graph) == before, "there they stay as they are"


@pytest.mark.parametrize(
    ("read", "mode"), [(lambda x: x * 2, "symbolic"), (lambda x: x.transpose(1, 2), "real")],
    ids=["their count is free", "turned for attention"],
)  # fmt: skip
def test_tokens_put_together_stay_as_they_are(read: Callable[[torch.Tensor], torch.Tensor], mode: str) -> None:
    graph = joined("cuda", read, mode)
    before = str(graph.graph)
    inductor_tuning.change_layouts(graph)
    assert str(graph.graph) == before


class Padded(torch.nn.Module):
    def forward(self, video: torch.Tensor) -> tuple[torch.Tensor]:
        return (with_edges(video, 2, 1, mirrored=True),)


@COMPILES
def test_rows_at_an_edge_are_copied_from_places_in_memory() -> None:
    calls = [[image(1, 64, *size, layout=torch.channels_last_3d)] for size in ((3, 6, 5), (4, 7, 8), (2, 3, 4))]
    free = FreeDimensions(calls)
    with torch.inference_mode(False):
        graph, given = compiled.traced(Padded(), [], [], calls[0], free)
        run, (code,) = run_and_get_code(compiled.by_inductor, graph, given, free)
    assert "aten.cumsum" in code, "numbers made of sizes alone would be computed in the kernel that copies"
    assert "abs" not in code[code.index("index out of bounds") - 1000 : code.index("index out of bounds")]
    for (video,) in calls:
        expected = torch.nn.functional.pad(video, (1, 1, 1, 1, 0, 0), mode="reflect")
        expected = torch.cat([expected[:, :, :1]] * 2 + [expected, expected[:, :, -1:]], 2)
        assert torch.equal(Padded()(video)[0], expected)
        assert torch.equal(run(video)[0], expected)


@pytest.mark.parametrize(("side", "kernel"), [(9, 3), (40, 3), (40, 1)], ids=["few pixels", "many", "one by one"])
def test_a_norm_and_a_convolution_of_free_sizes_are_torchs_for_every_size(side: int, kernel: int) -> None:
    sizes = (2, 64, side, side + 2), (1, 64, 1, 1), (3, 64, side + 1, side + 5)
    weight, bias = image(16, 64, kernel, kernel, dtype=torch.bfloat16) / 30, torch.randn(16).bfloat16()

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(torch.nn.functional.group_norm(x, 8), weight, bias, padding=kernel // 2)

    free = FreeDimensions([[image(*size, dtype=torch.bfloat16)] for size in sizes])
    given = free.examples([weight, bias], [image(*sizes[0], dtype=torch.bfloat16)])
    graph = make_fx(function, decomposition_table=inductor_tuning.TABLE, tracing_mode="symbolic")(
        given[2], given[0], given[1])  # fmt: skip
    assert aten.native_group_norm.default not in operations(graph)
    assert (aten.mm.default in operations(graph)) == (side == 9 or kernel == 1)
    for size in (*sizes, (1, 64, 7, 30), (2, 64, 33, 12)):
        x = image(*size, dtype=torch.bfloat16)
        result, expected = graph(x, weight, bias), function(x.double(), weight.double(), bias.double())
        assert (result.double() - expected).abs().max() <= 0.02 * max(1, expected.abs().max())
