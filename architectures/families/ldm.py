"""Code that UNet and ControlNet of the latent-diffusion family share: sizes read off their layers, attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention, SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, ResBlock

from ..blocks import OVERRIDE
from ..shapes import Dim, TensorSpec
from ..token_layers import attended

BATCH, HEIGHT, WIDTH, TOKENS, HINT_BATCH = Dim("B"), Dim("H"), Dim("W"), Dim("T"), Dim("HB")


def context_width(module: torch.nn.Module) -> int | None:
    """Return the features per prompt token that cross-attention reads, or None without cross-attention."""
    for name, layer in module.named_modules():
        if isinstance(layer, CrossAttention) and name.endswith("attn2"):
            return layer.to_k.in_features
    return None


def vector_width(module: torch.nn.Module) -> int | None:
    """Return the features of the vector conditioning ``y`` (SDXL's pooled prompt and sizes), or None without it."""
    return module.label_emb[0][0].in_features if module.num_classes == "sequential" else None


def is_plain_2d(module: torch.nn.Module, takes_y: bool) -> bool:
    """Tell whether a UNet or ControlNet has the image layout that this family describes, with or without ``y``."""
    classes = "sequential" if takes_y else None
    plain = not module.predict_codebook_ids and module.num_classes == classes
    temporal = getattr(module, "use_temporal_resblocks", False)
    flat = isinstance(module.input_blocks[0][0], torch.nn.Conv2d) and not temporal
    # res-blocks that resample halve with floor, not ceil; no published model has them
    resampling = any(isinstance(layer, ResBlock) and layer.updown for layer in module.modules())
    return plain and flat and not resampling and context_width(module) is not None


def skip_dims(module: torch.nn.Module) -> list[tuple[int, int]]:
    """Return (channels, downsampling) of the encoder's output after each input block, where residuals are added."""
    channels, down, skips = 0, 1, []
    for block in module.input_blocks:
        for layer in block:
            channels = getattr(layer, "out_channels", channels)
            if isinstance(layer, Downsample):
                down *= 2
        skips.append((channels, down))
    return skips


def residual_specs(module: torch.nn.Module, dtype: str, prefix: str = "", optional: bool = False) -> list[TensorSpec]:
    """Return the residuals that a ControlNet with this encoder gives, and that a UNet with this encoder takes.

    They are named in ComfyUI's order: ``output_<i>`` from the first input block on, then ``middle_0``.
    """
    skips = skip_dims(module)
    specs = [residual_spec(f"{prefix}output_{i}", dtype, skip, optional) for i, skip in enumerate(skips)]
    return [*specs, residual_spec(f"{prefix}middle_0", dtype, skips[-1], optional)]


def residual_spec(name: str, dtype: str, skip: tuple[int, int], optional: bool) -> TensorSpec:
    """Return a residual for a place of the encoder, by its (channels, downsampling)."""
    channels, down = skip
    return TensorSpec(name, dtype, (BATCH, channels, Dim("H", down=down), Dim("W", down=down)), optional)


def token_dims(module: torch.nn.Module) -> list[tuple[int, int]]:
    """Return (features, downsampling) of the tokens of each self-attention layer of a UNet, in the order of a pass.

    Empty if a layer has cross-attention in its place.
    """
    downs = [down for _, down in skip_dims(module)]
    blocks = [*module.input_blocks, module.middle_block or torch.nn.Identity(), *module.output_blocks]
    found = []
    for block, down in zip(blocks, [*downs, downs[-1], *reversed(downs)], strict=True):
        layers = [layer for layer in block.modules() if isinstance(layer, BasicTransformerBlock)]
        if any(layer.disable_self_attn for layer in layers):
            return []
        found += [(layer.norm1.normalized_shape[0], down) for layer in layers]
    return found


def token_specs(module: torch.nn.Module, dtype: str, prefix: str, frames: Dim | None = None) -> list[TensorSpec]:
    """Return the tokens of each self-attention layer, of a frame or of ``frames``."""
    specs = []
    for number, (features, down) in enumerate(token_dims(module)):
        length = Dim("H", down=down) * Dim("W", down=down)
        dims = (BATCH, length if frames is None else frames * length, features)
        specs.append(TensorSpec(f"{prefix}{number}", dtype, dims, optional=frames is not None))
    return specs


def residual_places(module: torch.nn.Module, prefix: str = "") -> dict[str, list[str | None]]:
    """Return the residuals of ``residual_specs`` in the order in which native consumes ComfyUI's lists."""
    blocks = range(len(module.input_blocks))
    return {"output": [f"{prefix}output_{i}" for i in reversed(blocks)], "middle": [f"{prefix}middle_0"]}


def conditioning_specs(module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
    """Return specs of ``timesteps`` (float32, as both networks embed them), ``context``, and ``y`` if it is taken."""
    specs = [
        TensorSpec("timesteps", "float32", (BATCH,), sample="timestep"),
        TensorSpec("context", dtype, (BATCH, TOKENS, context_width(module))),
    ]
    if (width := vector_width(module)) is not None:
        specs.append(TensorSpec("y", dtype, (BATCH, width)))
    return specs


@dataclass(frozen=True)
class Attention:
    """Attention in the place of ComfyUI's. q, k, v and the result are (batch, tokens, heads * features)."""

    def __call__(
        self, _native: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int,
        mask: torch.Tensor | None = None, **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        if mask is not None:
            raise NotImplementedError("masked attention has no place in these networks")
        return attended(*(t.unflatten(-1, (heads, -1)) for t in (q, k, v)))


def transformer_options() -> dict:
    """Return ComfyUI's per-call options with the exportable attention alone."""
    return {OVERRIDE: Attention()}


def use_attention(module: torch.nn.Module) -> None:
    """Make every transformer of a ControlNet copy use ``Attention``: its forward takes no options to say so."""
    for layer in module.modules():
        if isinstance(layer, SpatialTransformer):
            layer.register_forward_pre_hook(_with_options, with_kwargs=True)


def _with_options(_layer: torch.nn.Module, args: tuple, _kwargs: dict) -> tuple[tuple, dict]:
    return (*args[:2], transformer_options()), {}
