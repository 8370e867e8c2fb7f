"""InstantX's ControlNets for Qwen-Image: they read a latent of the control image, and nothing of reference images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, ResidualLayout, Unsupported
from ..shapes import Dim, TensorSpec
from ..sizes import BATCH, PATCH, PICTURE, PROMPT, TokenSizes
from ..token_layers import KEPT
from .qwen_image import SIZES, places_of, tokens_of, written_out


@dataclass(frozen=True)
class QwenImageControlNet(TokenSizes):
    """The ControlNet from its tokens on. Each of its blocks gives one residual, for several blocks of the model."""

    name = "qwen_image_controlnet"
    role = Role.CONTROLNET
    free = {symbol: served for symbol, served in TokenSizes.free.items() if symbol != "L"}
    arguments = ("x", "timesteps", "context", "attention_mask", "guidance", "ref_latents", "hint",
                 "transformer_options")  # fmt: skip

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is QwenImageControlNetModel and module.patch_size == PATCH

    def inputs(self, module: QwenImageControlNetModel, dtype: str) -> list[TensorSpec]:
        pairs = module.pe_embedder.dim // 2
        return [
            TensorSpec("image", dtype, (BATCH, PICTURE, module.in_channels)),
            TensorSpec("hint", dtype, (BATCH, PICTURE, module.controlnet_x_embedder.in_features)),
            TensorSpec("context", dtype, (BATCH, PROMPT, module.txt_in.in_features)),
            TensorSpec("timestep", dtype, (BATCH,), sample="sigma"),
            TensorSpec("pe_image", dtype, (Dim("R"), Dim("C"), pairs, 2), steady=True),
            TensorSpec("pe_context", dtype, (PROMPT, pairs, 2), steady=True),
        ]

    def outputs(self, module: QwenImageControlNetModel, dtype: str) -> list[TensorSpec]:
        blocks = range(len(module.controlnet_blocks))
        return [TensorSpec(f"residual_{i}", dtype, (BATCH, PICTURE, module.inner_dim)) for i in blocks]

    def function(self, module: QwenImageControlNetModel) -> torch.nn.Module:
        return _OnTokens(module)

    def binding(self, module: QwenImageControlNetModel) -> Binding:
        blocks, wanted = len(module.controlnet_blocks), module.main_model_double
        each = -(-wanted // blocks)
        layout = ResidualLayout({"input": [f"residual_{i // each}" for i in range(wanted)]}, from_end=False)
        return partial(_bind, layout, lru_cache(KEPT)(partial(places_of, module.pe_embedder)))


def _bind(
    layout: ResidualLayout, places: Callable[..., dict[str, torch.Tensor]], call: Mapping[str, Any]
) -> EngineCall:
    x, hint, context = call["x"], call["hint"], call["context"]
    for name in ("attention_mask", "guidance"):
        if call.get(name) is not None:
            raise Unsupported(name)
    if any(latent.ndim != 5 or latent.shape[2] != 1 for latent in (x, hint)):
        raise Unsupported("a latent of several pictures in a row")
    inputs = {"image": tokens_of(x), "hint": tokens_of(hint), "context": context, "timestep": call["timesteps"]}
    if hint.shape[0] == 1:  # ComfyUI hands one image to a whole batch
        inputs["hint"] = inputs["hint"].expand(x.shape[0], -1, -1)
    found = places(x.shape[-2:], context.shape[1], (), None, x.device, x.dtype)
    inputs |= {name: found[name] for name in ("pe_image", "pe_context")}
    return EngineCall(inputs, lambda outputs: layout.give(outputs, x))


class _OnTokens(torch.nn.Module):
    def __init__(self, net: QwenImageControlNetModel):
        super().__init__()
        self.net = written_out(net)
        self.blocks = in_blocks(net.transformer_blocks)

    def forward(
        self, image: torch.Tensor, hint: torch.Tensor, context: torch.Tensor, timestep: torch.Tensor,
        pe_image: torch.Tensor, pe_context: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        net, residuals = self.net, []
        h = net.img_in(image) + net.controlnet_x_embedder(hint)
        words = net.txt_in(net.txt_norm(context))
        time = net.time_text_embed(timestep, h)
        pe = torch.cat([pe_context, pe_image.flatten(0, 1)])
        for block, residual in zip(net.transformer_blocks, net.controlnet_blocks, strict=True):
            words, h = block(h, words, None, time, pe)
            residuals.append(residual(h))
        return tuple(residuals)


FILE_MARKS = ("controlnet_x_embedder.",)

NEEDS = (
    "comfy.ldm.qwen_image.controlnet:QwenImageControlNetModel.forward"
    "(self, x, timesteps, context, attention_mask, guidance, ref_latents, hint, transformer_options, **)",
)
"""Names in ComfyUI's own code that the family relies on, see ``needs``."""

ARCHITECTURES = (QwenImageControlNet(SIZES),)
