"""From a native module to a checked ONNX graph: any layout, any loading state, ComfyUI left as it was."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.ops
import pytest
import slow
import tiny_recipes
import torch
from built_once import built_once
from comfy.ldm.modules import attention
from hybrid_trt.architectures import Role, architecture_of
from hybrid_trt.architectures.shapes import Dim, Profile, Range, TensorSpec, sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model import weight_hash
from hybrid_trt.comfy_model.network import UNET_PREFIX, NativeNetwork
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_builder.worker import parity
from hybrid_trt.engine_builder.worker.onnx_export import DATA_NAME, export_onnx
from hybrid_trt.engine_library import BuildError, Engine, Library, Reason, Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions.file_session import FileSession
from small_networks import CPU, LAYOUTS, HintEncoder, native_call, network, with_lora

PROFILE = Profile({"B": Range(1, 2, 4), "H": Range(4, 16, 40), "W": Range(4, 16, 40), "T": Range(77, 77, 231),
                   "HB": Range(1, 1, 4)})


def order_of(net: NativeNetwork, precision: str = "float32") -> BuildOrder:
    return BuildOrder(net, precision, PROFILE, backends()["onnxruntime"])


def built(net: NativeNetwork, folder: Path, precision: str = "float32") -> Engine:
    return built_once(order_of(net, precision), Library([folder]))


def build_anew(net: NativeNetwork, folder: Path) -> Engine:
    return build_engine(order_of(net), Library([folder]), lambda *_: None, run=run_here)


def engine_error(net: NativeNetwork, engine: Engine, symbols: dict[str, int]) -> float:
    given = sample_inputs(engine.manifest.inputs, symbols, seed=99)
    plain = {name: tensor.float() for name, tensor in given.items()}
    if net.role is Role.CONTROLNET:  # the engine takes the hint encoded
        (spec,) = (s for s in net.architecture().inputs(net.module, "float32") if s.name == "hint")
        plain["hint"] = sample_inputs([spec], symbols, seed=99)["hint"]
        encoder = HintEncoder(net, engine.manifest.identity.precision)
        given["hint"] = encoder(plain["hint"])
    outputs = FileSession(engine, backends()["onnxruntime"].load, CPU).run(given)
    native = native_call(net, plain)
    return max(relative_error(o, n) for o, n in zip(outputs.values(), native, strict=True))


KINDS = {f"{kind}-{layout}": (kind, layout) for layout in LAYOUTS for kind in ("unet", "controlnet")}
SLOW = ("unet-sdxl_refiner", "controlnet-sd15_as_published", "unet-sd15_as_published", "controlnet-sdxl_as_published",
        "unet-sdxl_as_published", "controlnet-inpainting_channels", "unet-inpainting_channels",
        "controlnet-sdxl_refiner")


@pytest.mark.parametrize(("kind", "layout"), slow.cases(KINDS, SLOW))
def test_any_layout_becomes_an_engine_that_computes_what_native_does(tmp_path: Path, kind: str, layout: str) -> None:
    net = network(kind, layout)
    engine = built(net, tmp_path)
    family = "sdxl" if "sdxl" in layout else "sd15"
    assert engine.manifest.identity.architecture == f"{family}_{kind}"
    assert engine.manifest.parity["rel_err"] <= 1e-5
    for symbols in ({"B": 1, "H": 8, "W": 8, "T": 77, "HB": 1}, {"B": 3, "H": 13, "W": 31, "T": 154, "HB": 1},
                    {"B": 4, "H": 5, "W": 40, "T": 231, "HB": 4}):
        assert engine_error(net, engine, symbols) <= 1e-5, symbols


def test_every_residual_has_its_own_effect(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    engine = built(net, tmp_path)
    session = FileSession(engine, backends()["onnxruntime"].load, CPU)
    given = sample_inputs(engine.manifest.inputs, {"B": 1, "H": 11, "W": 9, "T": 77}, seed=3)
    full = session.run(given)["out"]
    residuals = [name for name in given if name.startswith("control_")]
    assert len(residuals) == len(net.module.input_blocks) + 1 + 2
    for name in residuals:
        without = session.run({n: t for n, t in given.items() if n != name})["out"]
        zeroed = native_call(net, {**given, name: torch.zeros_like(given[name])})[0]
        assert relative_error(without, zeroed) <= 1e-5
        assert relative_error(without, full) > 1e-3, name


@slow.when("unet")
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_fp16_engine_stays_close_to_native_in_fp32(tmp_path: Path, kind: str) -> None:
    net = network(kind, "unlike_levels")
    engine = built(net, tmp_path, "float16")
    assert {s.dtype for s in engine.manifest.inputs if s.name != "timesteps"} == {"float16"}
    error = engine_error(net, engine, {"B": 2, "H": 16, "W": 12, "T": 77, "HB": 1})
    assert 1e-6 < error <= 1e-2


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
@slow.when("unet")
def test_weights_kept_in_fp16_and_cast_at_every_call_export_as_they_compute(tmp_path: Path, kind: str) -> None:
    net = network(kind, "unlike_levels", torch.float16, comfy.ops.manual_cast)
    engine = built(net, tmp_path)
    assert engine_error(net, engine, {"B": 2, "H": 9, "W": 9, "T": 77, "HB": 1}) <= 1e-5


def loading_flags(net: NativeNetwork) -> list[tuple]:
    """Put on each layer what ComfyUI's loading leaves there."""
    return [(getattr(m, "comfy_cast_weights", None), getattr(m, "weight_function", None)) for m in net.module.modules()]


