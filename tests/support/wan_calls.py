"""Calls of tiny Wan networks: text and pictures to video, 5B and VACE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

WIDTH, CLIP = 4096, 1280
"""Features of a token of the prompt, and of CLIP."""


@dataclass(frozen=True)
class Call:
    """A call of a network: file, batch, frames and sides of the latent, tokens of the prompt and of CLIP.

    Attributes:
        channels: of what goes in.
        behind: frames of further latents behind the video's.
        controls: strengths of control videos.
        apart: whether each frame has a timestep of its own.
    """

    file: str = "tiny_wan"
    batch: int = 1
    size: tuple[int, int, int] = (3, 8, 6)
    words: int = 9
    channels: int = 16
    clip: int = 0
    behind: int = 0
    controls: tuple[float, ...] = ()
    apart: bool = False

    def drawn(self, seed: int = 1) -> dict[str, Any]:
        """Its arguments by name."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        times = (self.batch, self.size[0]) if self.apart else (self.batch,)
        call = {"x": random(self.batch, self.channels, *self.size), "context": random(self.batch, self.words, WIDTH),
                "timestep": 999 * torch.rand(times, generator=generator)}  # fmt: skip
        if self.clip:
            call["clip_fea"] = random(self.batch, self.clip, CLIP)
        if self.behind:
            call["time_dim_concat"] = random(self.batch, self.channels, self.behind, *self.size[1:])
        if self.controls:
            call["vace_context"] = random(self.batch, len(self.controls), 96, *self.size)
            call["vace_strength"] = list(self.controls)
        return call


CALLS = {
    "one frame": Call(size=(1, 8, 6)),
    "several frames": Call(),
    "more frames": Call(size=(5, 7, 6)),
    "odd sides, a batch": Call(batch=2, size=(2, 13, 11), words=30),
    "a prompt of one token": Call(words=1),
    "a long prompt": Call(words=128),
    "references behind the video": Call(behind=2),
    "a picture": Call("tiny_wan_i2v", 2, (3, 7, 8), 12, 36, 257),
    "first and last picture": Call("tiny_wan_flf2v", 1, channels=36, clip=514),
    "first picture of such a network": Call("tiny_wan_flf2v", 1, channels=36, clip=257),
    "2.2's picture": Call("tiny_wan22_i2v", 2, channels=36),
    "5B": Call("tiny_wan22_5b", channels=48),
    "5B, timesteps per frame": Call("tiny_wan22_5b", 2, (4, 5, 6), 20, 48, apart=True),
    "a control video": Call("tiny_wan_vace", controls=(1.0,)),
    "two control videos, a batch": Call("tiny_wan_vace", 2, (2, 6, 10), 20, controls=(0.4, 1.3)),
}
FILES = dict.fromkeys(call.file for call in CALLS.values())
