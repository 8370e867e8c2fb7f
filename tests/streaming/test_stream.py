"""TRT Stream: each picture is the one that stock nodes make of its frame alone, also with several frames in work."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import slow
from comfy_process import ComfyProcess
from streams import Case, compared, pictures_of, streamed

LIMIT = 1e-5
ALONE: dict[str, Any] = {}
AT_ONCE = {"steps_as_batch": True}
WAYS = pytest.mark.parametrize("way", [ALONE, AT_ONCE], ids=["frame by frame", "steps as a batch"])

CASES = {
    "one step": Case(steps=1),
    "two steps": Case(),
    "four steps": Case(steps=4),
    "one frame": Case(frames=1, images=1, controls=1),
    "seven frames": Case(frames=7, images=7, controls=1),
    "euler, cfg": Case(sampler="euler", scheduler="normal", cfg=3.0),
    "ancestral": Case(sampler="euler_ancestral", scheduler="normal", cfg=3.0, steps=4),
    "ancestral, one step": Case(sampler="euler_ancestral", steps=1),
    "ancestral, new seeds": Case(sampler="euler_ancestral", new_seeds=True),
    "second order": Case(sampler="dpmpp_2m", scheduler="karras", steps=4),
    "from noise": Case(denoise=1.0, controls=1),
    "from noise, new seeds": Case(denoise=1.0, new_seeds=True, steps=1),
    "one ControlNet": Case(controls=1),
    "two ControlNets, cfg": Case(controls=2, cfg=3.0, sampler="euler"),
    "one image for all": Case(controls=2, images=1),
    "the frame": Case(controls=1, follow="the frame"),
    "edges": Case(controls=2, follow="edges of the frame"),
    "cropped": Case(width=77, height=67, controls=1),
    "area": Case(region="area", cfg=3.0, width=128, sampler="euler"),
    "mask": Case(region="mask", controls=1),
    "TAESD": Case(vae="tiny_sdxl_taesd"),
    "a model that sees the frame itself": Case(unet="tiny_sd15_ip2p_unet", steps=1),
    "SDXL": Case(family="sdxl", controls=1, cfg=3.0, sampler="euler", vae="tiny_sdxl_taesd"),
}
IN_WORK = {
    "four steps, two ControlNets": Case(steps=4, controls=2, frames=5, images=5, end=1.0),
    "the frame, in work": Case(steps=4, controls=2, frames=6, follow="the frame", end=1.0),
    "three steps, cfg": Case(steps=3, sampler="euler", scheduler="normal", cfg=3.0, frames=5, controls=1, images=5,
                             end=1.0),
    "from noise, new seeds, in work": Case(steps=4, denoise=1.0, frames=5, new_seeds=True),
    "new seeds, euler": Case(steps=2, sampler="euler", frames=4, new_seeds=True, controls=1, images=1, end=1.0),
    "fewer frames than steps": Case(steps=5, frames=2, images=2, controls=1, end=1.0),
    "cropped, in work": Case(steps=3, width=77, height=67, controls=1, end=1.0),
    "a model that sees another picture": Case(unet="tiny_sd15_ip2p_unet", steps=3),
    "TAESD, in work": Case(steps=4, vae="tiny_sdxl_taesd", frames=5),
    "SDXL, in work": Case(steps=3, family="sdxl", controls=1, cfg=3.0, sampler="euler", vae="tiny_sdxl_taesd", end=1.0),
}  # fmt: skip
APART = {
    "another sampler": (Case(sampler="dpmpp_2m", scheduler="karras"), "neither lcm nor euler"),
    "a part of the steps": (Case(controls=1), "a ControlNet acts on a part of the steps"),
    "a mask": (Case(region="mask"), "a prompt acts on a part of the steps or of the picture"),
    "an area": (Case(region="area", width=128, controls=1, end=1.0), "a prompt acts on a part"),
    "a patch": (Case(patch=("HyperTile", {"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False})),
                "another node acts on each step"),
}  # fmt: skip
SLOW = {*CASES, *IN_WORK} - {"mask", "four steps, two ControlNets"}


@pytest.mark.parametrize(("case", "way"), slow.cases(
    {name: (case, ALONE) for name, case in CASES.items()} | {name: (case, AT_ONCE) for name, case in IN_WORK.items()},
    SLOW))  # fmt: skip
def test_a_streams_pictures_are_those_of_stock_nodes(comfy: ComfyProcess, case: Case, way: dict[str, Any]) -> None:
    difference, history = compared(comfy, case, **way)
    assert difference <= LIMIT
    (stream,) = history.output("report", "report")[0]["streams"]
    assert (stream["frames"], stream["one_by_one"], stream["steps_apart"]) == (case.frames, "", "")


@pytest.mark.parametrize(("case", "why"), slow.cases(APART, set(APART) - {"a part of the steps"}))
def test_frames_are_sampled_one_after_another_where_a_batch_would_not_be_exact_and_the_node_says_why(
    comfy: ComfyProcess, case: Case, why: str
) -> None:
    difference, history = compared(comfy, case, **AT_ONCE)
    assert difference <= LIMIT
    (told,) = history.output("report", "report")[0]["streams"]
    assert told["steps_apart"].startswith("Frames were sampled one after another: ")
    assert why in told["steps_apart"]
    assert told["steps_apart"] in history.output("report", "text")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "way"), [
    (Case(controls=2, cfg=3.0, sampler="euler", vae="tiny_sdxl_taesd"), ALONE),
    (Case(controls=2, steps=1, follow="the frame"), ALONE),
    (Case(controls=2, cfg=3.0, sampler="euler", frames=4, images=4, end=1.0, vae="tiny_sdxl_taesd"), AT_ONCE),
], ids=["two steps, TAESD", "one step, KL", "in work"])  # fmt: skip
def test_a_stream_on_engines_gives_the_pictures_of_stock_nodes(
    comfy: ComfyProcess, case: Case, way: dict[str, Any]
) -> None:
    difference, history = compared(comfy, case, engines=True, **way)
    assert difference <= 10 * LIMIT  # of a value; engines themselves are held to a relative error
    report = history.output("report", "report")[0]
    assert report["streams"][0]["steps_apart"] == ""
    counts = {row["kind"]: (row["engine"], row["native"]) for row in report["rows"]}
    in_work = case.frames + case.steps - 1
    calls, coded = (in_work, in_work) if way else (case.frames * case.steps, case.frames)
    assert counts == {"unet": (calls, 0), "controlnet": (calls, 0), "vae_decoder": (coded, 0),
                      "vae_encoder": (coded, 0)}  # fmt: skip


@pytest.mark.slow
@WAYS
def test_any_patch_of_another_node_acts_on_each_frame_as_in_stock(comfy: ComfyProcess, way: dict[str, Any]) -> None:
    """Each kind: where it may carry something on, or look at the step of one image, frames are sampled apart."""
    (kinds,) = [options["options"] for name, (_, options) in
                comfy.object_info("TestModelPatch")["input"]["required"].items() if name == "kind"]  # fmt: skip
    differences, case = {}, Case(frames=2, cfg=3.0, sampler="euler", controls=1, images=1, end=1.0 if way else 0.9)
    for kind in [kind for kind in kinds if kind.startswith("sd15/")]:
        differences[kind], _ = compared(comfy, replace(case, patch=("TestModelPatch", {"kind": kind})), **way)
    assert len(differences) > 30
    assert max(differences.values()) <= LIMIT, differences


@pytest.mark.slow
def test_a_lora_hooked_to_the_prompt_acts_on_each_frame(comfy: ComfyProcess) -> None:
    case = Case(steps=2, hooked=True)
    difference, history = compared(comfy, case)
    assert difference <= LIMIT
    assert "weight hooks" in history.output("report", "report")[0]["streams"][0]["one_by_one"]
    pictures = pictures_of(history)
    assert abs(pictures_of(comfy.queue(streamed(replace(case, hooked=False)))) - pictures).max() > 1e-3


def test_a_step_cache_has_each_frame_sampled_by_itself_and_the_node_says_why(comfy: ComfyProcess) -> None:
    cache = ("EasyCache", {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False})
    difference, history = compared(comfy, Case(steps=4, patch=cache))
    assert difference <= LIMIT
    (stream,) = history.output("report", "report")[0]["streams"]
    assert "another node (easycache) acts on each sampling" in stream["one_by_one"]


def test_a_number_of_control_images_that_fits_no_frames_is_told(comfy: ComfyProcess) -> None:
    history = comfy.queue(streamed(Case(frames=5, controls=1, images=3)))
    assert "ControlNet 1 has 3 images, and there are 5 frames." in history.error


def test_the_same_frames_are_not_sampled_again_in_the_next_prompt_and_the_report_tells_their_times(
    comfy: ComfyProcess,
) -> None:
    prompt = streamed(Case(frames=4, steps=1, seed=77))
    history = comfy.queue(prompt)
    assert "stream" not in history.cached
    (text,) = history.output("report", "text")
    assert re.search(r"Stream: 4 frames, [\d.]+ a second; p50 [\d.]+ ms, p95 [\d.]+ ms, p99 [\d.]+ ms\.", text)
    assert "stream" in comfy.queue(prompt).cached
