"""Calls and prompts of transformers on tokens, natively and through engines, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import comfy.sample
import token_networks
import torch
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures.shapes import Profile, RequestedSizes
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.model_wrapper import patch_model
from patched import sampling_node

Size = tuple[int, int]


@dataclass(frozen=True)
class Call:
    """A call of a network: batch, sides of the latent, tokens of the prompt, sides and method of references."""

    batch: int = 1
    sides: Size = (8, 6)
    words: int = 9
    references: tuple[Size, ...] = ()
    method: str | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def drawn(self, width: int, seed: int = 1) -> dict[str, Any]:
        """Its arguments by name; ``width`` is that of a token of the prompt."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        call = {"x": random(self.batch, 16, 1, *self.sides), "timesteps": torch.rand(self.batch, generator=generator),
                "context": random(self.batch, self.words, width)}  # fmt: skip
        if self.references:
            call["ref_latents"] = [random(self.batch, 16, 1, *one) for one in self.references]
        if self.method:
            call["ref_latents_method"] = self.method
        return call | self.more


def network_of(models: Mapping[str, Path], file: str, dtype: torch.dtype | None = None) -> NativeNetwork:
    return NativeNetwork.of_model(token_networks.load(str(models[file]), dtype), file)


def profile_of(network: NativeNetwork) -> Profile:
    return network.architecture().profile(RequestedSizes(32, 64, 256, 2, 128))


def engine_of(network: NativeNetwork, folder: Path) -> Engine:
    """An engine of ONNX Runtime."""
    order = BuildOrder(network, "float32", profile_of(network), backends()["onnxruntime"])
    return build_engine(order, Library([folder]), lambda *_: None, run=run_here)


def sample(
    model: ModelPatcher, width: int, size: Size = (8, 6), words: tuple[int, int] = (9, 30), cfg: float = 3.0,
    references: list[Size] | None = None, method: str | None = None, **entries: Any,
) -> torch.Tensor:  # fmt: skip
    """A latent as KSampler samples it in three steps; ``entries`` are further ones of both conditionings."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    extras = {"reference_latents": [drawn(1, 16, 1, *one) for one in references]} if references else {}
    extras |= {"reference_latents_method": method} if method else {}
    positive, negative = ([[drawn(1, count, width), {**extras, **entries}]] for count in words)
    noise = drawn(1, 16, 1, *size)
    with torch.inference_mode():
        return comfy.sample.sample(
            model, noise, 3, cfg, "euler", "simple", positive, negative, torch.zeros_like(noise), seed=7,
            disable_pbar=True)  # fmt: skip


class Patched:
    """A network's model with an engine behind the sampler patch."""

    def __init__(self, network: NativeNetwork, folder: Path, backend: str, any_weights: bool = False,
                 profile: Profile | None = None):
        choice = EngineChoice(profile or profile_of(network), backend=backend, replaceable=any_weights)
        self.handle = EngineHandle.look_up(network, choice, Library([folder]), f"{backend} in {folder}")
        self.model = patch_model(network.patcher, self.handle)

    def sample(self, width: int, **options: Any) -> torch.Tensor:
        with sampling_node():
            return sample(self.model, width, **options)

    @property
    def counts(self) -> tuple[int, int]:
        """Calls of the last run on the engine, and native."""
        return self.handle.stats.engine, self.handle.stats.native


def uneven(found: torch.Tensor) -> torch.Tensor:
    """Change features unevenly: a norm behind them does not undo it."""
    return found * torch.linspace(0.5, 1.5, found.shape[-1])


def replace_attention(model: ModelPatcher) -> None:
    """Have all layers compute another attention."""
    model.model_options["transformer_options"]["optimized_attention_override"] = (
        lambda native, *args, **kwargs: uneven(native(*args, **kwargs)))  # fmt: skip


def replace_block(model: ModelPatcher, kind: str = "double_block") -> None:
    """Have the first block of a kind change its picture."""
    model.set_model_patch_replace(lambda given, more: {
        **(out := more["original_block"](given)), "img": uneven(out["img"])}, "dit", kind, 0)  # fmt: skip
