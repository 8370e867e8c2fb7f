"""Merged models: engines have the weights that ComfyUI samples with, also where its loader leaves some alone."""

from __future__ import annotations

from pathlib import Path

import comfy.model_management
import dynamic_vram
import pytest
import token_networks
import torch
from comfy.model_patcher import ModelPatcher
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.weight_values import current_weights
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from safetensors.torch import load_file, save_file
from tiny_transformers import let_comfyui_load_zimage
from token_calls import Patched, profile_of, sample

from sampling import error

LIMIT = 1e-5
WIDTH = 4096


def other_file(file: Path, folder: Path) -> Path:
    """A file with the same values, all weights in another order."""
    save_file({name: weight.flip(-1).contiguous() for name, weight in load_file(file).items()}, folder / file.name)
    return folder / file.name


def merged(file: Path, other: Path, dynamic: bool = False) -> ModelPatcher:
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
    model = merged(models[name], other_file(models[name], tmp_path), dynamic)
    own = load_file(models[name])
    found = {key: weight for key, weight in current_weights(model, "diffusion_model.") if key in own}
    patched = {key for key, weight in found.items() if not torch.equal(weight.float(), own[key].float())}
    assert patched == patched_by_comfyui(model, own)
    assert alone <= found.keys() - patched
    assert len(patched) > len(found) / 2


@pytest.mark.parametrize("any_weights", [False, True])
def test_an_engine_of_a_merged_model_gives_natives_latent(
    models: dict[str, Path], tmp_path: Path, any_weights: bool
) -> None:
    files = models["tiny_wan"], other_file(models["tiny_wan"], tmp_path)
    network, library = NativeNetwork.of_model(merged(*files), "merged"), tmp_path / "engines"
    order = BuildOrder(network, "float32", profile_of(network), backends()["onnxruntime"], replaceable=any_weights)
    build_engine(order, Library([library]), lambda *_: None, run=run_here)
    patched, expected = Patched(network, library, "onnxruntime", any_weights), sample(merged(*files), WIDTH)
    assert error(patched.sample(WIDTH), expected) <= LIMIT
    assert patched.counts == (6, 0), patched.handle.stats.reasons
    assert error(sample(token_networks.load(str(files[0])), WIDTH), expected) > 0.1, "the merge acts"
