"""TRT Stream with live frames on tiny models: each picture is the one that stock nodes make of its frame."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from comfy_process import ComfyProcess
from hybrid_trt.streaming import pictures
from live_client import Client, image, joined, run_client, run_stream, same
from live_stream import by_stock_nodes, live
from pack import ROOT
from shipped_workflows import shipped
from workflow_recipes import with_tiny_models
from workflow_to_prompt import to_prompt


def test_pictures_are_those_of_stock_nodes_also_after_changes(comfy: ComfyProcess) -> None:
    """Changes act from the next frame on and stay; of several before it the last one counts."""
    made: list[torch.Tensor] = []

    async def act(client: Client) -> None:
        ready = {"prompt": "", "negative": "", "strengths": [0.8], "seed": 7, "steps": 2, "denoise": 0.6, "cfg": 1.0}
        assert client.told[0]["ready"] == ready
        for n, changes in enumerate(([], [{"seed": 2**63}, {"strengths": [0.1], "seed": 11}],
                                     [{"prompt": "a dog", "steps": 3, "denoise": 0.9}])):  # fmt: skip
            for change in changes:
                assert await client.ask(change) == {"changed": change}
            number, picture = await client.shown(image(n, 96, 64))
            assert number == n
            made.append(picture)

    assert run_client(comfy, live(), act).ok
    wanted = [by_stock_nodes(comfy, image(0, 96, 64)), by_stock_nodes(comfy, image(1, 96, 64), 0.1, seed=11),
              by_stock_nodes(comfy, image(2, 96, 64), 0.1, "a dog", seed=11, steps=3, denoise=0.9)]  # fmt: skip
    assert not same(wanted[0], wanted[1])
    assert not same(wanted[1], wanted[2])
    for picture, expected in zip(made, wanted, strict=True):
        assert same(picture, expected), (picture - expected).abs().max()


def test_a_prompt_that_cannot_be_encoded_is_told_and_the_one_before_stays(comfy: ComfyProcess) -> None:
    made: list[torch.Tensor] = []

    async def act(token: str) -> None:
        async with joined(comfy, token) as client:
            assert "changed" in await client.ask({"prompt": "a dog"})
            await client.shown(image(0))
            assert "changed" in await client.ask({"prompt": "(" * 4000 + "a" + ")" * 4000, "seed": 11})
            made.append((await client.shown(image(0)))[1])
            assert "The prompt stays as it is" in client.told[-1]["error"]
        async with joined(comfy, token) as again:
            assert again.told[0]["ready"]["prompt"] == "a dog"
            assert again.told[0]["ready"]["seed"] == 11
            await again.stop()

    assert run_stream(comfy, live(), act).ok
    assert same(made[0], by_stock_nodes(comfy, image(0), 0.8, "a dog", seed=11))


def test_frames_in_work_are_finished_when_no_other_comes(comfy: ComfyProcess) -> None:
    made: list[torch.Tensor] = []

    async def act(client: Client) -> None:
        assert client.told[0]["steps_as_batch"] is True, "a page then has more frames under way"
        for n in range(2):
            number, picture = await client.shown(image(n))
            assert number == n
            made.append(picture)

    settings = {"steps": 4, "sampler_name": "lcm"}
    assert run_client(comfy, live(steps_as_batch=True, **settings), act).ok
    for n, picture in enumerate(made):
        assert same(picture, by_stock_nodes(comfy, image(n), **settings))


def test_a_stream_without_frames_is_an_error_or_an_interrupt_if_it_was_stopped(comfy: ComfyProcess) -> None:
    async def stop(token: str) -> None:
        async with joined(comfy, token) as client:
            await client.stop()

    async def nobody(_: str) -> None:
        await asyncio.sleep(0)

    assert run_stream(comfy, live(), stop).status == "interrupted"
    history = run_stream(comfy, live(wait=1), nobody)
    assert history.status == "error"
    assert "got no frame" in history.error


def test_the_program_of_the_documentation_streams_a_folder(comfy: ComfyProcess, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", (ROOT / "docs" / "real_time.md").read_text(encoding="utf-8"), re.S)
    assert len(code.splitlines()) <= 40
    client, folder, results = tmp_path / "client.py", tmp_path / "frames", tmp_path / "results"
    client.write_text(code, encoding="utf-8")
    folder.mkdir()
    results.mkdir()
    for n in range(3):
        (folder / f"{n}.png").write_bytes(pictures.write(image(n), "png"))
    (folder / "3.jpg").write_bytes(b"none")

    async def act(_: str) -> None:
        ran = await asyncio.create_subprocess_exec(
            sys.executable, client, folder, results, comfy.url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)  # fmt: skip
        told, _ = await asyncio.wait_for(ran.communicate(), 50)
        assert ran.returncode == 0, told
        for words in (b'"changed": {"seed": 5}', b"so it was left out", b"The stream was stopped."):
            assert words in told, told

    assert run_stream(comfy, live(), act).ok
    made = sorted(results.iterdir())
    assert [path.name for path in made] == ["00000.jpg", "00001.jpg", "00002.jpg"]
    wanted = pictures.read(pictures.write(by_stock_nodes(comfy, image(2), seed=5), "jpeg"))
    assert (pictures.read(made[2].read_bytes()) - wanted).abs().mean() < 0.002


@pytest.mark.slow
def test_the_template_for_videos_paints_each_frame_on_engines(sd15: ComfyProcess, object_info: dict[str, Any]) -> None:
    prompt = to_prompt(with_tiny_models(shipped("sd15_video"), object_info), object_info)
    history = sd15.queue(prompt, timeout=300)
    ids = {entry["class_type"]: node for node, entry in prompt.items()}
    report = history.output(ids["TRTReport"], "report")[0]
    assert (report["unet"]["engine"], report["unet"]["native"]) == (6, 0), "three frames of two steps"
    (saved,) = history.output(ids["SaveVideo"], "images")
    with av.open(str(sd15.base / "output" / saved["subfolder"] / saved["filename"])) as video:
        assert len([*video.decode(video=0)]) == 3


FOUND_BY = {"DA3Render": ("ImageInvert", {}),
            "SDPoseDrawKeypoints": ("ImageSharpen", {"sharpen_radius": 2, "sigma": 1.0, "alpha": 1.0})}  # fmt: skip
"""Nodes without models in the place of those that draw depth and pose, whose models are large."""
FINDERS = ("LoadDA3Model", "DA3Inference", "SDPoseKeypointExtractor")


def without_finders(prompt: Prompt) -> Prompt:
    """The prompt with depth and pose drawn by nodes without models."""
    made = {name: entry for name, entry in prompt.items() if entry["class_type"] not in FINDERS}
    for name, entry in made.items():
        if (found := FOUND_BY.get(entry["class_type"])) is not None:
            (frame,) = (other for other, one in prompt.items() if one["class_type"] == "TRTFrame")
            made[name] = node(found[0], image=[frame, 0], **found[1])
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("template", "controls"), [("sd15_webcam", []), ("sd15_depth_and_pose", [8, 8])])
def test_the_templates_for_live_frames_stream_on_engines(
    sd15: ComfyProcess, object_info: dict[str, Any], template: str, controls: list[int]
) -> None:
    prompt = without_finders(to_prompt(with_tiny_models(shipped(template), object_info), object_info))

    async def act(client: Client) -> None:
        for n in range(4):
            assert (await client.shown(image(n, 128, 128)))[0] == n

    history = run_client(sd15, prompt, act, timeout=300)
    ids = {entry["class_type"]: node for node, entry in prompt.items()}
    report = history.output(ids["TRTReport"], "report")[0]
    assert (report["unet"]["engine"], report["unet"]["native"]) == (8, 0), "four frames of two steps"
    assert [row["engine"] for row in report["controlnets"]][: len(controls)] == controls
    if template == "sd15_webcam":
        assert len(history.output(ids["SaveImage"], "images")) == 1, "the last picture"
