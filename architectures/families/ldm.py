"""Code that UNet and ControlNet of the latent-diffusion family share: sizes read off their layers, attention."""

from __future__ import annotations

from typing import Any

import torch
from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention, SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, ResBlock

from ..blocks import OVERRIDE
from ..fused_linear import FusedLinear, Place, fuse
from ..shapes import Dim, TensorSpec
from ..token_layers import attended

MOST_FUSED = 1 << 26
"""Elements of a weight that layers share: it is made anew while those that it is made from are still there."""
BATCH, HEIGHT, WIDTH, TOKENS, HINT_BATCH = Dim("B"), Dim("H"), Dim("W"), Dim("T"), Dim("HB")


def context_width(module: torch.nn.Module) -> int | None:
    """Features per prompt token that the cross-attention layers read, or None when there are none."""
    for name, layer in module.named_modules():
        if isinstance(layer, CrossAttention) and name.endswith("attn2"):
            return layer.to_k.in_features
    return None


def vector_width(module: torch.nn.Module) -> int | None:
    """Features of the vector conditioning ``y`` (SDXL's pooled prompt and sizes), or None when the net takes none."""
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
    """(channels, downsampling) of the encoder's output after each input block, which is where residuals go."""
    channels, down, skips = 0, 1, []
    for block in module.input_blocks:
        for layer in block:
            channels = getattr(layer, "out_channels", channels)
            if isinstance(layer, Downsample):
                down *= 2
        skips.append((channels, down))
    return skips


def residual_specs(module: torch.nn.Module, dtype: str, prefix: str = "", optional: bool = False) -> list[TensorSpec]:
    """The residuals that a ControlNet with this encoder gives, and that a UNet with this encoder takes.

    They are named in ComfyUI's order: ``output_<i>`` from the first input block on, then ``middle_0``.
    """
    skips = skip_dims(module)
    specs = [residual_spec(f"{prefix}output_{i}", dtype, skip, optional) for i, skip in enumerate(skips)]
    return [*specs, residual_spec(f"{prefix}middle_0", dtype, skips[-1], optional)]


def residual_spec(name: str, dtype: str, skip: tuple[int, int], optional: bool) -> TensorSpec:
    """A residual that is added where the encoder has so many (channels, downsampling)."""
    channels, down = skip
    return TensorSpec(name, dtype, (BATCH, channels, Dim("H", down=down), Dim("W", down=down)), optional)


def token_dims(module: torch.nn.Module) -> list[tuple[int, int]]:
    """(features, downsampling) of the tokens of each self-attention layer of a UNet, in the order of a pass.

    Empty if a layer has no self-attention in its place.
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
    """The tokens of each self-attention layer of one frame, or of so many."""
    specs = []
    for number, (features, down) in enumerate(token_dims(module)):
        length = Dim("H", down=down) * Dim("W", down=down)
        dims = (BATCH, length if frames is None else frames * length, features)
        specs.append(TensorSpec(f"{prefix}{number}", dtype, dims, optional=frames is not None))
    return specs


def residual_places(module: torch.nn.Module, prefix: str = "") -> dict[str, list[str | None]]:
    """The residuals of ``residual_specs`` in the order in which native consumes ComfyUI's lists."""
    blocks = range(len(module.input_blocks))
    return {"output": [f"{prefix}output_{i}" for i in reversed(blocks)], "middle": [f"{prefix}middle_0"]}


def conditioning_specs(module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
    """``timesteps`` (always float32: both networks embed them in float32), ``context``, and ``y`` where it is taken."""
    specs = [
        TensorSpec("timesteps", "float32", (BATCH,), sample="timestep"),
        TensorSpec("context", dtype, (BATCH, TOKENS, context_width(module))),
    ]
    if (width := vector_width(module)) is not None:
        specs.append(TensorSpec("y", dtype, (BATCH, width)))
    return specs


def sdpa(
    _native: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention as one scaled_dot_product_attention, for ComfyUI's ``optimized_attention_override``.

    q, k, v and the result are (batch, tokens, heads * features).
    """
    if mask is not None:
        raise NotImplementedError("masked attention has no place in these networks")
    return attended(*(t.unflatten(-1, (heads, -1)) for t in (q, k, v)))


def transformer_options() -> dict:
    """ComfyUI's per-call options with nothing but the exportable attention in them."""
    return {OVERRIDE: sdpa}


def use_sdpa(module: torch.nn.Module) -> None:
    """Make every transformer of a ControlNet copy use ``sdpa``: its forward takes no options to say so per call."""

    def add_options(_layer: torch.nn.Module, args: tuple, _kwargs: dict) -> tuple[tuple, dict]:
        x, context = args[:2]
        return (x, context), {"transformer_options": transformer_options()}

    for layer in module.modules():
        if isinstance(layer, SpatialTransformer):
            layer.register_forward_pre_hook(add_options, with_kwargs=True)


def fuse_layers(module: torch.nn.Module) -> list[FusedLinear]:
    """Compute as one, in a copy, what takes the same input.

    That is query, key and value of each self-attention; keys and values of the prompt in all cross-attentions; and what
    all blocks take of the timestep.
    """
    groups: list[list[Place]] = []
    together: dict[tuple, list[Place]] = {}
    for block in [layer for layer in module.modules() if isinstance(layer, BasicTransformerBlock)]:
        for attention in (block.attn1, block.attn2):
            if attention is None:
                continue
            names = ("to_k", "to_v")
            if attention is block.attn1 and not block.disable_self_attn:
                groups.append([(attention, name) for name in ("to_q", *names)])
            else:
                key = ("context", attention.to_k.in_features)
                together.setdefault(key, []).extend((attention, name) for name in names)
    for block in [layer for layer in module.modules() if isinstance(layer, ResBlock)]:
        if block.emb_layers is not None:
            together.setdefault(("timestep", block.emb_layers[-1].in_features), []).append((block, "emb_layers"))
    for (_, width), places in together.items():
        groups.extend(_bounded(places, width))
    return fuse(module, groups)


def _bounded(places: list[Place], width: int) -> list[list[Place]]:
    """Places whose fused weight has no more than ``MOST_FUSED`` elements."""
    groups, elements = [[]], 0
    for place in places:
        layer = place[0].get_submodule(place[1])
        more = width * (layer[-1] if isinstance(layer, torch.nn.Sequential) else layer).out_features
        if groups[-1] and elements + more > MOST_FUSED:
            groups.append([])
            elements = 0
        groups[-1].append(place)
        elements += more
    return groups
