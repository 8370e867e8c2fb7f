"""A family for tests only: networks of no real model, with symbols, sizes and residuals of their own.

All that the pack needs to know of it is in this file, which a test adds to the families' path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers

from . import Role
from .calls import Binding, EngineCall, ResidualLayout, Unsupported
from .shapes import Dim, Examples, Picture, Profile, Range, RequestedSizes, Sizes, Symbol, TensorSpec, words_for

FEATURES, BLOCKS, PROMPT = 32, 4, 16
PIXELS = 8


class ToyNet(torch.nn.Module):
    """A backbone without downsampling: adds what its control's ``output`` list has, from the start on."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.first = torch.nn.Conv2d(4, FEATURES, 3, padding=1)
        self.prompt = torch.nn.Linear(PROMPT, FEATURES)
        self.time = torch.nn.Linear(1, FEATURES)
        self.blocks = torch.nn.ModuleList(torch.nn.Conv2d(FEATURES, FEATURES, 3, padding=1) for _ in range(BLOCKS))
        self.last = torch.nn.Conv2d(FEATURES, 4, 3, padding=1)

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor,
        guidance: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        control: dict | None = None,
        transformer_options: dict | None = None,
    ) -> torch.Tensor:
        options = transformer_options or {}
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
        executor = WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timestep, context, guidance, mask, control, options)

    def _forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor,
        guidance: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        control: dict | None = None,
        transformer_options: dict | None = None,
    ) -> torch.Tensor:
        words = self.prompt(context.mean(1)) + self.time(timestep[:, None].to(x.dtype) / 1000)
        h = self.first(x) + words[..., None, None]
        residuals = (control or {}).get("output", [])
        for i, block in enumerate(self.blocks):
            h = h + block(torch.nn.functional.silu(h))
            if i < len(residuals) and residuals[i] is not None:
                h = h + residuals[i]
        return self.last(torch.nn.functional.silu(h))


