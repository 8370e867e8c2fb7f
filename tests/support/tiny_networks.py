"""Tiny networks of ComfyUI's on the CPU, of families that the pack serves and of others, each with a call of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.ops
import torch
from comfy.cldm.cldm import ControlNet
from comfy.ldm.flux.model import Flux
from comfy.ldm.lumina.model import NextDiT
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.ldm.wan.model import WanModel


@dataclass(frozen=True)
class Tiny:
    """A class of networks, settings for a tiny one, and the shapes of what it is called with."""

    made_by: Callable[..., torch.nn.Module]
    settings: dict[str, Any]
    given: dict[str, tuple[int, ...]]

    def network(self, operations: type = comfy.ops.disable_weight_init, **changes: Any) -> torch.nn.Module:
        """One with weights that depend on their shapes alone."""
        settings = {n: list(v) if isinstance(v, list) else v for n, v in (self.settings | changes).items()}
        made = self.made_by(**settings, operations=operations, dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(1)
        for name, parameter in sorted(made.named_parameters()):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + 0.5 * name.endswith(
                "norm.weight"
            )
        return made.eval().requires_grad_(False)

    def call(self, network: torch.nn.Module) -> torch.Tensor:
        """The result of a call that is always the same."""
        generator = torch.Generator().manual_seed(2)
        given: dict[str, Any] = {n: torch.randn(shape, generator=generator) for n, shape in self.given.items()}
        times = "timesteps" if self.made_by in (NextDiT, UNetModel, ControlNet) else "timestep"
        given[times] = torch.tensor([0.3])
        if self.made_by is NextDiT:
            given["num_tokens"] = given["context"].shape[1]
        result = network(**given)
        return result if isinstance(result, torch.Tensor) else torch.cat([r.flatten() for r in result["output"]])


_LDM = {"image_size": 32, "in_channels": 4, "model_channels": 32, "num_heads": 4, "context_dim": 16,
        "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [1, 1], "transformer_depth_middle": 1,
        "use_spatial_transformer": True, "legacy": False}  # fmt: skip
_IMAGE, _VIDEO, _CONTEXT = (1, 4, 8, 8), (1, 4, 1, 8, 8), (1, 6, 16)

TINY = {
    "unet": Tiny(
        UNetModel, _LDM | {"out_channels": 4, "transformer_depth_output": [1] * 4}, {"x": _IMAGE, "context": _CONTEXT}
    ),
    "unet of SDXL's kind": Tiny(
        UNetModel,
        _LDM | {"out_channels": 4, "transformer_depth_output": [1] * 4, "use_linear_in_transformer": True,
                "num_head_channels": 8, "num_heads": -1, "num_classes": "sequential", "adm_in_channels": 16},
        {"x": _IMAGE, "context": _CONTEXT, "y": (1, 16)},
    ),
    "controlnet": Tiny(
        ControlNet, _LDM | {"hint_channels": 3}, {"x": _IMAGE, "context": _CONTEXT, "hint": (1, 3, 64, 64)}
    ),
    "NextDiT": Tiny(
        NextDiT,
        {"dim": 48, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "multiple_of": 8,
         "cap_feat_dim": 16, "axes_dims": (8, 8, 8), "axes_lens": (16, 16, 16), "qk_norm": True},
        {"x": _IMAGE, "context": _CONTEXT},
    ),
    "Flux": Tiny(
        Flux,
        {"in_channels": 4, "out_channels": 4, "vec_in_dim": 16, "context_in_dim": 16, "hidden_size": 48,
         "mlp_ratio": 2.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "axes_dim": [8, 8, 8],
         "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": []},
        {"x": _IMAGE, "context": _CONTEXT, "y": (1, 16), "guidance": (1,)},
    ),
    "WAN": Tiny(
        WanModel,
        {"dim": 48, "ffn_dim": 64, "freq_dim": 16, "text_dim": 16, "text_len": 8, "in_dim": 4, "out_dim": 4,
         "num_heads": 2, "num_layers": 1},
        {"x": _VIDEO, "context": (1, 8, 16)},
    ),
    "Qwen image": Tiny(
        QwenImageTransformer2DModel,
        {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 1, "attention_head_dim": 24,
         "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (8, 8, 8)},
        {"x": _VIDEO, "context": _CONTEXT},
    ),
}  # fmt: skip

SAME_WEIGHTS: dict[str, list[dict[str, Any]]] = {
    "unet": [{"num_heads": 2}],
    "unet of SDXL's kind": [{"num_head_channels": 16}],
    "controlnet": [{"num_heads": 2}],
    "NextDiT": [{"rope_theta": 256.0}, {"time_scale": 1000.0}, {"axes_dims": (4, 10, 10)}, {"norm_eps": 0.1},
                {"pad_tokens_multiple": 4}, {"qk_norm": False},
                {"n_heads": 4, "n_kv_heads": 4, "axes_dims": (4, 4, 4)}],
    "Flux": [{"theta": 256}, {"axes_dim": [4, 10, 10]}, {"txt_ids_dims": [1]}, {"num_heads": 4, "axes_dim": [4, 4, 4]}],
    "WAN": [{"eps": 0.1}, {"num_heads": 4}, {"model_type": "i2v"}],
    "Qwen image": [{"axes_dims_rope": (4, 10, 10)}],
}  # fmt: skip
"""Other arguments of constructors, with which a network computes something else, mostly with the same weights."""
