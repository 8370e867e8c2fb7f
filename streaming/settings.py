"""Settings of a stream: how each of its frames is sampled."""

from __future__ import annotations

from dataclasses import dataclass

AS_CONNECTED, THE_FRAME, EDGES = "as connected", "the frame", "edges of the frame"
FOLLOW = (AS_CONNECTED, THE_FRAME, EDGES)
"""Choices for the control images of a frame."""
STEPS_AS_BATCH = ("lcm", "euler")
"""Samplers whose steps of several frames can be one batch."""
FROM_NOISE = 0.9999
"""Denoise from which ComfyUI samples its whole schedule."""
LEAST_DENOISE = 0.01


@dataclass(frozen=True)
class Settings:
    """The inputs of a frame's sampling, with the names of ComfyUI's KSampler.

    Attributes:
        new_seeds: whether a frame's seed is ``seed`` and its number, added up.
        follow: where control images come from, one of ``FOLLOW``.
        steps_as_batch: whether the steps of neighbouring frames are to be one batch, where that is exact.
        remembered: earlier frames whose tokens self-attention sees too, see ``kept_tokens``; 0: none, which is exact.
        similar: mean difference of pixels up to which a frame counts as a repetition; 0: never.
    """

    steps: int = 1
    cfg: float = 1.0
    sampler_name: str = "lcm"
    scheduler: str = "sgm_uniform"
    denoise: float = 0.5
    seed: int = 0
    new_seeds: bool = False
    follow: str = AS_CONNECTED
    similar: float = 0.0
    remembered: int = 0
    steps_as_batch: bool = False

    @property
    def from_noise(self) -> bool:
        """True if a picture starts from pure noise, and not from its frame."""
        return self.denoise > FROM_NOISE

    def seed_of(self, number: int) -> int:
        """Return the seed of a frame."""
        return (self.seed + number) % 2**64 if self.new_seeds else self.seed
