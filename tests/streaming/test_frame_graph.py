"""A stream's frame as one CUDA graph: its pictures are those of frames that are launched kernel by kernel.

Captures are recorded here without CUDA: what is captured is what runs, on the buffers that it was captured with.
``benchmarks/realtime.py`` compares captured frames with stock's on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfy_extras.nodes_model_advanced import RescaleCFG
from fake_recorder import Recorder
from given_frames import Given, TextEncoder, apart, image, prompts, random, stock, streamed, with_image
from hybrid_trt.sampling import control_stack
from hybrid_trt.sampling.hint_cache import KeptHints
from hybrid_trt.sessions.cuda_capture import LargerGraph, part_of
from hybrid_trt.sessions.cuda_graphs import GraphCache
from hybrid_trt.sessions.made_inputs import ResultCache
from hybrid_trt.streaming.frames import AS_CONNECTED, EDGES, Changes, Frame, Settings
from hybrid_trt.streaming.stream import Stream
from memory_fixtures import file
from on_engines import OWN, OnEngines, steady_after_two

__all__ = ["file", "steady_after_two"]  # fixtures: pytest finds them by name

FRAMES = 6
LIMIT = 1e-5


def frames(changes: dict[int, Changes] | None = None, count: int = FRAMES) -> list[Frame]:
    return [Frame(n, image(40 + n), (changes or {}).get(n)) for n in range(count)]


def wanted(ours: OnEngines, own: Settings, frame: Frame, strength: float = 0.6, prompt: int = 1, tokens: int = 77
           ) -> torch.Tensor:
    """Stock's picture of a frame whose control image is the frame itself."""
    control = with_image(ours.native_net, frame.image, strength)
    return stock(ours.native, ours.native_vae, *prompts(control, seed=prompt, tokens=tokens), own, frame.image)


@pytest.mark.parametrize(("own", "vae", "calls"), [
    (OWN, "tiny_kl", FRAMES * OWN.steps),
    pytest.param(replace(OWN, new_seeds=True), "tiny_sdxl_taesd", FRAMES * OWN.steps, marks=pytest.mark.slow),
    (replace(OWN, steps_as_batch=True, new_seeds=True), "tiny_sdxl_taesd", FRAMES + OWN.steps - 1),
], ids=["steady", "new seeds", "frames in work at several steps"])  # fmt: skip
def test_frames_with_steady_settings_are_replayed_and_are_stocks(
    file: Path, models: dict[str, Path], tmp_path: Path, own: Settings, vae: str, calls: int
) -> None:
    ours, given = OnEngines(file, models, tmp_path, own, vae=vae), frames()
    pictures = ours.run(*given)
    assert (ours.recorder.captured, ours.recorder.replayed) == (1, 5 if own.steps_as_batch else 4)
    assert ours.patched.counts == (calls, 0), "a replay counts as its calls"
    for frame in given:
        seeded = replace(OWN, seed=OWN.seed + frame.number * own.new_seeds)
        assert apart(pictures[frame.number], wanted(ours, seeded, frame)) <= LIMIT, frame.number


@pytest.mark.parametrize(("change", "own", "strength", "captures"), [
    (Changes(strengths=(0.1,)), OWN, 0.1, 1),
    pytest.param(Changes(seed=90), replace(OWN, seed=90), 0.6, 1, marks=pytest.mark.slow),
    pytest.param(Changes(steps=3), replace(OWN, steps=3), 0.6, 2, marks=pytest.mark.slow),
    pytest.param(Changes(cfg=2.5), replace(OWN, cfg=2.5), 0.6, 2, marks=pytest.mark.slow),
    pytest.param(Changes(denoise=0.9), replace(OWN, denoise=0.9), 0.6, 2, marks=pytest.mark.slow),
], ids=["strength", "seed", "steps", "cfg", "denoise"])
def test_a_change_acts_from_its_frame_on_and_only_a_new_way_of_sampling_is_captured_anew(
    file: Path, models: dict[str, Path], tmp_path: Path, change: Changes, own: Settings, strength: float, captures: int
) -> None:
    ours, given = OnEngines(file, models, tmp_path), frames({5: change}, 9)
    pictures = ours.run(*given)
    assert ours.recorder.captured == captures
    for frame in (given[n] for n in (4, 5, 8)):
        now, at = (OWN, 0.6) if frame.number < 5 else (own, strength)
        assert apart(pictures[frame.number], wanted(ours, now, frame, at)) <= LIMIT, frame.number
    assert apart(pictures[8], wanted(ours, OWN, given[8])) > 1e-4


@pytest.mark.parametrize(("at_once", "text", "captures"), [
    pytest.param(False, "a cat", 1, marks=pytest.mark.slow), (True, "a cat", 1),
    pytest.param(False, "a very long prompt", 2, marks=pytest.mark.slow)],
    ids=["short", "steps as a batch", "of more tokens"])
def test_a_new_prompt_acts_from_its_frame_on_and_only_a_longer_one_is_captured_anew(
    file: Path, models: dict[str, Path], tmp_path: Path, at_once: bool, text: str, captures: int
) -> None:
    ours = OnEngines(file, models, tmp_path, replace(OWN, steps_as_batch=at_once), clip=TextEncoder())
    given = frames({5: Changes(prompt=text)}, 9)
    pictures = ours.run(*given)
    assert ours.recorder.captured == captures
    tokens = TextEncoder().encode_from_tokens_scheduled(len(text))[0][0].shape[1]
    for frame in (given[4], given[5], given[8]):
        told = {} if frame.number < 5 else {"prompt": len(text), "tokens": tokens}
        assert apart(pictures[frame.number], wanted(ours, OWN, frame, **told)) <= LIMIT, frame.number
    assert apart(pictures[8], wanted(ours, OWN, given[8])) > 1e-4