class ToyControl(torch.nn.Module):
    """A ControlNet of which each residual serves two blocks: the same tensor stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.hint = torch.nn.Conv2d(3, FEATURES, PIXELS, stride=PIXELS)
        self.first = torch.nn.Conv2d(4, FEATURES, 3, padding=1)
        self.residuals = torch.nn.ModuleList(
            torch.nn.Conv2d(FEATURES, FEATURES, 3, padding=1) for _ in range(BLOCKS // 2)
        )

    def forward(
        self, x: torch.Tensor, hint: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, **_: Any
    ) -> dict[str, list[torch.Tensor]]:
        h = torch.nn.functional.silu(self.first(x) + self.hint(hint))
        found = [residual(h) for residual in self.residuals]
        return {"output": [found[i // 2] for i in range(BLOCKS)]}


def _image(name: str, channels: int, optional: bool = False, up: int = 1, batch: str = "N") -> TensorSpec:
    sample = "unit" if name == "hint" else "normal"
    dims = (Dim(batch), channels, Dim("R", up=up), Dim("C", up=up))
    return TensorSpec(name, "float32", dims, optional, sample)


class ToySizes:
    """Images, rows and columns of the latent, words of the prompt, pictures of the hint."""

    sizes = Sizes("Toy", 64, 128, 256)
    batch = "N"
    per_step = True
    symbols = {"N": Symbol("images"), "R": Symbol("rows", PIXELS, "px"), "C": Symbol("columns", PIXELS, "px"),
               "L": Symbol("words", of_picture=False), "P": Symbol("pictures", of_picture=False)}  # fmt: skip

    def profile(self, asked: RequestedSizes) -> Profile:
        asked.check()
        low, best, high = asked.min_size or 64, asked.opt_size or 128, asked.max_size or 256
        size, many = Range(low // PIXELS, best // PIXELS, high // PIXELS), 2 * (asked.max_images or 1)
        return Profile({"N": Range(1, 2, many), "R": size, "C": size, "L": Range(1, 77, 308), "P": Range(1, 1, many)})

    def examples(self, profile: Profile) -> Examples:
        small = profile.clamp({"N": 2, "R": 9, "C": 11, "L": 5, "P": 1})
        opt, most = profile.sizes("opt"), profile.sizes("max")
        return Examples(small, [small, opt], [opt], [small, opt, most], [small, opt])

    def words(self, profile: Profile) -> str:
        return words_for(profile, self.symbols)

    def calls(self, profile: Profile, picture: Picture) -> list[dict[str, int]]:
        size = {"R": picture.height // PIXELS, "C": picture.width // PIXELS}
        usual = profile.sizes("opt")
        return [{s: {**size, "N": batch}.get(s, n) for s, n in usual.items()} for batch in picture.batches]

    def call_words(self, call: Mapping[str, int]) -> str:
        return ", ".join(f"{self.symbols[s].word} {self.symbols[s].text(n)}" for s, n in call.items())

    def fuse_layers(self, module: torch.nn.Module) -> list:
        return []

    def passes(self, module: torch.nn.Module) -> list:
        return []

    def engine_inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        return self.inputs(module, dtype)


class ToyBackbone(ToySizes):
    name = "toy"
    role = Role.BACKBONE
    arguments = ("x", "timestep", "context", "guidance", "mask", "control", "transformer_options")
    layout = ResidualLayout({"output": [f"control_{i}" for i in range(BLOCKS)]}, from_end=False)

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is ToyNet

    def inputs(self, module: ToyNet, dtype: str) -> list[TensorSpec]:
        words = TensorSpec("context", dtype, (Dim("N"), Dim("L"), PROMPT))
        time = TensorSpec("timestep", "float32", (Dim("N"),), sample="timestep")
        residuals = [_image(f"control_{i}", FEATURES, optional=True) for i in range(BLOCKS)]
        return [_image("x", 4), time, words, *residuals]

    def outputs(self, module: ToyNet, dtype: str) -> list[TensorSpec]:
        return [_image("out", 4)]

    def function(self, module: ToyNet) -> torch.nn.Module:
        return _Backbone(module)

    def binding(self, module: ToyNet) -> Binding:
        return self._bind

    def _bind(self, call: Mapping[str, Any]) -> EngineCall:
        if call.get("guidance") is not None or call.get("mask") is not None:
            raise Unsupported("guidance or a mask")
        x = call["x"]
        inputs = {name: call[name] for name in ("x", "timestep", "context")}
        inputs |= self.layout.take(call.get("control"), x.shape[0])
        return EngineCall(inputs, lambda outputs: outputs["out"].to(x.device, x.dtype))


class ToyControlNet(ToySizes):
    name = "toy_controlnet"
    role = Role.CONTROLNET
    arguments = ("x", "hint", "timesteps", "context")
    layout = ResidualLayout({"output": [f"residual_{i // 2}" for i in range(BLOCKS)]}, from_end=False)

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is ToyControl

    def inputs(self, module: ToyControl, dtype: str) -> list[TensorSpec]:
        return [_image("x", 4), _image("hint", 3, up=PIXELS, batch="P")]

    def outputs(self, module: ToyControl, dtype: str) -> list[TensorSpec]:
        return [_image(f"residual_{i}", FEATURES) for i in range(BLOCKS // 2)]

    def function(self, module: ToyControl) -> torch.nn.Module:
        return _ControlNet(module)

    def binding(self, module: ToyControl) -> Binding:
        return self._bind

    def _bind(self, call: Mapping[str, Any]) -> EngineCall:
        x = call["x"]
        return EngineCall({"x": x, "hint": call["hint"]}, lambda outputs: self.layout.give(outputs, x))


class _Backbone(torch.nn.Module):
    def __init__(self, net: ToyNet):
        super().__init__()
        self.net = net

    def forward(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, *residuals: torch.Tensor
    ) -> tuple[torch.Tensor]:
        return (self.net._forward(x, timestep, context, control={"output": list(residuals)}),)


class _ControlNet(torch.nn.Module):
    def __init__(self, net: ToyControl):
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, hint: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.net(x, hint, None, None)["output"][::2])


FILE_MARKS = ("toy.",)

ARCHITECTURES = (ToyBackbone(), ToyControlNet())
