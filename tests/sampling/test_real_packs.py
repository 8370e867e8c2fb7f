"""Stand-ins for real packs in a real server: pictures are native's, and no engine is lost by what a pack did before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfy_process import ComfyProcess
from scenarios import Scenario, latent_of, prompt

from sampling import error

LIMIT = 1e-5
TORCH = {"backend": "torch"}
SD15 = Scenario(controls=(), width=64, height=64, steps=2)
FLUX1 = SD15.but(family="flux1", settings=TORCH)
WAN = SD15.but(family="wan", unet="tiny_wan", length=5, settings=TORCH)
HUNYUAN = SD15.but(family="hunyuan", unet="tiny_hunyuan_video", length=5, settings=TORCH)

PACKS: dict[str, tuple[Scenario, dict[str, str]]] = {
    "a method of the network for the time of a call, as TeaCache does": (
        WAN, {"place": "function", "way": "method", "where": "forward_orig"}),
    "a method of the network in an outer-sample wrapper": (
        HUNYUAN, {"place": "outer_sample", "way": "method", "where": "forward_orig"}),
    "blocks that cache, as WaveSpeed has them": (
        HUNYUAN, {"place": "function", "way": "blocks", "where": "double_blocks"}),
    "blocks in a wrapper of the sampler": (
        FLUX1, {"place": "sampler_sample", "way": "blocks", "where": "single_blocks"}),
    "a function of ComfyUI's in each call": (
        SD15, {"place": "apply_model", "way": "function",
               "where": "comfy.ldm.modules.diffusionmodules.openaimodel:apply_control"}),
}  # fmt: skip


def sampled(comfy: ComfyProcess, scenario: Scenario, engines: bool, name: str) -> tuple[Any, list[dict]]:
    """Return a latent and the rows of the report."""
    history = comfy.queue(prompt(scenario, engines, name))
    return torch.from_numpy(latent_of(history)), history.output("report", "report")[0]["rows"] if engines else []


@pytest.mark.parametrize("pack", PACKS)
def test_a_pack_has_its_picture_and_the_prompt_after_it_runs_on_the_engine(sd15: ComfyProcess, pack: str) -> None:
    plain, change = PACKS[pack]
    changed = plain.but(patches=(("TestForeignChange", change),))
    native, own = (sampled(sd15, one, False, "native")[0] for one in (changed, plain))
    assert error(native, own) > 1e-3, "it does nothing here"
    sd15.free()  # the model's first call is a changed one
    for _ in range(2):
        latent, rows = sampled(sd15, changed, True, "changed")
        assert error(latent, native) <= LIMIT
        assert [row["engine"] for row in rows] == [0], "it is not said"
        latent, rows = sampled(sd15, plain, True, "plain")
        assert error(latent, own) <= LIMIT
        assert [row["native"] for row in rows] == [0], rows
