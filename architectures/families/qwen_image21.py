"""Qwen-Image 2.1 and its Turbo: one stream of tokens of the prompt, with references among its words, and the picture.

Prompt and references never attend to the picture, and their time is zero. So their keys and values stay the same for a
whole run. They are computed once, and a step takes them as inputs. ComfyUI's own network keeps them likewise.

ComfyUI has the network since 0.37, so nothing of it is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from comfy.ldm.flux.layers import EmbedND

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, PerImagePass, Unsupported, prompt_of, refuse_all_but
from ..quantised_linear import linear_behind
from ..shapes import Dim, Picture, Range, RequestedSizes, Sizes, Symbol, TensorSpec
from ..shared_tokens import SharedTokens
from ..sizes import BATCH, IMAGE, LATENT, PROMPT, REFERENCES, ImageTokenSizes
from ..token_layers import MOST_KEPT, attended, normed, rotated
from ..user_attention import computed

PACKAGE = "comfy.ldm.qwen_image21"
NETWORK, BLOCK = "QwenImage21Transformer2DModel", "QwenImage21TransformerBlock"


@dataclass(frozen=True)
class QwenImage21(ImageTokenSizes):
    """The transformer on the picture's tokens; keys and values of what stands before the picture are inputs."""

    name = "qwen_image21"
    role = Role.BACKBONE
    arguments = ("x", "timestep", "context", "ref_latents", "image_slots", "transformer_options")
    shared = SharedTokens("N", front=None)
    pixels = 2 * LATENT
    patch = 1
    free: ClassVar[Mapping[str, Range]] = ImageTokenSizes.free | {"T": Range(1, 130, 1 << 18)}
    named: ClassVar[Mapping[str, Symbol]] = ImageTokenSizes.named | {
        "T": Symbol("tokens of prompt and references", of_picture=False)}  # fmt: skip

    def matches(self, module: torch.nn.Module) -> bool:
        return _is_native(module, NETWORK) and all(_is_native(block, BLOCK) for block in module.transformer_blocks)

    def inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        step = [spec for spec in self.engine_inputs(module, dtype) if not spec.name.startswith("prefix_")]
        return [*step, _prompt(module, dtype)]

    def engine_inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        attention = module.transformer_blocks[0].attn
        heads, head = attention.heads, attention.norm_q.weight.shape[0]
        return [
            TensorSpec("image", dtype, (BATCH, IMAGE, module.img_in.in_features)),
            TensorSpec("timestep", "float32", (BATCH,), sample="sigma"),
            TensorSpec("pe", "float32", (IMAGE, head // 2, 2), steady=True),
            *(TensorSpec(name, dtype, (2, BATCH, PROMPT, heads, head)) for name in _prefixes(module)),
        ]

    def outputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("out", dtype, (BATCH, IMAGE, module.proj_out.out_features))]

    def passes(self, module: torch.nn.Module) -> list[PerImagePass]:
        """See ``Architecture``: the whole network on prompt and references."""
        takes = _prompt(module, str(module.dtype).removeprefix("torch."))
        found = PerImagePass(takes, _prefixes(module), _PrefixPass(module))
        module.txt_in = torch.nn.Identity()
        return [found]

    def function(self, module: torch.nn.Module) -> torch.nn.Module:
        return _OnTokens(module)

    def binding(self, module: torch.nn.Module) -> Binding:
        return partial(_bind, module, lru_cache(MOST_KEPT)(partial(_places, module.pe_embedder)))

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        """See ``NetworkSizes``: three references of the largest size at most."""
        own, batch = super()._ranges(asked), Range(1, asked.max_images, 2 * asked.max_images)
        return {**own, "B": batch, "T": Range(1, own["T"].opt, own["T"].max + REFERENCES * own["N"].max)}

    def _batches(self, picture: Picture) -> Sequence[int]:
        """See ``NetworkSizes``: prompts of two lengths are two calls, each with the latent's batch."""
        return (picture.images,) if picture.images else picture.batches

    def _several(self, batch: int) -> str:
        return f"up to {batch} in a batch"


def _is_native(module: torch.nn.Module, name: str) -> bool:
    return (type(module).__module__, type(module).__name__) == (f"{PACKAGE}.model", name)


def _prefixes(module: torch.nn.Module) -> tuple[str, ...]:
    return tuple(f"prefix_{i}" for i in range(len(module.transformer_blocks)))


def _prompt(module: torch.nn.Module, dtype: str) -> TensorSpec:
    return TensorSpec("context", dtype, (BATCH, Dim("L"), module.txt_in.in_layer.in_features))


class _Before:
    """Source of keys and values before the picture, besides the prompt. It is compared by its values.

    Args:
        odd: 1 for a height or width of the picture that is odd; references are centred on the picture.
        slots: places of references among the words.
        references: latents.
        form: the format in which native keeps keys and values, or None for its own.
    """

    def __init__(self, odd: Sequence[int], slots: Sequence[int], references: Sequence[torch.Tensor], form: str | None):
        self.odd, self.slots, self.references, self.form = odd, slots, references, form
        like = ((tuple(reference.shape), reference.dtype, reference.device) for reference in references)
        self._key = (form, *((*odd, *slots, *like) if references else ()))

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _Before) and self._key == other._key
        # ComfyUI makes these latents anew in each step, so only their values tell
        return same and all(map(torch.equal, self.references, other.references))

    def __hash__(self) -> int:
        return hash(self._key)


