"""The steps of neighbouring frames as one batch: one call of the networks takes each frame in work a step further.

With N steps, N frames are in work, each at another step: the new one at the first, the oldest at the last. A batch of N
takes far less time than N calls. A picture comes N - 1 frames later. The batch always has N images, since engines
and graphs are for one size each: a missing frame's place is filled, and that picture is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..architectures import timestep_per_image
from ..sampling.model_wrapper import KEY
from .frame_graph import FrameInputs
from .frames import STEPS_AS_BATCH
from .open_sampling import Noise

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from .control_images import Conditioning

OF_ALL_STEPS = frozenset((
    "pooled_output", "control", "control_apply_to_uncond", "strength", "width", "height", "crop_w", "crop_h",
    "target_width", "target_height", "aesthetic_score",
))  # fmt: skip
"""Options of a conditioning that act on each image of a batch and on each step alike.

Areas are not among them: ComfyUI would replace the frames' hints by a hint of the area's size."""


@dataclass(frozen=True)
class InWork:
    """A frame in work; without a key it only fills a place, and its picture is dropped."""

    key: Any
    image: torch.Tensor
    noise: Noise
    hints: Mapping[int, torch.Tensor]


class StepBatch:
    """The frames in work of one size and one schedule.

    Attributes:
        shape: of a frame's latent.
    """

    def __init__(self, steps: int, prompts: int, shape: tuple[int, ...], device: torch.device):
        """
        Args:
            prompts: number of prompts that may share a call; ComfyUI would repeat hints for the second.
        """
        self.shape, self._steps, self._prompts = shape, steps, prompts
        self._frames: list[InWork] = []
        self._latents = torch.zeros(steps - 1, *shape[1:], device=device)
        self._hints: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}

    @property
    def busy(self) -> bool:
        """True if a frame is in work."""
        return any(frame.key is not None for frame in self._frames)

    def filler(self) -> InWork:
        """Return a repetition of the newest frame, which fills a place."""
        return replace(self._frames[0], key=None)

    def inputs(
        self, new: InWork, strengths: Mapping[int, torch.Tensor], prompts: Mapping[str, torch.Tensor]
    ) -> FrameInputs:
        """Return the inputs of a call that takes all frames a step further; the new frame's first."""
        if not self._frames:
            self._frames = [replace(new, key=None)] * (self._steps - 1)
        frames = [new, *self._frames]
        drawn = None if new.noise.steps is None else tuple(
            frame.noise.steps[step] for step, frame in enumerate(frames[:-1]))  # fmt: skip
        hints = {place: self._hint(place, [frame.hints[place] for frame in frames]) for place in new.hints}
        return FrameInputs(new.image, replace(new.noise, steps=drawn), hints, strengths, prompts, self._latents)

    def advance(self, new: InWork, latents: torch.Tensor) -> Any:
        """Advance after that call; return the key of the frame that it finished."""
        frames = [new, *self._frames]
        self._frames, self._latents = frames[:-1], latents
        return frames[-1].key

    def _hint(self, place: int, hints: list[torch.Tensor]) -> torch.Tensor:
        """Return the hints of a ControlNet as a batch: the same tensor for the same hints, so that results are kept."""
        known = self._hints.get(place)
        if known is None or any(one is not other for one, other in zip(known[0], hints, strict=True)):
            with torch.inference_mode(False), torch.no_grad():
                known = self._hints[place] = hints, torch.cat(hints * self._prompts)
        return known[1]


def why_no_batch(model: ModelPatcher, conds: Mapping[str, Conditioning], sampler_name: str) -> str:
    """Return why the steps of several frames cannot be one batch, a part of a sentence; empty if they can."""
    if sampler_name not in STEPS_AS_BATCH:
        return f"the sampler is neither {' nor '.join(STEPS_AS_BATCH)}"
    if not timestep_per_image(model.model.diffusion_model):
        return "a network of this kind may take all images of a batch for the same step"
    if _another_acts_on_steps(model):
        return "another node acts on each step"
    entries = [entry for conditioning in conds.values() for entry in conditioning]
    if not all(_is_of_all_steps(text, options) for text, options in entries):
        return "a prompt acts on a part of the steps or of the picture"
    return ""


def _another_acts_on_steps(model: ModelPatcher) -> bool:
    """Tell whether another node acts on each step: it may take the first image's step for the whole batch's."""
    options, rest = dict(model.model_options), dict(model.object_patches)
    patches = dict(options.pop("transformer_options", {}))
    rest.pop("model_sampling", None)
    added = (model.wrappers, model.callbacks, patches.pop("wrappers", {}), patches.pop("callbacks", {}))
    names = {name for places in added for held in places.values() for name, functions in held.items() if functions}
    settings = [value for part in (options, patches) for value in part.values()]
    return bool(names - {KEY} or rest) or any(isinstance(value, torch.Tensor) or value for value in settings)


def _is_of_all_steps(text: torch.Tensor, options: Mapping[str, Any]) -> bool:
    unknown = {name for name, value in options.items() if value is not None} - OF_ALL_STEPS
    pooled = options.get("pooled_output")
    return not unknown and text.shape[0] == 1 and (pooled is None or pooled.shape[0] == 1)
