"""Layers of ``fp8_e4m3fn_fast`` on the torch backend: they multiply in fp8 as native's do, and with its weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd
import pytest
import tiny_models
import torch
from any_weights import PROFILE, SIZES, error, handle_of, inputs_of, lora, native, patched, served
from comfy import model_management
from dynamic_vram import on_cpu, weight_when_called
from fake_recorder import Recorder
from hybrid_trt.architectures.quantised_linear import multiplies_in_fp8
from hybrid_trt.architectures.shapes import RequestedSizes, sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor import compile_kinds
from hybrid_trt.backends.torch_inductor.compiled import lifted, traced
from hybrid_trt.backends.torch_inductor.graph_passes import is_write
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.structure_hash import structure_hash
from hybrid_trt.comfy_model.weight_formats import LARGE
from hybrid_trt.engine_builder import parallel
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Unavailable
from quantised import plain_fp8
from small_networks import CPU, ONE_LEVEL, network

FP8 = torch.float8_e4m3fn
LAYOUT = "inpainting_channels"
LIMIT = 1e-5
BUILT = {"B": 2, "H": 8, "W": 8, "T": 77}


def fast(layout: str = LAYOUT, kind: str = "unet") -> NativeNetwork:
    """A network that UNETLoader's weight_dtype ``fp8_e4m3fn_fast`` makes of a file in fp8; computes in float32."""
    return plain_fp8(layout, fast=True, kind=kind)


def fast_layers(net: NativeNetwork) -> dict[str, torch.nn.Module]:
    return {path: layer for path, layer in net.module.named_modules() if multiplies_in_fp8(layer)}


def behind(net: NativeNetwork, patcher: object, dtype: torch.dtype = torch.float32) -> NativeNetwork:
    return NativeNetwork(patcher, net.module, net.prefix, dtype, "a.safetensors", net.role)


