"""Control images that change with each frame of a stream, on ControlNets of the stream's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import comfy.utils
import torch
from comfy.controlnet import ControlBase, ControlNet

from ..comfy_model.comfyui_shims import give_hint
from ..sampling.hint_cache import dtype_of, hint_size, takes_plain_hint
from .frames import AS_CONNECTED, EDGES, THE_FRAME, upload

Conditioning = list[list[Any]]

LOW, HIGH = 0.4, 0.8
"""The thresholds that ComfyUI's own node for edges begins with."""


class ControlImages:
    """The ControlNets of a stream's conditionings.

    They are copies, so that the nodes' own stay as they are for other nodes and the next prompt.

    Attributes:
        positive, negative: the conditionings with the copies.
        controls: the copies, the first to act first.
        hints: the latest frame's hints that were made here, by the number of their ControlNet.
    """

    def __init__(self, positive: Conditioning, negative: Conditioning, follow: str, device: torch.device):
        """
        Args:
            follow: one of ``FOLLOW``.
            device: where the ControlNets run.
        """
        self._device = device
        self.controls: list[ControlBase] = []
        self.hints: dict[int, torch.Tensor] = {}
        self._strengths: dict[int, tuple[float, torch.Tensor]] = {}
        copies: dict[int, ControlBase] = {}
        self.positive, self.negative = (self._copied(given, copies) for given in (positive, negative))
        self._follow = follow
        self._given = [control.cond_hint_original for control in self.controls]
        self._set: list[tuple | None] = [None for _ in self.controls]

    def _copied(self, conditioning: Conditioning, copies: dict[int, ControlBase]) -> Conditioning:
        options = [dict(entry[1]) for entry in conditioning]
        for own in options:
            if own.get("control") is not None:
                own["control"] = self._copy(own["control"], copies)
        return [[entry[0], own] for entry, own in zip(conditioning, options, strict=True)]

    def _copy(self, control: ControlBase, copies: dict[int, ControlBase]) -> ControlBase:
        if id(control) not in copies:
            before = control.previous_controlnet
            before = None if before is None else self._copy(before, copies)
            copies[id(control)] = control.copy().set_previous_controlnet(before)
            self.controls.append(copies[id(control)])
        return copies[id(control)]

    def counts(self) -> list[int]:
        """Return the number of images that each ControlNet came with."""
        return [0 if image is None else image.shape[0] for image in self._given]

    def strengths(self, strengths: Sequence[float]) -> None:
        """Set the strengths of the first ControlNets from the next frame on."""
        for control, strength in zip(self.controls, strengths, strict=False):
            control.strength = float(strength)

    def why_no_batch(self) -> str:
        """Return why one call cannot have the hints of several frames at several steps; empty if it can."""
        if any(tuple(control.timestep_percent_range) != (0.0, 1.0) for control in self.controls):
            return "a ControlNet acts on a part of the steps"
        return "" if all(map(takes_plain_hint, self.controls)) else "a ControlNet is of a kind with hints of its own"

    def alike(self, number: int, other: int) -> bool:
        """Tell whether two frames have the same control images, if these are not made from the frames."""
        if self._follow != AS_CONNECTED:
            return True
        return all(count < 2 or number % count == other % count for count in self.counts())

    @property
    def hints_are_ours(self) -> bool:
        """True if every control image of the latest frame is a hint that was made here."""
        return len(self.hints) == sum(image is not None for image in self._given)

    def strength_tensors(self) -> dict[int, torch.Tensor]:
        """Return the strengths of the ControlNets that have hints, on the device, by their number."""
        for place in self.hints:
            strength = self.controls[place].strength
            if place not in self._strengths or self._strengths[place][0] != strength:
                self._strengths[place] = strength, upload(torch.tensor(strength, dtype=torch.float32), self._device)
        return {place: self._strengths[place][1] for place in self.hints}

    @contextlib.contextmanager
    def replaced_inputs(
        self, hints: Mapping[int, torch.Tensor], strengths: Mapping[int, torch.Tensor], latent: torch.Tensor
    ) -> Iterator[None]:
        """Replace the hints and strengths of the ControlNets."""
        own = {place: self.controls[place].strength for place in hints}
        for place, hint in hints.items():
            give_hint(self.controls[place], latent, hint)
            self.controls[place].strength = strengths[place]
        try:
            yield
        finally:
            for place in hints:
                give_hint(self.controls[place], latent, self.hints[place])
                self.controls[place].strength = own[place]

    def show(
        self, number: int, frame: torch.Tensor, latent: torch.Tensor | None, there: torch.Tensor | None = None,
        made: Mapping[int, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Give the ControlNets the images of a frame, before it is sampled.

        Args:
            frame: (1, H, W, 3).
            there: the frame on the device, if it is there already.
            made: images that nodes made from this frame, by the number of their ControlNet.
            latent: a latent of the frame's shape, on any device. The hints are made at once where ComfyUI's own code
                would make them in the first step, and would wait for the device. None leaves all of them to ComfyUI.
        """
        made = made or {}
        edges = _edges(frame) if self._follow == EDGES and len(made) < len(self.controls) else None
        for place, control in enumerate(self.controls):
            given = self._given[place]
            if given is None:
                continue
            if self._follow == AS_CONNECTED and place not in made:
                index = number % given.shape[0]
                known = None if latent is None else (index, tuple(latent.shape[2:]))
                if known is not None and self._set[place] == known:
                    continue  # the same image as before
                image = given[index : index + 1]
            else:
                known, image = None, _as_hint(made.get(place, frame if edges is None else edges))
            self._set[place] = known
            control.cond_hint_original = image
            control.cond_hint = control.extra_concat = None
            self.hints.pop(place, None)
            if latent is not None and takes_plain_hint(control):
                follows = self._follow == THE_FRAME and place not in made
                uploaded = _as_hint(there) if follows and there is not None else None
                self.hints[place] = self._hint(control, image, latent, uploaded)
                give_hint(control, latent, self.hints[place])

    def _hint(
        self, control: ControlNet, image: torch.Tensor, latent: torch.Tensor, there: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the hint that ComfyUI makes of an image, on the device. It has versions, so it can be kept.

        Args:
            there: the image on the device, if it is there already.
        """
        size = hint_size(control, latent)
        if tuple(image.shape[2:]) != size or control.upscale_algorithm != "nearest-exact":
            # in main memory, as ComfyUI does: a device may round positions in another way
            image = comfy.utils.common_upscale(image, size[1], size[0], control.upscale_algorithm, "center")
            there = None
        with torch.inference_mode(False), torch.no_grad():
            there = upload(image, self._device) if there is None else there
            return control.preprocess_image(there).to(dtype_of(control), copy=True)

    def end(self) -> None:
        """Free what the ControlNets hold."""
        self.hints.clear()
        for control in self.controls:
            control.cleanup()


def _as_hint(image: torch.Tensor) -> torch.Tensor:
    return image[..., :3].movedim(-1, 1)


def _edges(frame: torch.Tensor) -> torch.Tensor:
    from comfy_extras.nodes_canny import Canny

    return Canny.execute(frame[..., :3], LOW, HIGH).args[0]