@pytest.mark.parametrize("state", ["not_loaded", "patched_in_place", "lowvram"])
@slow.when("lowvram")
@slow.when("not_loaded")
def test_a_lora_is_built_in_whatever_state_the_model_is_loaded_in(tmp_path: Path, state: str) -> None:
    plain = network("unet", "unlike_levels", operations=comfy.ops.disable_weight_init)
    net = with_lora(plain)
    plain_hash, lora_hash = plain.weights_hash(), net.weights_hash()
    assert plain_hash != lora_hash
    if state != "not_loaded":
        net.patcher.patch_model(CPU, lowvram_model_memory=1 if state == "lowvram" else 0)
    flags = loading_flags(net)
    if state == "lowvram":
        assert any(functions for _, functions in flags), "nothing is left to be patched at call time"
    engine = built(net, tmp_path)
    assert engine.manifest.identity.weights == lora_hash
    assert loading_flags(net) == flags
    symbols = {"B": 1, "H": 8, "W": 8, "T": 77}
    if state == "not_loaded":
        assert engine_error(plain, engine, symbols) > 1e-3
        net.patcher.patch_model(CPU)
    assert engine_error(net, engine, symbols) <= 1e-5


def test_hashing_a_patched_model_from_the_unpatched_clone_sees_the_original_weights() -> None:
    plain = network("unet", "unlike_levels")
    before = plain.weights_hash()
    net = with_lora(plain)
    net.patcher.patch_model(CPU)
    fresh = network("unet", "unlike_levels")
    assert fresh.weights_hash() == before
    live = NativeNetwork(plain.patcher.clone(), plain.module, UNET_PREFIX, torch.float32, "live", plain.role)
    from hybrid_trt.comfy_model.weight_hash import _hash
    from hybrid_trt.comfy_model.weight_values import current_weights

    assert _hash(current_weights(live.patcher, UNET_PREFIX)) == before


def test_hashing_holds_a_few_weights_at_a_time() -> None:
    alive, most = 0, 0

    def ended() -> None:
        nonlocal alive
        alive -= 1

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive, most
        for number in range(200):
            weight = torch.full((1000, 100), float(number))
            weakref.finalize(weight, ended)
            alive += 1
            most = max(most, alive)
            yield str(number), weight

    digests = {str(n): weight_hash.digest(str(n), torch.full((1000, 100), float(n))) for n in range(200)}
    assert weight_hash._hash(made()) == weight_hash.combine(digests)
    assert most <= weight_hash.AHEAD + 4


def test_fp16_and_fp32_copies_of_the_same_weights_have_one_hash() -> None:
    half = network("unet", "unlike_levels", torch.float16)
    full = network("unet", "unlike_levels", torch.float16)
    full.module.to(torch.float32)
    assert half.weights_hash() == full.weights_hash()
    full_2 = network("unet", "unlike_levels", torch.float16)
    full_2.module.out[2].bias.data[0] += 0.01
    assert full_2.weights_hash() != half.weights_hash()


