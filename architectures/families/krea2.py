"""Krea 2: one stream of tokens of the prompt, the picture and reference images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from comfy.ldm.flux.layers import EmbedND, timestep_embedding
from comfy.ldm.krea2.model import SingleStreamBlock, SingleStreamDiT
from comfy.utils import repeat_to_batch_size

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, Unsupported, prompt_of, refuse_all_but
from ..shapes import Dim, Sizes, TensorSpec
from ..shared_tokens import SharedTokens
from ..sizes import BATCH, PATCH, PICTURE, PROMPT, REFERENCE, TokenSizes
from ..token_layers import MOST_KEPT, attended, latent_to_tokens, normed, to_latent

ZERO = "index_timestep_zero"
"""ComfyUI's name of the method of references whose time is zero."""

Size = tuple[int, int]


@dataclass(frozen=True)
class Krea2(TokenSizes):
    """The transformer from its tokens on. References have a time of their own: the picture's, or zero."""

    name = "krea2"
    role = Role.BACKBONE
    arguments = ("x", "timesteps", "context", "attention_mask", "ref_latents", "transformer_options")
    shared = SharedTokens("RC", front=(PROMPT,), back=(REFERENCE,))

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is SingleStreamDiT and module.patch == PATCH

    def inputs(self, module: SingleStreamDiT, dtype: str) -> list[TensorSpec]:
        width, pairs = module.first.in_features, module.pe_embedder.dim // 2
        return [
            TensorSpec("image", dtype, (BATCH, PICTURE, width)),
            TensorSpec("context", dtype, (BATCH, PROMPT, module.txtlayers * module.txtdim)),
            TensorSpec("reference", dtype, (BATCH, REFERENCE, width)),
            TensorSpec("timestep", "float32", (BATCH,), sample="sigma"),
            TensorSpec("reference_timestep", "float32", (BATCH,), sample="sigma"),
            TensorSpec("pe_image", "float32", (Dim("R"), Dim("C"), pairs, 2), steady=True),
            TensorSpec("pe_reference", "float32", (REFERENCE, pairs, 2), steady=True),
        ]

    def outputs(self, module: SingleStreamDiT, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("out", dtype, (BATCH, PICTURE, module.last.linear.out_features))]

    def function(self, module: SingleStreamDiT) -> torch.nn.Module:
        return _OnTokens(module)

    def binding(self, module: SingleStreamDiT) -> Binding:
        places = lru_cache(MOST_KEPT)(partial(_places, module.pe_embedder))
        return partial(_bind, places, module.default_ref_method)


_TAKEN = frozenset({*Krea2.arguments, "ref_latents_method", "crossattn_controlnet"})
"""Arguments that a call may carry. Native looks at neither ``attention_mask`` nor the last one."""


def _bind(
    places: Callable[..., dict[str, torch.Tensor]], usual_method: str | None, call: Mapping[str, Any]
) -> EngineCall:
    x, context, timestep = call["x"], prompt_of(call), call["timesteps"]
    refuse_all_but(call, _TAKEN)
    method = call.get("ref_latents_method", usual_method)
    references = call.get("ref_latents") or [] if method is not None else []  # without a method native ignores them
    if any(latent.ndim == 5 and latent.shape[2] != 1 for latent in (x, *references)):
        raise Unsupported("a latent with several frames, and engines of this model take one")
    latents = [repeat_to_batch_size(_flat(reference), x.shape[0]) for reference in references]
    image = latent_to_tokens(_flat(x))
    inputs = {"image": image, "context": context, "timestep": timestep, "reference_timestep": timestep}
    inputs["reference"] = torch.cat([image[:, :0], *map(latent_to_tokens, latents)], 1)
    if references and method == ZERO:
        inputs["reference_timestep"] = torch.zeros_like(timestep)
    inputs |= places(x.shape[-2:], tuple((r.shape[-2], r.shape[-1]) for r in latents), x.device)

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        picture = to_latent(outputs["out"].to(x.device, x.dtype), _flat(x))
        return picture.unsqueeze(2) if x.ndim == 5 else picture

    return EngineCall(inputs, finish)


_NATIVE = SimpleNamespace(patch=PATCH)
"""The only attribute that native's ``process_img`` reads of its network."""


def _flat(latent: torch.Tensor) -> torch.Tensor:
    return latent[:, :, 0] if latent.ndim == 5 else latent


