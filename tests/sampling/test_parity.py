"""Through engines or native: the same latent, whatever the graph asks for."""

from __future__ import annotations

import pytest
import slow
from comfy_process import ComfyProcess
from scenarios import A, B, Control, Scenario, compare, control_effect

LIMIT = 1e-5
VISIBLE = 1000 * LIMIT
"""A ControlNet that moves the latent less than this would prove nothing."""

STACKED = Scenario(steps=2, width=64, height=64)
XL = STACKED.but(family="sdxl", controls=(Control("tiny_sdxl_a", 1, 0.7), Control("tiny_sdxl_a", 2, 0.4)))


def rows(*controls: Control) -> Scenario:
    return STACKED.but(controls=controls)


SCENARIOS = {
    "two_stacked_controlnets": STACKED,
    "unet_engine_only": rows(A_NATIVE := Control(A.file, 1, 0.7, engine=False), Control(B.file, 2, 0.4, engine=False)),
    "no_controlnet": rows(),
    "controlnet_engines_only": STACKED.but(unet_engine=False),
    "stock_apply_nodes": STACKED.but(apply="stock"),
    "ranges_apart": rows(Control(A.file, 1, 1.0, 0.0, 0.4), Control(B.file, 2, 1.0, 0.5, 1.0)).but(steps=4),
    "one_range_ends_early": rows(Control(A.file, 1, 1.0, 0.0, 0.4), B).but(steps=4),
    "only_range_ends_early": rows(Control(A.file, 1, 1.0, 0.0, 0.4)).but(steps=4),
    "cfg_1": STACKED.but(cfg=1.0),
    "batch_3": STACKED.but(batch=3),
    "136x120_pixels": STACKED.but(width=136, height=120),
    "200x328_pixels": STACKED.but(width=200, height=328),
    "72x488_pixels": STACKED.but(width=72, height=488),
    "hint_of_another_size": STACKED.but(image_options={"width": 300, "height": 200}),
    "hint_batch_of_2_for_batch_of_2": STACKED.but(batch=2, image_options={"batch": 2}),
    "prompts_of_77_and_154_tokens": STACKED.but(tokens=(77, 154)),
    "prompts_of_77_and_462_tokens": STACKED.but(tokens=(77, 462)),
    "area_conditioning": STACKED.but(area=True, width=128, height=128),
    "dpmpp_2m_sde": STACKED.but(sampler="dpmpp_2m_sde"),
    "euler_ancestral": STACKED.but(sampler="euler_ancestral"),
    "heun_makes_two_calls_a_step": STACKED.but(sampler="heun"),
    "same_controlnet_twice_with_other_images": rows(A, Control(A.file, 5, 0.9)),
    "native_controlnet_before_an_engine": rows(A_NATIVE, B),
    "native_controlnet_after_an_engine": rows(A, Control(B.file, 2, 0.4, engine=False)),
    "five_controlnets": rows(*(Control((A, B)[i % 2].file, i + 1, 0.2 + 0.1 * i) for i in range(5))),
    "strength_above_1": rows(Control(A.file, 1, 1.8), B),
}

SLOW = ("two_stacked_controlnets", "no_controlnet", "136x120_pixels", "prompts_of_77_and_154_tokens",
        "only_range_ends_early", "batch_3", "hint_of_another_size", "72x488_pixels",
        "200x328_pixels", "hint_batch_of_2_for_batch_of_2",
        "dpmpp_2m_sde", "euler_ancestral", "heun_makes_two_calls_a_step", "strength_above_1", "five_controlnets",
        "prompts_of_77_and_462_tokens", "one_range_ends_early", "native_controlnet_after_an_engine")


@pytest.mark.parametrize("scenario", slow.cases(SCENARIOS, SLOW))
def test_latent_is_natives(sd15: ComfyProcess, scenario: Scenario) -> None:
    result = compare(sd15, scenario)
    assert result.error <= LIMIT
    assert result.all_on_engines(), result.report
    for i in {0, len(scenario.controls) - 1} if scenario.controls else ():
        assert control_effect(sd15, scenario, without=i) > VISIBLE, f"ControlNet {i} is idle"


def test_sdxl_family_latent_is_natives(sdxl: ComfyProcess) -> None:
    for controls in (XL.controls, ()):
        result = compare(sdxl, XL.but(controls=controls, width=136, batch=2))
        assert result.error <= LIMIT
        assert result.all_on_engines()
    assert control_effect(sdxl, XL) > VISIBLE


def test_every_call_is_counted_for_its_network(sd15: ComfyProcess) -> None:
    result = compare(sd15, SCENARIOS["one_range_ends_early"].but(seed=11))
    assert result.error <= LIMIT
    assert result.unet["engine"] == 4
    assert result.controlnets[B.file]["engine"] == 4
    assert 0 < result.controlnets[A.file]["engine"] < 4


@pytest.mark.fault("control image, size, prompt and batch change from run to run",
                   see="nothing: no old result is shown")
def test_switching_control_size_prompt_and_batch_between_prompts_never_gives_a_stale_result(sd15: ComfyProcess) -> None:
    sequence = [
        STACKED,
        STACKED.but(controls=()),
        rows(B),
        STACKED.but(tokens=(231, 77), width=136, height=120),
        STACKED.but(batch=2),
        rows(Control(A.file, 9, 0.7), B),
        STACKED,
    ]
    for i, scenario in enumerate(sequence):
        result = compare(sd15, scenario.but(seed=100 + i))
        assert result.error <= LIMIT, f"prompt {i}"
        assert result.all_on_engines(), f"prompt {i}"