def test_attention_of_this_comfyui_is_neither_used_nor_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attention_poisoned(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("ComfyUI's own attention was exported")

    own = attention_poisoned.__code__.replace(co_filename=attention.__file__)  # another pack's would stop the build
    attention_poisoned.__code__ = own
    poisoned = attention.wrap_attn(attention_poisoned)
    monkeypatch.setattr(attention, "optimized_attention", poisoned)
    monkeypatch.setattr(attention, "optimized_attention_masked", poisoned)
    for kind in ("unet", "controlnet"):
        net = network(kind, "unlike_levels")
        build_anew(net, tmp_path)
        assert not any(m._forward_pre_hooks for m in net.module.modules())
    assert attention.optimized_attention is poisoned


def test_every_parameter_is_found_in_the_graph_also_those_of_equal_values(tmp_path: Path) -> None:
    for kind in ("unet", "controlnet"):
        net = network(kind, "sdxl_refiner")
        for layer in (net.module.middle_block[0].in_layers[2], net.module.middle_block[0].out_layers[3]):
            layer.bias.data.zero_()
        engine = built(net, tmp_path)
        mapping = json.loads((engine.folder / "parameters.json").read_text())
        names = {name for name, _ in net.module.named_parameters() if not name.startswith("input_hint_block.")}
        assert mapping == {name: f"{kind}.{name}" for name in names}


def test_weights_are_in_a_file_beside_the_graph(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    architecture = architecture_of(net.module)
    inputs, outputs = architecture.inputs(net.module, "float32"), architecture.outputs(net.module, "float32")
    function = architecture.function(net.module)
    symbols = {"B": 1, "H": 8, "W": 8, "T": 77, "HB": 1}
    graph = export_onnx(function, inputs, outputs, symbols, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data", "parameters.json"]
    assert graph.stat().st_size < 2_000_000 < graph.with_name("model.onnx.data").stat().st_size
    cases = parity.reference_cases(function, inputs, architecture.examples(PROFILE).compared)
    record = parity.check_parity(graph, cases, outputs, "float32")
    assert record["rel_err"] <= 1e-5


@pytest.mark.fault("an export computes something else than the normal model",
                   see="an error in one sentence, with the difference")
def test_a_graph_that_differs_from_native_is_refused_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(parity.LIMITS, "float32", 1e-12)
    with pytest.raises(BuildError, match=r"differs from the normal model by \d\.\d+e-\d+ in .* \(limit 1e-12"):
        build_anew(network("unet", "unlike_levels"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_networks_without_an_architecture_are_named() -> None:
    net = network("unet", "unlike_levels")
    net.module.num_classes = "continuous"
    with pytest.raises(Unavailable) as refused:
        net.architecture()
    assert refused.value.fallback.reason is Reason.UNSUPPORTED_MODEL
    assert "UNetModel" in refused.value.fallback.detail


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_resampling_resblocks_are_not_mistaken_for_a_known_layout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "resampling", LAYOUTS["inpainting_channels"] | {"resblock_updown": True})
    assert architecture_of(network(kind, "resampling").module) is None


def test_tiny_models_are_of_the_layouts_that_the_server_tests_need() -> None:
    assert len(tiny_recipes.SD15["channel_mult"]) > 1, "without a downsample, odd sizes prove nothing"


# Graphs above the 2 GB at which protobuf ends

WIDTH, LAYERS, FILLED = 10_000, 11, 64


def wide_layers(data: Path) -> tuple[torch.nn.Module, dict[torch.nn.Parameter, int]]:
    """2.2 GB of linear layers in half precision, all zero but for a corner, in a file with holes that takes no disk."""
    size = WIDTH * WIDTH * 2
    generator = torch.Generator().manual_seed(1)
    with data.open("wb") as file:
        file.truncate(LAYERS * size)
        for layer in range(LAYERS):
            corner = (torch.randn(FILLED, FILLED, generator=generator) / FILLED**0.5).half()
            for i, row in enumerate(corner):
                file.seek(layer * size + i * WIDTH * 2)
                file.write(row.numpy().tobytes())
    values = torch.from_file(str(data), shared=False, size=LAYERS * WIDTH * WIDTH, dtype=torch.float16)
    function = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(LAYERS)))
    offsets = {}
    for i, layer in enumerate(function):
        layer.weight = torch.nn.Parameter(values[i * WIDTH * WIDTH : (i + 1) * WIDTH * WIDTH].view(WIDTH, WIDTH), False)
        offsets[layer.weight] = i * size
    return function, offsets


class AsTuple(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.inner(x),)


@pytest.mark.slow
def test_a_graph_above_two_gigabytes_is_exported_and_checked(tmp_path: Path) -> None:
    inner, offsets = wide_layers(tmp_path / DATA_NAME)
    function = AsTuple(inner)
    inputs, outputs = ([TensorSpec(name, "float16", (Dim("B"), WIDTH))] for name in ("x", "out"))
    graph = export_onnx(function, inputs, outputs, {"B": 2}, tmp_path, offsets)
    assert graph.stat().st_size < 100_000
    assert (tmp_path / DATA_NAME).stat().st_size > 2 << 30
    mapping = json.loads((tmp_path / "parameters.json").read_text())
    assert set(mapping) == {name for name, _ in function.named_parameters()}

    cases = parity.reference_cases(function, inputs, [{"B": 3}])
    assert cases[0].expected[0][:, :FILLED].abs().mean() > 0.1
    record = parity.check_parity(graph, cases, outputs, "float16")
    assert 0 < record["rel_err"] <= 5e-3
