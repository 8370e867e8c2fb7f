"""Quantised layers, and those of ``fp8_e4m3fn_fast``, on the torch backend: native's numbers in native's memory."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd
import pytest
import slow
import tiny_models
import torch
from any_weights import PROFILE, SIZES, error, handle_of, inputs_of, lora, native, patched, served
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from compiling import graph_of
from dynamic_vram import on_cpu, weight_when_called
from fake_recorder import Recorder
from hybrid_trt.architectures.quantised_linear import multiplies_in_fp8
from hybrid_trt.architectures.shapes import RequestedSizes, sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor import compile_kinds
from hybrid_trt.backends.torch_inductor.compiled import lifted
from hybrid_trt.backends.torch_inductor.graph_passes import is_write
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.comfy_model.module_copy import plain_copy
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.structure_hash import structure_hash
from hybrid_trt.comfy_model.weight_formats import LARGE, stored_dtypes, tensors_of
from hybrid_trt.comfy_model.weight_values import current_weights
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_builder.worker import helpers
from hybrid_trt.engine_library import Library, Unavailable
from quantised import FAST, FORMATS, ON_CPU, made, plain_fp8, quantised
from small_networks import CPU, ONE_LEVEL, native_call, network

LAYOUT = "inpainting_channels"
FP8 = torch.float8_e4m3fn
LIMIT = 1e-5
BUILT = {"B": 2, "H": 8, "W": 8, "T": 77}
"""The sizes that an engine of ``PROFILE`` is compiled for."""


def limit_of(
    net: NativeNetwork, sizes: dict[str, int] = SIZES, expected: list[torch.Tensor] | None = None
) -> float:
    """The largest error that says nothing: int8 rounds each row of the input anew, so the last bit of a value may
    change a code. Native's own result changes as much when its input changes by 1e-6. Where layers multiply in fp8 it
    is a fifth of what that changes: a value that is rounded to another code moves that much."""
    if fast_layers(net):
        plain = plain_fp8(net.label.partition(".")[0], kind="unet" if net.prefix else "controlnet")
        expected = native(net, net.patcher, sizes) if expected is None else expected
        acts = error(expected, native(plain, plain.patcher, sizes))
        assert acts > 1e-2, "it is not what plain fp8 weights give"
        return 0.2 * acts
    given = inputs_of(net)
    moved = native_call(net, {name: t * (1 + 1e-6) if name == "x" else t for name, t in given.items()})
    return max(LIMIT, 2 * error(moved, native_call(net, given)))


def fast_layers(net: NativeNetwork) -> dict[str, torch.nn.Module]:
    return {path: layer for path, layer in net.module.named_modules() if multiplies_in_fp8(layer)}


def behind(net: NativeNetwork, patcher: object, dtype: torch.dtype = torch.float32) -> NativeNetwork:
    """The network with another patcher, computing in a dtype."""
    return NativeNetwork(patcher, net.module, net.prefix, dtype, net.label, net.role)


def weights_of(net: NativeNetwork, dtype: torch.dtype) -> LiveWeights:
    """A copy of a network's weights, in sync with its patcher."""
    weights = LiveWeights(behind(net, net.patcher, dtype), dtype, share=False)
    weights.sync_from(net.patcher)
    return weights


def session_of(net: NativeNetwork) -> LiveSession:
    return LiveSession(net, backends()["torch"], "float32", Recorder())


def of_live(session: LiveSession, net: NativeNetwork, patcher: ModelPatcher) -> list[torch.Tensor]:
    session.begin_run(patcher)
    with torch.inference_mode():
        return list(session.run(inputs_of(net)).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*FORMATS, FAST])
def test_a_layer_gives_native_s_result_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """In every format that is quantised, and also where ComfyUI multiplies quantised weights as they are."""
    shapes, scale = (((5,), (2, 32), (2, 3, 4)), 300) if name == FAST else (((2, 32),), 1)  # of four native casts
    for disabled in (frozenset(), ON_CPU):
        net = made("unet", name, LAYOUT, dtype, disabled)
        weights, fast = weights_of(net, dtype), fast_layers(net)
        layers = fast or {path: layer for path, layer in net.module.named_modules() if "attn1.to_q" in path}
        assert layers
        assert not fast or {layer.weight.numel() > LARGE for layer in fast.values()} == {False, True}
        for (path, layer), shape in itertools.product(layers.items(), shapes):
            given = scale * torch.randn(*shape, layer.in_features, dtype=dtype)
            ours, its = given.clone(), given.clone()
            with torch.inference_mode():
                assert torch.equal(weights.module.get_submodule(path)(ours), layer(its)), path
            assert torch.equal(ours, its), "native writes to what it is given"


