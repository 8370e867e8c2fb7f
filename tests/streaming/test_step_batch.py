"""The steps of neighbouring frames as one batch: each picture is the one that stock nodes make of its frame alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.sd
import pytest
import slow
import torch
from comfy import model_management
from comfy.utils import load_torch_file
from comfy_process import ComfyProcess
from given_frames import Given, apart, image, prompts, random, stock, streamed, with_image
from hybrid_trt.engine_library import Library
from hybrid_trt.streaming.frames import THE_FRAME, Changes, Frame, Settings
from hybrid_trt.streaming.open_sampling import OpenSampling
from hybrid_trt.streaming.run import FrameTimes
from hybrid_trt.streaming.stream import Stream
from memory_fixtures import file, library
from patched import Patched, load
from streams import Case, compared

__all__ = ["file", "library"]  # fixtures: pytest finds them by name

LIMIT = 1e-5
OWN = Settings(steps=3, cfg=1.0, sampler_name="lcm", scheduler="sgm_uniform", denoise=0.6, seed=7, steps_as_batch=True)
AT_ONCE = {"steps_as_batch": True}

CASES = {
    "four steps, two ControlNets": Case(steps=4, controls=2, frames=5, images=5, end=1.0),
    "the frame": Case(steps=4, controls=2, frames=6, follow="the frame", end=1.0),
    "euler, cfg": Case(steps=3, sampler="euler", scheduler="normal", cfg=3.0, frames=5, controls=1, images=5, end=1.0),
    "from noise, new seeds": Case(steps=4, denoise=1.0, frames=5, new_seeds=True),
    "new seeds, euler": Case(steps=2, sampler="euler", frames=4, new_seeds=True, controls=1, images=1, end=1.0),
    "fewer frames than steps": Case(steps=5, frames=2, images=2, controls=1, end=1.0),
    "cropped": Case(steps=3, width=77, height=67, controls=1, end=1.0),
    "a model that sees another picture": Case(unet="tiny_sd15_ip2p_unet", steps=3),
    "TAESD": Case(steps=4, vae="tiny_sdxl_taesd", frames=5),
    "SDXL": Case(steps=3, family="sdxl", controls=1, cfg=3.0, sampler="euler", vae="tiny_sdxl_taesd", end=1.0),
}
APART = {
    "another sampler": (Case(sampler="dpmpp_2m", scheduler="karras"), "neither lcm nor euler"),
    "a part of the steps": (Case(controls=1), "a ControlNet acts on a part of the steps"),
    "a mask": (Case(region="mask"), "a prompt acts on a part of the steps or of the picture"),
    "an area": (Case(region="area", width=128, controls=1, end=1.0), "a prompt acts on a part"),
    "a patch": (Case(patch=("HyperTile", {"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False})),
                "another node acts on each step"),
}  # fmt: skip
SLOW = set(CASES) - {"four steps, two ControlNets"}


@pytest.mark.parametrize("case", slow.cases(CASES, SLOW))
def test_pictures_of_frames_at_several_steps_at_once_are_those_of_stock_nodes(comfy: ComfyProcess, case: Case) -> None:
    difference, history = compared(comfy, case, **AT_ONCE)
    assert difference <= LIMIT
    (told,) = history.output("report", "report")[0]["streams"]
    assert (told["frames"], told["one_by_one"], told["steps_apart"]) == (case.frames, "", "")


@pytest.mark.parametrize("name", [name if name == "a part of the steps" else pytest.param(name, marks=pytest.mark.slow)
                                  for name in APART])  # fmt: skip
def test_frames_are_sampled_one_after_another_where_a_batch_would_not_be_exact_and_the_node_says_why(
    comfy: ComfyProcess, name: str
) -> None:
    case, why = APART[name]
    difference, history = compared(comfy, case, **AT_ONCE)
    assert difference <= LIMIT
    (told,) = history.output("report", "report")[0]["streams"]
    assert told["steps_apart"].startswith("Frames were sampled one after another: ")
    assert why in told["steps_apart"]
    assert told["steps_apart"] in history.output("report", "text")[0]


@pytest.fixture(scope="module")
def vae(models: dict[str, Path]) -> comfy.sd.VAE:
    """One that takes little time; the streams on a server have a KL autoencoder."""
    return comfy.sd.VAE(sd=load_torch_file(str(models["tiny_sdxl_taesd"])))


@pytest.fixture(scope="module")
def net(models: dict[str, Path]) -> comfy.controlnet.ControlNet:
    return comfy.controlnet.load_controlnet(str(models["tiny_sd15_flat_a"]))


class Counted(Given):
    """Frames, and how many pictures were there when each was asked for; ``order`` is that of the pictures."""

    def __init__(self, *frames: Frame | None, ready: bool = True):
        super().__init__(*frames, ready=ready)
        self.order: list[int] = []

    def give(self, number: int, picture: torch.Tensor) -> None:
        super().give(number, picture)
        self.order.append(number)


def batches(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """Return the list that takes the number of images of each call of a model's UNet."""
    seen, unet = [], model.model.diffusion_model
    forward = unet.forward
    monkeypatch.setattr(unet, "forward", lambda x, *rest, **more: seen.append(x.shape[0]) or forward(x, *rest, **more))
    return seen


