"""Frames of a stream that are there from the start, the stream's run in this process, and stock's pictures of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.controlnet
import comfy.sample
import comfy.sd
import torch
from hybrid_trt.streaming.frames import Changes, Frame, Settings
from hybrid_trt.streaming.run import FrameTimes, run_stream
from hybrid_trt.streaming.stream import Stream
from patched import sampling_node


class Given:
    """A source that has all of its frames from the start."""

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
