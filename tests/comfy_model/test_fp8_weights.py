"""Weights kept in fp8 with patches before or behind the engine node: engines have what ComfyUI rounds them to."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.float
import comfy.model_management
import comfy.ops
import comfy.sd
import comfy.utils
import dynamic_vram
import patched as patched_model
import pytest
import slow
import tiny_models
import token_calls
import token_networks
import torch
from any_weights import another, built, error, handle_of, inputs_of, lora, native, patched, served
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from dynamic_vram import on_cpu, weight_when_called
from fake_recorder import Recorder
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model import weight_hash
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.weight_values import current_weights
from hybrid_trt.engine_library import Library
from memory_fixtures import device
from safetensors.torch import load_file, save_file
from small_networks import CPU, native_call, network
from tiny_transformers import let_comfyui_load_zimage

from sampling import error as sampling_error
from sampling import sample

__all__ = ["device"]  # fixtures: pytest finds them by name

NAME, LORA = "tiny_sd15_flat_unet", "tiny_sd15_lora"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
STORED = (*FP8, torch.bfloat16)
LIMIT = 1e-5


def stored_as(dtype: torch.dtype, kind: str = "unet") -> NativeNetwork:
    """A network whose weights lie in a dtype, computing in float32, as UNETLoader's weight_dtype makes it."""
    net = network(kind, "inpainting_channels", operations=comfy.ops.manual_cast)
    net.module.to(dtype)
    return net


def behind(net: NativeNetwork, patcher: ModelPatcher) -> NativeNetwork:
    return NativeNetwork(patcher, net.module, net.prefix, net.dtype, net.label, net.role)


def merged(net: NativeNetwork) -> ModelPatcher:
    """As ModelMergeSimple does it."""
    other = another(net, "inpainting_channels")
    patcher = net.patcher.clone()
    for key, patches in other.patcher.get_key_patches(net.prefix or None).items():
        patcher.add_patches({key: patches}, 0.4, 0.6)
    return patcher


def with_lora(net: NativeNetwork, strength: float = 0.8) -> ModelPatcher:
    return patched(net, (lora(net, 5), strength))


PATCHES = {"a LoRA": with_lora, "a merge": merged}


def of_live(net: NativeNetwork, patcher: ModelPatcher) -> list[torch.Tensor]:
    """Results of the torch backend."""
    session = LiveSession(net, backends()["torch"], "float32", Recorder())
    session.begin_run(patcher)
    with torch.inference_mode():
        return list(session.run(inputs_of(net)).values())


def unrounded(net: NativeNetwork, patcher: ModelPatcher) -> list[torch.Tensor]:
    """Native's results without its rounding."""
    wide = stored_as(torch.float32, "unet" if net.prefix else "controlnet")
    wide.module.load_state_dict({n: p.float() for n, p in net.module.state_dict().items()})
    plain = wide.patcher.clone()
    plain.patches, plain.patches_uuid = patcher.patches, patcher.patches_uuid
    return native(wide, plain)


CASES = [
    *itertools.product(STORED, ["unet"], ["a LoRA"]),
    (FP8[0], "controlnet", "a LoRA"),
    (FP8[0], "unet", "a merge"),
]


@pytest.mark.parametrize(("dtype", "kind", "how"), CASES)
def test_patched_weights_are_to_the_bit_what_comfyui_puts_in_their_place(
    dtype: torch.dtype, kind: str, how: str
) -> None:
    net = stored_as(dtype, kind)
    patcher = PATCHES[how](net)
    ours = {name: weight.clone() for name, weight in current_weights(patcher, net.prefix)}
    patcher.patch_model(CPU)
    its = {name: weight.clone() for name, weight in net.module.state_dict().items()}
    loaded = {name: weight.clone() for name, weight in current_weights(patcher, net.prefix)}
    patcher.unpatch_model(CPU)
    assert ours.keys() == its.keys()
    for name, weight in its.items():
        assert torch.equal(ours[name].float(), weight.float()), name
        assert torch.equal(loaded[name].float(), weight.float()), f"{name}, while it is loaded"