_TAKEN = frozenset({*QwenImage21.arguments, "attention_mask", "ref_latents_method", "crossattn_controlnet"})
"""Arguments that a call may carry. Native looks at none of the last three."""


def _bind(module: torch.nn.Module, places: Callable[..., torch.Tensor], call: Mapping[str, Any]) -> EngineCall:
    x, context, options = call["x"], prompt_of(call), call.get("transformer_options") or {}
    refuse_all_but(call, _TAKEN)
    references, words = list(call.get("ref_latents") or ()), context.shape[1]
    if any(latent.ndim != 4 for latent in (x, *references)):
        raise Unsupported("a latent with several frames, and engines of this model take one")
    if any(reference.shape[:2] != x.shape[:2] for reference in references):
        raise Unsupported("references of another batch size or kind of latent, which engines do not do")
    slots = tuple([*(call.get("image_slots") or ()), *[words] * len(references)][: len(references)])
    if [0, *slots, words] != sorted([0, *slots, words]):
        raise Unsupported("references outside the prompt or not in their order, which engines do not do")
    if not words:
        raise Unsupported("a prompt without words, which engines of this model do not do")
    height, width = x.shape[-2:]
    behind = words + sum(max(reference.shape[-2:]) for reference in references)
    inputs = {
        "image": x.flatten(2).transpose(1, 2),
        "timestep": ((call["timestep"] * 1000).to(x.dtype) / 1000).to(x.dtype),
        "pe": places((height, width), behind, x.device),
        "context": context,
    }
    before = _Before((height % 2, width % 2), slots, references, _form(module, options))

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return outputs["out"].to(x.device, x.dtype).transpose(1, 2).reshape(len(x), -1, height, width)

    return EngineCall(inputs, finish, {"context": before})


def _form(module: torch.nn.Module, options: Mapping[str, Any]) -> str | None:
    """Return the format of native's cache, in which a user may save memory: ``int8`` or ``int4``, or None."""
    wanted = options.get("qwen_image21_cache") or {}
    kept = getattr(module, "prefix_cache_enabled", False) and wanted.get("device") != "off"
    return wanted.get("dtype") if kept and wanted.get("dtype") in ("int8", "int4") else None


def _places(embedder: EmbedND, size: tuple[int, int], first: int, device: torch.device) -> torch.Tensor:
    """Return cosine and sine of the angles of a picture's tokens, (tokens, angles, 2)."""
    with torch.inference_mode(False):
        return _turns(embedder, _grid(size, first, (0.0, 0.0), device))


def _turns(embedder: EmbedND, ids: torch.Tensor) -> torch.Tensor:
    return embedder(ids.unsqueeze(0))[0, 0, ..., 0].contiguous()


