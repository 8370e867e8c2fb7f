"""Quantised layers on the torch backend: the same numbers as native's, in the same memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import comfy.ops
import pytest
import slow
import torch
from any_weights import PROFILE, error, handle_of, inputs_of, lora, native, patched, served
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from dynamic_vram import on_cpu, weight_when_called
from fake_recorder import Recorder
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.compiled import traced
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.comfy_model.module_copy import plain_copy
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.structure_hash import structure_hash
from hybrid_trt.comfy_model.weight_formats import LARGE, stored_dtypes, tensors_of
from hybrid_trt.comfy_model.weight_values import current_weights
from hybrid_trt.engine_builder import parallel
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Unavailable
from quantised import FORMATS, quantised
from small_networks import CPU, ONE_LEVEL, native_call, network

LAYOUT = "inpainting_channels"
LIMIT = 1e-5
BUILT = {"B": 2, "H": 8, "W": 8, "T": 77}
"""The sizes that an engine of ``PROFILE`` is compiled for."""


def limit_of(net: NativeNetwork) -> float:
    """The largest error that says nothing: int8 rounds each row of the input anew, so the last bit of a value may
    change a code. Native's own result changes as much when its input changes by 1e-6."""
    given = inputs_of(net)
    moved = native_call(net, {name: t * (1 + 1e-6) if name == "x" else t for name, t in given.items()})
    return max(LIMIT, 2 * error(moved, native_call(net, given)))


def session_of(net: NativeNetwork) -> LiveSession:
    return LiveSession(net, backends()["torch"], "float32", Recorder())