@pytest.mark.parametrize("how", PATCHES)
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_live_weights_are_what_native_samples_with(dtype: torch.dtype, how: str) -> None:
    net = stored_as(dtype)
    patcher = PATCHES[how](net)
    expected = native(net, patcher)
    assert error(unrounded(net, patcher), expected) > 10 * LIMIT, "the rounding is to be seen"
    assert error(of_live(net, patcher), expected) <= LIMIT


@slow.when("torch.bfloat16")
@pytest.mark.parametrize("dtype", [FP8[0], torch.bfloat16], ids=str)
def test_a_replaceable_engine_follows_loras_as_native_rounds_them(tmp_path: Path, dtype: torch.dtype) -> None:
    net = stored_as(dtype)
    built(net, tmp_path)
    handle = handle_of(net, tmp_path, replaceable=True)
    for patcher in (net.patcher, with_lora(net), merged(net), net.patcher):
        assert error(served(handle, patcher), native(net, patcher)) <= LIMIT


@slow.when("controlnet")
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_an_engine_with_a_lora_built_in_has_the_rounded_weights(tmp_path: Path, kind: str) -> None:
    plain = stored_as(torch.float8_e4m3fn, kind)
    net = behind(plain, with_lora(plain))
    built(net, tmp_path, replaceable=False)
    assert error(served(handle_of(net, tmp_path)), native(net, net.patcher)) <= LIMIT
    assert handle_of(behind(plain, with_lora(plain, 0.3)), tmp_path).session is None, "another strength is another hash"


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_rounding_leaves_what_is_exact_as_it_is(dtype: torch.dtype) -> None:
    """So that patches of strength 0 need not be looked at."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    every = every[every.float().isfinite()].float()
    for seed in range(20):
        assert torch.equal(comfy.float.stochastic_rounding(every, dtype, seed).float(), every)


class Kept:
    """A model whose weights lie in fp8, with a LoRA, and a library with its engine."""

    def __init__(self, file: Path, folder: Path):
        self.file = file
        self.native = self.loaded()
        self.library = Library([folder])
        net = NativeNetwork.of_model(self.native, NAME)
        patched_model.built_here(net, self.library, precision=net.precision)

    def loaded(self) -> ModelPatcher:
        model = comfy.sd.load_diffusion_model(str(self.file), model_options={"dtype": FP8[0]})
        loras = comfy.utils.load_torch_file(str(self.file.parent.parent / "loras" / f"{LORA}.safetensors"))
        return comfy.sd.load_lora_for_models(model, None, loras, 1.0, 0.0)[0]


def dynamically(patcher: ModelPatcher) -> ModelPatcher:
    """A patcher of the same model with the same patches that loads dynamically."""
    dynamic = on_cpu(patcher)
    dynamic.patches, dynamic.patches_uuid = patcher.patches, patcher.patches_uuid
    return dynamic


@pytest.fixture(scope="module")
def kept(environment: Any, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    files = tiny_models.make(environment.base / "models", [NAME, LORA])
    return Kept(files[NAME], tmp_path_factory.mktemp("library"))


def test_while_an_engine_serves_native_is_as_comfyui_loads_it(kept: Kept, device: None) -> None:
    reference = sample(kept.native)
    engine = patched_model.Patched(kept.native, kept.library)
    assert sampling_error(engine.sample(), reference) <= LIMIT
    assert engine.counts == (4, 0)
    assert engine.handle.stats.remark == ""
    assert not kept.native.model.model_lowvram, "off the device weights would not be rounded"


@slow.when("torch")
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_where_comfyui_loads_a_part_only_engines_have_the_weights_of_the_model_loaded_whole(
    kept: Kept, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, load = sample(kept.native), ModelPatcher.partially_load

    def partially_load(self: ModelPatcher, device_to: torch.device, *_: Any, **options: Any) -> int:
        return load(self, device_to, 0.1 if self.model is kept.native.model else 0, **options)

    model_management.unload_all_models()
    with monkeypatch.context() as little_memory:
        little_memory.setattr(ModelPatcher, "partially_load", partially_load)
        in_part = sample(kept.native)
        assert sampling_error(in_part, whole) > 1e-3, "what is off the device is not rounded"
        engine = patched_model.Patched(kept.native, kept.library, backend)
        assert sampling_error(engine.sample(), whole) <= LIMIT
        assert engine.counts == (4, 0)
    model_management.unload_all_models()
    assert sampling_error(engine.sample(), whole) <= LIMIT
    assert engine.counts == (4, 0)


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_under_dynamic_vram_engines_have_the_weights_of_the_model_loaded_whole(
    kept: Kept, backend: str, device: None
) -> None:
    whole, dynamic = sample(kept.native), dynamically(kept.loaded())
    engine = patched_model.Patched(dynamic, kept.library, backend)
    for _ in range(2):
        assert sampling_error(engine.sample(), whole) <= LIMIT
        assert engine.counts == (4, 0)
    assert "the engine has one of its values" in engine.handle.stats.remark
    assert dynamic.times_staged == 1, "native's weights wait"


def in_call(net: NativeNetwork, dynamic: ModelPatcher, calls: int) -> list[torch.Tensor]:
    """Native's results under dynamic VRAM in the last of so many calls, with the weights that ComfyUI gives each layer.
    """
    wide, large = stored_as(torch.float32), 0
    dynamic.load(CPU)
    for path, layer in net.module.named_modules():
        for leaf, weight in layer._parameters.items():
            if leaf == "weight" and getattr(layer, "weight_lowvram_function", None) is not None:
                weight, large = weight_when_called(layer, torch.float32, calls=calls), large + 1
            if weight is not None:
                wide.module.get_parameter(f"{path}.{leaf}").data = weight.float()
    assert large > 5
    return native_call(wide, inputs_of(wide))


def with_lora_on_all(net: NativeNetwork) -> ModelPatcher:
    return patched(net, (lora(net, 5, ".weight"), 0.8))


@pytest.mark.parametrize(("dtype", "how"), [(FP8[0], merged), (FP8[1], with_lora_on_all)],
                         ids=["e4m3, merged", "e5m2, with a LoRA on all"])
def test_under_dynamic_vram_patched_weights_are_as_near_to_native_as_its_calls_to_each_other(
    dtype: torch.dtype, how: Callable[[NativeNetwork], ModelPatcher]
) -> None:
    """The first call of native has the unrounded weights, and later ones have weights rounded by another seed."""
    net = stored_as(dtype)
    patcher = how(net)
    whole, dynamic = native(net, patcher), dynamically(patcher)
    ours = of_live(behind(net, dynamic), dynamic)
    assert error(ours, whole) <= LIMIT
    first, later = (in_call(net, dynamic, calls) for calls in (1, 2))
    between = error(first, later)
    assert between > 100 * LIMIT
    assert error(ours, first) <= 1.25 * between
    assert error(ours, later) <= 1.75 * between, "both are rounded: the square root of two"


def test_under_dynamic_vram_weights_have_the_dtype_that_large_layers_are_cast_to() -> None:
    """ComfyUI keeps the file's, and casts them in each call; small layers it loads as they are."""
    net = stored_as(FP8[0])
    model_management.archive_model_dtypes(net.module)
    net.module.float()
    for parameter in net.module.parameters():
        parameter.data.add_(0.01)
    plain = NativeNetwork(net.patcher, net.module, net.prefix, net.dtype, net.label, net.role)
    net = behind(net, on_cpu(net.patcher))
    layers = dict(net.module.named_modules())
    cast = 0
    for name, value in current_weights(net.patcher, net.prefix):
        path, _, leaf = name.rpartition(".")
        weight = layers[path]._parameters[leaf]
        large = sum(p.nbytes for p in layers[path].parameters()) > 16 * 1024
        assert torch.equal(value.float(), weight.to(FP8[0]).float() if large else weight), name
        cast += large and not torch.equal(value.float(), weight)
    assert cast > 10
    assert net.weights_hash() != hash_of(plain)
    given = inputs_of(net)
    expected = dict(current_weights(net.patcher, net.prefix))
    live = of_live(net, net.patcher)
    for name, value in expected.items():
        net.module.get_parameter(name).data = value.float()
    assert error(live, native_call(net, given)) <= LIMIT