def _grid(size: tuple[int, int], place: int, shift: tuple[float, float], device: torch.device) -> torch.Tensor:
    """Return the places of a picture's tokens, (tokens, 3): one in the row of words, then around the centre."""
    sides = [torch.arange(side, device=device) - (side - side // 2) + more
             for side, more in zip(size, shift, strict=True)]  # fmt: skip
    rows, columns = torch.meshgrid(*(side.float() for side in sides), indexing="ij")
    return torch.stack([torch.full_like(rows, place), rows, columns], -1).flatten(0, 1)


def _scaled(norm: torch.nn.Module, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the norm of ``x`` times 1 + ``scale``, in float32 as native's kernel does."""
    return (F.layer_norm(x.float(), norm.normalized_shape, eps=norm.eps) * (1 + scale.float())).to(x.dtype)


def _heads(layer: torch.nn.Module, x: torch.Tensor, pe: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values, (batch, tokens, heads, features), turned by their places."""
    q, k, v = (part(x).unflatten(-1, (layer.heads, -1)) for part in (layer.to_q, layer.to_k, layer.to_v))
    turned = [rotated(normed(t, norm.weight.to(t.dtype).float(), norm.eps), pe.unsqueeze(1)).to(t.dtype)
              for t, norm in ((q, layer.norm_q), (k, layer.norm_k))]  # fmt: skip
    return [*turned, v]


def _behind_attention(
    block: torch.nn.Module, x: torch.Tensor, found: torch.Tensor, moves: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Compute the rest of a block from what attention found."""
    _, gate, scale, last_gate = moves
    x = torch.addcmul(x, block.attn.to_out[0](found), gate)
    mlp, y = block.img_mlp, _scaled(block.img_norm2, x, scale)
    if mlp.fused:
        y = linear_behind(mlp.out, mlp.gate_up(y), "swiglu")
    else:
        y = mlp.out(F.silu(mlp.gate_layer(y)) * mlp.proj(y))
    x = torch.addcmul(x, y, last_gate)
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def _block(
    block: torch.nn.Module, x: torch.Tensor, moves: Sequence[torch.Tensor], pe: torch.Tensor, prefix: torch.Tensor
) -> torch.Tensor:
    """Compute native's block on the picture's tokens alone.

    Args:
        moves: by time, scale and gate of attention, then of the MLP.
        prefix: keys and values of all tokens before the picture.
    """
    q, k, v = _heads(block.attn, _scaled(block.img_norm1, x, moves[0]), pe)
    keys, values = (torch.cat(both, 1) for both in zip(prefix.unbind(0), (k, v), strict=True))
    return _behind_attention(block, x, attended(q, keys, values), moves)


def _moves(net: torch.nn.Module, embedded: torch.Tensor) -> list[torch.Tensor]:
    """Return scale, gate, scale and gate of all blocks at embedded times, each (times, 1, features)."""
    scale, gate, second_scale, second_gate = net.modulation(embedded).unsqueeze(1).chunk(4, -1)
    return [scale, gate.tanh(), second_scale, second_gate.tanh()]


class _PrefixPass(torch.nn.Module):
    """Makes keys and values of prompt and references: a tensor for each block, (2, batch, tokens, heads, features)."""

    def __init__(self, net: torch.nn.Module):
        super().__init__()
        self.txt_in, self.img_in, self.embedder = net.txt_in, net.img_in, net.pe_embedder
        self.time_text_embed, self.modulation = net.time_text_embed, net.modulation
        self.layers = torch.nn.ModuleList(map(_PrefixBlock, net.transformer_blocks))

    def forward(self, context: torch.Tensor, before: _Before) -> tuple[torch.Tensor, ...]:
        before.references = [latent.clone() for latent in before.references]  # other code may write to the given ones
        parts, ids, segments = zip(*self._parts(context, before), strict=True)
        x, pe = torch.cat(parts, 1), _turns(self.embedder, torch.cat(ids))
        moves = _moves(self, self.time_text_embed(x.new_zeros(1), x.dtype))
        found = []
        for layer in self.layers:
            x, kept = layer(x, moves, pe, segments)
            found.append(kept if before.form is None else _through(kept, before.form))
        return tuple(found)

    def _parts(self, context: torch.Tensor, before: _Before) -> Iterator[tuple[Any, ...]]:
        """Yield runs of words and references in their order: tokens, places, and how many of which kind."""
        norm, device = self.txt_in.text_norm, context.device
        y = normed(context, norm.weight.float() + 1.0, norm.eps).to(context.dtype)
        words = self.txt_in.out_layer(F.gelu(self.txt_in.in_layer(y), approximate="tanh"))
        place, ends = 0, [*before.slots, words.shape[1]]
        for start, end, reference in zip([0, *before.slots], ends, [*before.references, None], strict=True):
            if end > start:
                ids = torch.arange(place, place + end - start, device=device).float().unsqueeze(1).expand(-1, 3)
                yield words[:, start:end], ids, (end - start, True)
                place += end - start
            if reference is not None:
                tokens, size = reference.to(device, context.dtype).flatten(2).transpose(1, 2), reference.shape[-2:]
                shift = [0.5 * (side % 2 - odd) for side, odd in zip(size, before.odd, strict=True)]
                yield self.img_in(tokens), _grid(size, place, shift, device), (tokens.shape[1], False)
                place += max(size)


def _waits(layer: torch.nn.Module, x: torch.Tensor) -> bool:
    """Tell whether weights wait in main memory, from where they are streamed in each step."""
    return any(weight.device != x.device for weight in layer.parameters())


class _PrefixBlock(torch.nn.Module):
    """Computes a block on prompt and references, and its keys and values."""

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(
        self, x: torch.Tensor, moves: Sequence[torch.Tensor], pe: torch.Tensor, segments: Sequence[tuple[int, bool]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _waits(self, x):
            here = {name: weight.to(x.device) for name, weight in self.named_parameters()}
            return torch.func.functional_call(self, here, (x, moves, pe, segments))
        q, k, v = _heads(self.block.attn, _scaled(self.block.img_norm1, x, moves[0]), pe)
        found, start = [], 0
        for count, is_text in segments:  # a run of tokens sees all until its end, but words none behind themselves
            end = start + count
            mask = torch.ones(count, end, dtype=torch.bool, device=x.device).tril(start) if is_text else None
            heads = (t.transpose(1, 2) for t in (q[:, start:end], k[:, :end], v[:, :end]))
            found.append(computed(*heads, mask))
            start = end
        return _behind_attention(self.block, x, torch.cat(found, 1), moves), torch.stack([k, v])


def _through(kept: torch.Tensor, form: str) -> torch.Tensor:
    """Return keys and values as native's cache gives them back, which keeps them in fewer bits."""
    from comfy import quant_ops

    rows, group = kept.reshape(-1, kept.shape[-1]), 256
    while group > 4 and rows.shape[1] % group:
        group //= 4
    layout, more = quant_ops.TensorCoreConvRotW4A4Layout, {}
    if form == "int8":
        layout, more = quant_ops.TensorWiseINT8Layout, {"is_weight": True, "per_channel": True, "convrot": True}
    return layout.dequantize(*layout.quantize(rows, convrot_groupsize=group, **more)).reshape(kept.shape).to(kept.dtype)


class _OnTokens(torch.nn.Module):
    """All that native does in each step."""

    def __init__(self, net: torch.nn.Module):
        super().__init__()
        self.net = net
        self.blocks = in_blocks(net.transformer_blocks, _block)

    def forward(
        self, image: torch.Tensor, timestep: torch.Tensor, pe: torch.Tensor, *prefixes: torch.Tensor
    ) -> tuple[torch.Tensor]:
        net = self.net
        embedded, x = net.time_text_embed(timestep, image.dtype), net.img_in(image)
        moves = _moves(net, embedded)
        for block, prefix in zip(net.transformer_blocks, prefixes, strict=True):
            x = block(x, moves, pe, prefix)
        last = net.norm_out
        return (net.proj_out(_scaled(last.norm, x, last.linear(F.silu(embedded)).unsqueeze(1))),)


SIZES = Sizes("Qwen-Image 2.1", 256, 1024, 2048, max_tokens=1024)

FILE_MARKS = ("txt_in.text_norm.",)

KEPT_IN_RUNS = ("prefix_cache", "prefix_cache_enabled", "current_patcher")
"""Attributes that ComfyUI writes when a run begins, and native in a run: they are no settings of the network."""

NEEDS = (
    "comfy.ldm.flux.layers:EmbedND.forward(self, ids)",
    f"{PACKAGE}.model:{BLOCK}",
    f"{PACKAGE}.model:{NETWORK}._forward"
    "(self, x, timesteps, context, ref_latents, image_slots, transformer_options, **)",
) if find_spec(PACKAGE) else ()  # fmt: skip
"""Names in ComfyUI's own code that the family relies on; none where it lacks the network, which is no fault."""

ARCHITECTURES = (QwenImage21(SIZES),)
