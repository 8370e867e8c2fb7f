"""Z-Image: its groups of tokens and their padding, its weights."""

from __future__ import annotations

import comfy.ops
import pytest
import torch
import zimage
from family_contract import ACTS, LIMIT, difference, error_of, live, natively
from hybrid_trt.architectures.shapes import Picture, RequestedSizes, outside
from hybrid_trt.engine_library import Unavailable


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
    assert family.call_words(usual[0]) == "about 1008x1008, 128 tokens"
    (too_large,) = family.calls(profile, Picture(1536, 1552, (1,)))
    said = "picture size about 1552x1552 is outside the engine's 512x512 to 1536x1536"
    assert outside(profile, too_large, family.symbols) == said
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
    with pytest.raises(Unavailable, match="NextDiT"):
        zimage.network(**changes).architecture()
