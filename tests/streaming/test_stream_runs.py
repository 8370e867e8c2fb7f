"""A stream while it runs: changes, frames that are alike or in work, faults, what it leaves; in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.sd
import pytest
import slow
import torch
from comfy import model_management
from given_frames import Given, TextEncoder, apart, image, net, prompts, random, stock, streamed, vae, with_image
from hybrid_trt.engine_library import Library
from hybrid_trt.streaming import run
from hybrid_trt.streaming.frames import THE_FRAME, Changes, Frame, Settings, copy, mean_difference
from hybrid_trt.streaming.open_sampling import OpenSampling
from hybrid_trt.streaming.run import FrameTimes
from hybrid_trt.streaming.stream import Stream
from memory_fixtures import file, library
from patched import Patched, load

__all__ = ["file", "library", "net", "vae"]  # fixtures: pytest finds them by name

LIMIT = 1e-5
OWN = Settings(steps=2, cfg=1.0, sampler_name="euler_ancestral", scheduler="normal", denoise=0.5, seed=7)
IN_WORK = Settings(
    steps=3, cfg=1.0, sampler_name="lcm", scheduler="sgm_uniform", denoise=0.6, seed=7, steps_as_batch=True)
WAYS = ["frame by frame", "steps as a batch"]
VAE = comfy.sd.VAE


def numbered(*images: torch.Tensor) -> list[Frame]:
    return [Frame(number, one) for number, one in enumerate(images)]


def plainly(file: Path, vae: VAE, frame: torch.Tensor, own: Settings = OWN) -> torch.Tensor:
    """Stock's picture of a frame without a ControlNet."""
    return stock(load(file), vae, *prompts(), own, frame)


@pytest.mark.parametrize("own", slow.cases(dict(zip(WAYS, (
    OWN, replace(IN_WORK, steps=2, sampler_name="euler", scheduler="normal")), strict=True)), WAYS[:1]))
def test_changes_act_from_their_frame_on_and_are_stocks(file: Path, vae: VAE, net: Any, own: Settings) -> None:
    """Also changes of the prompt and of the frames' size."""
    changes = {1: Changes(strengths=(0.2,)), 2: Changes(seed=8), 3: Changes(steps=4, denoise=0.8), 4: Changes(cfg=3.0),
               5: Changes(denoise=0.3, seed=9), 6: Changes(prompt="a cat")}  # fmt: skip
    frames = [Frame(n, image(20 + n, {4: 72, 5: 96}.get(n, 64)), changes.get(n)) for n in range(8)]
    source, shown = Given(*frames), image(5)
    stream = Stream(load(file), vae, *prompts(with_image(net, shown, 1.0)), own, TextEncoder())
    times = streamed(stream, source)
    assert (list(source.pictures), times.one_by_one, times.steps_apart) == (list(range(8)), "", "")
    model, (positive, negative) = load(file), prompts(with_image(net, shown, 1.0))
    for frame in frames:
        change = frame.changes or Changes()
        own = replace(own, **{name: value for name in ("steps", "denoise", "cfg", "seed")
                              if (value := getattr(change, name)) is not None})  # fmt: skip
        if change.strengths:
            positive, negative = prompts(with_image(net, shown, change.strengths[0]))
        if change.prompt:
            before = stock(model, vae, positive, negative, own, frame.image)
            positive = [[random(1, 77, 768, seed=len(change.prompt)), positive[0][1]]]
            assert apart(source.pictures[frame.number], before) > 1e-3
        wanted = stock(model, vae, positive, negative, own, frame.image)
        assert apart(source.pictures[frame.number], wanted) <= LIMIT, frame.number


