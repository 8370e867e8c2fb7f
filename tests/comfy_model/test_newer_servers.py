"""Files and calls that ComfyUI's versions after 0.30.0 compute otherwise: pictures stay native's.

Each test runs on every version. What an older one has not is skipped there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.ldm.wan.model
import flux_networks
import pytest
import token_calls
import token_networks
import torch
import torch.nn.functional as F
import zimage
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from comfy_kitchen.registry import registry
from compiling import COMPILES, graph_of
from hybrid_trt.architectures.families.ldm import Attention
from hybrid_trt.architectures.quantised_linear import linear_behind
from hybrid_trt.architectures.shapes import Profile
from hybrid_trt.architectures.token_layers import RotaryAttention
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.compiled import lifted
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.structure_hash import structure_hash
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.engine_status import status
from hybrid_trt.sampling.model_wrapper import patch_model
from memory_fixtures import file, library
from model_families import wan
from patched import Patched, load, sampling_node
from quantised import UNSERVED, quantised_state
from safetensors.torch import load_file, save_file
from tiny_transformers import KREA2, QWEN_IMAGE, let_comfyui_load_zimage

from sampling import error, sample

__all__ = ["file", "library"]  # fixtures: pytest finds them by name

LIMIT = 1e-5
QWEN, KREA = QWEN_IMAGE["joint_attention_dim"], KREA2["txtlayers"] * KREA2["txtdim"]

DRAWN: dict[str, Callable[[NativeNetwork], dict[str, Any]]] = {
    "tiny_wan": lambda net: wan.FAMILY.calls["several frames"].drawn(net),
    "tiny_wan_i2v": lambda net: wan.FAMILY.calls["a picture"].drawn(net),
    "tiny_wan_vace": lambda net: wan.FAMILY.calls["a control video"].drawn(net),
    "tiny_zimage": lambda _: zimage.call(8, 6, 2),
    "tiny_flux1_unet": lambda net: flux_networks.call(net, (12, 8), 2),
    "tiny_qwen_image": lambda _: token_calls.Call(2, (13, 11), 30).drawn(QWEN),
    "tiny_krea2": lambda _: token_calls.Call(2, (13, 11), 30).drawn(KREA),
}
"""A call of each family that has int8 files."""

UNREAD = {"tiny_qwen_image": 3}
"""Layers of the last block whose results nobody reads, so that no graph has them."""


def quantised_file(source: Path, folder: Path, name: str) -> Path:
    """A copy of a file with the linear layers of its blocks quantised."""
    state = load_file(source)
    layers = [key.removesuffix(".weight") for key, weight in state.items()
              if key.endswith(".weight") and weight.ndim == 2 and ("blocks." in key or "layers." in key)]
    save_file(quantised_state(state, layers, name), folder / source.name)
    return folder / source.name


def network_of(models: dict[str, Path], folder: Path, file: str, name: str) -> NativeNetwork:
    let_comfyui_load_zimage()
    path = quantised_file(models[file], folder, name)
    with torch.inference_mode():  # as ComfyUI runs loaders
        return NativeNetwork.of_model(token_networks.load(str(path)), file)


def natively(net: NativeNetwork, call: dict[str, Any]) -> torch.Tensor:
    given = {"transformer_options": {}, **call}
    times = next(given.pop(name) for name in ("timestep", "timesteps") if name in given)
    return net.module(given.pop("x"), times, given.pop("context"), **given)


def without_rounding(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32, convrot: bool = False, convrot_groupsize: int = 1,
    input_act: str | None = None, **absent: None,
) -> torch.Tensor:  # fmt: skip
    """Stand for the int8 kernel: each argument acts, and no last bit of a value changes much."""
    x = {None: x, "gelu_tanh": F.gelu(x, approximate="tanh")}[input_act]
    x = x.roll(convrot_groupsize, -1) if convrot else x
    return F.linear(x, weight.float() * weight_scale.reshape(-1, 1), bias).to(out_dtype)


@pytest.fixture
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let native and engines compute int8 products without rounding."""
    choose = registry.get_implementation
    monkeypatch.setattr(registry, "get_implementation", lambda name, *args, **given: (
        without_rounding if name == "int8_linear" else choose(name, *args, **given)))  # fmt: skip


