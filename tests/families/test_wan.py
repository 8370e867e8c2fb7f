"""Wan: two models of a prompt, float32 at its entry, relatives that compute more."""

from __future__ import annotations

from pathlib import Path

import comfy.ops
import pytest
import torch
from comfy.ldm.wan.ar_model import CausalWanModel
from comfy.ldm.wan.model import CameraWanModel, HumoWanModel, SCAILWanModel
from comfy.ldm.wan.model_animate import AnimateWanModel
from comfy.model_patcher import ModelPatcher
from family_contract import ACTS, LIMIT, live
from hybrid_trt.architectures import Role, architecture_of
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.shapes import Picture, RequestedSizes, outside
from model_families.wan import FAMILY, prompt
from token_calls import Patched, network_of

from sampling import error


def test_two_models_of_a_prompt_have_each_their_engine(models: dict[str, Path], tmp_path: Path) -> None:
    """As 2.2 samples: one model takes the first steps, another the last ones."""
    files, halves = ("tiny_wan", "tiny_wan_low_noise"), ({"last_step": 2}, {"start_step": 2, "disable_noise": True})
    patched = [Patched(network_of(models, file), tmp_path, "torch") for file in files]
    native = [network_of(models, file).patcher for file in files]

    def both(first: ModelPatcher, second: ModelPatcher) -> torch.Tensor:
        return prompt(start=prompt().sample(first, **halves[0])).sample(second, **halves[1])

    expected = both(*native)
    assert error(both(native[0], native[0]), expected) > ACTS
    assert error(both(patched[0].model, patched[1].model), expected) <= LIMIT
    assert [one.counts for one in patched] == [(2, 0), (1, 0)]


def test_half_precision_keeps_the_entry_of_the_picture_in_float32(models: dict[str, Path]) -> None:
    half = network_of(models, "tiny_wan", torch.bfloat16)
    assert half.module.patch_embedding.weight.dtype == torch.float32
    kept = live(half, "bfloat16").live.weights.module.patch_embedding.weight.dtype
    assert kept == torch.float32, "as native keeps it"


def test_a_reference_for_a_network_that_takes_one_is_a_reason(models: dict[str, Path]) -> None:
    """Such is Fun control; without a reference an engine serves it."""
    network = network_of(models, "tiny_wan")
    network.module.ref_conv = torch.nn.Conv2d(16, 256, 2, 2)
    bind, call = network.architecture().binding(network.module), FAMILY.calls["several frames"].drawn(network)
    assert bind(call).inputs
    with pytest.raises(Unsupported, match="a reference image"):
        bind({**call, "reference_latent": torch.zeros(1, 16, 8, 6)})


def test_a_video_that_is_too_long_is_told_in_its_frames(models: dict[str, Path]) -> None:
    family = network_of(models, "tiny_wan").architecture()
    profile = family.profile(RequestedSizes())
    for length, said in ((129, None), (161, "frames 161 is outside the engine's 1 to 129")):
        (call,) = family.calls(profile, Picture(832, 480, (1,), length=length))
        assert outside(profile, call, family.symbols) == said


@pytest.mark.parametrize("kind", [CameraWanModel, SCAILWanModel, HumoWanModel, CausalWanModel, AnimateWanModel])
def test_no_engine_is_for_relatives(kind: type) -> None:
    """They compute more: natively they are as before, and the node names their class."""
    sizes = {"dim": 256, "ffn_dim": 256, "num_heads": 2, "num_layers": 2}
    net = kind(**sizes, operations=comfy.ops.disable_weight_init, device="meta", dtype=torch.float32)
    assert architecture_of(net, Role.BACKBONE) is None
