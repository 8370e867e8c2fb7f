"""Small random Flux networks inside real ComfyUI patchers, and calls of them as ComfyUI's sampler makes them."""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch
from comfy.ldm.flux.controlnet import ControlNetFlux
from comfy.ldm.flux.model import Flux
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures import Role
from hybrid_trt.comfy_model.network import UNET_PREFIX, NativeNetwork
from small_networks import CPU

FLUX1: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 24, "context_in_dim": 48, "hidden_size": 64, "mlp_ratio": 2.0,
    "num_heads": 2, "depth": 2, "depth_single_blocks": 3, "axes_dim": [8, 12, 12], "theta": 10000, "patch_size": 2,
    "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip
"""As Flux.1 dev."""
FLUX2 = FLUX1 | {
    "in_channels": 32, "out_channels": 32, "vec_in_dim": None, "axes_dim": [8] * 4, "theta": 2000, "patch_size": 1,
    "qkv_bias": False, "txt_ids_dims": [3], "global_modulation": True, "mlp_silu_act": True, "ops_bias": False,
    "default_ref_method": "index", "ref_index_scale": 10.0,
}  # fmt: skip
LAYOUTS = {
    "dev": FLUX1,
    "schnell": FLUX1 | {"guidance_embed": False},
    "fill": FLUX1 | {"in_channels": 96},
    "ovis": FLUX1 | {"yak_mlp": True, "txt_norm": True, "vec_in_dim": None, "guidance_embed": False,
                     "txt_ids_dims": [1, 2]},
    "flux2": FLUX2,
    "klein": FLUX2 | {"guidance_embed": False},
}  # fmt: skip


def random_weights(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Draw weights that keep activations near one."""
    generator = torch.Generator().manual_seed(1)
    for name, p in module.named_parameters():
        fan_in = p[0].numel() if p.ndim > 1 else 100
        p.data = (torch.randn(p.shape, generator=generator) / fan_in**0.5 + name.endswith("norm.weight")).to(dtype)


def network(layout: str, dtype: torch.dtype = torch.float32, **other: Any) -> NativeNetwork:
    """A random network of a layout; ``other`` replaces some of its settings."""
    model = torch.nn.Module()
    settings = LAYOUTS[layout] | other
    model.diffusion_model = Flux(**settings, dtype=dtype, device=CPU, operations=comfy.ops.disable_weight_init)
    random_weights(model.diffusion_model, dtype)
    model.eval().requires_grad_(False)
    return NativeNetwork(ModelPatcher(model, CPU, CPU), model.diffusion_model, UNET_PREFIX, dtype, layout,
                         Role.BACKBONE)  # fmt: skip


CONTROLS: dict[str, dict[str, Any]] = {
    "instantx": {"depth": 1, "depth_single_blocks": 2},
    "without_singles": {"depth": 2, "depth_single_blocks": 0, "guidance_embed": False},
    "union": {"depth": 2, "depth_single_blocks": 0, "num_union_modes": 7},
    "six_for_19": {"depth": 6, "depth_single_blocks": 0},
    "inpaint": {"depth": 1, "depth_single_blocks": 0, "control_latent_channels": 17},
    "xlabs": {"depth": 2, "depth_single_blocks": 0, "latent_input": False, "control_latent_channels": None},
    "mistoline": {"depth": 3, "depth_single_blocks": 2, "latent_input": False, "control_latent_channels": None,
                  "mistoline": True},
}  # fmt: skip
"""Layouts of ControlNets as they differ from Flux.1's model. The last two take pixels, the others a latent.

*six_for_19* is Union Pro 2: each of five residuals acts on four blocks, and nothing is left for the sixth.
"""
PIXELS = ("xlabs", "mistoline")


def control_network(layout: str, dtype: torch.dtype = torch.float32) -> NativeNetwork:
    """A random ControlNet of a layout for ``FLUX1``, whose latent has 16 channels. Hint encoders are loud."""
    config = FLUX1 | {"latent_input": True, "control_latent_channels": 16} | CONTROLS[layout]
    module = ControlNetFlux(**config, dtype=dtype, device=CPU, operations=comfy.ops.disable_weight_init)
    random_weights(module, dtype)
    for name, p in module.named_parameters():
        p.data *= 2.0 if name.startswith(("input_hint_block", "input_cond_block")) else 1.0
    module.eval().requires_grad_(False)
    return NativeNetwork(ModelPatcher(module, CPU, CPU), module, "", dtype, layout, Role.CONTROLNET)


def control_call(net: NativeNetwork, hints: int = 1, **changes: Any) -> dict[str, Any]:
    """Random arguments of a native ControlNet's call; see ``call``."""
    given, types = call(net, **{name: v for name, v in changes.items() if name != "control_type"}), {}
    channels = net.module.pos_embed_input.in_features // 4
    generator = torch.Generator().manual_seed(9)
    height, width = given["x"].shape[2:]
    if net.module.latent_input:
        hint = torch.randn(hints, channels, height, width, generator=generator).to(net.dtype)
    else:
        hint = torch.rand(hints, 3, 8 * height, 8 * width, generator=generator).to(net.dtype)
    if "control_type" in changes:
        types["control_type"] = changes["control_type"]
    timesteps = given.pop("timestep").to(net.dtype)
    return {**given, "timesteps": timesteps, "hint": hint, **types}


def call(net: NativeNetwork, size: tuple[int, int] = (12, 8), batch: int = 1, prompt: int = 9, seed: int = 1,
         references: tuple[tuple[int, int], ...] = (), **more: Any) -> dict[str, Any]:
    """Random arguments of a native call by name; ``size`` is that of the latent: height, width."""
    generator, params = torch.Generator().manual_seed(seed), net.module.params

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(net.dtype)

    found = {
        "x": draw(batch, params.in_channels, *size),
        "timestep": torch.rand(batch, generator=generator),
        "context": draw(batch, prompt, params.context_in_dim),
    }
    if params.vec_in_dim is not None:
        found["y"] = draw(batch, params.vec_in_dim)
    if params.guidance_embed:
        found["guidance"] = (1 + 3 * torch.rand(batch, generator=generator)).to(net.dtype)
    if references:
        found["ref_latents"] = [draw(batch, params.in_channels, *one) for one in references]
    return found | more


def residuals(net: NativeNetwork, tokens: int, doubles: str, singles: str, batch: int = 1) -> dict[str, list]:
    """A control whose residual is the same wherever a letter comes again, and none where there is a dot."""
    generator = torch.Generator().manual_seed(5)
    drawn = {letter: torch.randn(batch, tokens, net.module.hidden_size, generator=generator).to(net.dtype)
             for letter in sorted({*doubles, *singles} - {"."})}  # fmt: skip
    return {"input": [*map(drawn.get, doubles)], "output": [*map(drawn.get, singles)]}
