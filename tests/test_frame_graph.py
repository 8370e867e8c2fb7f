"""A stream's frame as one CUDA graph: its pictures are those of frames that are launched kernel by kernel.

Captures are recorded here without CUDA: what is captured is what runs, on the buffers that it was captured with.
``test_stream_gpu.py`` holds the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.sd
import pytest
import torch
from comfy.utils import load_torch_file
from fake_recorder import Recorder
from given_frames import Given, apart, image, prompts, random, stock, streamed, with_image
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.autoencoder import AutoencoderSizes
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling.controlnet import back_with_engine
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.vae import vae_with_engines
from hybrid_trt.streaming import frame_graph
from hybrid_trt.streaming.frame_graph import FrameGraph
from hybrid_trt.streaming.frames import Changes, Frame
from hybrid_trt.streaming.settings import AS_CONNECTED, EDGES, THE_FRAME, Settings
from hybrid_trt.streaming.stream import Stream
from memory_fixtures import file
from patched import PROFILE, Patched, load

__all__ = ["file"]  # a fixture: pytest finds it by name

OWN = Settings(steps=2, cfg=1.0, sampler_name="lcm", scheduler="sgm_uniform", denoise=0.6, seed=7, follow=THE_FRAME)
FRAMES = 9
LIMIT = 1e-5


@pytest.fixture(autouse=True)
def steady_after_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_graph, "STEADY", 2)
    # on a CPU nothing is compiled here, so live weights have to serve VAEs as they serve the other networks
    monkeypatch.setattr(AutoencoderSizes, "per_step", True)


class OnEngines:
    """A stream whose networks all run on engines, with a double of CUDA's captures."""

    def __init__(self, file: Path, models: dict[str, Path], folder: Path, own: Settings = OWN,
                 images: torch.Tensor | None = None, clip: Any = None):
        library = Library([folder])
        self.native_vae = comfy.sd.VAE(sd=load_torch_file(str(models["tiny_kl"])))
        networks = {role: NativeNetwork.of_vae(self.native_vae, role, "vae")
                    for role in (Role.VAE_ENCODER, Role.VAE_DECODER)}
        vae = vae_with_engines(self.native_vae, {role: self._handle(one, library) for role, one in networks.items()})
        self.native_net = comfy.controlnet.load_controlnet(str(models["tiny_sd15_flat_a"]))
        net = back_with_engine(
            self.native_net, self._handle(NativeNetwork.of_controlnet(self.native_net, "net"), library))
        self.shown = image(5) if images is None else images
        self.patched = Patched(load(file), library, backend="torch")
        self.stream = Stream(self.patched.model, vae, *prompts(with_image(net, self.shown, 0.6)), own, clip)
        self.recorder = Recorder()
        self.stream._graph = FrameGraph(torch.device("cpu"), self.stream._made, capture=self.recorder)

    @staticmethod
    def _handle(network: NativeNetwork, library: Library) -> EngineHandle:
        return EngineHandle(network, EngineChoice(PROFILE, backend="torch"), library, "engine")

    def run(self, *frames: Frame) -> dict[int, torch.Tensor]:
        source = Given(*frames)
        times = streamed(self.stream, source)
        assert times.one_by_one == ""
        assert times.again == 0
        return source.pictures


def frames(changes: dict[int, Changes] | None = None, count: int = FRAMES) -> list[Frame]:
    return [Frame(n, image(40 + n), (changes or {}).get(n)) for n in range(count)]


def wanted(ours: OnEngines, file: Path, own: Settings, frame: Frame, strength: float = 0.6, prompt: int = 1
           ) -> torch.Tensor:
    """Stock's picture of a frame whose control image is the frame itself."""
    control = with_image(ours.native_net, frame.image, strength)
    return stock(load(file), ours.native_vae, *prompts(control, seed=prompt), own, frame.image)


