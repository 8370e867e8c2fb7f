"""Sizes, tensors and calls of VAEs: a picture or a video without a prompt. Batches are split, so a call fits each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from . import Role
from .calls import Binding, EngineCall, refuse_all_but
from .shapes import Dim, Picture, Profile, Range, RequestedSizes, Sizes, Symbol, TensorSpec
from .sizes import BATCH, LatentSizes

if TYPE_CHECKING:
    import torch

SIZES = Sizes("VAE", 64, 1024, 1536)


@dataclass(frozen=True)
class VAESizes(LatentSizes):
    """One half of a VAE for stills: (batch, channels, height, width), pixels from -1 to 1.

    A VAE runs once per picture, so its calls are not captured as CUDA graphs.
    """

    name: str
    role: Role

    per_step = False
    usual_batch = 1
    arguments = ("images",)
    colours = 3
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 1, 1), "H": Range(1, 22, 1 << 11), "W": Range(1, 26, 1 << 11)}

    @property
    def decodes(self) -> bool:
        return self.role is Role.VAE_DECODER

    def channels(self, module: torch.nn.Module) -> int:
        """Return the channels of a VAE's latent."""
        raise NotImplementedError

    def inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        return [self._spec("images", module, dtype, latent=self.decodes)]

    def outputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        return [self._spec("result", module, dtype, latent=not self.decodes)]

    def _spec(self, name: str, module: torch.nn.Module, dtype: str, latent: bool) -> TensorSpec:
        channels, pixels = (self.channels(module), 1) if latent else (self.colours, self.pixels)
        return TensorSpec(name, dtype, (BATCH, channels, *self._frames(latent), Dim("H", up=pixels),
                                        Dim("W", up=pixels)))  # fmt: skip

    def _frames(self, latent: bool) -> tuple[Dim, ...]:
        """Return the dimension of frames; a still has none."""
        return ()

    def binding(self, module: torch.nn.Module) -> Binding:
        return bind_images

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        own = super()._ranges(asked)
        return {"B": self.free["B"], "H": own["H"], "W": own["W"]}

    def words(self, profile: Profile) -> str:
        """See ``Architecture``: ``256 to 1024 px``."""
        return super().words(profile.only("HW"))

    def _batches(self, picture: Picture) -> tuple[int, ...]:
        """See ``NetworkSizes``: one call, whatever the batch."""
        return (1,)


@dataclass(frozen=True)
class VideoVAESizes(VAESizes):
    """One half of a VAE for videos, (batch, channels, frames, height, width). A still has a single latent frame.

    Attributes:
        each: frames of each latent frame behind the first, which stands for one.
    """

    each = 4
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 1, 1), "L": Range(0, 2, 1 << 10), "H": Range(1, 22, 1 << 10), "W": Range(1, 26, 1 << 10)}
    named: ClassVar[Mapping[str, Symbol]] = {**LatentSizes.named, "L": Symbol("frames")}
    traced: ClassVar[Mapping[str, int]] = {"B": 1, "L": 2, "H": 9, "W": 12}
    compared: ClassVar[tuple[Mapping[str, int], ...]] = ({"B": 1, "L": 0, "H": 16, "W": 16},)

    @property
    def symbols(self) -> Mapping[str, Symbol]:
        return {**super().symbols, "L": replace(self.named["L"], shown=self._length)}

    def _frames(self, latent: bool) -> tuple[Dim, ...]:
        return (Dim("L", up=1 if latent else self.each, plus=1),)

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        return {**super()._ranges(asked), "L": self.free["L"]}

    def _of_picture(self, picture: Picture) -> dict[str, int]:
        return {**super()._of_picture(picture), "L": self._later(picture.length)}

    def _later(self, frames: int) -> int:
        """Return the latent frames behind the first of so many frames."""
        return (frames - 1) // self.each

    def _length(self, later: int) -> int:
        """Return the frames of a video with so many latent frames behind the first."""
        return later * self.each + 1

    def call_words(self, call: Mapping[str, int]) -> str:
        """See ``Architecture``: ``832x480, 81 frames``."""
        frames = [f"{self._length(call['L'])} frames"] if call.get("L") else []
        return ", ".join([*self._picture_words(call), *frames])


def bind_images(call: Mapping[str, Any]) -> EngineCall:
    """Bind a call of a VAE, whose only argument is ``images``."""
    images = call["images"]
    refuse_all_but(call, {"images"})

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return outputs["result"].to(images.device, images.dtype)

    return EngineCall({"images": images}, finish)
