"""Frames to latents and back: the arithmetic of ComfyUI's VAE, on the device, with its network loaded already.

ComfyUI's own methods load the VAE, ask for free memory, and wait for the device in each call. They also serve
here for VAEs of other kinds, or when memory is short.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from comfy import model_management

from ..comfy_model.comfyui_internals import Feature, works
from ..comfy_model.whose_code import is_known
from .frames import upload

if TYPE_CHECKING:
    from comfy.sd import VAE

log = logging.getLogger(__name__)

Code = Callable[[torch.Tensor], torch.Tensor]


class FrameVAE:
    """A VAE for frames of one stream; ``reload`` loads the models again that ComfyUI's own methods unloaded."""

    def __init__(self, vae: VAE, reload: Callable[[], None], stays_loaded: bool):
        """
        Args:
            stays_loaded: True if it is loaded for as long as the stream runs; else ComfyUI's own methods load it.
        """
        self._vae = vae
        self._reload = reload
        self._plain = stays_loaded and _is_plain(vae)

    def latent_shape(self, image: torch.Tensor, channels: int) -> tuple[int, ...]:
        """Return the shape of an empty latent for an image (1, H, W, 3), cropped as encoding crops it."""
        ratio = self._vae.spacial_compression_encode()
        return 1, channels, image.shape[1] // ratio, image.shape[2] // ratio

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        """Return the latent of an image (1, H, W, 3), on the VAE's device or in main memory."""
        return self._run(self._encode, self._vae.encode, image)

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Return the picture (1, H, W, 3) of a latent, 0 to 1, on the VAE's device or in main memory."""
        picture = self._run(self._decode, self._vae.decode, latent)
        return picture.reshape(-1, *picture.shape[-3:]) if picture.ndim == 5 else picture

    def _encode(self, image: torch.Tensor) -> torch.Tensor:
        vae = self._vae
        pixels = upload(vae.vae_encode_crop_pixels(image), vae.device).movedim(-1, 1)
        latent = vae.first_stage_model.encode(vae.process_input(pixels).to(vae.vae_dtype))
        return latent.to(vae.vae_output_dtype())

    def _decode(self, latent: torch.Tensor) -> torch.Tensor:
        vae = self._vae
        pixels = vae.first_stage_model.decode(latent.to(vae.device, vae.vae_dtype))
        # a copy: an engine may lend its output, and this is written to
        picture = pixels.to(vae.vae_output_dtype(), copy=True)
        vae.process_output(picture)
        return picture.movedim(1, -1)

    def _run(self, plain: Code, stock: Code, given: torch.Tensor) -> torch.Tensor:
        """Run plain code, or ComfyUI's own, which decodes in tiles: from the first call on that lacks memory."""
        if self._plain:
            try:
                return plain(given)
            except Exception as error:
                model_management.raise_non_oom(error)
            log.warning("Hybrid TRT: the VAE lacks memory, so ComfyUI's own way takes its place. Frames take longer.")
            self._plain = False
        try:
            return stock(given)
        finally:
            self._reload()


def _is_plain(vae: VAE) -> bool:
    """Tell whether a VAE is unmodified, and for pictures (channels, height, width)."""
    if not works(Feature.STREAMS) or type(vae).__module__ != "comfy.sd":
        return False
    ours = (vae.encode, vae.decode, vae.process_input, vae.process_output, vae.vae_encode_crop_pixels)
    if not all(map(is_known, ours)) or vae.latent_dim != 2:
        return False
    if vae.extra_1d_channel is not None or vae.format_encoded is not None:
        return False
    return not getattr(vae.first_stage_model, "comfy_has_chunked_io", False)