def test_frames_with_steady_settings_are_replayed_and_are_stocks(
    file: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    ours, given = OnEngines(file, models, tmp_path), frames()
    pictures = ours.run(*given)
    assert (ours.recorder.captured, ours.recorder.replayed) == (1, 5)
    for frame in given:
        assert apart(pictures[frame.number], wanted(ours, file, OWN, frame)) <= LIMIT, frame.number


def test_a_replayed_frame_counts_as_its_calls(file: Path, models: dict[str, Path], tmp_path: Path) -> None:
    ours = OnEngines(file, models, tmp_path)
    ours.run(*frames())
    assert ours.recorder.replayed
    assert ours.patched.counts == (FRAMES * OWN.steps, 0)


def test_each_frames_seed_acts_in_a_replay(file: Path, models: dict[str, Path], tmp_path: Path) -> None:
    own = replace(OWN, new_seeds=True)
    ours, given = OnEngines(file, models, tmp_path, own), frames()
    pictures = ours.run(*given)
    assert ours.recorder.replayed == 5
    for frame in given[-2:]:
        seeded = replace(OWN, seed=OWN.seed + frame.number)
        assert apart(pictures[frame.number], wanted(ours, file, seeded, frame)) <= LIMIT
        assert apart(pictures[frame.number], wanted(ours, file, OWN, frame)) > 1e-3


@pytest.mark.parametrize(("change", "own", "strength"), [
    (Changes(strengths=(0.1,)), OWN, 0.1), (Changes(seed=90), replace(OWN, seed=90), 0.6),
    (Changes(steps=3), replace(OWN, steps=3), 0.6), (Changes(cfg=2.5), replace(OWN, cfg=2.5), 0.6),
    (Changes(denoise=0.9), replace(OWN, denoise=0.9), 0.6),
], ids=["strength", "seed", "steps", "cfg", "denoise"])
def test_a_change_acts_from_its_frame_on_and_is_captured_anew(
    file: Path, models: dict[str, Path], tmp_path: Path, change: Changes, own: Settings, strength: float
) -> None:
    ours, given = OnEngines(file, models, tmp_path), frames({6: change}, 12)
    pictures = ours.run(*given)
    assert ours.recorder.captured == (1 if change.seed else 2)
    for frame in given[5:]:
        now, at = (OWN, 0.6) if frame.number < 6 else (own, strength)
        assert apart(pictures[frame.number], wanted(ours, file, now, frame, at)) <= LIMIT, frame.number
    assert apart(pictures[11], wanted(ours, file, OWN, given[11])) > 1e-4


class TextEncoder:
    """Stands for CLIP."""

    def tokenize(self, text: str) -> int:
        return len(text)

    def encode_from_tokens_scheduled(self, tokens: int) -> list:
        return [[random(1, 77, 768, seed=tokens), {"pooled_output": None}]]


def test_a_new_prompt_acts_from_its_frame_on(file: Path, models: dict[str, Path], tmp_path: Path) -> None:
    ours = OnEngines(file, models, tmp_path, clip=TextEncoder())
    given = frames({6: Changes(prompt="a cat")}, 12)
    pictures = ours.run(*given)
    assert ours.recorder.captured == 2
    for frame in given[6:]:
        wish = wanted(ours, file, OWN, frame, prompt=len("a cat"))
        assert apart(pictures[frame.number], wish) <= LIMIT, frame.number


@pytest.mark.parametrize("follow", [AS_CONNECTED, EDGES])
@pytest.mark.parametrize("count", [1, FRAMES])
def test_control_images_act_in_a_replay_wherever_they_come_from(
    file: Path, models: dict[str, Path], tmp_path: Path, follow: str, count: int
) -> None:
    shown = torch.cat([image(70 + n) for n in range(count)])
    ours, given = OnEngines(file, models, tmp_path, replace(OWN, follow=follow), shown), frames()
    pictures = ours.run(*given)
    assert ours.recorder.replayed == 5
    assert len({float(picture.sum()) for picture in pictures.values()}) == FRAMES
    frame = given[-1]
    control = shown[-1:] if follow == AS_CONNECTED else edges(frame.image)
    net = with_image(ours.native_net, control, 0.6)
    wish = stock(load(file), ours.native_vae, *prompts(net), OWN, frame.image)
    assert apart(pictures[frame.number], wish) <= LIMIT


def edges(frame: torch.Tensor) -> torch.Tensor:
    from comfy_extras.nodes_canny import Canny

    return Canny.execute(frame, 0.4, 0.8).args[0]


def test_new_weights_are_captured_anew(file: Path, models: dict[str, Path], tmp_path: Path) -> None:
    ours, given = OnEngines(file, models, tmp_path), frames(count=12)

    class Patching(Given):
        def give(self, number: int, picture: torch.Tensor) -> None:
            super().give(number, picture)
            if number == 5:  # frame 6 is under way
                with torch.inference_mode(False), torch.no_grad():
                    ours.patched.native.model.diffusion_model.out[2].bias.add_(0.3)

    source = Patching(*given)
    streamed(ours.stream, source)
    assert apart(source.pictures[11], wanted(ours, file, OWN, given[11])) > 1e-3
    assert ours.recorder.captured >= 1


def test_frames_of_another_size_are_captured_anew(file: Path, models: dict[str, Path], tmp_path: Path) -> None:
    ours = OnEngines(file, models, tmp_path)
    given = [Frame(n, image(40 + n, 64 if n < 6 else 128)) for n in range(12)]
    pictures = ours.run(*given)
    assert ours.recorder.captured == 2
    for number in (5, 11):
        assert apart(pictures[number], wanted(ours, file, OWN, given[number])) <= LIMIT


@pytest.mark.fault("a frame of a stream cannot be captured as a CUDA graph")
def test_frames_that_cannot_be_captured_run_as_before(file: Path, models: dict[str, Path], tmp_path: Path) -> None:
    ours, given = OnEngines(file, models, tmp_path), frames()
    ours.recorder.error = RuntimeError("operation not permitted when stream is capturing")
    pictures = ours.run(*given)
    for frame in given:
        assert apart(pictures[frame.number], wanted(ours, file, OWN, frame)) <= LIMIT
    assert ours.patched.counts == (FRAMES * OWN.steps, 0)


@pytest.mark.parametrize("what", ["the VAE", "the ControlNet", "a function in each step"])
def test_a_frame_with_a_part_that_is_no_engines_is_no_graph(
    file: Path, models: dict[str, Path], tmp_path: Path, what: str
) -> None:
    ours, given = OnEngines(file, models, tmp_path), frames()
    stream = ours.stream
    net, vae, model = with_image(ours.native_net, image(5), 0.6), ours.native_vae, ours.patched.model
    if what == "a function in each step":
        model = model.clone()
        model.set_model_sampler_post_cfg_function(lambda args: args["denoised"])
    stream = Stream(
        model, vae if what == "the VAE" else stream._vae._vae,
        *prompts(net if what == "the ControlNet" else stream.controls.controls[0]), OWN)
    stream._graph = FrameGraph(torch.device("cpu"), stream._made, capture=ours.recorder)
    ours.stream = stream
    pictures = ours.run(*given)
    assert ours.recorder.captured == 0
    assert apart(pictures[8], wanted(ours, file, OWN, given[8])) <= LIMIT
