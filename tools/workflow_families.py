"""Published models of transformers: their files, where these are, and how each family is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from workflow_parts import Published


@dataclass(frozen=True)
class Transformer(Published):
    """A family whose model, text encoders and VAE are files of their own.

    Attributes:
        model: file of the model; of two models that of the first steps.
        encoders: files of the text encoders, one or two.
        kind: how the loader of text encoders calls the family.
        shift: ModelSamplingAuraFlow's, or None where the family needs none.
        guidance: what FluxGuidance gives beside the prompt, or None.
        sampling: widgets of its sampler; at ``cfg`` 1 there is no negative prompt.
        latent: the node that makes empty latents.
        lora: file and strength of a LoRA, or None.
        second: the model of the last steps and its LoRA, where there are two models.
        prompt: what the prompt says first.
    """

    model: str
    encoders: tuple[str, ...]
    kind: str
    vae: str
    shift: float | None = None
    guidance: float | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    latent: str = "EmptySD3LatentImage"
    lora: tuple[str, float] | None = None
    second: tuple[str, str] | None = None
    prompt: str = "a house by a lake, morning light, photograph"


WINTER = "make it winter, snow on the roof"
UNION = "FLUX.1-dev-ControlNet-Union-Pro-2.0.safetensors"
FUN = "Z-Image-Turbo-Fun-Controlnet-Union.safetensors"
QWEN_ENCODER, QWEN_VAE = "qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_image_vae.safetensors"
QWEN_FILES = {QWEN_ENCODER: "Comfy-Org/Qwen-Image_ComfyUI/split_files/text_encoders",
              QWEN_VAE: "Comfy-Org/Qwen-Image_ComfyUI/split_files/vae"}
FLUX1 = Transformer(
    title="Flux.1",
    size=1024,
    downloads={
        "flux1-dev.safetensors": "Comfy-Org/flux1-dev",
        "flux1-fill-dev.safetensors": "Comfy-Org/flux1-dev/split_files/diffusion_models",
        "flux1-dev-kontext_fp8_scaled.safetensors":
            "Comfy-Org/flux1-kontext-dev_ComfyUI/split_files/diffusion_models",
        "clip_l.safetensors": "comfyanonymous/flux_text_encoders",
        "t5xxl_fp16.safetensors": "comfyanonymous/flux_text_encoders",
        "ae.safetensors": "Comfy-Org/Lumina_Image_2.0_Repackaged/split_files/vae",
    },
    model="flux1-dev.safetensors",
    encoders=("clip_l.safetensors", "t5xxl_fp16.safetensors"),
    kind="flux",
    vae="ae.safetensors",
    guidance=3.5,
    sampling={"steps": 20, "cfg": 1.0, "scheduler": "simple"},
)
KONTEXT = replace(FLUX1, model="flux1-dev-kontext_fp8_scaled.safetensors", guidance=2.5, prompt=WINTER)
FILL = replace(FLUX1, model="flux1-fill-dev.safetensors", guidance=30.0, sampling={"steps": 20, "cfg": 1.0},
               prompt="a wooden boat on the lake")
KLEIN = Transformer(
    title="Flux.2",
    size=1024,
    downloads={
        "flux-2-klein-4b-fp8.safetensors": "black-forest-labs/FLUX.2-klein-4b-fp8",
        "qwen_3_4b.safetensors": "Comfy-Org/z_image_turbo/split_files/text_encoders",
        "flux2-vae.safetensors": "Comfy-Org/flux2-dev/split_files/vae",
    },
    model="flux-2-klein-4b-fp8.safetensors",
    encoders=("qwen_3_4b.safetensors",),
    kind="flux2",
    vae="flux2-vae.safetensors",
    sampling={"cfg": 1.0},
    latent="EmptyFlux2LatentImage",
    prompt=WINTER,
)
ZIMAGE = Transformer(
    title="Z-Image",
    size=1024,
    downloads={
        "z_image_turbo_bf16.safetensors": "Comfy-Org/z_image_turbo/split_files/diffusion_models",
        "qwen_3_4b.safetensors": "Comfy-Org/z_image_turbo/split_files/text_encoders",
        "ae.safetensors": "Comfy-Org/z_image_turbo/split_files/vae",
        "pixel_art_style_z_image_turbo.safetensors": "tarn59/pixel_art_style_lora_z_image_turbo",
        FUN: "alibaba-pai/Z-Image-Turbo-Fun-Controlnet-Union",
    },
    model="z_image_turbo_bf16.safetensors",
    encoders=("qwen_3_4b.safetensors",),
    kind="lumina2",
    vae="ae.safetensors",
    shift=3.0,
    sampling={"steps": 8, "cfg": 1.0, "sampler_name": "res_multistep", "scheduler": "simple"},
)
ZIMAGE_LORA = replace(ZIMAGE, lora=("pixel_art_style_z_image_turbo.safetensors", 1.0))
KREA2 = Transformer(
    title="Krea 2",
    size=1024,
    downloads={
        "krea2_turbo_fp8_scaled.safetensors": "Comfy-Org/Krea-2/diffusion_models",
        "qwen3vl_4b_fp8_scaled.safetensors": "Comfy-Org/Krea-2/text_encoders",
        "krea2_darkbrush.safetensors": "Comfy-Org/Krea-2/loras",
        QWEN_VAE: "Comfy-Org/Krea-2/vae",
    },
    model="krea2_turbo_fp8_scaled.safetensors",
    encoders=("qwen3vl_4b_fp8_scaled.safetensors",),
    kind="krea2",
    vae=QWEN_VAE,
    sampling={"steps": 8, "cfg": 1.0, "scheduler": "simple"},
    latent="EmptyLatentImage",
)
KREA2_LORA = replace(KREA2, lora=("krea2_darkbrush.safetensors", 0.8))
QWEN_IMAGE = Transformer(
    title="Qwen-Image",
    size=1328,
    downloads={"qwen_image_fp8_e4m3fn.safetensors": "Comfy-Org/Qwen-Image_ComfyUI/split_files/diffusion_models"}
    | QWEN_FILES,
    model="qwen_image_fp8_e4m3fn.safetensors",
    encoders=(QWEN_ENCODER,),
    kind="qwen_image",
    vae=QWEN_VAE,
    shift=3.1,
    sampling={"steps": 20, "cfg": 4.0, "scheduler": "simple"},
)
QWEN_EDIT = Transformer(
    title="Qwen-Image",
    size=1024,
    downloads={
        "qwen_image_edit_2511_fp8mixed.safetensors": "Comfy-Org/Qwen-Image-Edit_ComfyUI/split_files/diffusion_models"}
    | QWEN_FILES,
    model="qwen_image_edit_2511_fp8mixed.safetensors",
    encoders=(QWEN_ENCODER,),
    kind="qwen_image",
    vae=QWEN_VAE,
    shift=3.1,
    sampling={"steps": 40, "cfg": 3.0, "scheduler": "simple"},
)
WAN_FILES = "Comfy-Org/Wan_2.2_ComfyUI_Repackaged/split_files"


def _wan22(model: str, lora: str) -> Transformer:
    """Wan 2.2's two models of one kind, each with its LoRA of four steps in all."""
    models = [f"wan2.2_{model}_{noise}_noise_14B_fp8_scaled.safetensors" for noise in ("high", "low")]
    loras = [f"wan2.2_{model}_lightx2v_4steps_lora_{lora}_{noise}_noise.safetensors" for noise in ("high", "low")]
    return Transformer(
        title="Wan 2.2",
        size=640,
        downloads={
            **dict.fromkeys(models, f"{WAN_FILES}/diffusion_models"),
            **dict.fromkeys(loras, f"{WAN_FILES}/loras"),
            "umt5_xxl_fp8_e4m3fn_scaled.safetensors":
                "Comfy-Org/Wan_2.1_ComfyUI_repackaged/split_files/text_encoders",
            "wan_2.1_vae.safetensors": f"{WAN_FILES}/vae",
        },
        model=models[0],
        encoders=("umt5_xxl_fp8_e4m3fn_scaled.safetensors",),
        kind="wan",
        vae="wan_2.1_vae.safetensors",
        shift=5.0,
        sampling={"steps": 4, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"},
        lora=(loras[0], 1.0),
        second=(models[1], loras[1]),
    )


WAN_TEXT, WAN_IMAGE = _wan22("t2v", "v1.1"), _wan22("i2v", "v1")
H3_SOUND = "minimax_h3_audio_vae_fp32.safetensors"
MINIMAX_H3 = Transformer(
    title="MiniMax H3",
    size=832,
    downloads={
        "minimax_h3_fl2va_pruned_int8_convrot.safetensors": "Comfy-Org/MiniMax-H3/diffusion_models",
        "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors": "Comfy-Org/MiniMax-H3/text_encoders",
        "minimax_h3_video_vae_fp16.safetensors": "Comfy-Org/MiniMax-H3/vae",
        H3_SOUND: "Comfy-Org/MiniMax-H3/vae",
    },
    model="minimax_h3_fl2va_pruned_int8_convrot.safetensors",
    encoders=("qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors",),
    kind="minimax",
    vae="minimax_h3_video_vae_fp16.safetensors",
    sampling={"steps": 20, "cfg": 1.0, "sampler_name": "res_multistep", "scheduler": "simple"},
)
LTX23 = Transformer(
    title="LTX-2.3",
    size=960,
    downloads={
        "ltx-2.3-22b-distilled-fp8.safetensors": "Lightricks/LTX-2.3-fp8",
        "gemma_3_12B_it_fp4_mixed.safetensors": "Comfy-Org/ltx-2/split_files/text_encoders",
    },
    model="ltx-2.3-22b-distilled-fp8.safetensors",
    encoders=("gemma_3_12B_it_fp4_mixed.safetensors",),
    kind="ltxav",
    vae="",
    sampling={"cfg": 1.0},
)
