"""A stream while it runs: changes, frames that are alike, faults, and what it leaves behind; in this process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.controlnet
import comfy.sample
import comfy.sd
import pytest
import torch
from comfy import model_management
from comfy.utils import load_torch_file
from comfy_process import ComfyProcess
from given_frames import Given, apart, image, prompts, random, stock, streamed, with_image
from hybrid_trt.engine_library import Library
from hybrid_trt.streaming import open_sampling, run
from hybrid_trt.streaming.frames import Changes, Frame, Settings, copy, mean_difference
from hybrid_trt.streaming.run import FrameTimes
from hybrid_trt.streaming.stream import Stream
from memory_fixtures import file, library
from patched import Patched, load
from streams import Case, compared
from streams import streamed as streamed_prompt

__all__ = ["file", "library"]  # fixtures: pytest finds them by name

LIMIT = 1e-5
OWN = Settings(steps=2, cfg=1.0, sampler_name="euler_ancestral", scheduler="normal", denoise=0.5, seed=7)


@pytest.fixture(scope="module")
def vae(models: dict[str, Path]) -> comfy.sd.VAE:
    """One that takes little time; the streams on a server have a KL autoencoder."""
    return comfy.sd.VAE(sd=load_torch_file(str(models["tiny_sdxl_taesd"])))


@pytest.fixture(scope="module")
def net(models: dict[str, Path]) -> comfy.controlnet.ControlNet:
    return comfy.controlnet.load_controlnet(str(models["tiny_sd15_flat_a"]))


def test_changes_act_from_their_frame_on_and_are_stocks(file: Path, vae: comfy.sd.VAE, net: Any) -> None:
    frames = [image(20 + n) for n in range(7)]
    changes = [None, Changes(strengths=(0.2,)), Changes(seed=8), Changes(steps=4, denoise=0.8), Changes(cfg=3.0),
               Changes(denoise=0.3), None]  # fmt: skip
    source = Given(*(Frame(n, frame, change) for n, (frame, change) in enumerate(zip(frames, changes, strict=True))))
    shown = image(5)
    stream = Stream(load(file), vae, *prompts(with_image(net, shown, 1.0)), OWN)
    assert streamed(stream, source).one_by_one == ""
    model = load(file)
    strength, values = 1.0, {name: getattr(OWN, name) for name in ("steps", "cfg", "denoise", "seed")}
    for number, (frame, change) in enumerate(zip(frames, changes, strict=True)):
        if change is not None:
            strength = change.strengths[0] if change.strengths else strength
            values |= {name: getattr(change, name) for name in values if getattr(change, name) is not None}
        own = Settings(sampler_name=OWN.sampler_name, scheduler=OWN.scheduler, **values)
        wanted = stock(model, vae, *prompts(with_image(net, shown, strength)), own, frame)
        assert apart(source.pictures[number], wanted) <= LIMIT, number


class TextEncoder:
    """Stands for CLIP: each text has a prompt of its own."""

    def tokenize(self, text: str) -> int:
        return len(text)

    def encode_from_tokens_scheduled(self, tokens: int) -> list:
        return [[random(1, 77, 768, seed=tokens), {"pooled_output": None}]]


def test_a_model_that_comfyui_has_lost_is_not_loaded_again(
    file: Path, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = model_management.loaded_models
    monkeypatch.setattr(model_management, "loaded_models", lambda **options: [None, *loaded(**options)])
    stream = Stream(load(file), vae, *prompts(), OWN)
    source = Given(Frame(0, image(0)))
    monkeypatch.setattr(stream, "_show", lambda *arguments: (stream._reload(), Stream._show(stream, *arguments)))
    streamed(stream, source)
    assert apart(source.pictures[0], stock(load(file), vae, *prompts(), OWN, image(0))) <= LIMIT


def test_a_new_prompt_acts_from_its_frame_on(file: Path, vae: comfy.sd.VAE) -> None:
    frame, (positive, negative) = image(3), prompts()
    source = Given(Frame(0, frame), Frame(1, frame, Changes(prompt="a cat")), Frame(2, frame))
    streamed(Stream(load(file), vae, positive, negative, OWN, TextEncoder()), source)
    assert apart(source.pictures[0], stock(load(file), vae, positive, negative, OWN, frame)) <= LIMIT
    new = [[random(1, 77, 768, seed=len("a cat")), {}]]
    wanted = stock(load(file), vae, new, negative, OWN, frame)
    assert apart(source.pictures[0], wanted) > 1e-3
    assert max(apart(source.pictures[n], wanted) for n in (1, 2)) <= LIMIT


@pytest.mark.fault("the text encoder fails on a new prompt of a stream",
                   see="the prompt stays as it was, and the client is told; the stream goes on")
def test_a_prompt_that_cannot_be_encoded_leaves_the_one_before_and_the_stream_goes_on(
    file: Path, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clip, frame = TextEncoder(), image(3)
    source = Given(Frame(0, frame), Frame(1, frame, Changes(prompt="((a", negative="b", seed=9)), Frame(2, frame))
    known = clip.encode_from_tokens_scheduled

    def encode(tokens: int) -> list:
        if tokens == 3:
            raise RecursionError("too many parentheses")
        return known(tokens)

    monkeypatch.setattr(clip, "encode_from_tokens_scheduled", encode)
    positive, negative = prompts()
    streamed(Stream(load(file), vae, positive, negative, replace(OWN, cfg=3.0), clip), source)
    assert "The prompt stays as it is: the text encoder failed" in caplog.text
    negative = [[random(1, 77, 768, seed=1), {}]]
    wanted = stock(load(file), vae, positive, negative, replace(OWN, cfg=3.0, seed=9), frame)
    assert max(apart(source.pictures[n], wanted) for n in (1, 2)) <= LIMIT


def test_an_interrupt_while_a_prompt_is_encoded_ends_the_stream(
    file: Path, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(_tokens: int) -> list:
        raise model_management.InterruptProcessingException

    clip, frame = TextEncoder(), image(3)
    monkeypatch.setattr(clip, "encode_from_tokens_scheduled", encode)
    source = Given(Frame(0, frame), Frame(1, frame, Changes(prompt="a cat")), Frame(2, frame))
    with pytest.raises(model_management.InterruptProcessingException):
        streamed(Stream(load(file), vae, *prompts(), OWN, clip), source)
    assert 2 not in source.pictures


def test_without_a_text_encoder_a_new_prompt_is_refused_and_the_stream_goes_on(
    file: Path, vae: comfy.sd.VAE, caplog: pytest.LogCaptureFixture
) -> None:
    frame = image(3)
    source = Given(Frame(0, frame), Frame(1, frame, Changes(prompt="a cat", seed=OWN.seed)))
    streamed(Stream(load(file), vae, *prompts(), OWN), source)
    assert "connect CLIP to TRT Stream" in caplog.text
    assert apart(source.pictures[0], source.pictures[1]) == 0


def test_frames_of_several_sizes_are_sampled_in_one_stream(file: Path, vae: comfy.sd.VAE, net: Any) -> None:
    frames = [image(1, 64), image(2, 96), image(3, 72), image(4, 64)]
    source, shown = Given(*(Frame(n, frame) for n, frame in enumerate(frames))), image(5, 80)
    streamed(Stream(load(file), vae, *prompts(with_image(net, shown, 0.6)), OWN), source)
    for number, frame in enumerate(frames):
        wanted = stock(load(file), vae, *prompts(with_image(net, shown, 0.6)), OWN, frame)
        assert apart(source.pictures[number], wanted) <= LIMIT, number


def test_the_nodes_own_controlnets_are_left_as_they_were(file: Path, vae: comfy.sd.VAE, net: Any) -> None:
    control = with_image(net, image(5), 0.6)
    before = dict(vars(control))
    stream = Stream(load(file), vae, *prompts(control), Settings(**{**vars(OWN), "follow": "the frame"}))
    streamed(stream, Given(Frame(0, image(1), Changes(strengths=(0.1,)))))
    assert dict(vars(control)) == before
    assert stream.controls.controls[0].cond_hint is None, "nothing is kept on the device"


def test_a_picture_is_given_before_the_next_frame_is_waited_for(
    file: Path, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = SimpleNamespace(synchronize=lambda: None)  # as of a device that may still compute
    monkeypatch.setattr(run, "download", lambda tensor: (tensor, event))
    frames = [Frame(n, image(n)) for n in range(3)]
    waiting, full = Given(*frames, ready=False), Given(*frames)
    for source in (waiting, full):
        streamed(Stream(load(file), vae, *prompts(), OWN), source)
    assert waiting.asked == [0, 1, 2]
    assert full.asked == [0, 0, 1], "the device has the next frame to do while this one's picture is taken"


def test_frames_that_are_alike_get_one_picture_until_one_differs_from_it(file: Path, vae: comfy.sd.VAE) -> None:
    first = image(1)
    frames = [first, first + 0.004, first + 0.008, first + 0.012, image(2)]
    source = Given(*(Frame(n, frame) for n, frame in enumerate(frames)))
    stream = Stream(load(file), vae, *prompts(), Settings(**{**vars(OWN), "similar": 0.01}))
    assert streamed(stream, source).repeated == 2
    assert [apart(source.pictures[0], source.pictures[n]) == 0 for n in range(5)] == [True, True, True, False, False]
    wanted = stock(load(file), vae, *prompts(), OWN, frames[3])
    assert apart(source.pictures[3], wanted) <= LIMIT


def test_a_change_makes_a_picture_even_of_the_same_frame(file: Path, vae: comfy.sd.VAE) -> None:
    source = Given(Frame(0, image(1)), Frame(1, image(1), Changes(seed=9)))
    streamed(Stream(load(file), vae, *prompts(), Settings(**{**vars(OWN), "similar": 0.01})), source)
    assert apart(source.pictures[0], source.pictures[1]) > 1e-3


@pytest.mark.fault("an engine gives values that are no numbers (NaN) for a frame of a stream",
                   see="that frame is made again at normal speed, and *TRT Report* counts it")
def test_native_makes_a_frame_again_that_an_engine_spoilt(
    file: Path, library: Library, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched, calls = Patched(load(file), library), []
    session = patched.handle.session
    ran = session.run

    def broken(*args: Any) -> dict[str, torch.Tensor]:
        results = ran(*args)
        calls.append(1)
        if len(calls) == 3:  # the first step of the second frame
            next(iter(results.values())).view(-1)[7] = float("nan")
        return results

    monkeypatch.setattr(session, "run", broken)
    frames = [image(n) for n in range(4)]
    source = Given(*(Frame(n, frame) for n, frame in enumerate(frames)))
    times = streamed(Stream(patched.model, vae, *prompts(), OWN), source)
    assert (times.count, times.again, times.one_by_one) == (4, 1, "")
    for number, frame in enumerate(frames):
        assert apart(source.pictures[number], stock(load(file), vae, *prompts(), OWN, frame)) <= 10 * LIMIT, number
    assert patched.counts == (4 * OWN.steps, OWN.steps)


@pytest.mark.fault("a stream is interrupted", see="the prompt ends; the model is as it was before")
def test_an_interrupted_stream_leaves_the_model_as_it_was(file: Path, vae: comfy.sd.VAE, net: Any) -> None:
    model, asked = load(file), []

    class Interrupted(Given):
        def give(self, number: int, picture: torch.Tensor) -> None:
            asked.append(number)
            model_management.interrupt_current_processing()

    stream = Stream(model, vae, *prompts(with_image(net, image(5), 0.6)), OWN)
    with pytest.raises(model_management.InterruptProcessingException):
        streamed(stream, Interrupted(*(Frame(n, image(n)) for n in range(5))))
    assert asked == [0]
    assert model.model.current_patcher is None
    assert stream.controls.controls[0].cond_hint is None
    assert apart(stock(model, vae, *prompts(), OWN, image(1)), stock(load(file), vae, *prompts(), OWN, image(1))) == 0


@pytest.mark.fault("a stream's frames are samplings of their own, before which nothing has loaded the VAE",
                   see="ComfyUI's own way loads it for each frame")
def test_the_vae_is_loaded_for_each_frame_that_is_a_sampling_of_its_own(
    file: Path, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bool] = []

    def look(call: Any) -> Any:
        return lambda given: loaded.append(vae.patcher in model_management.loaded_models()) or call(given)

    for name in ("encode", "decode"):
        monkeypatch.setattr(vae.first_stage_model, name, look(getattr(vae.first_stage_model, name)))
    monkeypatch.setattr("hybrid_trt.streaming.stream.why_one_by_one", lambda *_: "for a test")
    stream = Stream(load(file), vae, *prompts(), OWN)
    source = Given(Frame(0, image(0)), Frame(1, image(1)))
    model_management.unload_all_models()
    streamed(stream, source)
    assert loaded == [True] * 4
    for number in (0, 1):
        assert apart(source.pictures[number], stock(load(file), vae, *prompts(), OWN, image(number))) <= LIMIT


@pytest.mark.fault("memory is too short to encode or decode a frame at once", see="ComfyUI's own way, in tiles: slower")
def test_a_vae_that_lacks_memory_goes_comfyuis_way_and_the_pictures_are_the_same(
    file: Path, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("there is none left")

    stream = Stream(load(file), vae, *prompts(), OWN)
    monkeypatch.setattr(stream._vae, "_decode", full)
    source = Given(Frame(0, image(0)), Frame(1, image(1)))
    streamed(stream, source)
    for number in (0, 1):
        assert apart(source.pictures[number], stock(load(file), vae, *prompts(), OWN, image(number))) <= LIMIT


def test_a_long_stream_keeps_no_more_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MOST", 10)
    times = FrameTimes()
    times._ms = type(times._ms)(maxlen=10)
    for n in range(1000):
        times.add(n)
    assert (times.count, len(times._ms), times.percentile(50), times.percentile(99)) == (1000, 10, 995, 999)


def test_conditionings_are_prepared_once_for_frames_of_one_size(
    file: Path, vae: comfy.sd.VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, ask = [], open_sampling.OpenSampling._depend_on_frames
    monkeypatch.setattr(open_sampling.OpenSampling, "_depend_on_frames",
                        lambda self, latent: prepared.append(latent.shape) or ask(self, latent))  # fmt: skip
    streamed(Stream(load(file), vae, *prompts(), OWN), Given(*(Frame(n, image(n)) for n in range(5))))
    assert len(prepared) == 1


def test_a_step_cache_has_each_frame_sampled_by_itself_and_the_node_says_why(comfy: ComfyProcess) -> None:
    cache = ("EasyCache", {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False})
    difference, history = compared(comfy, Case(steps=4, patch=cache))
    assert difference <= LIMIT
    (stream,) = history.output("report", "report")[0]["streams"]
    assert "another node (easycache) acts on each sampling" in stream["one_by_one"]


def test_a_number_of_control_images_that_fits_no_frames_is_told(comfy: ComfyProcess) -> None:
    history = comfy.queue(streamed_prompt(Case(frames=5, controls=1, images=3)))
    assert "ControlNet 1 has 3 images, and there are 5 frames." in history.error


def test_the_same_frames_are_not_sampled_again_in_the_next_prompt(comfy: ComfyProcess) -> None:
    prompt = streamed_prompt(Case(frames=2, steps=1, seed=77))
    assert "stream" not in comfy.queue(prompt).cached
    assert "stream" in comfy.queue(prompt).cached


def test_the_report_tells_frame_times(comfy: ComfyProcess) -> None:
    history = comfy.queue(streamed_prompt(Case(frames=4, steps=1)))
    (text,) = history.output("report", "text")
    assert re.search(r"Stream: 4 frames, [\d.]+ a second; p50 [\d.]+ ms, p95 [\d.]+ ms, p99 [\d.]+ ms\.", text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_copies_in_main_memory_keep_values_whatever_the_layout(dtype: torch.dtype) -> None:
    made = random(2, 6, 5, 3, seed=1).to(dtype)
    for source in (made[1:], made[1:].movedim(-1, 1), made[..., :2]):
        target = torch.empty_strided(source.shape, source.stride(), dtype=dtype)
        copy(source, target)
        assert torch.equal(target, source)
    assert mean_difference(made, made + 0.5) == pytest.approx(0.5, rel=2e-2)
