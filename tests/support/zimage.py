"""Tiny Z-Image networks and their calls, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sample
import comfy.sd
import torch
from comfy.ldm.lumina.model import NextDiT
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import RequestedSizes
from hybrid_trt.comfy_model.network import UNET_PREFIX, NativeNetwork
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.model_wrapper import patch_model
from patched import sampling_node
from small_networks import random_weights
from tiny_transformers import ZIMAGE, let_comfyui_load_zimage

CPU = torch.device("cpu")
WIDTH = ZIMAGE["cap_feat_dim"]


def network(
    dtype: torch.dtype = torch.float32, operations: type = comfy.ops.disable_weight_init, **changes: Any
) -> NativeNetwork:
    """A random network inside a real ComfyUI patcher; computes in float32."""
    model = torch.nn.Module()
    module = NextDiT(**{**ZIMAGE, **changes}, device=CPU, dtype=dtype, operations=operations)
    random_weights(module, dtype)
    for name, parameter in module.named_parameters():
        if "norm" in name or name == "cap_embedder.0.weight":
            parameter.data = (parameter.data.float() + 1).to(dtype)
        elif "pad_token" in name:
            parameter.data = (parameter.data.float() * 16).to(dtype)
    model.diffusion_model = module.eval().requires_grad_(False)
    return NativeNetwork(ModelPatcher(model, CPU, CPU), module, UNET_PREFIX, torch.float32, "zimage", Role.BACKBONE)


def call(height: int = 8, width: int = 8, batch: int = 1, tokens: int = 9, seed: int = 1) -> dict[str, Any]:
    """The arguments of a native call; latents' sizes, and the prompt's length."""
    generator = torch.Generator().manual_seed(seed)
    x, prompts = (torch.randn(shape, generator=generator) for shape in ((batch, 16, height, width),
                                                                        (batch, tokens, WIDTH)))
    timesteps = torch.rand(batch, generator=generator)
    return {"x": x, "timesteps": timesteps, "context": prompts, "num_tokens": tokens, "transformer_options": {}}


def load(file: Path) -> ModelPatcher:
    """The MODEL as ComfyUI's loader node gives it."""
    let_comfyui_load_zimage()
    return comfy.sd.load_diffusion_model(str(file))


def prompts(*tokens: int, batch: int = 1, seed: int = 1) -> list[torch.Tensor]:
    """Random prompts of some lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, length, WIDTH, generator=generator) for length in tokens]


def sample(
    model: ModelPatcher, positive: list, negative: list, cfg: float = 3.0, size: tuple[int, int] = (8, 6),
    batch: int = 1, steps: int = 4,
) -> torch.Tensor:  # fmt: skip
    """A latent sampled as KSampler does, with ComfyUI's conditionings."""
    noise = torch.randn(batch, 16, *size, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return comfy.sample.sample(model, noise, steps, cfg, "euler", "normal", positive, negative,
                                   torch.zeros_like(noise), seed=5, disable_pbar=True)


class Patched:
    """A model with its engine behind the sampler patch."""

    def __init__(self, native: ModelPatcher, library: Library, backend: str = "torch", any_weights: bool = False):
        self.native = native
        network = NativeNetwork.of_model(native, "zimage")
        profile = network.architecture().profile(RequestedSizes(64, 128, 256, 2))
        choice = EngineChoice(profile, backend=backend, replaceable=any_weights)
        self.handle = EngineHandle.look_up(network, choice, library, "engine")
        self.model = patch_model(native, self.handle)

    def sample(self, *args: Any, **options: Any) -> torch.Tensor:
        """One run, which the pack takes for an execution of a sampling node."""
        with sampling_node():
            return sample(self.model, *args, **options)

    @property
    def counts(self) -> tuple[int, int]:
        """Calls of the last run on the engine, and native."""
        return self.handle.stats.engine, self.handle.stats.native

    @property
    def encoded(self) -> int:
        """Number of times that prompts were encoded so far."""
        session = self.handle.session
        passes = session.live.passes if self.handle.choice.backend == "torch" else session._current.passes
        return passes.computed