def test_a_model_that_comfyui_has_lost_is_not_loaded_again(
    file: Path, vae: VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = model_management.loaded_models
    monkeypatch.setattr(model_management, "loaded_models", lambda **options: [None, *loaded(**options)])
    stream = Stream(load(file), vae, *prompts(), OWN)
    source = Given(Frame(0, image(0)))
    monkeypatch.setattr(stream, "_show", lambda *arguments: (stream._reload(), Stream._show(stream, *arguments)))
    streamed(stream, source)
    assert apart(source.pictures[0], plainly(file, vae, image(0))) <= LIMIT


@pytest.mark.fault("the text encoder fails on a new prompt of a stream",
                   see="the prompt stays as it was, and the client is told; the stream goes on")
def test_a_prompt_that_cannot_be_encoded_leaves_the_one_before_and_the_stream_goes_on(
    file: Path, vae: VAE, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    file: Path, vae: VAE, monkeypatch: pytest.MonkeyPatch
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
    file: Path, vae: VAE, caplog: pytest.LogCaptureFixture
) -> None:
    source = Given(Frame(0, image(3)), Frame(1, image(3), Changes(prompt="a cat", seed=OWN.seed)))
    streamed(Stream(load(file), vae, *prompts(), OWN), source)
    assert "connect CLIP to TRT Stream" in caplog.text
    assert apart(source.pictures[0], source.pictures[1]) == 0


def test_the_nodes_own_controlnets_are_left_as_they_were(file: Path, vae: VAE, net: Any) -> None:
    control = with_image(net, image(5), 0.6)
    before = dict(vars(control))
    stream = Stream(load(file), vae, *prompts(control), replace(OWN, follow=THE_FRAME))
    streamed(stream, Given(Frame(0, image(1), Changes(strengths=(0.1,)))))
    assert dict(vars(control)) == before
    assert stream.controls.controls[0].cond_hint is None, "nothing is kept on the device"


def test_a_picture_is_given_before_the_next_frame_is_waited_for(
    file: Path, vae: VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = SimpleNamespace(synchronize=lambda: None)  # as of a device that may still compute
    monkeypatch.setattr(run, "download", lambda tensor: (tensor, event))
    frames = numbered(*map(image, range(3)))
    waiting, full = Given(*frames, ready=False), Given(*frames)
    for source in (waiting, full):
        streamed(Stream(load(file), vae, *prompts(), OWN), source)
    assert waiting.asked == [0, 1, 2]
    assert full.asked == [0, 0, 1], "the device has the next frame to do while this one's picture is taken"


def batches(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """Return the list that takes the number of images of each call of a model's UNet."""
    seen, unet = [], model.model.diffusion_model
    forward = unet.forward
    monkeypatch.setattr(unet, "forward", lambda x, *rest, **more: seen.append(x.shape[0]) or forward(x, *rest, **more))
    return seen


@pytest.mark.parametrize("count", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_a_source_gets_all_its_pictures_in_order_each_so_many_frames_later_as_there_are_steps_less_one(
    file: Path, vae: VAE, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    source, model = Given(*(Frame(n, image(20 + n)) for n in range(count))), load(file)
    seen = batches(monkeypatch, model)
    streamed(Stream(model, vae, *prompts(), IN_WORK), source)
    assert list(source.pictures) == list(range(count))
    assert source.asked == [max(0, n - IN_WORK.steps + 1) for n in range(count)], "nothing else waits for its picture"
    assert seen == [IN_WORK.steps] * (count + IN_WORK.steps - 1), "always one size of a batch, and no call without use"
    for number in range(count):
        assert apart(source.pictures[number], plainly(file, vae, image(20 + number), IN_WORK)) <= LIMIT


def test_frames_in_work_are_finished_where_no_other_comes_for_now(
    file: Path, vae: VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = numbered(*map(image, range(3)))
    source, model = Given(frames[0], frames[1], None, frames[2], ready=False), load(file)
    seen = batches(monkeypatch, model)
    streamed(Stream(model, vae, *prompts(), IN_WORK), source)
    assert (list(source.pictures), source.asked) == ([0, 1, 2], [0, 0, 0, 2])
    assert len(seen) == (2 + IN_WORK.steps - 1) + IN_WORK.steps
    for frame in frames:
        assert apart(source.pictures[frame.number], plainly(file, vae, frame.image, IN_WORK)) <= LIMIT


def test_frames_that_the_model_sees_beside_its_prompt_are_sampled_one_after_another(
    file: Path, vae: VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenSampling, "_depend_on_frames", lambda *_: True)  # as with an inpainting UNet
    source, model = Given(*numbered(image(0), image(1))), load(file)
    seen = batches(monkeypatch, model)
    times = streamed(Stream(model, vae, *prompts(), IN_WORK), source)
    assert "the model sees each frame beside its prompt" in times.sentence()
    assert seen == [1] * 2 * IN_WORK.steps


@pytest.mark.parametrize("own", [OWN, IN_WORK], ids=WAYS)
def test_frames_that_are_alike_get_one_picture_until_one_differs_from_it(file: Path, vae: VAE, own: Settings) -> None:
    first = image(1)
    frames = [first, first + 0.004, first + 0.008, first + 0.012, image(2), image(2)]
    source = Given(*numbered(*frames))
    stream = Stream(load(file), vae, *prompts(), replace(own, similar=0.01))
    assert streamed(stream, source).repeated == 3
    assert list(source.pictures) == list(range(6))
    assert [apart(source.pictures[0], source.pictures[n]) == 0 for n in range(5)] == [True, True, True, False, False]
    assert apart(source.pictures[4], source.pictures[5]) == 0
    for number in (3, 5):
        assert apart(source.pictures[number], plainly(file, vae, frames[number], own)) <= LIMIT


def test_a_still_camera_gets_its_picture_after_as_many_frames_as_there_are_steps(file: Path, vae: VAE) -> None:
    source = Given(*numbered(*[image(1)] * 5))
    streamed(Stream(load(file), vae, *prompts(), replace(IN_WORK, similar=0.01)), source)
    assert source.asked == [0, 0, 0, 3, 4], "the alike ones are given as soon as the first is"


def test_a_change_makes_a_picture_even_of_the_same_frame(file: Path, vae: VAE) -> None:
    source = Given(Frame(0, image(1)), Frame(1, image(1), Changes(seed=9)))
    streamed(Stream(load(file), vae, *prompts(), replace(OWN, similar=0.01)), source)
    assert apart(source.pictures[0], source.pictures[1]) > 1e-3


@pytest.mark.fault("an engine gives values that are no numbers (NaN) for a frame of a stream",
                   see="that frame is made again at normal speed, and *TRT Report* counts it")
@pytest.mark.fault("an engine gives values that are no numbers (NaN) for one of the frames in work",
                   see="that frame is made again at normal speed, the others are as they were")
@pytest.mark.parametrize(("own", "call", "place", "calls"), [
    (OWN, 3, 0, 6 * OWN.steps), (IN_WORK, 4, 1, 6 + IN_WORK.steps - 1)], ids=WAYS)
def test_native_makes_a_frame_again_that_an_engine_spoilt(
    file: Path, library: Library, vae: VAE, net: Any, monkeypatch: pytest.MonkeyPatch, own: Settings, call: int,
    place: int, calls: int,
) -> None:  # fmt: skip
    """The first step of the second frame, and the second step of the third."""
    patched, ran = Patched(load(file), library), []
    session_run = patched.handle.session.run

    def broken(*args: Any) -> dict[str, torch.Tensor]:
        results = session_run(*args)
        ran.append(1)
        if len(ran) == call:
            next(iter(results.values()))[place].view(-1)[7] = float("nan")
        return results

    monkeypatch.setattr(patched.handle.session, "run", broken)
    frames, own = numbered(*map(image, range(6))), replace(own, follow=THE_FRAME)
    source = Given(*frames)
    times = streamed(Stream(patched.model, vae, *prompts(with_image(net, image(5), 0.6)), own), source)
    assert (list(source.pictures), times.count, times.again) == (list(range(6)), 6, 1)
    assert (times.one_by_one, times.steps_apart) == ("", "")
    for frame in frames:
        wanted = stock(load(file), vae, *prompts(with_image(net, frame.image, 0.6)), own, frame.image)
        assert apart(source.pictures[frame.number], wanted) <= 10 * LIMIT, frame.number
    assert patched.counts == (calls, own.steps), "calls on engines, and native ones"


@pytest.mark.fault("a stream is interrupted", see="the prompt ends; the model is as it was before")
@pytest.mark.fault("a stream is interrupted while frames are in work",
                   see="the prompt ends without their pictures; the model is as it was before")
@pytest.mark.parametrize("own", [OWN, IN_WORK], ids=WAYS)
def test_an_interrupted_stream_leaves_the_model_as_it_was(file: Path, vae: VAE, net: Any, own: Settings) -> None:
    model, given = load(file), []

    class Interrupted(Given):
        def give(self, number: int, picture: torch.Tensor) -> None:
            given.append(number)
            model_management.interrupt_current_processing()

    stream = Stream(model, vae, *prompts(with_image(net, image(5), 0.6)), own)
    with pytest.raises(model_management.InterruptProcessingException):
        streamed(stream, Interrupted(*numbered(*map(image, range(8)))))
    assert given == [0]
    assert model.model.current_patcher is None
    assert stream.controls.controls[0].cond_hint is None
    assert not stream.busy
    assert apart(stock(model, vae, *prompts(), own, image(1)), plainly(file, vae, image(1), own)) == 0


@pytest.mark.fault("a stream's frames are samplings of their own, before which nothing has loaded the VAE",
                   see="ComfyUI's own way loads it for each frame")
def test_the_vae_is_loaded_for_each_frame_that_is_a_sampling_of_its_own(
    file: Path, vae: VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bool] = []

    def look(call: Any) -> Any:
        return lambda given: loaded.append(vae.patcher in model_management.loaded_models()) or call(given)

    for name in ("encode", "decode"):
        monkeypatch.setattr(vae.first_stage_model, name, look(getattr(vae.first_stage_model, name)))
    monkeypatch.setattr("hybrid_trt.streaming.stream.why_one_by_one", lambda *_: "for a test")
    stream = Stream(load(file), vae, *prompts(), OWN)
    source = Given(*numbered(image(0), image(1)))
    model_management.unload_all_models()
    streamed(stream, source)
    assert loaded == [True] * 4
    for number in (0, 1):
        assert apart(source.pictures[number], plainly(file, vae, image(number))) <= LIMIT


@pytest.mark.fault("memory is too short to encode or decode a frame at once", see="ComfyUI's own way, in tiles: slower")
def test_a_vae_that_lacks_memory_goes_comfyuis_way_and_the_pictures_are_the_same(
    file: Path, vae: VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("there is none left")

    stream = Stream(load(file), vae, *prompts(), OWN)
    monkeypatch.setattr(stream._vae, "_decode", full)
    source = Given(*numbered(image(0), image(1)))
    streamed(stream, source)
    for number in (0, 1):
        assert apart(source.pictures[number], plainly(file, vae, image(number))) <= LIMIT


def test_a_long_stream_keeps_no_more_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MOST", 10)
    times = FrameTimes()
    times._ms = type(times._ms)(maxlen=10)
    for n in range(1000):
        times.add(n)
    assert (times.count, len(times._ms), times.percentile(50), times.percentile(99)) == (1000, 10, 995, 999)


def test_conditionings_are_prepared_once_for_frames_of_one_size(
    file: Path, vae: VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, ask = [], OpenSampling._depend_on_frames
    monkeypatch.setattr(OpenSampling, "_depend_on_frames",
                        lambda self, latent: prepared.append(latent.shape) or ask(self, latent))  # fmt: skip
    streamed(Stream(load(file), vae, *prompts(), OWN), Given(*numbered(*map(image, range(5)))))
    assert len(prepared) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_copies_in_main_memory_keep_values_whatever_the_layout(dtype: torch.dtype) -> None:
    made = random(2, 6, 5, 3, seed=1).to(dtype)
    for source in (made[1:], made[1:].movedim(-1, 1), made[..., :2]):
        target = torch.empty_strided(source.shape, source.stride(), dtype=dtype)
        copy(source, target)
        assert torch.equal(target, source)
    assert mean_difference(made, made + 0.5) == pytest.approx(0.5, rel=2e-2)
