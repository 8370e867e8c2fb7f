"""A family for tests only: a transformer on tokens of no real model, with symbols, sizes and residuals of its own.

All that the pack needs to know of it is in this file, which a test adds to the families' path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from .. import Role
from ..calls import Binding, EngineCall, ResidualLayout, Unsupported
from ..shapes import Dim, Examples, Picture, Profile, Range, RequestedSizes, Sizes, Symbol, TensorSpec, words_for

FEATURES, HEADS, BLOCKS, PROMPT, CHANNELS = 32, 2, 4, 16, 4
HEAD = FEATURES // HEADS
PATCH = 2
PIXELS = 8 * PATCH
"""Pixels per token."""


def to_tokens(x: torch.Tensor) -> torch.Tensor:
    """(images, channels, height, width) -> (images, rows * columns, channels * 2 * 2)."""
    patches = pad_to_patch_size(x, (PATCH, PATCH)).unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def to_image(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of ``to_tokens``, without what was padded."""
    height, width = like.shape[2:]
    patches = tokens.unflatten(1, (math.ceil(height / PATCH), -1)).unflatten(3, (CHANNELS, PATCH, PATCH))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)[..., :height, :width]


def rotary(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Cosines, then sines of each token's place: (rows, columns, ``HEAD``)."""
    steps = 100.0 ** -torch.linspace(0, 1, HEAD // 4, device=device)
    down, across = (torch.arange(n, device=device)[:, None] * steps for n in (rows, columns))
    angles = torch.cat([down[:, None].expand(-1, columns, -1), across[None].expand(rows, -1, -1)], -1)
    return torch.cat([angles.cos(), angles.sin()], -1)


def _of(x: torch.Tensor, embeddings: Callable[..., torch.Tensor]) -> torch.Tensor:
    return embeddings(*(math.ceil(side / PATCH) for side in x.shape[2:]), x.device)


class ToyBlock(torch.nn.Module):
    """Attention of prompt and image together, the image's tokens turned by their places; then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(FEATURES) for _ in range(2))
        self.qkv = torch.nn.Linear(FEATURES, 3 * FEATURES)
        self.proj = torch.nn.Linear(FEATURES, FEATURES)
        self.mlp = torch.nn.ModuleList([torch.nn.Linear(FEATURES, 64), torch.nn.Linear(64, FEATURES)])

    def forward(self, h: torch.Tensor, prompt: int, pe: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](h)).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(self._turned(q, prompt, pe), self._turned(k, prompt, pe), v)
        h = h + self.proj(attended.transpose(1, 2).flatten(2))
        return h + self.mlp[1](gelu(self.mlp[0](self.norms[1](h))))

    def _turned(self, t: torch.Tensor, prompt: int, pe: torch.Tensor) -> torch.Tensor:
        cos, sin = pe.flatten(0, 1).to(t.dtype).chunk(2, -1)
        a, b = t[:, :, prompt:].chunk(2, -1)
        return torch.cat([t[:, :, :prompt], torch.cat([a * cos - b * sin, a * sin + b * cos], -1)], 2)


class ToyNet(torch.nn.Module):
    """Adds what its control's lists have to the image's tokens, from the start on: ``input``, then ``output``.

    It embeds its timestep in float32, whatever the rest computes in.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype
        self.image = torch.nn.Linear(CHANNELS * PATCH * PATCH, FEATURES)
        self.prompt = torch.nn.Linear(PROMPT, FEATURES)
        self.blocks = torch.nn.ModuleList(ToyBlock() for _ in range(BLOCKS))
        self.last = torch.nn.Linear(FEATURES, CHANNELS * PATCH * PATCH)
        self.to(dtype)
        self.time = torch.nn.Linear(16, FEATURES)
        self.register_buffer("frequencies", torch.linspace(1, 9, 8), persistent=False)

    def forward(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, guidance: torch.Tensor | None = None,
        mask: torch.Tensor | None = None, control: dict | None = None, transformer_options: dict | None = None,
    ) -> torch.Tensor:  # fmt: skip
        options = transformer_options or {}
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
        executor = WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timestep, context, guidance, mask, control, options)

    def _forward(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, guidance: torch.Tensor | None = None,
        mask: torch.Tensor | None = None, control: dict | None = None, transformer_options: dict | None = None,
    ) -> torch.Tensor:  # fmt: skip
        lists = [(control or {}).get(name) or [] for name in ("input", "output")]
        residuals = [one for found in lists for one in [*found, None, None][: BLOCKS // 2]]
        return to_image(self.on_tokens(to_tokens(x), context, timestep, _of(x, rotary), residuals), x)

    def on_tokens(
        self, image: torch.Tensor, context: torch.Tensor, timestep: torch.Tensor, pe: torch.Tensor, residuals: list
    ) -> torch.Tensor:
        """The transformer itself."""
        angles = timestep[:, None].float() * self.frequencies
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1)).to(image.dtype)
        prompt = context.shape[1]
        h = torch.cat([self.prompt(context), self.image(image)], 1) + time[:, None]
        for block, residual in zip(self.blocks, residuals, strict=True):
            h = block(h, prompt, pe)
            if residual is not None:
                h = torch.cat([h[:, :prompt], h[:, prompt:] + residual.to(h.dtype)], 1)
        return self.last(silu(h[:, prompt:]))


class ToyControl(torch.nn.Module):
    """A ControlNet of which each residual serves two blocks: the same tensor stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.hint = torch.nn.Conv2d(3, FEATURES, PIXELS, stride=PIXELS)
        self.image = torch.nn.Linear(CHANNELS * PATCH * PATCH, FEATURES)
        self.residuals = torch.nn.ModuleList(torch.nn.Linear(FEATURES, FEATURES) for _ in range(BLOCKS // 2))

    def forward(
        self, x: torch.Tensor, hint: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, **_: Any
    ) -> dict[str, list[torch.Tensor]]:
        found = self.on_tokens(to_tokens(x), pad_to_patch_size(hint, (PIXELS, PIXELS)))
        return {name: [residual] * (BLOCKS // 2) for name, residual in zip(("input", "output"), found, strict=True)}

    def on_tokens(self, image: torch.Tensor, hint: torch.Tensor) -> list[torch.Tensor]:
        """The network itself."""
        h = silu(self.image(image) + self.hint(hint).flatten(2).transpose(1, 2))
        return [residual(h) for residual in self.residuals]


def _tokens(name: str, dtype: str, width: int, optional: bool = False) -> TensorSpec:
    return TensorSpec(name, dtype, (Dim("N"), Dim("R") * Dim("C"), width), optional)


class ToySizes:
    """Images, rows and columns of tokens, words of the prompt, pictures of the hint."""

    sizes = Sizes("Toy", 64, 128, 256)
    batch, prompt = "N", "L"
    free = {}
    halved = ("N",)
    per_step = True
    symbols = {"N": Symbol("images"), "R": Symbol("rows", PIXELS, "px"), "C": Symbol("columns", PIXELS, "px"),
               "L": Symbol("words", of_picture=False), "P": Symbol("pictures", of_picture=False)}  # fmt: skip

    def profile(self, asked: RequestedSizes) -> Profile:
        asked.check()
        low, best, high = asked.min_size or 64, asked.opt_size or 128, asked.max_size or 256
        size, many = Range(low // PIXELS, best // PIXELS, high // PIXELS), 2 * (asked.max_images or 1)
        return Profile({"N": Range(1, 2, many), "R": size, "C": size, "L": Range(1, 77, 308), "P": Range(1, 1, many)})

    def examples(self, profile: Profile) -> Examples:
        small = profile.clamp({"N": 2, "R": 5, "C": 7, "L": 5, "P": 1})
        opt, most = profile.sizes("opt"), profile.sizes("max")
        return Examples(small, [small, opt], opt, [small, opt, most])

    def words(self, profile: Profile) -> str:
        return words_for(profile, self.symbols)

    def calls(self, profile: Profile, picture: Picture) -> list[dict[str, int]]:
        size = {"R": math.ceil(picture.height / PIXELS), "C": math.ceil(picture.width / PIXELS)}
        usual = profile.sizes("opt")
        return [{s: {**size, "N": batch}.get(s, n) for s, n in usual.items()} for batch in picture.batches]

    def call_words(self, call: Mapping[str, int]) -> str:
        return ", ".join(f"{self.symbols[s].word} {self.symbols[s].text(n)}" for s, n in call.items())

    def passes(self, module: torch.nn.Module) -> list:
        return []

    def engine_inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        return self.inputs(module, dtype)


class ToyBackbone(ToySizes):
    name = "toy"
    role = Role.BACKBONE
    arguments = ("x", "timestep", "context", "guidance", "mask", "control", "transformer_options")
    layout = ResidualLayout({"input": ["control_0", "control_1"], "output": ["control_2", "control_3"]}, from_end=False)

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is ToyNet

    def inputs(self, module: ToyNet, dtype: str) -> list[TensorSpec]:
        words = TensorSpec("context", dtype, (Dim("N"), Dim("L"), PROMPT))
        time = TensorSpec("timestep", "float32", (Dim("N"),), sample="sigma")
        pe = TensorSpec("pe", "float32", (Dim("R"), Dim("C"), HEAD), steady=True)
        residuals = [_tokens(f"control_{i}", dtype, FEATURES, optional=True) for i in range(BLOCKS)]
        return [_tokens("image", dtype, CHANNELS * PATCH * PATCH), words, time, pe, *residuals]

    def outputs(self, module: ToyNet, dtype: str) -> list[TensorSpec]:
        return [_tokens("out", dtype, CHANNELS * PATCH * PATCH)]

    def function(self, module: ToyNet) -> torch.nn.Module:
        return _OnTokens(module)

    def binding(self, module: ToyNet) -> Binding:
        return partial(self._bind, lru_cache(4)(rotary))

    def _bind(self, embeddings: Callable[..., torch.Tensor], call: Mapping[str, Any]) -> EngineCall:
        if call.get("guidance") is not None or call.get("mask") is not None:
            raise Unsupported("guidance or a mask")
        x = call["x"]
        inputs = {"image": to_tokens(x), "context": call["context"], "timestep": call["timestep"]}
        inputs["pe"] = _of(x, embeddings)
        inputs |= self.layout.take(call.get("control"), x.shape[0])
        return EngineCall(inputs, lambda outputs: to_image(outputs["out"], x).to(x.device, x.dtype))


class ToyControlNet(ToySizes):
    name = "toy_controlnet"
    role = Role.CONTROLNET
    arguments = ("x", "hint", "timesteps", "context")
    layout = ResidualLayout({"input": ["residual_0"] * 2, "output": ["residual_1"] * 2}, from_end=False)

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is ToyControl

    def inputs(self, module: ToyControl, dtype: str) -> list[TensorSpec]:
        hint = (Dim("P"), 3, Dim("R", up=PIXELS), Dim("C", up=PIXELS))
        return [_tokens("image", dtype, CHANNELS * PATCH * PATCH), TensorSpec("hint", dtype, hint, sample="unit")]

    def outputs(self, module: ToyControl, dtype: str) -> list[TensorSpec]:
        return [_tokens(f"residual_{i}", dtype, FEATURES) for i in range(BLOCKS // 2)]

    def function(self, module: ToyControl) -> torch.nn.Module:
        return _OnTokens(module)

    def binding(self, module: ToyControl) -> Binding:
        return self._bind

    def _bind(self, call: Mapping[str, Any]) -> EngineCall:
        x, hint = call["x"], pad_to_patch_size(call["hint"], (PIXELS, PIXELS))
        return EngineCall({"image": to_tokens(x), "hint": hint}, lambda outputs: self.layout.give(outputs, x))


class _OnTokens(torch.nn.Module):
    def __init__(self, net: ToyNet | ToyControl):
        super().__init__()
        self.net = net

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if isinstance(self.net, ToyControl):
            return tuple(self.net.on_tokens(*given))
        return (self.net.on_tokens(*given[:4], list(given[4:])),)


FILE_MARKS = ("toy.",)

ARCHITECTURES = (ToyBackbone(), ToyControlNet())
