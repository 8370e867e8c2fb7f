"""Streams whose self-attention sees earlier frames, so that pictures of neighbouring frames look alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy.ldm.modules.attention import BasicTransformerBlock

from ..architectures.kept_tokens import KeptTokens
from ..sampling.model_wrapper import with_tokens_kept

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


def with_kept(model: ModelPatcher, frames: int) -> tuple[ModelPatcher, KeptTokens | None]:
    """Return a clone whose self-attention sees so many earlier frames, and their memory; None for no frames.

    Live weights may compute it too. File engines cannot.

    Raises:
        ValueError: this kind of model has no such place; the text is for the user.
    """
    if not frames:
        return model.clone(), None
    layers = model.get_model_object("diffusion_model").modules()
    if not any(isinstance(layer, BasicTransformerBlock) for layer in layers):
        raise ValueError(
            "This kind of model cannot attend to earlier frames, only UNets can, so there are no pictures. "
            "Set 'attend to earlier frames' of TRT Stream to 0."
        )
    kept, patched = KeptTokens(frames), with_tokens_kept(model.clone())
    patched.set_model_attn1_patch(kept)
    return patched, kept
