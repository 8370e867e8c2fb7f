"""Frames of a stream that are there from the start, the stream's run in this process, and stock's pictures of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.sample
import comfy.sd
import pytest
import torch
from comfy.utils import load_torch_file
from hybrid_trt.sampling.frame_times import FrameTimes
from hybrid_trt.streaming.frames import Changes, Frame
from hybrid_trt.streaming.run import run_stream
from hybrid_trt.streaming.settings import Settings
from hybrid_trt.streaming.stream import Stream
from patched import sampling_node


@pytest.fixture(scope="module")
def vae(models: dict[str, Path]) -> comfy.sd.VAE:
    """One that takes little time; the streams on a server have a KL autoencoder."""
    return comfy.sd.VAE(sd=load_torch_file(str(models["tiny_sdxl_taesd"])))


@pytest.fixture(scope="module")
def net(models: dict[str, Path]) -> comfy.controlnet.ControlNet:
    return comfy.controlnet.load_controlnet(str(models["tiny_sd15_flat_a"]))


class TextEncoder:
    """Stands for CLIP: each text has a prompt of its own, and a long one more tokens."""

    def tokenize(self, text: str) -> int:
        return len(text)

    def encode_from_tokens_scheduled(self, tokens: int) -> list:
        return [[random(1, 77 * (1 + tokens // 9), 768, seed=tokens), {"pooled_output": None}]]


class Given:
    """A source that has all of its frames from the start; ``pictures`` are in the order in which they came."""

    def __init__(self, *frames: Frame | None, ready: bool = True):
        self._frames, self._ready = frames, ready
        self.pictures: dict[int, torch.Tensor] = {}
        self.asked: list[int] = []
        self.refused: list[tuple[str, Changes]] = []

    def frames(self) -> Iterator[Frame | None]:
        for frame in self._frames:
            self.asked.append(len(self.pictures))
            yield frame

    def ready(self) -> bool:
        return self._ready

    def give(self, number: int, picture: torch.Tensor) -> None:
        assert number not in self.pictures
        self.pictures[number] = picture.clone()

    def refuse(self, why: str, settings: Changes) -> None:
        self.refused.append((why, settings))


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def image(seed: int, side: int = 64) -> torch.Tensor:
    small = random(1, 3, 9, 9, seed=seed)
    return torch.nn.functional.interpolate(small, (side, side), mode="bilinear").sigmoid().movedim(1, -1).contiguous()


def prompts(*controls: comfy.controlnet.ControlBase, seed: int = 1, tokens: int = 77) -> tuple[list, list]:
    options: dict[str, Any] = {"control": controls[-1], "control_apply_to_uncond": False} if controls else {}
    return tuple([[random(1, 77 if i else tokens, 768, seed=seed + i), dict(options)]] for i in range(2))


def with_image(net: comfy.controlnet.ControlNet, shown: torch.Tensor, strength: float) -> comfy.controlnet.ControlNet:
    return net.copy().set_cond_hint(shown[..., :3].movedim(-1, 1), strength, (0.0, 1.0))


def stock(model: Any, vae: comfy.sd.VAE, positive: list, negative: list, own: Settings, frame: torch.Tensor
          ) -> torch.Tensor:
    """The picture that VAEEncode, KSampler and VAEDecode make."""
    with torch.inference_mode():
        latent = vae.encode(frame)
        noise = comfy.sample.prepare_noise(latent, own.seed)
        latent = comfy.sample.sample(
            model, noise, own.steps, own.cfg, own.sampler_name, own.scheduler, positive, negative, latent,
            denoise=own.denoise, disable_pbar=True, seed=own.seed)  # fmt: skip
        return vae.decode(latent)


def streamed(stream: Stream, source: Given) -> FrameTimes:
    times = FrameTimes()
    with torch.inference_mode(), sampling_node():
        run_stream(stream, source, times)
    return times


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())