def of_live(session: LiveSession, net: NativeNetwork, patcher: ModelPatcher) -> list[torch.Tensor]:
    session.begin_run(patcher)
    with torch.inference_mode():
        return list(session.run(inputs_of(net)).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_gives_native_s_result_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """In every format that is quantised, and also where ComfyUI multiplies quantised weights as they are."""
    for disabled in (frozenset(), None):
        net = quantised("unet", LAYOUT, name, dtype, *(() if disabled is None else (disabled,)))
        weights = LiveWeights(NativeNetwork(net.patcher, net.module, net.prefix, dtype, "", net.role), dtype, False)
        weights.sync_from(net.patcher)
        layers = {path: layer for path, layer in net.module.named_modules() if "attn1.to_q" in path}
        assert layers
        for path, layer in layers.items():
            given = torch.randn(2, 32, layer.in_features, dtype=dtype)
            with torch.inference_mode():
                assert torch.equal(weights.module.get_submodule(path)(given), layer(given)), path


LAYER_BY_LAYER = {"fp8 e5m2", "int8", "int8 rows", "mxfp8"}
"""Formats that a test above tries too, on layers."""


@pytest.mark.parametrize(("name", "kind"), [
    *(pytest.param(name, "unet", marks=[pytest.mark.slow] * (name in LAYER_BY_LAYER)) for name in FORMATS),
    ("fp8", "controlnet")])
def test_live_weights_compute_what_native_does_with_loras_too(name: str, kind: str) -> None:
    net = quantised(kind, LAYOUT, name)
    expected = native(net, net.patcher)
    assert error(expected, native(network(kind, LAYOUT), network(kind, LAYOUT).patcher)) > 1e-3, "quantisation acts"
    session, limit = session_of(net), limit_of(net)
    assert limit < 0.3 * error(expected, native(network(kind, LAYOUT), network(kind, LAYOUT).patcher)) or "int8" in name
    assert error(of_live(session, net, net.patcher), expected) <= limit
    with_lora = patched(net, (lora(net, 5), 0.8))
    changed = native(net, with_lora)
    assert error(changed, expected) > 3 * limit, "the LoRA acts"
    assert error(of_live(session, net, with_lora), changed) <= limit
    assert error(of_live(session, net, net.patcher), expected) <= limit, "and it is gone again"


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


@pytest.mark.parametrize(("name", "processes"), slow.cases(
    {"fp8, one process": ("fp8", 0), "fp8": ("fp8", 2), "int8": ("int8 convrot", 2)}, ["fp8, one process", "int8"]
))
def test_an_engine_is_built_without_the_weights_and_serves_them_with_loras(
    name: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "room_for_processes", lambda _task: processes)
    net = quantised("unet", ONE_LEVEL, name)
    order, lines, phases = BuildOrder(net, "float32", PROFILE, backends()["torch"]), [], []
    engine = build_engine(order, Library([tmp_path]), lambda phase, _: phases.append(phase), lines.append)
    assert any(phase.endswith(f" with {processes} processes") for phase in phases) is (processes > 0), phases
    assert not any("one process compiles all of it" in line for line in lines), "no part failed"
    assert "read" not in engine.manifest.seconds, "weights are inputs of what is compiled"
    handle = handle_of(net, tmp_path, backend="torch")
    for patcher in (net.patcher, patched(net, (lora(net, 5), 0.8))):
        assert error(served(handle, patcher, BUILT), native(net, patcher, BUILT)) <= limit_of(net)
    assert handle.session.uncovered is None, "the compiled file served"


def test_the_structure_tells_formats_apart_and_not_the_values() -> None:
    every = [structure_hash(quantised("unet", LAYOUT, name).module, live=True) for name in FORMATS]
    every.append(structure_hash(network("unet", LAYOUT).module, live=True))
    assert len(set(every)) == len(every)
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


def test_backends_with_weights_in_their_files_say_which_one_to_choose(tmp_path: Path) -> None:
    net = quantised("unet", LAYOUT, "int8")
    handle = handle_of(net, tmp_path)
    assert handle.session is None
    assert "onnxruntime cannot run; choose torch" in handle.fallback.detail
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
        NativeNetwork(net.patcher, net.module, net.prefix, net.dtype, net.label, net.role).architecture()


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
@pytest.mark.parametrize("functional", [False, True])
def test_rounding_to_fp8_is_fused_where_that_changes_no_bit(name: str, fused: bool, functional: bool) -> None:
    net = quantised("unet", LAYOUT, name, torch.bfloat16, frozenset())
    weights = LiveWeights(NativeNetwork(net.patcher, net.module, net.prefix, torch.bfloat16, "", net.role),
                          torch.bfloat16, False)  # fmt: skip
    weights.sync_from(net.patcher)
    attention = weights.module.middle_block[1].transformer_blocks[0].attn1
    layer = Both(attention.to_q, attention.to_k)
    parameters = dict(layer.named_parameters())
    given = torch.randn(2, 32, attention.to_q.in_features, dtype=torch.bfloat16)
    graph, _ = traced(layer, list(parameters.values()), list(parameters), [given], (), functional)
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


@pytest.mark.parametrize("name", ["fp8", "fp8 with input scales", "int8 rows"])
def test_under_dynamic_vram_weights_are_to_the_bit_what_comfyui_multiplies_with(name: str) -> None:
    net = quantised("unet", "unlike_levels", name, torch.bfloat16, frozenset())
    dynamic = on_cpu(net.patcher)
    assert dynamic.add_patches(lora(net, 5), 0.8)
    net = NativeNetwork(dynamic, net.module, net.prefix, torch.bfloat16, name, net.role)
    assert net.architecture() is not None, "it is served"
    weights = LiveWeights(net, torch.bfloat16, share=False)
    weights.sync_from(dynamic)
    dynamic.load(CPU)
    counts: Counter[str] = Counter()
    for path, layer in net.module.named_modules():
        if not hasattr(layer, "quant_format"):
            continue
        large = model_management.module_size(layer) > LARGE
        its = weight_when_called(layer, torch.bfloat16, torch.bfloat16, rounds=True) if large else layer.weight
        ours = weights.module.get_submodule(path)
        for part, value in tensors_of("weight", its).items():
            assert torch.equal(ours.get_parameter(part).view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), (
                path, part)
        patched_one = layer.weight_lowvram_function is not None if large else path.endswith("to_k")
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
    net = NativeNetwork(dynamic, net.module, net.prefix, net.dtype, "", net.role)
    assert net.architecture() is not None, "it is served"
    weights = LiveWeights(net, torch.float32, share=False)
    weights.sync_from(dynamic)
    dynamic.load(CPU)
    changing = 0
    for path, layer in net.module.named_modules():
        if hasattr(layer, "quant_format") and getattr(layer, "weight_lowvram_function", None) is not None:
            ours = weights.module.get_submodule(path).weight.dequantize()
            assert torch.equal(ours, weight_when_called(layer, torch.float32, calls=2)), path
            changing += not torch.equal(ours, weight_when_called(layer, torch.float32))
    assert changing > 2, "the first call has another one"
