"""TRT Frame: nodes between it and a ControlNet run again for each frame, as stock nodes run for that frame."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from comfy_process import ComfyProcess
from live_client import Client, image, run_client, same
from live_stream import by_stock_nodes, inverted, live
from scenarios import node
from streams import NODES, Case, compared, pictures_of, streamed

LIMIT = 1e-5
ONE = Case(controls=1, steps=1, frames=2, images=1, follow=NODES)
CASES = {
    "two ControlNets": Case(controls=2, follow=NODES),
    "from noise, odd size": replace(ONE, denoise=1.0, width=77),
    "each frame alone": replace(ONE, hooked=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_control_images_are_those_that_the_nodes_make_of_each_frame_alone(comfy: ComfyProcess, case: Case) -> None:
    difference, history = compared(comfy, case)
    assert difference <= LIMIT
    (stream,) = history.output("report", "report")[0]["streams"]
    assert (stream["frames"], bool(stream["one_by_one"])) == (case.frames, case.hooked)


@pytest.mark.parametrize("apply", ["stock", pytest.param("trt", marks=pytest.mark.slow)])
def test_nodes_behind_a_controlnet_without_strength_are_left_out(comfy: ComfyProcess, apply: str) -> None:
    case = replace(ONE, controls=2, strengths=(0.0, 0.4), apply=apply)
    assert compared(comfy, case)[0] <= LIMIT


def test_pictures_are_the_same_whatever_the_example(comfy: ComfyProcess) -> None:
    """Also one of the frames' very size, and with other images than its own behind it: none is taken for a frame's."""
    wanted = pictures_of(comfy.queue(streamed(ONE)))
    found = pictures_of(comfy.queue(streamed(ONE, example=["frames", 0])))
    assert numpy.array_equal(found, wanted)


@pytest.mark.slow
def test_a_stream_on_engines_follows_the_nodes_too(comfy: ComfyProcess) -> None:
    difference, history = compared(comfy, CASES["two ControlNets"], engines=True)
    assert difference <= 10 * LIMIT
    rows = history.output("report", "report")[0]["rows"]
    assert all(row["native"] == 0 for row in rows)


def test_live_frames_go_through_the_nodes_and_the_page_finds_the_stream(comfy: ComfyProcess) -> None:
    made: list[torch.Tensor] = []

    async def act(client: Client) -> None:
        for n in range(2):
            made.append((await client.shown(image(n, 96, 64), "png"))[1])

    prompt = inverted(live(), ["frame", 0]) | {"frame": node("TRTFrame")}
    assert run_client(comfy, prompt, act, format="png").ok
    wanted = [by_stock_nodes(comfy, image(n, 96, 64), invert=True) for n in range(2)]
    assert (wanted[0] - by_stock_nodes(comfy, image(0, 96, 64))).abs().max() > 2 / 255, "the node changes nothing"
    assert all(map(same, made, wanted))


@pytest.mark.parametrize(("kind", "words"), [
    ("TestWaits", "TestWaits waits for something else while it runs, so TRT Stream cannot"),
    ("TestExpands", "TestExpands becomes other nodes when it runs, so TRT Stream cannot"),
    ("TestTwoImages", "not one image for a frame, so TRT Stream stops. Look at ImageBlend."),
])  # fmt: skip
def test_a_node_that_cannot_run_for_each_frame_is_an_error_and_no_old_image(
    comfy: ComfyProcess, kind: str, words: str
) -> None:
    prompt = streamed(ONE)
    prompt["odd"] = node(kind, image=["frame", 0])
    edges = prompt["edges_of_frame"]
    history = comfy.queue(prompt | {"edges_of_frame": edges | {"inputs": edges["inputs"] | {"image": ["odd", 0]}}})
    assert history.status == "error"
    assert words in history.error


WAYS = {
    "TRTStream": ("", {}),
    "InstructPixToPixConditioning": ("tiny_sd15_ip2p_unet", {"odd": node(
        "InstructPixToPixConditioning", positive=["apply_tiny_sd15_a", 0], negative=["apply_tiny_sd15_a", 1],
        vae=["vae", 0], pixels=["frame", 0])}),
    "ImageToMask": ("", {"mask": node("ImageToMask", image=["frame", 0], channel="red"), "odd": node(
        "ConditioningSetMask", conditioning=["apply_tiny_sd15_a", 0], mask=["mask", 0], strength=1.0,
        set_cond_area="default")}),
}  # fmt: skip
"""The node that a frame reaches -> the model, and the nodes on the way to the stream's prompt."""


@pytest.mark.parametrize("reached", WAYS)
def test_a_frame_that_reaches_anything_but_a_controlnets_image_is_an_error(comfy: ComfyProcess, reached: str) -> None:
    unet, nodes = WAYS[reached]
    prompt = streamed(replace(ONE, unet=unet), example=["frames", 0]) | nodes
    prompt["stream"]["inputs"] |= {"positive": ["odd", 0]} if nodes else {"frames": ["frame", 0]}
    history = comfy.queue(prompt)
    assert history.status == "error"
    assert f"reaches {reached}, which" in history.error
    assert "Wire it to the images of ControlNets alone." in history.error
