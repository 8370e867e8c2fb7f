"""Streams whose self-attention sees earlier frames: their keys and values stand beside those of the frame.

Natively and on live weights, also as CUDA graphs: captures are recorded here without CUDA, as in
``test_frame_graph.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_process import ComfyProcess
from fake_recorder import Recorder
from given_frames import Given, apart, image, prompts, random, stock, streamed, vae, with_image
from hybrid_trt.architectures.kept_tokens import PLACE, KeptTokens
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.engine_library import Library, Reason, Unavailable
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.model_wrapper import KEY
from hybrid_trt.streaming.frames import Changes, Frame, Settings
from hybrid_trt.streaming.stream import Stream, with_kept
from memory_fixtures import file
from on_engines import OWN as LCM
from on_engines import OnEngines, steady_after_two
from patched import Patched, library_of, load
from scenarios import SETTINGS, node
from small_networks import CPU, LAYOUTS, network
from streams import Case, compared, pictures_of
from streams import streamed as prompt_of

__all__ = ["file", "steady_after_two", "vae"]  # fixtures: pytest finds them by name

EULER = Settings(steps=2, cfg=2.0, sampler_name="euler", scheduler="simple", denoise=0.6, seed=7)
LIMIT = 1e-5


PROMPT = 77
"""Keys of the prompt: attention to these is left as it is."""


class EarlierKeys:
    """Another way to see earlier frames, to compare with: keys and values behind the frame's, not tokens."""

    def __init__(self, frames: int):
        self.frames, self.earlier, self.now = frames, [], []

    def next_frame(self) -> None:
        self.earlier, self.now = [self.now, *self.earlier][: self.frames], []

    def __call__(self, native: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **options: Any
                 ) -> torch.Tensor:  # fmt: skip
        if k.shape[1] != PROMPT:
            before = [frame[len(self.now)] for frame in self.earlier if frame]
            self.now.append((k, v))
            k, v = (torch.cat([own, *(one[part] for one in before)], 1) for part, own in enumerate((k, v)))
        return native(q, k, v, heads, **options)


def stream_of(file: Path, vae: comfy.sd.VAE, folder: Path, own: Settings) -> Stream:
    """A stream whose UNet is on live weights."""
    return Stream(Patched(load(file), Library([folder]), "torch").model, vae, *prompts(), own)


def handle_of(stream: Stream) -> EngineHandle:
    """The handle that the stream's UNet calls go to."""
    (router,) = stream._model.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY)
    return router._handle


def wanted(file: Path, vae: comfy.sd.VAE, frames: list[Frame], own: list[Settings], controls: list | None = None
           ) -> list[torch.Tensor]:
    """Stock's pictures, each with the keys and values of so many frames before it."""
    model, attention, made = load(file), EarlierKeys(own[0].remembered), []
    model.model_options["transformer_options"] = {"optimized_attention_override": attention}
    for number, frame in enumerate(frames):
        given = () if controls is None else (controls[number],)
        made.append(stock(model, vae, *prompts(*given), own[number], frame.image))
        attention.next_frame()
    return made


def numbered(*images: torch.Tensor) -> list[Frame]:
    return [Frame(number, one) for number, one in enumerate(images)]


def natively(file: Path, vae: comfy.sd.VAE, frames: list[torch.Tensor], remembered: int) -> list[torch.Tensor]:
    """Pictures of a stream without engines that sees so many earlier frames."""
    stream, source = Stream(load(file), vae, *prompts(), replace(EULER, remembered=remembered)), Given(
        *numbered(*frames))  # fmt: skip
    assert streamed(stream, source).one_by_one == ""
    return [source.pictures[n] for n in range(len(frames))]