@pytest.mark.parametrize("count", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_a_source_gets_all_its_pictures_in_order_each_so_many_frames_later_as_there_are_steps_less_one(
    file: Path, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    source, model = Counted(*(Frame(n, image(20 + n)) for n in range(count))), load(file)
    seen = batches(monkeypatch, model)
    streamed(Stream(model, vae, *prompts(), OWN), source)
    assert source.order == list(range(count))
    assert source.asked == [max(0, n - OWN.steps + 1) for n in range(count)], "nothing else waits for its picture"
    assert seen == [OWN.steps] * (count + OWN.steps - 1), "always one size of a batch, and no call without a use"
    for number in range(count):
        assert apart(source.pictures[number], stock(load(file), vae, *prompts(), OWN, image(20 + number))) <= LIMIT


def test_frames_in_work_are_finished_where_no_other_comes_for_now(
    file: Path, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [Frame(n, image(n)) for n in range(3)]
    source, model = Counted(frames[0], frames[1], None, frames[2], ready=False), load(file)
    seen = batches(monkeypatch, model)
    streamed(Stream(model, vae, *prompts(), OWN), source)
    assert (source.order, source.asked) == ([0, 1, 2], [0, 0, 0, 2])
    assert len(seen) == (2 + OWN.steps - 1) + OWN.steps
    for frame in frames:
        assert apart(source.pictures[frame.number], stock(load(file), vae, *prompts(), OWN, frame.image)) <= LIMIT


class TextEncoder:
    """Stands for CLIP: each text has a prompt of its own."""

    def tokenize(self, text: str) -> int:
        return len(text)

    def encode_from_tokens_scheduled(self, tokens: int) -> list:
        return [[random(1, 77, 768, seed=tokens), {"pooled_output": None}]]


def test_each_frame_is_finished_with_the_settings_that_it_came_with(
    file: Path, vae: comfy.sd.VAE, net: Any
) -> None:
    euler = replace(OWN, sampler_name="euler", scheduler="normal", steps=2)
    changes = {2: Changes(strengths=(0.2,)), 3: Changes(steps=3, denoise=0.8), 5: Changes(cfg=3.0, seed=9),
               6: Changes(prompt="a cat")}  # fmt: skip
    frames = [Frame(n, image(20 + n, 72 if n == 4 else 64), changes.get(n)) for n in range(7)]
    source, shown = Counted(*frames), image(5)
    times = streamed(Stream(load(file), vae, *prompts(with_image(net, shown, 1.0)), euler, TextEncoder()), source)
    assert (source.order, times.steps_apart) == (list(range(7)), "")
    model, own, strength = load(file), euler, 1.0
    positive, negative = prompts(with_image(net, shown, strength))
    for frame in frames:
        change = frame.changes or Changes()
        own = replace(own, **{name: value for name in ("steps", "denoise", "cfg", "seed")
                              if (value := getattr(change, name)) is not None})  # fmt: skip
        if change.strengths:
            positive, negative = prompts(with_image(net, shown, change.strengths[0]))
        if change.prompt:
            positive = [[random(1, 77, 768, seed=len(change.prompt)), positive[0][1]]]
        wanted = stock(model, vae, positive, negative, own, frame.image)
        assert apart(source.pictures[frame.number], wanted) <= LIMIT, frame.number


def test_frames_that_the_model_sees_beside_its_prompt_are_sampled_one_after_another(
    file: Path, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenSampling, "_depend_on_frames", lambda *_: True)  # as with an inpainting UNet
    source, model = Counted(*(Frame(n, image(n)) for n in range(2))), load(file)
    seen = batches(monkeypatch, model)
    times = streamed(Stream(model, vae, *prompts(), OWN), source)
    assert "the model sees each frame beside its prompt" in times.sentence()
    assert seen == [1] * 2 * OWN.steps


def test_a_frame_like_the_one_before_gets_its_picture_when_that_is_there(file: Path, vae: comfy.sd.VAE) -> None:
    first = image(1)
    shown = [first, first + 0.004, image(2), image(3), image(3), image(4)]
    source = Counted(*(Frame(n, frame) for n, frame in enumerate(shown)))
    times = streamed(Stream(load(file), vae, *prompts(), replace(OWN, similar=0.01)), source)
    assert (source.order, times.repeated) == (list(range(6)), 2)
    assert [apart(source.pictures[a], source.pictures[b]) == 0 for a, b in ((0, 1), (1, 2), (3, 4), (4, 5))] == [
        True, False, True, False]  # fmt: skip
    assert apart(source.pictures[4], stock(load(file), vae, *prompts(), OWN, shown[3])) <= LIMIT


def test_a_still_camera_gets_its_picture_after_as_many_frames_as_there_are_steps(
    file: Path, vae: comfy.sd.VAE
) -> None:
    source = Counted(*(Frame(n, image(1)) for n in range(5)))
    streamed(Stream(load(file), vae, *prompts(), replace(OWN, similar=0.01)), source)
    assert source.asked == [0, 0, 0, 3, 4], "the alike ones are given as soon as the first is"


@pytest.mark.slow
def test_any_patch_of_another_node_acts_on_each_frame_in_work_as_in_stock(comfy: ComfyProcess) -> None:
    """Each kind of patch: where it may look at the step of one image alone, frames are sampled one after another."""
    (kinds,) = [options["options"] for name, (_, options) in
                comfy.object_info("TestModelPatch")["input"]["required"].items() if name == "kind"]  # fmt: skip
    differences = {}
    for kind in [kind for kind in kinds if kind.startswith("sd15/")]:
        case = Case(frames=2, cfg=3.0, sampler="euler", controls=1, images=1, end=1.0,
                    patch=("TestModelPatch", {"kind": kind}))  # fmt: skip
        differences[kind], _ = compared(comfy, case, **AT_ONCE)
    assert len(differences) > 30
    assert max(differences.values()) <= LIMIT, differences


@pytest.mark.slow
def test_frames_in_work_on_engines_are_those_of_stock_nodes(comfy: ComfyProcess) -> None:
    case = Case(controls=2, cfg=3.0, sampler="euler", frames=4, images=4, end=1.0, vae="tiny_sdxl_taesd")
    difference, history = compared(comfy, case, engines=True, **AT_ONCE)
    assert difference <= 10 * LIMIT  # of a value; engines themselves are held to a relative error
    report = history.output("report", "report")[0]
    assert report["streams"][0]["steps_apart"] == ""
    counts = {row["kind"]: (row["engine"], row["native"]) for row in report["rows"]}
    calls = case.frames + case.steps - 1
    assert counts == dict.fromkeys(("unet", "controlnet", "vae_decoder", "vae_encoder"), (calls, 0))


@pytest.mark.fault("an engine gives values that are no numbers (NaN) for one of the frames in work",
                   see="that frame is made again at normal speed, the others are as they were")
def test_native_makes_the_frame_again_that_an_engine_spoilt_and_no_other(
    file: Path, library: Library, vae: comfy.sd.VAE, net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched, calls = Patched(load(file), library), []
    session = patched.handle.session
    ran = session.run

    def broken(*args: Any) -> dict[str, torch.Tensor]:
        results = ran(*args)
        calls.append(1)
        if len(calls) == 4:
            next(iter(results.values()))[1].view(-1)[7] = float("nan")  # frame 2 at its second step
        return results

    monkeypatch.setattr(session, "run", broken)
    frames = [Frame(n, image(n)) for n in range(6)]
    source, own = Counted(*frames), replace(OWN, follow=THE_FRAME)
    positive, negative = prompts(with_image(net, image(5), 0.6))
    times: FrameTimes = streamed(Stream(patched.model, vae, positive, negative, own), source)
    assert (source.order, times.again, times.steps_apart) == (list(range(6)), 1, "")
    for frame in frames:
        wanted = stock(load(file), vae, *prompts(with_image(net, frame.image, 0.6)), own, frame.image)
        assert apart(source.pictures[frame.number], wanted) <= 10 * LIMIT, frame.number
    assert patched.counts == (len(frames) + OWN.steps - 1, OWN.steps), "calls on engines, and native ones"


@pytest.mark.fault("a stream is interrupted while frames are in work",
                   see="the prompt ends without their pictures; the model is as it was before")
def test_a_stream_that_is_interrupted_with_frames_in_work_leaves_the_model_as_it_was(
    file: Path, vae: comfy.sd.VAE, net: Any
) -> None:
    model, given = load(file), []

    class Interrupted(Given):
        def give(self, number: int, picture: torch.Tensor) -> None:
            given.append(number)
            model_management.interrupt_current_processing()

    stream = Stream(model, vae, *prompts(with_image(net, image(5), 0.6)), OWN)
    with pytest.raises(model_management.InterruptProcessingException):
        streamed(stream, Interrupted(*(Frame(n, image(n)) for n in range(8))))
    assert given == [0]
    assert model.model.current_patcher is None
    assert stream.controls.controls[0].cond_hint is None
    assert not stream.busy
    assert apart(stock(model, vae, *prompts(), OWN, image(1)), stock(load(file), vae, *prompts(), OWN, image(1))) == 0