LAYER_BY_LAYER = {"fp8 e5m2", "int8", "int8 rows", "mxfp8"}
"""Formats that a test above tries too, on layers."""


@pytest.mark.parametrize(("name", "kind"), [
    *(pytest.param(name, "unet", marks=[pytest.mark.slow] * (name in LAYER_BY_LAYER)) for name in [*FORMATS, FAST]),
    ("fp8", "controlnet"), (FAST, "controlnet")])
def test_live_weights_compute_what_native_does_with_loras_too(name: str, kind: str) -> None:
    net, plain = made(kind, name, LAYOUT), plain_fp8(LAYOUT, kind=kind) if name == FAST else network(kind, LAYOUT)
    expected, session, limit = native(net, net.patcher), session_of(net), limit_of(net)
    acts = error(expected, native(plain, plain.patcher))
    assert acts > 1e-3, "quantisation acts"
    assert limit < 0.3 * acts or "int8" in name
    assert error(of_live(session, net, net.patcher), expected) <= limit
    with_lora = patched(net, (lora(net, 5), 0.8))
    changed = native(net, with_lora)
    assert error(changed, expected) > 3 * limit, "the LoRA acts"
    assert error(of_live(session, net, with_lora), changed) <= limit
    assert error(of_live(session, net, net.patcher), expected) <= limit, "and it is gone again"
    assert session._live.weights.most_bytes < sum(4 * p.numel() for p in net.module.parameters())


@pytest.mark.parametrize("name", ["fp8", "int8 rows", "nvfp4"])
def test_weights_of_a_copy_take_the_memory_that_native_s_take(name: str) -> None:
    net = quantised("unet", LAYOUT, name)
    weights = list(net.module.parameters())
    parts = [part for w in weights if isinstance(w, QuantizedTensor) for part in w.state_dict("w").values()]
    native_bytes = sum(p.nbytes for p in (*parts, *(w for w in weights if not isinstance(w, QuantizedTensor))))
    weights = LiveWeights(net, torch.float32, share=False)
    assert weights.missing(net.patcher) == weights.most_bytes == native_bytes
    weights.sync_from(net.patcher)
    assert weights.bytes == native_bytes


def test_loaded_quantised_weights_are_used_where_they_are() -> None:
    net = quantised("unet", LAYOUT, "fp8")
    session = session_of(net)
    net.patcher.patch_model(CPU)
    assert error(of_live(session, net, net.patcher), native_call(net, inputs_of(net))) <= LIMIT
    assert session._live.weights.bytes == 0


@pytest.mark.parametrize(("name", "count"), slow.cases(
    {"fp8, alone": ("fp8", 0), "fp8": ("fp8", 2), "int8": ("int8 convrot", 2), "fast, alone": (FAST, 0),
     "fast": (FAST, 2)}, ["fp8, alone", "int8", "fast, alone", "fast"]))  # fmt: skip
def test_an_engine_is_built_without_the_weights_and_serves_them_with_loras(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "room_for_helpers", lambda _device: count)
    net = made("unet", name, ONE_LEVEL)
    order, lines = BuildOrder(net, "float32", PROFILE, backends()["torch"]), []
    engine = build_engine(order, Library([tmp_path]), lambda *_: None, lines.append)
    assert not any("a helper failed" in line for line in lines), lines
    assert "read" not in engine.manifest.seconds, "weights are inputs of what is compiled"
    handle = handle_of(net, tmp_path, backend="torch")
    for patcher in (net.patcher, patched(net, (lora(net, 5), 0.8))):
        expected = native(net, patcher, BUILT)
        assert error(served(handle, patcher, BUILT), expected) <= limit_of(net, BUILT, expected)
    assert handle.session.uncovered is None, "the compiled file served"