@pytest.mark.parametrize("remembered", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_frame_sees_the_keys_and_values_of_those_before_it_at_its_own_step(
    file: Path, vae: comfy.sd.VAE, remembered: int
) -> None:
    frames = [image(n) for n in range(3)]
    found = natively(file, vae, frames, remembered)
    wish = wanted(file, vae, numbered(*frames), [replace(EULER, remembered=remembered)] * 3)
    assert max(map(apart, found, wish)) <= LIMIT
    plain = natively(file, vae, frames, 0)
    assert apart(found[0], plain[0]) <= LIMIT, "nothing is before the first frame"
    assert min(map(apart, found[1:], plain[1:])) > 10 * LIMIT


def test_frames_that_do_not_change_have_the_pictures_of_stock_nodes(file: Path, vae: comfy.sd.VAE) -> None:
    plain, found = (natively(file, vae, [image(3)] * 3, n) for n in (0, 3))
    assert max(map(apart, found, plain)) <= LIMIT


def test_pictures_of_a_trembling_video_differ_less_from_frame_to_frame(file: Path, vae: comfy.sd.VAE) -> None:
    frames = [(image(3) + 0.1 * random(1, 64, 64, 3, seed=n)).clamp(0, 1) for n in range(4)]

    def unrest(remembered: int) -> float:
        made = natively(file, vae, frames, remembered)
        return sum(float((a - b).abs().mean()) for a, b in zip(made, made[1:], strict=False))

    assert unrest(2) < unrest(0)


def test_another_size_begins_anew(file: Path, vae: comfy.sd.VAE) -> None:
    frames = [image(0), image(1, 72), image(2, 72)]
    found, plain = (natively(file, vae, frames, n) for n in (1, 0))
    assert apart(found[1], plain[1]) <= LIMIT
    assert apart(found[2], plain[2]) > 10 * LIMIT


def test_models_of_other_kinds_are_refused_with_a_sentence(models: dict[str, Path]) -> None:
    model = comfy.sd.load_diffusion_model(str(models["tiny_flux1_unet"]))
    with pytest.raises(ValueError, match="cannot attend to earlier frames, only UNets can"):
        with_kept(model, 1)
    assert with_kept(model, 0)[1] is None


def test_the_node_remembers_frames_when_asked_and_the_unet_stays_on_live_weights(comfy: ComfyProcess) -> None:
    case = Case(frames=3, steps=1)
    asked = prompt_of(case, remembered_frames=1)
    asked["accelerate"] = node("TRTAccelerate", model=["model", 0], **SETTINGS | {"backend": "torch"})
    asked["stream"]["inputs"]["model"] = ["accelerate", 0]
    history = comfy.queue(asked)
    found = pictures_of(history)
    _, plain = compared(comfy, case)
    assert abs(found[0] - pictures_of(plain)[0]).max() <= LIMIT
    assert abs(found[1:] - pictures_of(plain)[1:]).max() > 10 * LIMIT
    (row,) = history.output("report", "report")[0]["rows"]
    assert (row["engine"], row["native"]) == (3, 0)


@pytest.mark.parametrize(("remembered", "cfg", "calls_captured"), [
    (2, 2.0, True), pytest.param(1, 1.0, False, marks=pytest.mark.slow),
    pytest.param(1, 2.0, True, marks=pytest.mark.slow), pytest.param(2, 1.0, True, marks=pytest.mark.slow)])
def test_live_weights_make_the_pictures_of_native_with_the_tokens_of_earlier_frames(
    file: Path, vae: comfy.sd.VAE, tmp_path: Path, remembered: int, cfg: float, calls_captured: bool
) -> None:
    own, frames = replace(EULER, remembered=remembered, cfg=cfg), numbered(*map(image, range(6)))
    stream, source = stream_of(file, vae, tmp_path, own), Given(*frames)
    handle = handle_of(stream)
    recorder = handle.session.graphs._capture = Recorder() if calls_captured else None
    streamed(stream, source)
    wish = wanted(file, vae, frames, [own] * 6)
    assert max(apart(source.pictures[n], one) for n, one in enumerate(wish)) <= LIMIT
    assert (handle.stats.engine, handle.stats.native) == (6 * own.steps, 0)
    assert not handle.stats.uncovered, "a build would compile nothing for these calls"
    if recorder is not None:
        assert recorder.captured == 1, "frames that have fewer before them are captured by nobody"
        assert recorder.replayed > 0


@pytest.mark.parametrize("remembered", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_captured_frames_see_those_before_them_while_strengths_and_seeds_change(
    file: Path, models: dict[str, Path], tmp_path: Path, remembered: int
) -> None:
    own = replace(LCM, remembered=remembered)
    ours = OnEngines(file, models, tmp_path, own)
    changes = {5: Changes(strengths=(0.2,)), 7: Changes(seed=90)}
    frames = [Frame(n, image(40 + n), changes.get(n)) for n in range(8)]
    pictures = ours.run(*frames)
    controls = [with_image(ours.native_net, frame.image, 0.6 if frame.number < 5 else 0.2) for frame in frames]
    seeds = [replace(own, seed=7 if frame.number < 7 else 90) for frame in frames]
    wish = wanted(file, ours.native_vae, frames, seeds, controls)
    assert [n for n, one in enumerate(wish) if apart(pictures[n], one) > LIMIT] == []
    assert (ours.recorder.captured, ours.recorder.replayed) == (1, 8 - remembered - 2)
    stats = handle_of(ours.stream).stats
    assert (stats.engine, stats.native) == (8 * own.steps, 0)


@pytest.mark.slow
def test_a_size_that_comes_again_begins_anew_and_is_captured_anew(
    file: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    own, sides = replace(LCM, remembered=1), [64] * 5 + [96] * 2 + [64] * 5
    ours = OnEngines(file, models, tmp_path, own)
    frames = numbered(*(image(40 + n, side) for n, side in enumerate(sides)))
    pictures = ours.run(*frames)
    for start, end in ((0, 5), (5, 7), (7, 12)):
        part = frames[start:end]
        controls = [with_image(ours.native_net, frame.image, 0.6) for frame in part]
        wish = wanted(file, ours.native_vae, part, [own] * len(part), controls)
        assert max(apart(pictures[start + n], one) for n, one in enumerate(wish)) <= LIMIT, start
    assert ours.recorder.captured == 2


@pytest.mark.fault(
    "an engine gives NaN for a frame while a stream attends to earlier frames",
    see="that frame is made again at normal speed, and seen by none after it; the next has that one before it",
)
def test_a_frame_that_an_engine_spoilt_is_seen_by_none_after_it(
    file: Path, vae: comfy.sd.VAE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, frames = replace(EULER, remembered=1), numbered(*map(image, range(5)))
    stream, source = stream_of(file, vae, tmp_path, own), Given(*frames, ready=False)
    session, run = handle_of(stream).session, handle_of(stream).session.run
    calls: list[int] = []

    def spoilt(*given: object) -> dict[str, torch.Tensor]:
        calls.append(len(calls))
        return {name: one * (float("nan") if calls[-1] == 4 else 1) for name, one in run(*given).items()}

    monkeypatch.setattr(session, "run", spoilt)
    assert streamed(stream, source).again == 1
    wish = [*wanted(file, vae, frames[:2], [own] * 2), *wanted(file, vae, frames[2:], [own] * 3)]
    assert max(apart(source.pictures[n], one) for n, one in enumerate(wish)) <= LIMIT


def test_a_call_that_native_takes_over_sees_and_leaves_the_same_tokens(
    file: Path, vae: comfy.sd.VAE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, frames = replace(EULER, remembered=1), numbered(*map(image, range(4)))
    stream, source = stream_of(file, vae, tmp_path, own), Given(*frames)
    handle = handle_of(stream)
    session, run, calls = handle.session, handle.session.run, []

    def failing(*given: object) -> dict[str, torch.Tensor]:
        calls.append(given)
        if len(calls) in (3, 6):  # the first step of the second frame, the last of the third
            raise Unavailable(Reason.UNSUPPORTED_INPUT, "not this one")
        return run(*given)

    monkeypatch.setattr(session, "run", failing)
    streamed(stream, source)
    assert (handle.stats.engine, handle.stats.native) == (6, 2)
    wish = wanted(file, vae, frames, [own] * 4)
    assert max(apart(source.pictures[n], one) for n, one in enumerate(wish)) <= LIMIT


@pytest.mark.slow
def test_a_file_engine_leaves_such_calls_to_native_with_the_reason(
    file: Path, vae: comfy.sd.VAE, tmp_path: Path
) -> None:
    own, frames = replace(EULER, remembered=1), numbered(*map(image, range(3)))
    patched = Patched(load(file), library_of(file, tmp_path))
    stream, source = Stream(patched.model, vae, *prompts(), own), Given(*frames)
    streamed(stream, source)
    assert patched.counts == (0, 3 * own.steps)
    assert "attn1_patch by KeptTokens" in str(patched.handle.stats.details)
    wish = wanted(file, vae, frames, [own] * 3)
    assert max(apart(source.pictures[n], one) for n, one in enumerate(wish)) <= LIMIT


@pytest.mark.parametrize("layout", [
    name if name in ("unlike_levels", "sdxl_refiner") else pytest.param(name, marks=pytest.mark.slow)
    for name in LAYOUTS])
def test_every_layout_gives_and_takes_the_tokens_that_natives_layers_have(layout: str) -> None:
    net = replace(network("unet", layout), keeps_tokens=True)
    architecture, native, ours = net.architecture(), KeptTokens(2), KeptTokens(2)
    session, bind = LiveSession(net, backends()["torch"], "float32"), architecture.binding(net.module)
    inputs = architecture.inputs(net.module, "float32")
    specs = [spec for spec in inputs if not spec.optional and spec.name != "earlier"]
    for frame in range(4):
        given = sample_inputs(specs, {"B": 2, "H": 13, "W": 10, "T": 77}, seed=frame)
        for kept in (native, ours):
            kept.begin((2, 13, 10))
            kept.launch()
        patched = [{"patches": {PLACE: [kept]}} for kept in (native, ours)]
        call = bind({**given, "transformer_options": patched[1]})
        found = call.finish(session.run(call.inputs))
        assert apart(found, net.module(**given, transformer_options=patched[0])) <= 1e-4, frame
        if frame:
            assert apart(found, net.module(**given, transformer_options={})) > 1e-3
    assert all(map(torch.allclose, native._calls[CPU, 0].now, ours._calls[CPU, 0].now, [1e-3] * 99, [1e-4] * 99))


def test_a_call_of_another_size_at_the_same_place_of_a_frame_begins_anew() -> None:
    kept = KeptTokens(1)
    seen = []
    for length in (4, 4, 6, 6):
        kept.begin((1, 4, 8, 8))
        kept.launch()
        tokens = torch.full((1, length, 3), float(len(seen)))
        seen.append(kept(tokens, tokens, tokens, {"block": ("input", 1), "original_shape": [1, 4, 2, length]})[1])
    assert [one.shape[1] for one in seen] == [4, 8, 6, 12]
    assert torch.equal(seen[3][:, 6:], seen[2])
