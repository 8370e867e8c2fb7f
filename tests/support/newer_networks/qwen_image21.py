"""A stand-in for ComfyUI's network of Qwen-Image 2.1, which the pinned ComfyUI lacks: typed anew for the tests.

Names of attributes, shapes and calls are native's. It has no Fun control and no training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from comfy import ops, patcher_extension, quant_ops
from comfy.ldm.flux.layers import EmbedND, timestep_embedding
from comfy.ldm.flux.math import apply_rope1
from comfy.ldm.lightricks.model import TimestepEmbedding
from comfy.ldm.modules.attention import optimized_attention
from torch import nn

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PrefixCache:
    """Keys and values of some prefixes, each by the values that they follow from.

    Args:
        dtype: ``default``, or ``int8`` or ``int4`` to keep them in fewer bits.
    """

    def __init__(self, dtype: str):
        self.dtype = dtype
        self.slots: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def find(self, key: torch.Tensor) -> list[torch.Tensor] | None:
        return next((kept for known, kept in self.slots if known.shape == key.shape and torch.equal(known, key)), None)

    def kept(self, pair: torch.Tensor) -> torch.Tensor:
        """Return what the cache gives back for keys and values."""
        if self.dtype == "default":
            return pair.clone()
        rows = pair.reshape(-1, pair.shape[-1])
        size = next(size for size in (256, 64, 16, 4) if rows.shape[1] % size == 0)
        if self.dtype == "int4":
            layout = quant_ops.TensorCoreConvRotW4A4Layout
            found = layout.quantize(rows, convrot_groupsize=size)
        else:
            layout = quant_ops.TensorWiseINT8Layout
            found = layout.quantize(rows, is_weight=True, per_channel=True, convrot=True, convrot_groupsize=size)
        return layout.dequantize(*found).reshape(pair.shape).to(pair.dtype)


class ZeroCenteredRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, **where: Any):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width, **where)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.to(x.device, torch.float32) + 1.0
        return F.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)


class TextProjection(nn.Module):
    def __init__(self, inside: int, width: int, eps: float, linear: Callable, **where: Any):
        super().__init__()
        self.text_norm = ZeroCenteredRMSNorm(inside, eps, **where)
        self.in_layer, self.out_layer = linear(inside, width), linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_layer(F.gelu(self.in_layer(self.text_norm(x)), approximate="tanh"))


class TimestepProjEmbeddings(nn.Module):
    def __init__(self, width: int, operations: Any, **where: Any):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(256, width, sample_proj_bias=False, operations=operations, **where)

    def forward(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.timestep_embedder(timestep_embedding(timestep.float(), 256).to(dtype))


class SwiGLUFeedForward(nn.Module):
    def __init__(self, width: int, inside: int, fused: bool, linear: Callable):
        super().__init__()
        self.fused, self.out = fused, linear(inside, width)
        if fused:
            self.gate_up = linear(width, 2 * inside)
        else:
            self.proj, self.gate_layer = linear(width, inside), linear(width, inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return ops.linear_input_act(self.out, self.gate_up(x), "swiglu")
        return self.out(F.silu(self.gate_layer(x)) * self.proj(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, head: int, eps: float, linear: Callable, norm: Callable):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (linear(width, heads * head) for _ in range(3))
        self.to_out = nn.ModuleList([linear(heads * head, width)])
        self.norm_q, self.norm_k = norm(head, eps=eps), norm(head, eps=eps)

    def forward(
        self, x: torch.Tensor, pe: torch.Tensor, attn_fn: Attend, prefix_len: int, transformer_options: dict
    ) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.to_q, self.to_k, self.to_v))
        q, k = self.norm_q(q), self.norm_k(k)
        for patch in transformer_options.get("patches", {}).get("attn1_patch", ()):
            options = {**transformer_options, "img_slice": [prefix_len, x.shape[1]]}
            q, k, v, pe = (t.transpose(1, 2) for t in (q, k, v, pe))
            changed = patch(q, k, v, pe=pe, attn_mask=None, extra_options=options)
            q, k, v, pe = (changed.get(name, own).transpose(1, 2)
                           for name, own in (("q", q), ("k", k), ("v", v), ("pe", pe)))  # fmt: skip
        return self.to_out[0](attn_fn(apply_rope1(q, pe), apply_rope1(k, pe), v))


def parts(x: torch.Tensor, rows: torch.Tensor, prefix: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tokens of prefix and picture, each with its rows: the last one is that of time zero."""
    return [(x[:, :prefix], rows[-1:].unsqueeze(1)), (x[:, prefix:], rows[:-1].unsqueeze(1))]


