"""Qwen-Image and Qwen-Image-Edit: a transformer on tokens of the picture, of reference images and of the prompt.

InstantX's ControlNets for it read a latent of the control image, and nothing of reference images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel
from comfy.ldm.qwen_image.model import Attention, QwenImageTransformer2DModel, QwenImageTransformerBlock

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, ResidualLayout, Unsupported, not_done, prompt_of, refuse_all_but
from ..shapes import Dim, Sizes, TensorSpec
from ..shared_tokens import SharedTokens
from ..sizes import BATCH, PATCH, PICTURE, PROMPT, REFERENCE, TokenSizes
from ..token_layers import MOST_KEPT, attended, latent_to_tokens, to_latent, write_out_norms

INDEX, ZERO, NEGATIVE = "index", "index_timestep_zero", "negative_index"
"""ComfyUI's methods to place references; with any other method they lie beside each other."""

Size = tuple[int, int]


@dataclass(frozen=True)
class QwenImage(TokenSizes):
    """The transformer from its tokens on; ``control_<i>`` is added to the picture's tokens behind a block.

    References have a time of their own: that of the picture, or zero where ComfyUI says so.
    """

    name = "qwen_image"
    role = Role.BACKBONE
    arguments = ("x", "timesteps", "context", "attention_mask", "ref_latents", "additional_t_cond",
                 "transformer_options")  # fmt: skip
    shared = SharedTokens("RC", front=(PROMPT,), back=(REFERENCE,))

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is QwenImageTransformer2DModel
            and module.patch_size == PATCH
            and not module.time_text_embed.use_additional_t_cond
            and hasattr(module, "proj_out")
        )

    def inputs(self, module: QwenImageTransformer2DModel, dtype: str) -> list[TensorSpec]:
        width, features = module.in_channels, module.inner_dim
        pairs = module.pe_embedder.dim // 2
        blocks = range(len(module.transformer_blocks))
        return [
            TensorSpec("image", dtype, (BATCH, PICTURE, width)),
            TensorSpec("context", dtype, (BATCH, PROMPT, module.txt_in.in_features)),
            TensorSpec("reference", dtype, (BATCH, REFERENCE, width)),
            TensorSpec("timestep", "float32", (BATCH,), sample="sigma"),
            TensorSpec("reference_timestep", "float32", (BATCH,), sample="sigma"),
            TensorSpec("pe_image", dtype, (Dim("R"), Dim("C"), pairs, 2), steady=True),
            TensorSpec("pe_context", dtype, (PROMPT, pairs, 2), steady=True),
            TensorSpec("pe_reference", dtype, (REFERENCE, pairs, 2), steady=True),
            *(TensorSpec(f"control_{i}", dtype, (BATCH, PICTURE, features), optional=True) for i in blocks),
        ]

    def outputs(self, module: QwenImageTransformer2DModel, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("out", dtype, (BATCH, PICTURE, module.proj_out.out_features))]

    def function(self, module: QwenImageTransformer2DModel) -> torch.nn.Module:
        return _OnTokens(module)

    def binding(self, module: QwenImageTransformer2DModel) -> Binding:
        blocks = [f"control_{i}" for i in range(len(module.transformer_blocks))]
        layout = ResidualLayout({"input": blocks}, from_end=False)
        places = lru_cache(MOST_KEPT)(partial(_places, module.pe_embedder))
        return partial(_bind, layout, places, module.default_ref_method)


_TAKEN = frozenset({"x", "timesteps", "context", "ref_latents", "ref_latents_method", "transformer_options", "control",
                    "crossattn_controlnet"})  # fmt: skip
"""Arguments that a call may carry. Native's transformer does not look at the last one."""


def _bind(
    layout: ResidualLayout, places: Callable[..., dict[str, torch.Tensor]], usual_method: str,
    call: Mapping[str, Any],
) -> EngineCall:  # fmt: skip
    x, context, timestep = call["x"], prompt_of(call), call["timesteps"]
    refuse_all_but(call, _TAKEN)
    references = call.get("ref_latents") or []
    if any(latent.ndim != 5 or latent.shape[2] != 1 for latent in (x, *references)):
        raise Unsupported("a latent with several frames, and engines of this model take one")
    if any(len(reference) != len(x) for reference in references):
        raise Unsupported("references of another batch size than the latent's, which engines do not do")
    method = call.get("ref_latents_method", usual_method)
    image = _tokens(x)
    inputs = {"image": image, "context": context, "timestep": timestep, "reference_timestep": timestep}
    inputs["reference"] = torch.cat([image[:, :0], *map(_tokens, references)], 1)
    if references and method == ZERO:
        inputs["reference_timestep"] = timestep * 0
    sides = tuple((r.shape[-2], r.shape[-1]) for r in references)
    inputs |= places(x.shape[-2:], context.shape[1], sides, method, x.device, x.dtype)
    residuals = layout.take(call.get("control"), x.shape[0])
    inputs |= residuals

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return to_latent(outputs["out"].to(x.device, x.dtype), x[:, :, 0]).unsqueeze(2)

    return EngineCall(inputs, finish, residuals=frozenset(residuals))


