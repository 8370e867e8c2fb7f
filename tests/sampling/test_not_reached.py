"""Samplings that do not call the UNet as the sampler patch expects it, or from where it expects it: what is told."""

from __future__ import annotations

from typing import Any

import pytest
import slow
from comfy_process import ComfyProcess
from scenarios import Control, Prompt, Scenario, latent_of, native_latent, node, prompt, relative_difference

LIMIT = 1e-5
STEPS = 4
PLAIN = Scenario(controls=(), steps=STEPS, seed=921, width=64, height=64)


def ran(comfy: ComfyProcess, built: Prompt) -> tuple[Any, dict[str, Any], str]:
    history = comfy.queue(built)
    assert history.ok, history.error
    report, text = (history.output("report", name)[0] for name in ("report", "text"))
    return latent_of(history), report, text


@pytest.mark.parametrize(("inputs", "engine", "native"), [
    ({}, 0, STEPS), ({"every": 2}, STEPS // 2, STEPS // 2), ({"replaced": True}, 0, STEPS),
])  # fmt: skip
def test_a_unet_that_another_node_computes_by_itself_is_not_said_to_be_on_its_engine(
    sd15: ComfyProcess, inputs: dict[str, Any], engine: int, native: int
) -> None:
    latent, report, text = ran(sd15, prompt(PLAIN.but(patches=[("TestOwnForward", inputs)]), True, "own"))
    assert relative_difference(latent, native_latent(sd15, PLAIN)) <= LIMIT
    assert (report["unet"]["engine"], report["unet"]["native"]) == (engine, native)
    assert report["unet"]["reasons"] == {"not called through TRT Sampler Patch": native}
    assert text.startswith("Accelerated: 0 of 1 model")
    assert "another node" in text
    assert "computes the UNet by itself" in text
    if "replaced" not in inputs:
        assert "(comfy_test_nodes)" in report["rows"][0]["details"]["not called through TRT Sampler Patch"]


@pytest.mark.parametrize(("patch", "calls"), [
    (("EasyCache", {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}), None),
    (("RescaleCFG", {"multiplier": 0.7}), STEPS),
])  # fmt: skip
def test_steps_that_a_cache_leaves_out_are_no_native_calls(sd15: ComfyProcess, patch: Any, calls: int | None) -> None:
    _, report, _ = ran(sd15, prompt(PLAIN.but(patches=[patch], seed=922), True, "cache"))
    assert report["unet"]["native"] == 0
    assert report["unet"]["engine"] == calls if calls else 0 < report["unet"]["engine"] < STEPS
    assert report["on_engines"] == 1


def test_a_sampling_of_no_steps_tells_nothing(sd15: ComfyProcess) -> None:
    built = prompt(PLAIN, True, "none")
    built["sampler"]["inputs"]["denoise"] = 0.0
    _, report, text = ran(sd15, built)
    assert report["rows"] == []
    assert text.startswith("No engine was asked for")


@pytest.mark.parametrize("way", ["thread", "executor"])
@slow.when("thread")
def test_a_report_counts_what_a_node_samples_in_a_thread_of_its_own(sd15: ComfyProcess, way: str) -> None:
    for seed in (923, 924):  # the second time on a thread that has sampled before
        scenario = PLAIN.but(seed=seed, controls=(Control("tiny_sd15_a", 1, 0.7),))
        built = prompt(scenario, True, "thread")
        given = built["sampler"]["inputs"]
        inputs = {name: given[name] for name in ("model", "positive", "negative", "latent_image", "seed", "steps")}
        built["sampler"] = node("TestSampleInThread", way=way, **inputs)
        latent, report, text = ran(sd15, built)
        assert relative_difference(latent, native_latent(sd15, scenario)) <= LIMIT
        assert {row["sampler_node"] for row in report["rows"]} == {"sampler"}
        assert [(row["engine"], row["native"]) for row in report["rows"]] == [(STEPS, 0)] * 2
        assert text.startswith("Accelerated: 2 of 2 models")


@slow.when("alone")
@pytest.mark.parametrize("controls", [(), (Control("tiny_sd15_a", 1, 0.7),)], ids=["alone", "with_a_controlnet"])
def test_without_an_engine_the_model_runs_native_and_the_node_says_so(sd15: ComfyProcess, controls: tuple) -> None:
    """As the page sends it where TRT UNet Engine is bypassed or muted."""
    scenario = PLAIN.but(controls=controls, seed=925)
    built = prompt(scenario, True, "bypassed")
    del built["unet_engine"], built["patch"]["inputs"]["engine"]
    history = sd15.queue(built)
    assert history.ok, history.error
    assert relative_difference(latent_of(history), native_latent(sd15, scenario)) <= LIMIT
    report, text = (history.output("report", name)[0] for name in ("report", "text"))
    assert report["unet"] == {"engine": 0, "native": STEPS, "reasons": {"no engine wired in": STEPS}}
    assert report["missing"] == []
    assert "tiny_sd15_unet: 4 at normal speed" in text
    assert history.output("patch", "native") == [True]
    assert history.output("patch", "text")[0].startswith("no engine wired in: TRT UNet Engine is bypassed")


def test_a_sampler_patch_without_an_engine_leaves_the_one_before_it_in_place(sd15: ComfyProcess) -> None:
    built = prompt(PLAIN.but(seed=926, patches=[("TRTSamplerPatch", {})]), True, "twice")
    latent, report, _ = ran(sd15, built)
    assert relative_difference(latent, native_latent(sd15, PLAIN.but(seed=926))) <= LIMIT
    assert report["unet"] == {"engine": STEPS, "native": 0, "reasons": {}}
