"""LTX-2: rotary embeddings of a run, whole prompts with masks and guides, and ComfyUI's dynamic VRAM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import comfy.sd
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.nested_tensor import NestedTensor
from comfy.ops import mixed_precision_ops
from dynamic_vram import on_cpu
from family_contract import ACTS, LIMIT, Prompt, drawing, lora_of
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.snapshot import without_weights, write_structure
from hybrid_trt.engine_library import Unavailable
from model_families.ltx2 import FAMILY, FILE, KNOWS_25, LTX23, guides
from token_calls import Patched, network_of

from sampling import error

PLACES = ("pe", "pe_sound", "pe_cross", "pe_sound_cross")


def test_rotary_embeddings_are_made_once_for_a_run_and_anew_for_other_guides(models: dict[str, Path]) -> None:
    network = network_of(models, FILE)
    bind, call = network.architecture().binding(network.module), FAMILY.calls["a guide"].drawn(network)
    copied = {**call, "keyframe_idxs": call["keyframe_idxs"].clone(), "x": [t + 1 for t in call["x"]]}
    moved = {**call, "keyframe_idxs": call["keyframe_idxs"] + 1}
    first, second = (bind(given).inputs for given in (call, copied))
    assert all(first[name] is second[name] for name in PLACES)
    assert not torch.equal(bind(moved).inputs["pe"], first["pe"])


def masked(video: torch.Tensor, prompt: Prompt) -> NestedTensor:
    """A mask of a video, and of all of its sound."""
    return NestedTensor((video, torch.ones(1, 1, prompt.sound[2], 1)))


def test_a_version_of_comfyui_that_does_not_know_a_file_is_a_reason(models: dict[str, Path]) -> None:
    """Such as 0.30.0 for LTX-2.5, whose linear layers have no biases: it leaves random numbers there."""
    network = network_of(models, FILE)
    network.patcher.model.model_config.unet_config["ff_bias"] = False
    if KNOWS_25:
        assert network.architecture().name == "ltx2"
    else:
        with pytest.raises(Unavailable, match="missing weights"):
            network.architecture()


def test_a_network_of_a_quantised_file_is_handed_to_the_builder(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps ComfyUI's factory of its layers, a class that no other process can import."""
    network = network_of(models, LTX23)
    monkeypatch.setattr(network.module, "operations", mixed_precision_ops())
    assert without_weights(write_structure(network, torch.float32)).transformer_blocks


@pytest.mark.parametrize("file", [FILE, LTX23])
def test_prompts_with_a_first_frame_and_with_a_weighted_guide_are_natives(
    models: dict[str, Path], tmp_path: Path, file: str
) -> None:
    prompt = FAMILY.prompts["text"]
    random = drawing(5)
    prompt = replace(prompt, file=file, start=NestedTensor((random(*prompt.shape), random(*prompt.sound))))
    first, guided = torch.ones(1, 1, *prompt.shape[2:]), guides(0.7)(drawing(3), prompt.shape[2:])
    first[:, :, 0] = 0.0
    entries = {name: guided[name] for name in ("keyframe_idxs", "guide_attention_entries")}
    patched, native = Patched(network_of(models, file), tmp_path, "torch"), network_of(models, file).patcher
    plain = prompt.sample(native)
    for own, mask in ((prompt, first), (replace(prompt, entries=lambda _: entries), guided["denoise_mask"])):
        expected = own.sample(native, noise_mask=masked(mask, prompt))
        assert error(expected, plain) > ACTS, "it acts"
        assert error(own.sample(patched.model, noise_mask=masked(mask, prompt)), expected) <= LIMIT
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons


def test_under_dynamic_vram_prompts_and_loras_are_natives(models: dict[str, Path], tmp_path: Path) -> None:
    lora = lora_of(network_of(models, FILE), FAMILY.loras["text"])

    def with_lora(model: ModelPatcher) -> ModelPatcher:
        return comfy.sd.load_lora_for_models(model, None, lora, 0.7, 0)[0]

    dynamic, native = on_cpu(network_of(models, FILE).patcher), network_of(models, FILE).patcher
    patched, prompt = Patched(NativeNetwork.of_model(dynamic, FILE), tmp_path, "torch"), FAMILY.prompts["text"]
    for model, reference in ((patched.model, native), (with_lora(patched.model), with_lora(native))):
        assert error(prompt.sample(model), prompt.sample(reference)) <= LIMIT
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