def normed(norm: nn.Module, x: torch.Tensor, scale: torch.Tensor, prefix: int) -> torch.Tensor:
    return torch.cat([norm(part) * (1 + own) for part, own in parts(x, scale, prefix)], 1)


def added(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, prefix: int) -> torch.Tensor:
    return x + torch.cat([part * own for part, own in parts(y, gate, prefix)], 1)


class QwenImage21TransformerBlock(nn.Module):
    def __init__(
        self, width: int, heads: int, head: int, ratio: int, eps: float, fused: bool, linear: Callable, norms: Any
    ):
        super().__init__()
        self.img_norm1, self.img_norm2 = (norms.LayerNorm(width, elementwise_affine=False, eps=eps) for _ in range(2))
        self.attn = Attention(width, heads, head, eps, linear, norms.RMSNorm)
        self.img_mlp = SwiGLUFeedForward(width, width * ratio, fused, linear)

    def forward(
        self, x: torch.Tensor, mod: Sequence[torch.Tensor], pe: torch.Tensor, attn_fn: Attend, prefix_len: int,
        transformer_options: dict,
    ) -> torch.Tensor:  # fmt: skip
        y = normed(self.img_norm1, x, mod[0], prefix_len)
        x = added(x, self.attn(y, pe, attn_fn, prefix_len, transformer_options), mod[1], prefix_len)
        x = added(x, self.img_mlp(normed(self.img_norm2, x, mod[2], prefix_len)), mod[3], prefix_len)
        return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


class LastLayer(nn.Module):
    def __init__(self, width: int, eps: float, linear: Callable, norms: Any):
        super().__init__()
        self.linear, self.norm = linear(width, width), norms.LayerNorm(width, eps, elementwise_affine=False)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * (1 + self.linear(F.silu(temb)).unsqueeze(1))