@pytest.mark.parametrize("name", ["int8", "int8 convrot"])
@pytest.mark.parametrize("file", DRAWN)
def test_int8_networks_compute_with_natives_kernels_and_are_traced_with_them(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smooth: None, file: str, name: str
) -> None:
    net = network_of(models, tmp_path, file, name)
    session, call = LiveSession(net, backends()["torch"], "float32"), DRAWN[file](net)
    given, run = [], session._live.run
    monkeypatch.setattr(session._live, "run", lambda inputs, compiled: given.append(inputs) or run(inputs, compiled))
    with torch.inference_mode():
        expected = natively(net, call)
        bound = net.architecture().binding(net.module)(call)
        found = relative_error(bound.finish(session.run(bound.inputs, bound.extras)), expected)
        assert found <= LIMIT
    monkeypatch.undo()  # from here on with ComfyUI's own kernel
    function, inputs = session._live.function, [given[0][spec.name] for spec in session._live.inputs]
    graph, weights = graph_of(function, inputs), lifted(function)
    kernels = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    layers = sum(getattr(layer, "quant_format", None) is not None for layer in function.modules())
    assert kernels["comfy_kitchen.int8_linear.default"] == layers - UNREAD.get(file, 0) > 0
    assert "aten._int_mm.default" not in kernels
    with torch.inference_mode():
        pairs = zip(graph(*weights.values(), *inputs), function(*inputs), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.skipif(not hasattr(comfy.ldm.wan.model, "WanFeedForward"), reason="no activation is folded there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int8 convrot", "fp8"])
def test_wans_feed_forward_layers_give_natives_bits_with_a_folded_activation(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    net = network_of(models, tmp_path, "tiny_wan", name)
    for layer in net.module.modules():
        if isinstance(getattr(layer, "weight", None), QuantizedTensor):
            layer.weight = torch.nn.Parameter(layer.weight.to(dtype=dtype), requires_grad=False)
    weights = LiveWeights(net, torch.float32)
    weights.sync_from(net.patcher)
    folded, choose = [], registry.get_implementation
    monkeypatch.setattr(registry, "get_implementation", lambda name, kwargs=None, **rest: (
        folded.append((kwargs or {}).get("input_act")) or choose(name, kwargs=kwargs, **rest)))  # fmt: skip
    for given in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, 24, net.module.dim, dtype=given)
        folded.clear()
        for native, ours in zip(net.module.blocks, weights.module.blocks, strict=True):
            with torch.inference_mode():
                assert torch.equal(linear_behind(ours.ffn[2], ours.ffn[0](x), "gelu_tanh"), native.ffn(x))
        folds = name != "fp8" and given == dtype  # native dequantises weights of another dtype
        assert folded.count("gelu_tanh") == 2 * folds * len(net.module.blocks)


@pytest.mark.parametrize("file", ["tiny_wan", "tiny_flux1_unet", "tiny_zimage", "tiny_krea2"])
def test_what_a_native_run_leaves_on_layers_is_no_part_of_the_network(models: dict[str, Path], file: str) -> None:
    """Newer layers cast their weights in a context."""
    let_comfyui_load_zimage()
    with torch.inference_mode():
        fresh, ran = (NativeNetwork.of_model(token_networks.load(str(models[file])), file) for _ in range(2))
        ran.patcher.patch_model(torch.device("cpu"))
        natively(ran, DRAWN[file](ran))
    for live in (False, True):
        assert structure_hash(fresh.module, live) == structure_hash(ran.module, live)


@pytest.mark.fault("a model has weights in ComfyUI's four-bit formats (convrot_w4a4, asym_w4a8_int8)",
                   see="normal speed: *unsupported model*, with the format's name")