def test_the_structure_tells_formats_apart_and_not_the_values() -> None:
    nets = [*(made("unet", name, LAYOUT) for name in [*FORMATS, FAST]), plain_fp8(LAYOUT), network("unet", LAYOUT)]
    every = [structure_hash(net.module, live=True) for net in nets]
    assert len(set(every)) == len(every), "engines are never mixed"
    fast_yet_wide = network("unet", LAYOUT, operations=comfy.ops.fp8_ops)
    assert structure_hash(fast_yet_wide.module, live=True) == every[-1], "weights in float32 are multiplied as ever"
    again = quantised("unet", LAYOUT, "fp8")
    again.module.out[2].weight.data.mul_(2)
    assert structure_hash(again.module, live=True) == every[0]


def test_the_weights_that_are_hashed_are_dequantised_with_their_patches() -> None:
    net = quantised("unet", LAYOUT, "fp8")
    plain = dict(current_weights(net.patcher, net.prefix))
    key = "middle_block.1.transformer_blocks.0.attn1.to_k.weight"
    assert torch.equal(plain[key], net.module.get_parameter(key).dequantize())
    patcher = patched(net, (lora(net, 5), 0.8))
    before = dict(current_weights(patcher, net.prefix))
    patcher.patch_model(CPU)
    its = net.module.get_parameter(key).dequantize().clone()
    patcher.unpatch_model(CPU)
    assert torch.equal(before[key], its)
    assert not torch.equal(before[key], plain[key])


@pytest.mark.parametrize(("name", "words"), [
    ("int8", ""), (FAST, "multiply in fp8 (fp8_e4m3fn_fast), which ")])
def test_backends_with_weights_in_their_files_say_which_one_to_choose(name: str, words: str, tmp_path: Path) -> None:
    net = made("unet", name, LAYOUT)
    handle = handle_of(net, tmp_path)
    assert handle.session is None
    assert f"{words}onnxruntime cannot run; choose torch" in handle.fallback.detail
    assert "has no engine" not in handle.fallback.sentence(), "torch has one"
    order = BuildOrder(net, "float32", PROFILE, backends()["onnxruntime"])
    with pytest.raises(Unavailable, match="choose torch as the backend"):
        build_engine(order, Library([tmp_path]), lambda *_: None)


def test_a_format_whose_kernels_cannot_be_traced_has_a_reason() -> None:
    net = quantised("unet", LAYOUT, "int8")
    layer = net.module.middle_block[1].transformer_blocks[0].attn1.to_q
    plain = torch.randn(layer.out_features, 256)
    layer.weight = torch.nn.Parameter(QuantizedTensor.from_float(plain, "TensorCoreConvRotW4A4Layout"), False)
    with pytest.raises(Unavailable, match="in the format TensorCoreConvRotW4A4"):
        behind(net, net.patcher).architecture()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_large_plain_fp8_weights_stay_fp8_and_are_cast_while_they_are_used(dtype: torch.dtype) -> None:
    net = network("unet", LAYOUT, operations=comfy.ops.manual_cast)
    net.module.to(dtype)
    plain = network("unet", LAYOUT)
    assert structure_hash(net.module) == structure_hash(plain.module), "engines with weights of their own serve both"
    assert structure_hash(net.module, live=True) != structure_hash(plain.module, live=True)
    dtypes = stored_dtypes(net.module, torch.float32)
    assert {dtypes[name] for name, p in net.module.named_parameters() if p.ndim > 1 and p.numel() > 16384} == {dtype}
    assert {dtypes[name] for name, p in net.module.named_parameters() if p.ndim == 1} == {torch.float32}
    session = session_of(net)
    assert error(of_live(session, net, net.patcher), native(net, net.patcher)) <= LIMIT
    weights = session._live.weights
    fp8 = sum(p.numel() for p in net.module.parameters() if p.ndim > 1 and p.numel() > 16384)
    assert weights.bytes < 4 * sum(p.numel() for p in net.module.parameters()) - 3 * fp8 + 1


def test_a_layer_that_is_wider_than_its_network_keeps_its_dtype() -> None:
    net = network("unet", LAYOUT, torch.bfloat16)
    wide = net.module.out[2]
    wide.to(torch.float32)
    assert [n for n, d in stored_dtypes(net.module, torch.bfloat16).items() if d == torch.float32] == [
        "out.2.weight", "out.2.bias"
    ]
    copy = plain_copy(net.module, torch.bfloat16, lambda _, p: p.data, lambda _, b: b)
    given = torch.randn(1, wide.in_channels, 8, 8)
    wide.comfy_cast_weights = True
    with torch.inference_mode():
        assert torch.equal(copy.out[2](given), wide(given)), "float32 inputs are not rounded"
        assert copy.out[2](given.bfloat16()).dtype == torch.bfloat16
    assert set(stored_dtypes(network("unet", LAYOUT).module, torch.float16).values()) == {torch.float16}


