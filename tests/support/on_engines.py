"""Streams whose networks all run on engines, in this process, with a double of CUDA's captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.sd
import pytest
import torch
from comfy.utils import load_torch_file
from fake_recorder import Recorder
from given_frames import Given, image, prompts, streamed, with_image
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.vae_sizes import VAESizes
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling.controlnet import back_with_engine
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.vae import vae_with_engines
from hybrid_trt.streaming import frame_graph
from hybrid_trt.streaming.frame_graph import FrameGraph
from hybrid_trt.streaming.frames import THE_FRAME, Frame, Settings
from hybrid_trt.streaming.stream import Stream
from patched import PROFILE, Patched, load

OWN = Settings(steps=2, cfg=1.0, sampler_name="lcm", scheduler="sgm_uniform", denoise=0.6, seed=7, follow=THE_FRAME)


@pytest.fixture(autouse=True)
def steady_after_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_graph, "STEADY", 1)
    monkeypatch.setattr(frame_graph, "STEADY_AGAIN", 1)
    # on a CPU nothing is compiled here, so live weights have to serve VAEs as they serve the other networks
    monkeypatch.setattr(VAESizes, "per_step", True)


class OnEngines:
    """A stream whose networks all run on engines, with a double of CUDA's captures; TAESD takes the least time."""

    def __init__(self, file: Path, models: dict[str, Path], folder: Path, own: Settings = OWN,
                 images: torch.Tensor | None = None, clip: Any = None, vae: str = "tiny_sdxl_taesd"):
        library = Library([folder])
        self.native_vae = comfy.sd.VAE(sd=load_torch_file(str(models[vae])))
        networks = {role: NativeNetwork.of_vae(self.native_vae, role, "vae")
                    for role in (Role.VAE_ENCODER, Role.VAE_DECODER)}
        vae = vae_with_engines(self.native_vae, {role: self._handle(one, library) for role, one in networks.items()})
        self.native_net = comfy.controlnet.load_controlnet(str(models["tiny_sd15_flat_a"]))
        net = back_with_engine(
            self.native_net, self._handle(NativeNetwork.of_controlnet(self.native_net, "net"), library))
        self.shown = image(5) if images is None else images
        self.patched = Patched(load(file), library, backend="torch")
        stream = Stream(self.patched.model, vae, *prompts(with_image(net, self.shown, 0.6)), own, clip)
        self.native = load(file)
        self.recorder = Recorder()
        self.recorded(stream)

    def recorded(self, stream: Stream) -> None:
        """Let a stream capture by the recorder."""
        self.stream = stream
        stream._graph = FrameGraph(torch.device("cpu"), stream._made, stream._made_of, capture=self.recorder)

    @staticmethod
    def _handle(network: NativeNetwork, library: Library) -> EngineHandle:
        return EngineHandle.look_up(network, EngineChoice(PROFILE, backend="torch"), library, "engine")

    def run(self, *frames: Frame) -> dict[int, torch.Tensor]:
        source = Given(*frames)
        times = streamed(self.stream, source)
        assert times.one_by_one == ""
        assert times.again == 0
        return source.pictures
