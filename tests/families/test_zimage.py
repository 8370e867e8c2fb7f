"""Z-Image: its groups of tokens and their padding, its weights, LoRAs of its prompts' layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd
import comfy.utils
import pytest
import tiny_models
import torch
import zimage
from comfy.model_patcher import ModelPatcher
from family_contract import ACTS, LIMIT, difference, error_of, live, natively
from hybrid_trt.architectures.shapes import Picture, RequestedSizes
from hybrid_trt.engine_library import Library, Unavailable
from hybrid_trt.engine_library.engine import relative_error

STEPS = 4
A, B = zimage.prompts(20, 31)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_weights_that_are_cast_at_every_call_compute_as_natives(dtype: torch.dtype) -> None:
    net, given = zimage.network(dtype, comfy.ops.manual_cast), zimage.call(tokens=40)
    assert error_of(net, live(net), given) <= LIMIT


def test_sizes_are_those_of_tokens_in_groups() -> None:
    family = zimage.network().architecture()
    profile = family.profile(RequestedSizes())
    assert profile.to_json() == {"B": [1, 1, 2], "N": [32, 128, 288], "T": [1, 4, 17]}
    assert family.words(profile) == "1 image, 512 to 1536 px, 544 tokens"
    usual = family.calls(profile, Picture(832, 1216, (1,)))
    assert usual == [{"B": 1, "N": 124, "T": 4}]
    assert family.call_words(usual[0]) == "3968 image tokens, 128 tokens"
    assert family.calls(profile, Picture(1024, 1024, (4, 2)))[0] == {"B": 4, "N": 128, "T": 4}
    small = family.profile(RequestedSizes(64, 72, 80, 3, 20))
    assert small.to_json() == {"B": [1, 1, 6], "N": [1, 1, 1], "T": [1, 1, 1]}
    assert family.words(small) == "up to 3 images, 80 px, 32 tokens"


def test_padding_prompt_and_time_each_change_the_picture() -> None:
    net, given = zimage.network(), zimage.call(height=6, tokens=9)
    session, before = live(net), natively(net, given)
    for name, value in {"context": given["context"].flip(1), "timesteps": given["timesteps"] / 2}.items():
        changed = {**given, name: value}
        assert difference(natively(net, changed), before) > ACTS, name
        assert error_of(net, session, changed) <= LIMIT, name
    for name in ("x_pad_token", "cap_pad_token"):
        other = zimage.network()
        getattr(other.module, name).data.mul_(3)
        assert difference(natively(other, given), before) > ACTS, name
        assert error_of(other, live(other), given) <= LIMIT, name


@pytest.mark.parametrize("changes", [
    {"pad_tokens_multiple": None}, {"n_kv_heads": 2}, {"clip_text_dim": 32}, {"qk_norm": False},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_relatives_with_other_layers_are_not_taken_for_it(changes: dict) -> None:
    with pytest.raises(Unavailable, match="is a NextDiT"):
        zimage.network(**changes).architecture()


@pytest.fixture
def patched(environment: Any, tmp_path: Path) -> zimage.Patched:
    (file,) = tiny_models.make(environment.base / "models", ["tiny_zimage"]).values()
    return zimage.Patched(zimage.load(file), Library([tmp_path]))


def with_other_places(model: ModelPatcher) -> ModelPatcher:
    model = model.clone()
    model.set_model_rope_options(scale_x=1.3, shift_x=2.0, scale_y=0.8, shift_y=1.0, scale_t=1.0, shift_t=0.0)
    return model


def test_a_lora_of_the_prompts_layers_and_the_pictures_is_followed_from_run_to_run(
    environment: Any, patched: zimage.Patched
) -> None:
    (file,) = tiny_models.make(environment.base / "models", ["tiny_zimage_lora"]).values()
    lora = comfy.utils.load_torch_file(str(file))
    only_prompts = {name: tensor for name, tensor in lora.items() if "context_refiner" in name}
    assert 0 < len(only_prompts) < len(lora)
    given, plain = ([[A, {}]], [[B, {}]]), patched.model
    for weights, strength in ((lora, 0.8), (only_prompts, 0.8), (only_prompts, 0.0), (lora, 0.5)):
        native, _ = comfy.sd.load_lora_for_models(patched.native, None, weights, strength, 0)
        patched.model, _ = comfy.sd.load_lora_for_models(plain, None, weights, strength, 0)
        expected = zimage.sample(native, *given)
        assert (relative_error(zimage.sample(patched.native, *given), expected) > 100 * LIMIT) is (strength > 0)
        assert relative_error(patched.sample(*given), expected) <= LIMIT
        assert patched.counts == (2 * STEPS, 0)


def test_places_that_another_node_moves_are_served(patched: zimage.Patched) -> None:
    given = [[A, {}]], [[B, {}]]
    native = zimage.sample(with_other_places(patched.native), *given)
    assert relative_error(native, zimage.sample(patched.native, *given)) > 100 * LIMIT
    patched.model = with_other_places(patched.model)
    assert relative_error(patched.sample(*given), native) <= LIMIT
    assert patched.counts == (2 * STEPS, 0)