_NATIVE = SimpleNamespace(patch_size=PATCH)
"""The only attribute that native's ``process_img`` reads of its network."""


def _tokens(latent: torch.Tensor) -> torch.Tensor:
    """(batch, channels, 1, height, width) -> (batch, tokens, features)."""
    return latent_to_tokens(latent.squeeze(2))


def _places(
    embedder: EmbedND, size: Size, words: int, references: Sequence[Size], method: str | None, device: torch.device,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return rotary embeddings of all tokens, as native places them: cosine and sine."""

    def ids(height: int, width: int, **where: int) -> torch.Tensor:
        latent = torch.zeros(1, 1, 1, height, width, device=device, dtype=dtype)
        return QwenImageTransformer2DModel.process_img(_NATIVE, latent, **where)[1]

    def embedded(ids: torch.Tensor) -> torch.Tensor:
        return embedder(ids)[0, 0, ..., 0].to(dtype).contiguous()

    rows, columns = (-(-side // PATCH) for side in size)
    first = max(rows, columns) // 2
    context = torch.arange(first, first + words, device=device).reshape(1, -1, 1).repeat(1, 1, 3)
    beside = [ids(*r, **where) for r, where in zip(references, _where(references, method), strict=True)]
    nothing = torch.zeros(1, 0, 3, device=device)
    return {
        "pe_image": embedded(ids(*size)).unflatten(0, (rows, columns)),
        "pe_context": embedded(context),
        "pe_reference": embedded(torch.cat([nothing, *beside], 1)),
    }


def _where(references: Sequence[Size], method: str | None) -> list[dict[str, int]]:
    """Return the place of each reference, as arguments of native's ``process_img``."""
    if method in (INDEX, ZERO, NEGATIVE):
        step = -1 if method == NEGATIVE else 1
        return [{"index": step * (i + 1)} for i in range(len(references))]
    found, height, width = [], 0, 0
    for h, w in references:
        beside = {"h_offset": 0, "w_offset": width} if h + height > w + width else {"h_offset": height, "w_offset": 0}
        found.append({"index": 1, **beside})
        height, width = max(height, h + beside["h_offset"]), max(width, w + beside["w_offset"])
    return found


class _Attention(Attention):
    """Native's, with the rotation written out."""

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, image_rotary_emb: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        words = encoder_hidden_states.shape[1]

        def heads(of_words: torch.nn.Module, of_image: torch.nn.Module, norms: Sequence = ()) -> torch.Tensor:
            both = [of_words(encoder_hidden_states), of_image(hidden_states)]
            if norms:
                split = [t.unflatten(-1, (self.heads, -1)) for t in both]
                both = [norm(t).flatten(2) for t, norm in zip(split, norms, strict=True)]
            # joined in three dimensions: ``inductor_tuning`` takes four for an image
            return torch.cat(both, 1).unflatten(-1, (self.heads, -1))

        q = heads(self.add_q_proj, self.to_q, (self.norm_added_q, self.norm_q))
        k = heads(self.add_k_proj, self.to_k, (self.norm_added_k, self.norm_k))
        out = attended(q, k, heads(self.add_v_proj, self.to_v), image_rotary_emb)
        return self.to_out[0](out[:, words:]), self.to_add_out(out[:, :words])


def _write_out(net: torch.nn.Module) -> None:
    """Let norms and attention of a copy compute in plain operations."""
    write_out_norms(net)
    for block in net.transformer_blocks:
        block.attn.__class__ = _Attention


def _block(
    block: QwenImageTransformerBlock, h: torch.Tensor, words: torch.Tensor, times: torch.Tensor, pe: torch.Tensor,
    behind: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute native's block.

    Args:
        times: of the picture and the prompt; with references (2, batch, features), and then theirs.
        behind: a row for each token of references.
    """
    own = None if behind is None else h.shape[1] - behind.shape[0]
    times = times if behind is None else torch.cat(times.unbind())
    return QwenImageTransformerBlock.forward(block, h, words, None, times, pe, timestep_zero_index=own)


class _OnTokens(torch.nn.Module):
    def __init__(self, net: QwenImageTransformer2DModel):
        super().__init__()
        _write_out(net)
        self.net = net
        self.blocks = in_blocks(net.transformer_blocks, _block)

    def forward(
        self, image: torch.Tensor, context: torch.Tensor, reference: torch.Tensor, timestep: torch.Tensor,
        reference_timestep: torch.Tensor, pe_image: torch.Tensor, pe_context: torch.Tensor,
        pe_reference: torch.Tensor, *control: torch.Tensor,
    ) -> tuple[torch.Tensor]:  # fmt: skip
        net, picture = self.net, image.shape[1]
        h = net.img_in(torch.cat([image, reference], 1))
        words = net.txt_in(net.txt_norm(context))
        time = net.time_text_embed(torch.cat([timestep, reference_timestep]), h)
        pe = torch.cat([pe_context, pe_image.flatten(0, 1), pe_reference])
        behind = pe_reference if pe_reference.shape[0] else None
        times = time.chunk(2)[0] if behind is None else torch.stack(time.chunk(2))  # code for any batch halves no rows
        for block, residual in zip(net.transformer_blocks, control, strict=True):
            words, h = block(h, words, times, pe, behind)
            h = torch.cat([h[:, :picture] + residual, h[:, picture:]], 1)
        return (net.proj_out(net.norm_out(h[:, :picture], time.chunk(2)[0])),)


@dataclass(frozen=True)
class QwenImageControlNet(TokenSizes):
    """The ControlNet from its tokens on. Each of its blocks gives a residual for several blocks of the model."""

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
        return _ControlNetOnTokens(module)

    def binding(self, module: QwenImageControlNetModel) -> Binding:
        blocks, wanted = len(module.controlnet_blocks), module.main_model_double
        each = -(-wanted // blocks)
        layout = ResidualLayout({"input": [f"residual_{i // each}" for i in range(wanted)]}, from_end=False)
        return partial(_bind_controlnet, layout, lru_cache(MOST_KEPT)(partial(_places, module.pe_embedder)))


def _bind_controlnet(
    layout: ResidualLayout, places: Callable[..., dict[str, torch.Tensor]], call: Mapping[str, Any]
) -> EngineCall:
    x, hint, context = call["x"], call["hint"], call["context"]
    for name in ("attention_mask", "guidance"):
        if call.get(name) is not None:
            raise not_done(name)
    if any(latent.ndim != 5 or latent.shape[2] != 1 for latent in (x, hint)):
        raise Unsupported("a latent with several frames, and engines of this model take one")
    inputs = {"image": _tokens(x), "hint": _tokens(hint), "context": context, "timestep": call["timesteps"]}
    if hint.shape[0] == 1:  # an image for the whole batch
        inputs["hint"] = inputs["hint"].expand(x.shape[0], -1, -1)
    found = places(x.shape[-2:], context.shape[1], (), None, x.device, x.dtype)
    inputs |= {name: found[name] for name in ("pe_image", "pe_context")}
    return EngineCall(inputs, lambda outputs: layout.give(outputs, x))


class _ControlNetOnTokens(torch.nn.Module):
    def __init__(self, net: QwenImageControlNetModel):
        super().__init__()
        _write_out(net)
        self.net = net
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


SIZES = Sizes("Qwen-Image", 256, 1328, 1664, max_tokens=1024)

FILE_MARKS = ("transformer_blocks.0.txt_mod.1.", "transformer_blocks.0.attn.add_q_proj.", "controlnet_x_embedder.")

NEEDS = (
    "comfy.ldm.flux.layers:EmbedND.forward(self, ids)",
    "comfy.ldm.qwen_image.controlnet:QwenImageControlNetModel.forward"
    "(self, x, timesteps, context, attention_mask, guidance, ref_latents, hint, transformer_options, **)",
    "comfy.ldm.qwen_image.model:Attention",
    "comfy.ldm.qwen_image.model:QwenImageTransformerBlock",
    "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel.process_img(self, x, index, h_offset, w_offset)",
    "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel._forward"
    "(self, x, timesteps, context, attention_mask, ref_latents, additional_t_cond, transformer_options, control, **)",
)

ARCHITECTURES = (QwenImage(SIZES), QwenImageControlNet(SIZES))
