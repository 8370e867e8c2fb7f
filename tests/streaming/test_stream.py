"""TRT Stream: each picture is the one that stock nodes make of its frame alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import slow
from comfy_process import ComfyProcess
from streams import Case, compared, pictures_of, streamed

LIMIT = 1e-5

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


SLOW = set(CASES) - {"ancestral, new seeds", "mask"}


@pytest.mark.parametrize("case", slow.cases(CASES, SLOW))
def test_a_streams_pictures_are_those_of_stock_nodes(comfy: ComfyProcess, case: Case) -> None:
    difference, history = compared(comfy, case)
    assert difference <= LIMIT
    (stream,) = history.output("report", "report")[0]["streams"]
    assert (stream["frames"], stream["one_by_one"]) == (case.frames, "")


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    Case(controls=2, cfg=3.0, sampler="euler", vae="tiny_sdxl_taesd"),
    Case(controls=2, steps=1, follow="the frame"),
], ids=["two steps, TAESD", "one step, KL"])  # fmt: skip
def test_a_stream_on_engines_gives_the_pictures_of_stock_nodes(comfy: ComfyProcess, case: Case) -> None:
    difference, history = compared(comfy, case, engines=True)
    assert difference <= 10 * LIMIT  # of a value; engines themselves are held to a relative error
    rows = history.output("report", "report")[0]["rows"]
    counts = {row["kind"]: (row["engine"], row["native"]) for row in rows}
    calls = case.frames * case.steps
    assert counts == {"unet": (calls, 0), "controlnet": (calls, 0), "vae_decoder": (case.frames, 0),
                      "vae_encoder": (case.frames, 0)}  # fmt: skip


@pytest.mark.slow
def test_any_patch_of_another_node_acts_on_each_frame_as_in_stock(comfy: ComfyProcess) -> None:
    """Each kind of patch: where it may carry something from frame to frame, each is a sampling of its own."""
    (kinds,) = [options["options"] for name, (_, options) in
                comfy.object_info("TestModelPatch")["input"]["required"].items() if name == "kind"]  # fmt: skip
    differences = {}
    for kind in [kind for kind in kinds if kind.startswith("sd15/")]:
        case = Case(frames=2, cfg=3.0, sampler="euler", controls=1, images=1, patch=("TestModelPatch", {"kind": kind}))
        differences[kind], _ = compared(comfy, case)
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