@pytest.mark.parametrize("name", UNSERVED)
def test_formats_of_four_bits_run_native_with_a_reason(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind = UNSERVED[name]["format"]
    if kind not in QUANT_ALGOS:
        pytest.skip(f"this ComfyUI has no {kind}")
    profile = token_calls.profile_of(token_calls.network_of(models, "tiny_wan"))
    net = network_of(models, tmp_path, "tiny_wan", name)
    expected = token_calls.sample(net.patcher, wan.WIDTH)
    plain = token_networks.load(str(models["tiny_wan"]))
    assert error(token_calls.sample(plain, wan.WIDTH), expected) > 1e-3, "quantisation acts"
    handle = EngineHandle.look_up(net, EngineChoice(profile, backend="torch"), Library([tmp_path]), "node")
    with sampling_node():
        assert error(token_calls.sample(patch_model(net.patcher, handle), wan.WIDTH), expected) == 0
    assert handle.stats.engine == 0 < handle.stats.native
    assert list(handle.stats.reasons) == [Reason.UNSUPPORTED_MODEL.value]
    assert f"quantised layers in the format {QUANT_ALGOS[kind]['comfy_tensor_layout']}".removesuffix("Layout") in (
        status(handle))  # fmt: skip


@pytest.mark.parametrize("attention", [Attention(), RotaryAttention(), RotaryAttention(torch.ones(6, 2, 2))],
                         ids=["unet", "hunyuan", "rotary"])  # fmt: skip
def test_attention_inside_engines_takes_what_newer_layers_tell_it(attention: Callable[..., torch.Tensor]) -> None:
    """Layers of newer versions ask for full precision where an approximate kernel gave no numbers."""
    shape = (1, 6, 8) if isinstance(attention, Attention) else (1, 2, 6, 4)
    given = [torch.randn(shape) for _ in range(3)]
    told = attention(None, *given, 2, low_precision_attention=False, _inside_attn_wrapper=True)
    assert torch.equal(told, attention(None, *given, 2))


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_comfyuis_own_node_for_exact_attention_keeps_the_engine(file: Path, library: Library, backend: str) -> None:
    nodes = pytest.importorskip("comfy_extras.nodes_model_advanced")
    if not hasattr(nodes, "ModelAttentionBackend"):
        pytest.skip("this ComfyUI has no such node")
    engine = Patched(load(file), library, backend)
    reference = sample(load(file))
    (engine.model,) = nodes.ModelAttentionBackend().patch(engine.model, "pytorch attention")
    assert error(engine.sample(), reference) <= LIMIT
    assert engine.counts[0] > 0 == engine.counts[1], engine.handle.stats.details


@pytest.mark.slow
@COMPILES
def test_a_compiled_int8_wan_serves_loras_with_natives_pictures(models: dict[str, Path], tmp_path: Path) -> None:
    net, call = network_of(models, tmp_path, "tiny_wan", "int8 convrot"), {"B": 1, "F": 1, "R": 4, "C": 3, "T": 9}
    order = BuildOrder(net, "float32", Profile.around([call]), backends()["torch"])
    build_engine(order, Library([tmp_path]), lambda *_: None)
    choice = EngineChoice(Profile.around([call]), backend="torch")
    handle = EngineHandle.look_up(net, choice, Library([tmp_path]), "node")
    torch.manual_seed(3)
    difference = {f"diffusion_model.blocks.{i}.ffn.2.weight": ("diff", (torch.randn(block.ffn[2].weight.shape) / 16,))
                  for i, block in enumerate(net.module.blocks)}  # fmt: skip
    seen = []
    for patches in ({}, difference):
        patcher, native = patch_model(net.patcher, handle), net.patcher.clone()
        for one in (patcher, native):
            one.add_patches(patches, 0.8)
        sampled = [token_calls.sample(native, wan.WIDTH, words=(9, 9), cfg=1.0)]
        with sampling_node():
            sampled.append(token_calls.sample(patcher, wan.WIDTH, words=(9, 9), cfg=1.0))
        assert (handle.stats.engine, handle.stats.native) == (3, 0), handle.stats.reasons
        assert handle.session.uncovered is None, "the file served"
        assert error(*sampled) <= 5e-3, "a last bit may change a code"
        seen.append(sampled[0])
    assert error(*seen) > 0.03, "the LoRA acts"