@pytest.mark.parametrize(("follow", "count"), [
    (AS_CONNECTED, FRAMES), pytest.param(AS_CONNECTED, 1, marks=pytest.mark.slow),
    pytest.param(EDGES, 1, marks=pytest.mark.slow)])
def test_control_images_act_in_a_replay_wherever_they_come_from(
    file: Path, models: dict[str, Path], tmp_path: Path, follow: str, count: int
) -> None:
    shown = torch.cat([image(70 + n) for n in range(count)])
    ours, given = OnEngines(file, models, tmp_path, replace(OWN, follow=follow), shown), frames()
    pictures = ours.run(*given)
    assert ours.recorder.replayed == 4
    assert len({float(picture.sum()) for picture in pictures.values()}) == FRAMES
    frame = given[-1]
    control = shown[-1:] if follow == AS_CONNECTED else edges(frame.image)
    net = with_image(ours.native_net, control, 0.6)
    wish = stock(ours.native, ours.native_vae, *prompts(net), OWN, frame.image)
    assert apart(pictures[frame.number], wish) <= LIMIT


def edges(frame: torch.Tensor) -> torch.Tensor:
    from comfy_extras.nodes_canny import Canny

    return Canny.execute(frame, 0.4, 0.8).args[0]


def test_weights_that_moved_are_captured_anew(
    file: Path, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, given = OnEngines(file, models, tmp_path), frames(count=9)
    weights = ours.patched.handle.session.active.live.weights
    where: list[int] = []

    class Moving(Given):
        def give(self, number: int, picture: torch.Tensor) -> None:
            super().give(number, picture)
            if number == 4:
                weights.generation += 1
            where.append(ours.recorder.captured)

    source = Moving(*given)
    streamed(ours.stream, source)
    assert where[4] == 1
    assert where[-1] == 2
    assert apart(source.pictures[8], wanted(ours, OWN, given[8])) <= LIMIT


@pytest.mark.fault("a frame of a stream cannot be captured as a CUDA graph",
                   see="nothing: its frames are launched kernel by kernel; the log tells why")
def test_frames_that_cannot_be_captured_run_as_before(file: Path, models: dict[str, Path], tmp_path: Path) -> None:
    ours, given = OnEngines(file, models, tmp_path), frames()
    ours.recorder.error = RuntimeError("operation not permitted when stream is capturing")
    pictures = ours.run(*given)
    assert apart(pictures[5], wanted(ours, OWN, given[5])) <= LIMIT
    assert ours.patched.counts == (FRAMES * OWN.steps, 0)


@pytest.mark.parametrize("what", ["the VAE", pytest.param("the ControlNet", marks=pytest.mark.slow),
                                  pytest.param("a function in each step", marks=pytest.mark.slow)])
def test_a_frame_with_a_part_that_is_no_engines_is_no_graph(
    file: Path, models: dict[str, Path], tmp_path: Path, what: str
) -> None:
    ours, given = OnEngines(file, models, tmp_path), frames()
    stream = ours.stream
    net, vae, model = with_image(ours.native_net, image(5), 0.6), ours.native_vae, ours.patched.model
    if what == "a function in each step":
        model = RescaleCFG().patch(model, 0.7)[0]
    stream = Stream(
        model, vae if what == "the VAE" else stream._vae._vae,
        *prompts(net if what == "the ControlNet" else stream.controls.controls[0]), OWN)
    ours.recorded(stream)
    pictures = ours.run(*given)
    assert ours.recorder.captured == 0
    assert apart(pictures[5], wanted(ours, OWN, given[5])) <= LIMIT


def test_a_part_of_a_larger_graph_captures_nothing_itself_and_caches_keep_nothing_of_it() -> None:
    recorder, computed = Recorder(), []
    graphs = GraphCache(torch.device("cpu"), capture=recorder)

    def doubled(source: torch.Tensor, _extra: object) -> tuple[torch.Tensor, ...]:
        computed.append(source)
        return (2 * source,)

    known, fresh, cache, larger = torch.ones(3), torch.full((3,), 2.0), ResultCache(doubled), LargerGraph()
    kept = cache.get(known, None, 0)
    with part_of(larger):
        for _ in range(4):
            assert float(graphs.run(lambda given: {"out": given["x"] + 1}, {"x": fresh})["out"][0]) == 3
            assert cache.get(fresh, None, 0)[0][0] == 4
        assert cache.get(known, None, 0) is kept
    assert (recorder.captured, len(computed), larger.read) == (0, 5, [kept])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_strength_on_the_device_scales_in_float32_as_a_gpu_does_with_a_number(dtype: torch.dtype) -> None:
    given = [random(4, 4, seed=seed).to(dtype) for seed in range(3)]
    scaled = [tensor.clone() for tensor in given]
    control_stack._scale(scaled, torch.tensor(0.7, dtype=torch.float32))
    assert all(torch.equal(one, (tensor.float() * 0.7).to(dtype)) for one, tensor in zip(scaled, given, strict=True))


def test_a_repeated_hint_of_a_larger_graph_is_made_anew_from_its_buffer() -> None:
    kept, buffer = KeptHints(), torch.ones(2, 3, 8, 8)
    with part_of(LargerGraph()):
        first = kept.repeated(buffer, 4, 2)
        assert kept.repeated(buffer, 4, 2) is not first
    assert kept.repeated(buffer, 4, 2) is kept.repeated(buffer, 4, 2)