class QwenImage21Transformer2DModel(nn.Module):
    def __init__(
        self, in_channels: int = 64, out_channels: int = 64, num_layers: int = 32, attention_head_dim: int = 128,
        num_attention_heads: int = 32, context_in_dim: int = 4096, mlp_ratio: int = 3,
        axes_dims_rope: Sequence[int] = (16, 56, 56), eps: float = 1e-6, fused_mlp: bool = True,
        image_model: str | None = None, dtype: torch.dtype | None = None, device: Any = None, operations: Any = None,
    ):  # fmt: skip
        super().__init__()
        where = {"dtype": dtype, "device": device}
        width = num_attention_heads * attention_head_dim

        def linear(rows: int, columns: int) -> nn.Module:
            return operations.Linear(rows, columns, bias=False, **where)

        class Norms:
            """The norms of the operations, on this device."""

            @staticmethod
            def RMSNorm(*args: Any, **options: Any) -> nn.Module:
                return operations.RMSNorm(*args, **options, **where)

            @staticmethod
            def LayerNorm(*args: Any, **options: Any) -> nn.Module:
                return operations.LayerNorm(*args, **options, **where)

        self.dtype, self.out_channels, self.inner_dim = dtype, out_channels, width
        self.pe_embedder = EmbedND(dim=attention_head_dim, theta=10000, axes_dim=list(axes_dims_rope))
        self.time_text_embed = TimestepProjEmbeddings(width, operations, **where)
        self.txt_in = TextProjection(context_in_dim, width, eps, linear, **where)
        self.img_in = linear(in_channels, width)
        self.modulation = nn.Sequential(nn.SiLU(), linear(width, 4 * width))
        self.transformer_blocks = nn.ModuleList(
            QwenImage21TransformerBlock(
                width, num_attention_heads, attention_head_dim, mlp_ratio, eps, fused_mlp, linear, Norms)
            for _ in range(num_layers))  # fmt: skip
        self.norm_out = LastLayer(width, eps, linear, Norms)
        self.proj_out = linear(width, out_channels)
        self.prefix_cache: PrefixCache | None = None
        self.prefix_cache_enabled = False
        self.current_patcher: Any = None

    def reset_prefix_cache(self, enabled: bool) -> None:
        self.prefix_cache, self.prefix_cache_enabled = None, enabled

    def build_sequence(
        self, x: torch.Tensor, context: torch.Tensor, ref_latents: list[torch.Tensor], image_slots: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int, bool]]]:
        """Return all tokens, their rotary embeddings, and runs of them: first, end, and whether they are words."""
        words = self.txt_in(context)
        slots = [*image_slots, *[words.shape[1]] * len(ref_latents)][: len(ref_latents)]
        tokens, ids, runs, place, length = [], [], [], 0, 0

        def add(more: torch.Tensor, where: torch.Tensor, is_text: bool) -> None:
            nonlocal length
            tokens.append(more)
            ids.append(where)
            runs.append((length, length + more.shape[1], is_text))
            length += more.shape[1]

        for begin, end, image in zip([0, *slots], [*slots, words.shape[1]], [*ref_latents, x], strict=True):
            if end > begin:
                add(words[:, begin:end], torch.arange(place, place + end - begin).float()[:, None].expand(-1, 3), True)
                place += end - begin
            sides, own = image.shape[-2:], x.shape[-2:]
            down, across = (torch.arange(n).float() - (n - n // 2) + (n % 2 - m % 2) / 2
                            for n, m in zip(sides, own, strict=True))  # fmt: skip
            where = torch.stack([torch.full(sides, float(place)), down[:, None].expand(sides),
                                 across[None].expand(sides)], -1)  # fmt: skip
            add(self.img_in(image.flatten(2).transpose(1, 2)), where.flatten(0, 1), False)
            place += max(sides)
        pe = self.pe_embedder(torch.cat(ids).to(x.device).unsqueeze(0)).transpose(1, 2).contiguous()
        return torch.cat(tokens, 1), pe, runs

    def forward(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, ref_latents: Any = None,
        image_slots: Any = None, transformer_options: Any = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        options = {} if transformer_options is None else transformer_options
        wrappers = patcher_extension.get_all_wrappers(patcher_extension.WrappersMP.DIFFUSION_MODEL, options)
        executor = patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timestep, context, ref_latents, image_slots, options, **kwargs)

    def _forward(
        self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, ref_latents: Any = None,
        image_slots: Any = None, transformer_options: Any = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        options = {} if transformer_options is None else transformer_options
        references, slots, patches = list(ref_latents or ()), list(image_slots or ()), options.get("patches", {})
        h, pe, runs = self.build_sequence(x, context, references, slots)
        prefix = h.shape[1] - x.shape[2] * x.shape[3]
        for patch in patches.get("post_input", ()):
            changed = patch({"img": h, "pe": pe, "transformer_options": options})
            h, pe = changed["img"], changed.get("pe", pe)
        t = ((timesteps * 1000).to(x.dtype) / 1000).to(x.dtype)
        temb = self.time_text_embed(torch.cat([t, t.new_zeros(1)]), x.dtype)
        scale1, gate1, scale2, gate2 = self.modulation(temb).chunk(4, -1)
        mod = scale1, gate1.tanh(), scale2, gate2.tanh()
        replaced = options.get("patches_replace", {}).get("dit", {})
        hooked = replaced or any(patches.get(name) for name in ("post_input", "single_block", "attn1_patch"))
        kept = None if hooked else self._kept(x, context, references, slots, mod, h, pe, runs, options)
        if kept is not None:
            h, pe = h[:, prefix:], pe[:, prefix:]
        for i, block in enumerate(self.transformer_blocks):
            own = _all_before(runs, options) if kept is None else _after(kept[i], options)
            at = prefix if kept is None else 0

            def block_wrap(given: dict, block: nn.Module = block, own: Attend = own, at: int = at) -> dict:
                return {"img": block(given["img"], mod, given["pe"], own, at, given["transformer_options"])}

            given = {"img": h, "vec": temb, "pe": pe, "mod": mod, "attn_fn": own, "transformer_options": options}
            patch = replaced.get(("single_block", i))
            h = (block_wrap(given) if patch is None else patch(given, {"original_block": block_wrap}))["img"]
            for patch in patches.get("single_block", ()):
                h = patch({"img": h, "x": x, "block_index": i, "transformer_options": options})["img"]
        found = self.proj_out(self.norm_out(h if kept is not None else h[:, prefix:], temb[:-1]))
        return found.transpose(1, 2).reshape(x.shape[0], self.out_channels, *x.shape[2:])

    def _kept(
        self, x: torch.Tensor, context: torch.Tensor, references: list[torch.Tensor], slots: list[int], mod: Any,
        h: torch.Tensor, pe: torch.Tensor, runs: list, options: dict,
    ) -> list[torch.Tensor] | None:  # fmt: skip
        """Return keys and values of the prefix by block, computed where they are not known; None without a cache."""
        wanted, prefix = options.get("qwen_image21_cache", {}), runs[-1][0]
        if not self.prefix_cache_enabled or not prefix or wanted.get("device") == "off":
            return None
        numbers = [context.shape[1], *x.shape[-2:], *slots, *(side for r in references for side in r.shape)]
        head = torch.tensor(numbers, dtype=torch.float32).to(context.device).expand(context.shape[0], -1)
        key = torch.cat([head, *(t.float().flatten(1) for t in (context, *references))], 1)
        assert self.current_patcher is not None  # native asks it for free memory
        cache = self.prefix_cache = self.prefix_cache or PrefixCache(wanted.get("dtype", "default"))
        if (known := cache.find(key)) is not None:
            return known
        h, pe, made = h[:, :prefix], pe[:, :prefix], []
        for block in self.transformer_blocks:
            h = block(h, mod, pe, _all_before(runs[:-1], options, lambda kv: made.append(cache.kept(kv))), prefix,
                      options)  # fmt: skip
        cache.slots.append((key, made))
        return made


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict, mask: Any = None) -> torch.Tensor:
    flat = (t.flatten(2) for t in (q, k, v))
    return optimized_attention(*flat, q.shape[2], mask=mask, transformer_options=options)


def _all_before(runs: list, options: dict, kept: Callable[[torch.Tensor], Any] = lambda kv: None) -> Attend:
    """Return attention of words to what stands before them, and of pictures to all before their end."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kept(torch.stack([k, v], 1))
        found = []
        for begin, end, is_text in runs:
            # native's mask is of booleans, which ComfyUI's attention for CPUs would add as numbers
            mask = torch.full((end - begin, end), -torch.inf).to(q).triu(begin + 1) if is_text else None
            found.append(_attention(q[:, begin:end], k[:, :end], v[:, :end], options, mask))
        return torch.cat(found, 1)

    return attend


def _after(kept: torch.Tensor, options: dict) -> Attend:
    """Return attention of the picture to kept keys and values, and to its own."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = kept.unbind(1)
        return _attention(q, torch.cat([keys, k], 1), torch.cat([values, v], 1), options)

    return attend