def hash_of(net: NativeNetwork) -> str:
    weight_hash.forget_hash(net.patcher)
    return net.weights_hash()


# Merged models


WIDTH = 4096


def other_file(file: Path, folder: Path) -> Path:
    """A file with the same values, all weights in another order."""
    save_file({name: weight.flip(-1).contiguous() for name, weight in load_file(file).items()}, folder / file.name)
    return folder / file.name


def merged_files(file: Path, other: Path, dynamic: bool = False) -> ModelPatcher:
    """Half of each of two models, as *ModelMergeSimple* makes it."""
    let_comfyui_load_zimage()
    first, second = (token_networks.load(str(one)) for one in (file, other))
    both = dynamic_vram.on_cpu(first) if dynamic else first.clone()
    for key, patches in second.get_key_patches("diffusion_model.").items():
        both.add_patches({key: patches}, 0.5, 0.5)
    return both


def patched_by_comfyui(model: ModelPatcher, own: dict[str, torch.Tensor]) -> set[str]:
    """Load a model; return its weights with patches: put in place, or attached to be added when the layer is called."""
    comfy.model_management.load_models_gpu([model])
    found = set()
    for path, layer in model.model.diffusion_model.named_modules():
        for leaf, weight in layer.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            if getattr(layer, f"{leaf}_lowvram_function", None) or not torch.equal(weight.float(), own[name].float()):
                found.add(name)
    return found