class Both(torch.nn.Module):
    """Two layers of one input."""

    def __init__(self, *layers: torch.nn.Module):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


@pytest.mark.parametrize(("name", "fused"), [("fp8", True), ("fp8 e5m2", True), ("fp8 with input scales", False)])
def test_rounding_to_fp8_is_fused_where_that_changes_no_bit(name: str, fused: bool) -> None:
    net = quantised("unet", LAYOUT, name, torch.bfloat16, frozenset())
    attention = weights_of(net, torch.bfloat16).module.middle_block[1].transformer_blocks[0].attn1
    layer = Both(attention.to_q, attention.to_k)
    graph = graph_of(layer, [torch.randn(2, 32, attention.to_q.in_features, dtype=torch.bfloat16)])
    found = {str(node.target) for node in graph.graph.nodes}
    assert "aten._scaled_mm.default" in found
    ones = [(node.args, node.kwargs) for node in graph.graph.nodes if str(node.target) == "aten.ones.default"]
    assert len(ones) == len(set(map(str, ones))), "a scale of one is made once for all layers"
    assert ("comfy_kitchen.quantize_fp8.default" in found) is not fused
    assert ("aten.clamp.default" in found) is fused


@pytest.mark.parametrize("name", FORMATS)
def test_patched_weights_are_to_the_bit_what_comfyui_puts_in_their_place(name: str) -> None:
    net = quantised("unet", LAYOUT, name)
    patcher = patched(net, (lora(net, 5), 0.8))
    weights = LiveWeights(net, torch.float32, share=False)
    weights.sync_from(patcher)
    ours = {name: parameter.clone() for name, parameter in weights.module.named_parameters()}
    patcher.patch_model(CPU)
    weights = LiveWeights(net, torch.float32)
    weights.sync_from(patcher)
    assert weights.bytes == 0, "these are ComfyUI's own"
    its = {name: parameter.clone() for name, parameter in weights.module.named_parameters()}
    patcher.unpatch_model(CPU)
    assert ours.keys() == its.keys()
    for part, value in its.items():
        assert torch.equal(ours[part].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), part


@pytest.mark.parametrize("name", ["fp8", "fp8 with input scales", "int8 rows", FAST])
def test_under_dynamic_vram_weights_are_to_the_bit_what_comfyui_multiplies_with(name: str) -> None:
    net = made("unet", name, "unlike_levels", torch.bfloat16, frozenset())
    dynamic = on_cpu(net.patcher)
    assert dynamic.add_patches(lora(net, 5), 0.8)
    net = behind(net, dynamic, torch.bfloat16)
    assert net.architecture() is not None, "it is served"
    weights, counts = weights_of(net, torch.bfloat16), Counter()
    dynamic.load(CPU)
    dtypes = (FP8, model_management.lora_compute_dtype(CPU)) if name == FAST else (torch.bfloat16, torch.bfloat16)
    for path, layer in net.module.named_modules():
        if not hasattr(layer, "quant_format") and not multiplies_in_fp8(layer):
            continue
        large = model_management.module_size(layer) > LARGE
        its = weight_when_called(layer, *dtypes, rounds=True) if large else layer.weight
        ours = weights.module.get_submodule(path)
        for part, value in tensors_of("weight", its).items():
            assert torch.equal(ours.get_parameter(part).view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), (
                path, part)
        patched_one = path.endswith("to_k")
        assert not large or name == FAST or patched_one is (layer.weight_lowvram_function is not None)
        counts[f"{'large' if large else 'small'} {patched_one}"] += 1
    assert min(counts[kind] for kind in ("large True", "large False", "small True", "small False")) > 0, counts


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_under_dynamic_vram_dequantised_layers_have_what_later_calls_of_native_have(name: str) -> None:
    """Their first call has the unrounded weight, and later ones the rounded one."""
    net = quantised("unet", "unlike_levels", name)
    for layer in net.module.modules():
        if hasattr(layer, "quant_format"):
            layer._full_precision_mm = True
    dynamic = on_cpu(net.patcher)
    assert dynamic.add_patches(lora(net, 5), 0.8)
    net = behind(net, dynamic)
    assert net.architecture() is not None, "it is served"
    weights = weights_of(net, torch.float32)
    dynamic.load(CPU)
    changing = 0
    for path, layer in net.module.named_modules():
        if hasattr(layer, "quant_format") and getattr(layer, "weight_lowvram_function", None) is not None:
            ours = weights.module.get_submodule(path).weight.dequantize()
            assert torch.equal(ours, weight_when_called(layer, torch.float32, calls=2)), path
            changing += not torch.equal(ours, weight_when_called(layer, torch.float32))
    assert changing > 2, "the first call has another one"