def of_live(session: LiveSession, net: NativeNetwork, patcher: object) -> list[torch.Tensor]:
    session.begin_run(patcher)
    with torch.inference_mode():
        return list(session.run(inputs_of(net)).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_layer_gives_native_s_result_to_the_bit(dtype: torch.dtype) -> None:
    net = fast()
    weights = LiveWeights(behind(net, net.patcher, dtype), dtype, False)
    weights.sync_from(net.patcher)
    layers = fast_layers(net)
    assert any(layer.weight.numel() <= LARGE for layer in layers.values())
    assert any(layer.weight.numel() > LARGE for layer in layers.values())
    for path, layer in layers.items():
        own = weights.module.get_submodule(path)
        for shape in ((5,), (2, 32), (2, 3, 4)):  # of four dimensions native casts the weight
            given = 300 * torch.randn(*shape, layer.in_features, dtype=dtype)
            ours, its = given.clone(), given.clone()
            with torch.inference_mode():
                assert torch.equal(own(ours), layer(its)), path
            assert torch.equal(ours, its), "native writes to what it is given"


def limit_for(net: NativeNetwork, expected: list[torch.Tensor], sizes: dict[str, int] = SIZES) -> float:
    """A tenth of what multiplying in fp8 changes: the last bit of a value may change how it is rounded to fp8."""
    kind = "unet" if net.prefix else "controlnet"
    plain = plain_fp8(net.label.partition(".")[0], kind=kind)
    acts = error(expected, native(plain, plain.patcher, sizes))
    assert acts > 1e-2, "it is not what plain fp8 weights give"
    return 0.1 * acts


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_live_weights_compute_what_native_does_with_loras_too(kind: str) -> None:
    net = fast(kind=kind)
    session = LiveSession(net, backends()["torch"], "float32", Recorder())
    with_lora = patched(net, (lora(net, 5), 0.8))
    for patcher in (net.patcher, with_lora, net.patcher):
        expected = native(net, patcher)
        assert error(of_live(session, net, patcher), expected) <= limit_for(net, expected)
    assert session._live.weights.most_bytes < sum(4 * p.numel() for p in net.module.parameters())


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
@pytest.mark.parametrize("functional", [False, True])
def test_the_graph_has_native_s_product_and_writes_only_where_that_is_read_later(functional: bool, read: bool) -> None:
    net = fast()
    weights = LiveWeights(behind(net, net.patcher, torch.bfloat16), torch.bfloat16, False)
    weights.sync_from(net.patcher)
    attention = weights.module.middle_block[1].transformer_blocks[0].attn1
    function = Three(attention.to_q, attention.to_k, read)
    given = torch.randn(2, 32, attention.to_q.in_features, dtype=torch.bfloat16)
    parameters = dict(function.named_parameters())
    graph, _ = traced(function, list(parameters.values()), list(parameters), [given], (), functional)
    targets = Counter(str(node.target) for node in graph.graph.nodes)
    assert targets["aten._scaled_mm.default"] == 2
    written = any(is_write(node) for node in graph.graph.nodes)
    assert written is (read and not functional)
    with torch.inference_mode():
        results, expected = graph(*parameters.values(), given), function(given)
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
    weights = LiveWeights(net, torch.float32, False)
    weights.sync_from(net.patcher)
    function, specs = architecture.function(weights.module), architecture.engine_inputs(net.module, "float32")
    profile = architecture.profile(RequestedSizes(32, 64, 256))
    call = {symbol: served.opt for symbol, served in (profile.ranges | architecture.free).items()}
    given = list(sample_inputs(specs, call, seed=1).values())
    calls = compile_kinds.calls_of_blocks(function, given)
    for block, call in zip(function.blocks, calls, strict=True):
        layers = sum(map(multiplies_in_fp8, block.modules()))
        alone, inputs = compile_kinds.BlockFunction(block, call.form), [torch.randn(t.shape) for t in call.inputs]
        tensors = lifted(alone)
        graph, _ = traced(alone, [*tensors.values()], [*tensors], inputs, ())
        targets = Counter(str(node.target) for node in graph.graph.nodes)
        assert targets["aten._scaled_mm.default"] == layers


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_is_built_without_the_weights_and_serves_them_with_loras(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "room_for_processes", lambda _task: processes)
    net = fast(ONE_LEVEL)
    order, lines = BuildOrder(net, "float32", PROFILE, backends()["torch"]), []
    build_engine(order, Library([tmp_path]), lambda *_: None, lines.append)
    assert not any("one process compiles all of it" in line for line in lines), "no part failed"
    handle = handle_of(net, tmp_path, backend="torch")
    for patcher in (net.patcher, patched(net, (lora(net, 5), 0.8))):
        expected = native(net, patcher, BUILT)
        assert error(served(handle, patcher, BUILT), expected) <= limit_for(net, expected, BUILT)
    assert handle.session.uncovered is None, "the compiled file served"


def test_under_dynamic_vram_weights_are_to_the_bit_what_comfyui_multiplies_with() -> None:
    net = fast("unlike_levels")
    dynamic = on_cpu(net.patcher)
    assert dynamic.add_patches(lora(net, 5), 0.8)
    net = behind(net, dynamic, torch.bfloat16)
    assert net.architecture() is not None, "it is served"
    weights = LiveWeights(net, torch.bfloat16, share=False)
    weights.sync_from(dynamic)
    dynamic.load(CPU)
    counts: Counter[str] = Counter()
    for path, layer in fast_layers(net).items():
        large = model_management.module_size(layer) > LARGE
        its = weight_when_called(layer, FP8, model_management.lora_compute_dtype(CPU), True) if large else layer.weight
        ours = weights.module.get_submodule(path).weight
        assert torch.equal(ours.view(torch.uint8), its.view(torch.uint8)), path
        counts[f"{'large' if large else 'small'} {path.endswith('to_k')}"] += 1
    assert min(counts[kind] for kind in ("large True", "large False", "small True", "small False")) > 0, counts


def test_under_dynamic_vram_layers_of_a_wider_file_are_cast_as_native_casts_them() -> None:
    """There a layer's weight has the dtype of the file, and only fp8 is multiplied as it is."""
    net = fast()
    model_management.archive_model_dtypes(net.module)
    net.module.bfloat16()
    assert not fast_layers(net)
    net = behind(net, on_cpu(net.patcher))
    weights = LiveWeights(net, torch.float32, share=False)
    assert FP8 in {parameter.dtype for parameter in weights.module.parameters()}, "kept as native keeps them"
    assert not any(map(multiplies_in_fp8, weights.module.modules()))
    assert not net.only_live


def test_layers_that_comfyui_widens_first_have_a_reason() -> None:
    net = fast()
    for layer in fast_layers(net).values():
        layer.weight_comfy_model_dtype = torch.bfloat16
    with pytest.raises(Unavailable, match="widens"):
        net.architecture()


def test_engines_of_plain_fp8_weights_and_of_these_are_never_mixed() -> None:
    every = {structure_hash(net.module, live=True) for net in (plain_fp8(LAYOUT), fast(), network("unet", LAYOUT))}
    assert len(every) == 3
    fast_yet_wide = network("unet", LAYOUT, operations=comfy.ops.fp8_ops)
    assert structure_hash(fast_yet_wide.module, live=True) in every, "weights in float32 are multiplied as ever"


def test_backends_with_weights_in_their_files_say_which_one_to_choose(tmp_path: Path) -> None:
    handle = handle_of(fast(), tmp_path)
    assert handle.session is None
    assert "multiply in fp8 (fp8_e4m3fn_fast), which onnxruntime cannot run; choose torch" in handle.fallback.detail
    order = BuildOrder(fast(), "float32", PROFILE, backends()["onnxruntime"])
    with pytest.raises(Unavailable, match="choose torch as the backend"):
        build_engine(order, Library([tmp_path]), lambda *_: None)