@pytest.mark.fault("models of a family with weights beside its layers are merged (Wan, Z-Image, Krea 2)",
                   see="nothing: ComfyUI leaves some of them unmerged, so engines do too")
@pytest.mark.parametrize(("name", "dynamic", "alone"), [
    ("tiny_wan", False, {"head.modulation", "blocks.0.modulation", "blocks.1.modulation"}),
    ("tiny_wan", True, {"head.modulation", "blocks.0.modulation", "blocks.1.modulation"}),
    ("tiny_zimage", False, {"x_pad_token", "cap_pad_token"}),
    ("tiny_krea2", False, set()),
    ("tiny_krea2", True, {"blocks.0.mod.lin", "blocks.0.prenorm.scale", "last.modulation.lin"}),
])  # fmt: skip
def test_weights_have_the_patches_that_comfyui_gives_them(
    models: dict[str, Path], tmp_path: Path, name: str, dynamic: bool, alone: set[str]
) -> None:
    model = merged_files(models[name], other_file(models[name], tmp_path), dynamic)
    own = load_file(models[name])
    found = {key: weight for key, weight in current_weights(model, "diffusion_model.") if key in own}
    changed = {key for key, weight in found.items() if not torch.equal(weight.float(), own[key].float())}
    assert changed == patched_by_comfyui(model, own)
    assert alone <= found.keys() - changed
    assert len(changed) > len(found) / 2


@pytest.mark.parametrize("any_weights", [False, True])
def test_an_engine_of_a_merged_model_gives_natives_latent(
    models: dict[str, Path], tmp_path: Path, any_weights: bool
) -> None:
    files = models["tiny_wan"], other_file(models["tiny_wan"], tmp_path)
    network, library = NativeNetwork.of_model(merged_files(*files), "merged"), tmp_path / "engines"
    profile, expected = token_calls.profile_of(network), token_calls.sample(merged_files(*files), WIDTH)
    patched_model.built_here(network, Library([library]), profile=profile, replaceable=any_weights)
    engine = token_calls.Patched(network, library, "onnxruntime", any_weights)
    assert sampling_error(engine.sample(WIDTH), expected) <= LIMIT
    assert engine.counts == (6, 0), engine.handle.stats.reasons
    plain = token_calls.sample(token_networks.load(str(files[0])), WIDTH)
    assert sampling_error(plain, expected) > 0.1, "the merge acts"