class Three(torch.nn.Module):
    """Two layers of one input, and what reads that beside them."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module, read: bool):
        super().__init__()
        self.first, self.second, self.read = first, second, read

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = given * 1000
        before = given + 1
        results = self.first(given), self.second(given.flatten(0, 1)), before
        return (*results, given - 1) if self.read else results


@pytest.mark.parametrize("read", [False, True])
def test_the_graph_has_native_s_product_and_writes_only_where_that_is_read_later(read: bool) -> None:
    weights = weights_of(made("unet", FAST, LAYOUT), torch.bfloat16)
    attention = weights.module.middle_block[1].transformer_blocks[0].attn1
    function = Three(attention.to_q, attention.to_k, read)
    given = torch.randn(2, 32, attention.to_q.in_features, dtype=torch.bfloat16)
    graph = graph_of(function, [given])
    targets = Counter(str(node.target) for node in graph.graph.nodes)
    assert targets["aten._scaled_mm.default"] == 2
    written = any(is_write(node) for node in graph.graph.nodes)
    assert written is read
    with torch.inference_mode():
        results, expected = graph(*lifted(function).values(), given), function(given)
    for ours, its in zip(results[2:], expected[2:], strict=True):
        assert torch.equal(ours, its), "the clamped values are read, as in native"
    for ours, its in zip(results[:2], expected[:2], strict=True):
        assert (ours - its).norm() <= 1e-2 * its.norm(), "by another kernel on a CPU"


@pytest.mark.parametrize("name", ["tiny_flux1_unet", "tiny_wan"])
def test_blocks_of_a_network_that_comfyui_loads_so_multiply_in_fp8(
    name: str, environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_management, "supports_fp8_compute", lambda *_: True)
    file = tiny_models.make(environment.base / "models", [name])[name]
    chosen = {"dtype": FP8, "fp8_optimizations": True}  # as UNETLoader hands it on
    net = NativeNetwork.of_model(comfy.sd.load_diffusion_model(str(file), model_options=chosen), name)
    architecture = net.architecture()
    assert len(fast_layers(net)) > 20
    function = architecture.function(weights_of(net, torch.float32).module)
    specs = architecture.engine_inputs(net.module, "float32")
    profile = architecture.profile(RequestedSizes(32, 64, 256))
    call = {symbol: served.opt for symbol, served in (profile.ranges | architecture.free).items()}
    given = list(sample_inputs(specs, call, seed=1).values())
    calls = compile_kinds.calls_of_blocks(function, given)
    for block, (call,) in zip(function.blocks, calls, strict=True):
        layers = sum(map(multiplies_in_fp8, block.modules()))
        alone, inputs = compile_kinds.BlockFunction(block, call.form), [torch.randn(t.shape) for t in call.inputs]
        targets = Counter(str(node.target) for node in graph_of(alone, inputs).graph.nodes)
        assert targets["aten._scaled_mm.default"] == layers


def test_under_dynamic_vram_layers_of_a_wider_file_are_cast_as_native_casts_them() -> None:
    """There a layer's weight has the dtype of the file, and only fp8 is multiplied as it is."""
    net = made("unet", FAST, LAYOUT)
    model_management.archive_model_dtypes(net.module)
    net.module.bfloat16()
    assert not fast_layers(net)
    net = behind(net, on_cpu(net.patcher))
    weights = LiveWeights(net, torch.float32, share=False)
    assert FP8 in {parameter.dtype for parameter in weights.module.parameters()}, "kept as native keeps them"
    assert not any(map(multiplies_in_fp8, weights.module.modules()))
    assert not net.only_live


def test_layers_that_comfyui_widens_first_have_a_reason() -> None:
    net = made("unet", FAST, LAYOUT)
    for layer in fast_layers(net).values():
        layer.weight_comfy_model_dtype = torch.bfloat16
    with pytest.raises(Unavailable, match="widens"):
        net.architecture()
