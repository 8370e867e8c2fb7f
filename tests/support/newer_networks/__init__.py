"""Networks of newer ComfyUI versions for the pinned one: stand-ins under native's names, for tests alone.

``install`` leaves a ComfyUI alone that has them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

PACKAGE = "comfy.ldm.qwen_image21"
CHANNELS = 64


def install() -> None:
    """Let this process's ComfyUI load Qwen-Image 2.1."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return
    from comfy import model_detection, supported_models

    sys.path.append(str(Path(__file__).with_name("importable")))  # ``comfy`` may lie in several folders
    importlib.invalidate_caches()
    network = importlib.import_module(f"{PACKAGE}.model").QwenImage21Transformer2DModel
    own = model_detection.detect_unet_config

    def detect(state_dict: dict[str, Any], key_prefix: str, *args: Any, **kwargs: Any) -> dict | None:
        if f"{key_prefix}txt_in.text_norm.weight" in state_dict:
            return _config(state_dict, key_prefix)
        return own(state_dict, key_prefix, *args, **kwargs)

    model_detection.detect_unet_config = detect
    supported_models.models.append(_supported(network))


def _config(state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return a network's settings, read off its file."""

    def rows(name: str) -> int:
        return state_dict[f"{prefix}{name}.weight"].shape[0]

    first = f"{prefix}transformer_blocks."
    head = rows("transformer_blocks.0.attn.norm_q")
    return {
        "image_model": "qwen_image21", "in_channels": state_dict[f"{prefix}img_in.weight"].shape[1],
        "out_channels": rows("proj_out"), "attention_head_dim": head, "context_in_dim": rows("txt_in.text_norm"),
        "num_attention_heads": rows("img_in") // head, "mlp_ratio": 3,
        "num_layers": 1 + max(int(name[len(first):].split(".")[0]) for name in state_dict if name.startswith(first)),
        "fused_mlp": f"{first}0.img_mlp.gate_up.weight" in state_dict,
    }  # fmt: skip


def _supported(network: type) -> type:
    """Return the entry of ComfyUI's table of models."""
    import torch
    from comfy import conds, latent_formats, model_base, supported_models_base

    class Latents(latent_formats.LatentFormat):
        latent_channels, spacial_downscale_ratio = CHANNELS, 16

    class QwenImage21(model_base.QwenImage):
        def __init__(self, config: Any, device: Any = None):
            super().__init__(config, device=device, unet_model=network)

        @property
        def current_patcher(self) -> Any:
            return self.__dict__.get("_patcher")

        @current_patcher.setter
        def current_patcher(self, patcher: Any) -> None:
            self.__dict__["_patcher"] = patcher
            if "diffusion_model" in self._modules:  # it is set before there is a network, too
                self.diffusion_model.current_patcher = patcher
                self.diffusion_model.reset_prefix_cache(patcher is not None and not patcher.hook_patches)

        def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
            found = super().extra_conds(**kwargs)
            slots = kwargs.get("image_slots")
            return found | ({} if slots is None else {"image_slots": conds.CONDConstant(slots)})

    class Entry(supported_models_base.BASE):
        unet_config, unet_extra_config = {"image_model": "qwen_image21"}, {}
        sampling_settings = {"multiplier": 1.0, "shift": 0.69}
        memory_usage_factor, latent_format = 6.0, Latents
        supported_inference_dtypes = [torch.bfloat16, torch.float32]
        vae_key_prefix, text_encoder_key_prefix = ["vae."], ["text_encoders."]

        def get_model(self, state_dict: dict[str, Any], prefix: str = "", device: Any = None) -> Any:
            return QwenImage21(self, device=device)

    return Entry