def _places(
    embedder: EmbedND, size: Size, references: Sequence[Size], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return rotary embeddings of picture and references, as native places them: cosine and sine."""

    def ids(sides: Size, index: int) -> torch.Tensor:
        return SingleStreamDiT.process_img(_NATIVE, torch.zeros(1, 1, *sides, device=device), index=index)[1]

    def embedded(ids: torch.Tensor) -> torch.Tensor:
        return embedder(ids)[0, 0, ..., 0].contiguous()

    beside = [ids(sides, index) for index, sides in enumerate(references, 1)]
    nothing = torch.zeros(1, 0, 3, device=device)
    return {
        "pe_image": embedded(ids(size, 0)).unflatten(0, tuple(-(-side // PATCH) for side in size)),
        "pe_reference": embedded(torch.cat([nothing, *beside], 1)),
    }


def _norm(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Native's norm, written out: the exporter to ONNX does not know it."""
    return normed(x, 1 + layer.scale.float(), layer.eps).to(x.dtype)


def _mlp(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer.down(F.silu(layer.gate(x)) * layer.up(x))


def _attention(layer: torch.nn.Module, x: torch.Tensor, pe: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v = layer.wq(x), layer.wk(x), layer.wv(x)
    q, k, v = (t.unflatten(-1, (n, -1)) for t, n in ((q, layer.heads), (k, layer.kvheads), (v, layer.kvheads)))
    q, k = _norm(layer.qknorm.qnorm, q), _norm(layer.qknorm.knorm, k)
    return layer.wo(attended(q, k, v, pe) * layer.gate(x).sigmoid())


def _fused_text(net: SingleStreamDiT, context: torch.Tensor) -> torch.Tensor:
    """Return the prompt as the transformer takes it, from the text encoder's layers for each token."""

    def through(blocks: Sequence[torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = x + _attention(block.attn, _norm(block.prenorm, x))
            x = x + _mlp(block.mlp, _norm(block.postnorm, x))
        return x

    batch, words = context.shape[:2]
    layers = context.reshape(batch * words, net.txtlayers, net.txtdim)
    layers = through(net.txtfusion.layerwise_blocks, layers).transpose(1, 2)
    x = net.txtfusion.projector(layers).squeeze(-1).reshape(batch, words, net.txtdim)
    x = through(net.txtfusion.refiner_blocks, x)
    norm, *rest = net.txtmlp
    x = _norm(norm, x)
    for layer in rest:
        x = layer(x)
    return x


class _OnTokens(torch.nn.Module):
    def __init__(self, net: SingleStreamDiT):
        super().__init__()
        self.net = net
        self.blocks = in_blocks(net.blocks, _block)

    def forward(
        self, image: torch.Tensor, context: torch.Tensor, reference: torch.Tensor, timestep: torch.Tensor,
        reference_timestep: torch.Tensor, pe_image: torch.Tensor, pe_reference: torch.Tensor,
    ) -> tuple[torch.Tensor]:  # fmt: skip
        net, words, picture = self.net, context.shape[1], image.shape[1]
        h = torch.cat([_fused_text(net, context), net.first(torch.cat([image, reference], 1))], 1)
        time = net.tmlp(timestep_embedding(timestep, net.tdim).unsqueeze(1).to(h.dtype))
        of_references = net.tmlp(timestep_embedding(reference_timestep, net.tdim).unsqueeze(1).to(h.dtype))
        behind = pe_reference if pe_reference.shape[0] else None
        times = net.tproj(time), None if behind is None else net.tproj(of_references)
        cos, sin = (torch.full_like(pe_image[0, :1, :, 0], value).expand(words, -1) for value in (1, 0))
        pe = torch.cat([torch.stack([cos, sin], -1), pe_image.flatten(0, 1), pe_reference])
        for block in net.blocks:
            h = block(h, times, pe, behind)
        h = h[:, words : words + picture]
        scale, shift = (time + net.last.modulation.lin.to(time.dtype)).chunk(2, 1)
        return (net.last.linear((1 + scale) * _norm(net.last.norm, h) + shift),)


def _block(
    block: SingleStreamBlock, h: torch.Tensor, times: Sequence[torch.Tensor | None], pe: torch.Tensor,
    behind: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Compute native's block.

    Args:
        times: of the picture and the prompt, and of references.
        behind: a row for each token of references.
    """
    moved = [(time + block.mod.lin.to(time.dtype)).chunk(6, -1) for time in times if time is not None]

    def parts(x: torch.Tensor) -> Sequence[torch.Tensor]:
        own = None if behind is None else x.shape[1] - behind.shape[0]
        return [x] if own is None else [x[:, :own], x[:, own:]]

    def scaled(x: torch.Tensor, scale: int, shift: int) -> torch.Tensor:
        return torch.cat([(1 + m[scale]) * part + m[shift] for m, part in zip(moved, parts(x), strict=True)], 1)

    def gated(x: torch.Tensor, gate: int) -> torch.Tensor:
        return torch.cat([m[gate] * part for m, part in zip(moved, parts(x), strict=True)], 1)

    h = h + gated(_attention(block.attn, scaled(_norm(block.prenorm, h), 0, 1), pe), 2)
    return h + gated(_mlp(block.mlp, scaled(_norm(block.postnorm, h), 3, 4)), 5)


SIZES = Sizes("Krea 2", 256, 1024, 1536, max_tokens=1024)

FILE_MARKS = ("txtfusion.projector.",)

NEEDS = (
    "comfy.ldm.flux.layers:EmbedND.forward(self, ids)",
    "comfy.ldm.flux.layers:timestep_embedding(t, dim, max_period, time_factor)",
    "comfy.ldm.krea2.model:SingleStreamBlock",
    "comfy.ldm.krea2.model:SingleStreamDiT.process_img(self, x, index)",
    "comfy.ldm.krea2.model:SingleStreamDiT._forward"
    "(self, x, timesteps, context, attention_mask, ref_latents, transformer_options, **)",
)

ARCHITECTURES = (Krea2(SIZES),)
