"""Recipes of the tiny models: which networks of which shape and seed are in which file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiny_transformers import (
    ANIMA,
    ANIMA_LLLITE,
    FLUX1,
    FLUX2,
    HUNYUAN_IMAGE21,
    HUNYUAN_REFINER,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO15,
    KREA2,
    LTX2,
    LTX23,
    LTX25,
    LTX_VAE,
    MINIMAX_H3,
    MINIMAX_H3_PRUNED,
    QWEN_IMAGE,
    QWEN_IMAGE21,
    WAN,
    WAN_5B,
    WAN_I2V,
    WAN_VACE,
    ZIMAGE,
)

#: Raise this when the drawing of weights changes, so that files made before are made again.
RECIPE_VERSION = 1

_UNET = {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "use_spatial_transformer": True,
         "legacy": False}
_SD15 = _UNET | {"context_dim": 768, "num_heads": 8}
#: Two levels and a downsample between them: residual extents matter (ceil of odd sizes). 4 residuals + middle.
SD15 = _SD15 | {"channel_mult": [1, 1], "num_res_blocks": [1, 1], "transformer_depth": [1, 1],
                "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1}
#: The smallest network that ComfyUI takes for SD1.5: one level, a middle without attention.
SD15_FLAT = _SD15 | {"channel_mult": [1], "num_res_blocks": [1], "transformer_depth": [1],
                     "transformer_depth_output": [1, 0], "transformer_depth_middle": -1}
#: A T2I-adapter adds its first feature after input block 2, at full latent size: that takes two blocks on level one.
#: On the other layouts above the native code logs 'control could not be applied' and goes on.
SD15_T2I = _SD15 | {"channel_mult": [1], "num_res_blocks": [2], "transformer_depth": [1, 0],
                    "transformer_depth_output": [1, 0, 0], "transformer_depth_middle": -1}
#: KOALA-700M's depths: the smallest layout that ComfyUI takes for the SDXL family (with `y`). 6 residuals + middle.
SDXL = _UNET | {"context_dim": 2048, "num_head_channels": 64, "num_classes": "sequential", "adm_in_channels": 2816,
                "use_linear_in_transformer": True, "channel_mult": [1, 1, 1], "num_res_blocks": [1, 1, 1],
                "transformer_depth": [0, 2, 5], "transformer_depth_output": [0, 0, 0, 1, 0, 1],
                "transformer_depth_middle": -1}


@dataclass(frozen=True)
class Part:
    """One network inside a file: which one, its shape, its seed and the prefix of its keys."""

    network: str
    seed: int
    config: dict[str, Any] = field(default_factory=dict)
    prefix: str = ""


@dataclass(frozen=True)
class Recipe:
    """A file below the models directory and the networks in it."""

    file: str
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """The file's stem, which is unique among the recipes."""
        return Path(self.file).stem

    @property
    def digest(self) -> str:
        """Names everything that the file's content depends on."""
        text = json.dumps([RECIPE_VERSION, [asdict(part) for part in self.parts]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (
    Recipe("checkpoints/tiny_sd15.safetensors", (
        Part("unet", 15, SD15, "model.diffusion_model."),
        Part("taesd", 1, {"scale": 0.18215}, "first_stage_model."),
        Part("clip_l", 2, {}, "cond_stage_model.transformer."))),
    Recipe("diffusion_models/tiny_sd15_unet.safetensors", (Part("unet", 15, SD15),)),
    Recipe("diffusion_models/tiny_sd15_other_unet.safetensors", (Part("unet", 16, SD15),)),
    Recipe("diffusion_models/tiny_sd15_flat_unet.safetensors", (Part("unet", 17, SD15_FLAT),)),
    Recipe("diffusion_models/tiny_sd15_quantised_unet.safetensors", (
        Part("quantised_unet", 17, SD15_FLAT | {"format": "float8_e4m3fn"}),)),
    Recipe("diffusion_models/tiny_sdxl_fp8_unet.safetensors", (
        Part("quantised_unet", 20, SDXL | {"format": "float8_e4m3fn"}),)),
    Recipe("diffusion_models/tiny_sdxl_int8_unet.safetensors", (
        Part("quantised_unet", 20, SDXL | {"format": "int8_tensorwise"}),)),
    Recipe("diffusion_models/tiny_sd15_t2i_unet.safetensors", (Part("unet", 18, SD15_T2I),)),
    Recipe("diffusion_models/tiny_sd15_ip2p_unet.safetensors", (Part("unet", 19, SD15_FLAT | {"in_channels": 8}),)),
    Recipe("diffusion_models/tiny_sdxl_unet.safetensors", (Part("unet", 20, SDXL),)),
    Recipe("diffusion_models/tiny_zimage.safetensors", (Part("zimage", 91, ZIMAGE),)),
    Recipe("diffusion_models/tiny_zimage_16.safetensors", (Part("zimage", 94, ZIMAGE | {"n_layers": 16}),)),
    Recipe("diffusion_models/tiny_zimage_fp8.safetensors", (
        Part("quantised_zimage", 91, ZIMAGE | {"format": "float8_e4m3fn"}),)),
    Recipe("diffusion_models/tiny_zimage_int8.safetensors", (
        Part("quantised_zimage", 91, ZIMAGE | {"format": "int8_tensorwise"}),)),
    Recipe("diffusion_models/tiny_flux1_unet.safetensors", (Part("flux", 91, FLUX1),)),
    Recipe("diffusion_models/tiny_flux1_schnell_unet.safetensors", (
        Part("flux", 92, FLUX1 | {"guidance_embed": False}),)),
    Recipe("diffusion_models/tiny_flux1_fill_unet.safetensors", (Part("flux", 93, FLUX1 | {"in_channels": 96}),)),
    Recipe("diffusion_models/tiny_flux2_klein_unet.safetensors", (Part("flux", 94, FLUX2),)),
    Recipe("diffusion_models/tiny_flux1_fp8_unet.safetensors", (
        Part("quantised_flux", 91, FLUX1 | {"format": "float8_e4m3fn"}),)),
    Recipe("diffusion_models/tiny_qwen_image.safetensors", (
        Part("qwen_image", 91, QWEN_IMAGE | {"in_channels": 64, "num_layers": 2}),)),
    Recipe("controlnet/tiny_qwen_image_control.safetensors", (
        Part("qwen_image_control", 93, QWEN_IMAGE | {"in_channels": 64, "num_layers": 1}),)),
    Recipe("diffusion_models/tiny_qwen_image21.safetensors", (Part("qwen_image21", 112, QWEN_IMAGE21),)),
    Recipe("diffusion_models/tiny_qwen_image21_unfused.safetensors", (
        Part("qwen_image21", 113, QWEN_IMAGE21 | {"fused": False}),)),
    Recipe("diffusion_models/tiny_krea2.safetensors", (Part("krea2", 92, KREA2),)),
    Recipe("diffusion_models/tiny_anima.safetensors", (Part("anima", 94, ANIMA | {"model_channels": 256}),)),
    Recipe("model_patches/tiny_anima_lllite.safetensors", (Part("anima_lllite", 95, ANIMA_LLLITE),)),
    Recipe("model_patches/tiny_anima_lllite_other.safetensors", (Part("anima_lllite", 96, ANIMA_LLLITE),)),
    Recipe("model_patches/tiny_anima_lllite_inpaint.safetensors", (
        Part("anima_lllite", 97, ANIMA_LLLITE | {"channels": 4, "aspp": False}),)),
    Recipe("diffusion_models/tiny_wan.safetensors", (Part("wan", 95, WAN),)),
    Recipe("diffusion_models/tiny_wan_low_noise.safetensors", (Part("wan", 96, WAN),)),
    Recipe("diffusion_models/tiny_wan_i2v.safetensors", (Part("wan", 97, WAN_I2V),)),
    Recipe("diffusion_models/tiny_wan_flf2v.safetensors", (
        Part("wan", 98, WAN_I2V | {"flf_pos_embed_token_number": 514}),)),
    Recipe("diffusion_models/tiny_wan22_i2v.safetensors", (Part("wan", 99, WAN | {"in_dim": 36}),)),
    Recipe("diffusion_models/tiny_wan22_5b.safetensors", (Part("wan", 100, WAN_5B),)),
    Recipe("diffusion_models/tiny_wan_vace.safetensors", (Part("wan", 101, WAN_VACE),)),
    Recipe("diffusion_models/tiny_hunyuan_video15.safetensors", (Part("hunyuan", 102, HUNYUAN_VIDEO15),)),
    Recipe("diffusion_models/tiny_hunyuan_video15_sr.safetensors", (
        Part("hunyuan", 103, HUNYUAN_VIDEO15 | {"in_channels": 98, "meanflow": True}),)),
    Recipe("diffusion_models/tiny_hunyuan_video.safetensors", (Part("hunyuan", 104, HUNYUAN_VIDEO),)),
    Recipe("diffusion_models/tiny_hunyuan_image21.safetensors", (Part("hunyuan", 105, HUNYUAN_IMAGE21),)),
    Recipe("diffusion_models/tiny_hunyuan_image21_refiner.safetensors", (Part("hunyuan", 106, HUNYUAN_REFINER),)),
    Recipe("diffusion_models/tiny_ltx2.safetensors", (Part("ltx2", 109, LTX2),)),
    Recipe("diffusion_models/tiny_ltx2_interleaved.safetensors", (
        Part("ltx2", 110, LTX2 | {"rope_type": "interleaved"}),)),
    Recipe("diffusion_models/tiny_ltx23.safetensors", (Part("ltx2", 111, LTX23),)),
    Recipe("diffusion_models/tiny_ltx25.safetensors", (Part("ltx2", 112, LTX25),)),
    Recipe("checkpoints/tiny_ltx23_checkpoint.safetensors", (
        Part("ltx2", 111, LTX23, "model.diffusion_model."), Part("ltx_vae", 113, LTX_VAE, "vae."))),
    Recipe("diffusion_models/tiny_minimax_h3.safetensors", (Part("minimax_h3", 107, MINIMAX_H3),)),
    Recipe("diffusion_models/tiny_minimax_h3_pruned.safetensors", (Part("minimax_h3", 108, MINIMAX_H3_PRUNED),)),
    Recipe("vae/tiny_sdxl_taesd.safetensors", (Part("taesd", 1, {"scale": 0.13025}),)),
    Recipe("vae/tiny_kl.safetensors", (Part("vae", 81, {"decoder_ch": 32}),)),
    Recipe("vae/tiny_flux_kl.safetensors", (Part("vae", 82, {"decoder_ch": 32, "z_channels": 16}),)),
    Recipe("vae/tiny_flux2_kl.safetensors", (Part("vae", 83, {"decoder_ch": 32, "z_channels": 32, "statistics": 1}),)),
    Recipe("vae/tiny_qwen_vae.safetensors", (Part("video_vae", 84, {"dim": 8, "z_dim": 16}),)),
    # ComfyUI fixes the sizes of text encoders, none of which is tiny: this file can be chosen, not loaded
    Recipe("text_encoders/no_text_encoder.safetensors", (Part("nothing", 85),)),
    Recipe("geometry_estimation/no_depth_model.safetensors", (Part("nothing", 86),)),  # likewise
    Recipe("text_encoders/demo_clip_l.safetensors", (Part("clip_l", 2, {}),)),
    Recipe("controlnet/tiny_sd15_a.safetensors", (Part("controlnet", 31, SD15, "control_model."),)),
    Recipe("controlnet/tiny_sd15_b.safetensors", (Part("controlnet", 32, SD15, "control_model."),)),
    Recipe("controlnet/tiny_sd15_flat_a.safetensors", (Part("controlnet", 33, SD15_FLAT, "control_model."),)),
    # by the end of its name ComfyUI knows that its residuals are to be averaged over the picture
    Recipe("controlnet/tiny_sd15_shuffle.safetensors", (Part("controlnet", 34, SD15, "control_model."),)),
    Recipe("controlnet/tiny_sdxl_a.safetensors", (Part("controlnet", 41, SDXL, "control_model."),)),
    Recipe("controlnet/tiny_sdxl_b.safetensors", (Part("controlnet", 42, SDXL, "control_model."),)),
    Recipe("controlnet/tiny_flux1_a.safetensors", (
        Part("flux_controlnet", 43, FLUX1 | {"depth": 1, "control_latent_channels": 16}),)),
    Recipe("controlnet/tiny_flux1_b.safetensors", (
        Part("flux_controlnet", 44, FLUX1 | {"depth_single_blocks": 0, "control_latent_channels": 16}),)),
    Recipe("controlnet/tiny_flux1_union.safetensors", (
        Part("flux_controlnet", 45, FLUX1 | {"depth_single_blocks": 1, "control_latent_channels": 16,
                                             "num_union_modes": 7}),)),
    Recipe("controlnet/tiny_flux1_xlabs.safetensors", (
        Part("flux_pixel_controlnet", 46, FLUX1 | {"depth_single_blocks": 0}),)),
    Recipe("controlnet/tiny_flux1_mistoline.safetensors", (
        Part("flux_pixel_controlnet", 47, FLUX1 | {"depth_single_blocks": 1, "mistoline": True}),)),
    Recipe("controlnet/tiny_sd15_t2i.safetensors", (Part("t2i_adapter", 51),)),
    Recipe("controlnet/tiny_sd15_control_lora.safetensors", (Part("control_lora", 61, SD15 | {"rank": 4}),)),
    Recipe("loras/tiny_sd15_lora.safetensors", (Part("lora", 71, SD15 | {"rank": 4}),)),
    Recipe("loras/tiny_zimage_lora.safetensors", (Part("zimage_lora", 73, ZIMAGE | {"rank": 4}),)),
    Recipe("loras/tiny_krea2_lora.safetensors", (Part("krea2_lora", 74, KREA2 | {"rank": 4}),)),
    Recipe("loras/tiny_wan_lora.safetensors", (Part("wan_lora", 75, WAN | {"rank": 4}),)),
    Recipe("loras/tiny_sdxl_lora.safetensors", (Part("lora", 72, SDXL | {"rank": 4}),)),
    Recipe("loras/tiny_flux1_lora.safetensors", (Part("flux_lora", 73, FLUX1 | {"rank": 4}),)),
)}
