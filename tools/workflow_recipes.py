"""The shipped workflows in the order in which they are made, and what makes them run on tiny models."""

from __future__ import annotations

import copy
from typing import Any

from workflow_families import (
    FILL,
    FLUX1,
    FUN,
    H3_SOUND,
    KLEIN,
    KONTEXT,
    KREA2,
    KREA2_LORA,
    LTX23,
    MINIMAX_H3,
    QWEN_EDIT,
    QWEN_ENCODER,
    QWEN_IMAGE,
    QWEN_VAE,
    UNION,
    WAN_IMAGE,
    WAN_TEXT,
    ZIMAGE,
    ZIMAGE_LORA,
)
from workflow_parts import SD15, SDXL, Recipe
from workflow_streams import depth_and_pose, video, webcam
from workflow_to_prompt import ObjectInfo, Workflow, set_widget
from workflow_transformers import TRANSFORMERS
from workflow_variants import (
    advanced,
    repaint,
    two_controlnets,
)
from workflow_videos import VIDEOS

RECIPES: tuple[Recipe, ...] = (
    two_controlnets("sd15_two_controlnets", SD15),
    two_controlnets("sdxl_two_controlnets", SDXL),
    repaint(),
    advanced(),
    webcam(),
    depth_and_pose(),
    video(),
    *TRANSFORMERS,
    *VIDEOS,
)
FAMILIES = (FLUX1, KONTEXT, FILL, KLEIN, ZIMAGE, KREA2, QWEN_IMAGE, QWEN_EDIT, WAN_TEXT, WAN_IMAGE, MINIMAX_H3, LTX23)
#: Files that transformers' workflows name -> tiny ones. No text encoder is tiny: that file is only there to be chosen,
#: and so are the tiny ones for Fun control and for what MiniMax H3 decodes with.
TINY = {
    FLUX1.model: "tiny_flux1_unet", KONTEXT.model: "tiny_flux1_unet", FILL.model: "tiny_flux1_fill_unet",
    KLEIN.model: "tiny_flux2_klein_unet", ZIMAGE.model: "tiny_zimage", KREA2.model: "tiny_krea2",
    QWEN_IMAGE.model: "tiny_qwen_image", QWEN_EDIT.model: "tiny_qwen_image", MINIMAX_H3.model: "tiny_minimax_h3_pruned",
    WAN_TEXT.model: "tiny_wan", WAN_TEXT.second[0]: "tiny_wan_low_noise", LTX23.model: "tiny_ltx23_checkpoint",
    **dict.fromkeys((WAN_IMAGE.model, WAN_IMAGE.second[0]), "tiny_wan22_i2v"), UNION: "tiny_flux1_union",
    FUN: "tiny_anima_lllite", FLUX1.vae: "tiny_flux_kl", KLEIN.vae: "tiny_flux2_kl",
    **dict.fromkeys((QWEN_VAE, WAN_TEXT.vae, MINIMAX_H3.vae, H3_SOUND), "tiny_qwen_vae"),
    ZIMAGE_LORA.lora[0]: "tiny_zimage_lora", KREA2_LORA.lora[0]: "tiny_krea2_lora",
    **dict.fromkeys((file for one in (WAN_TEXT, WAN_IMAGE) for file in (one.lora[0], one.second[1])), "tiny_wan_lora"),
    **dict.fromkeys((QWEN_ENCODER, *(file for family in FAMILIES for file in family.encoders)), "no_text_encoder"),
}  # fmt: skip
SIZES = {"EmptyHunyuanLatentVideo": (64, 64, 5), "WanImageToVideo": (64, 64, 5), "MiniMaxH3ImageToVideo": (128, 96, 5),
         "EmptyLTXVLatentVideo": (64, 64, 9), "EmptyLatentImage": (128, 128), "EmptySD3LatentImage": (128, 128)}
"""Width and height of tiny pictures; of videos the length too."""


def with_tiny_models(workflow: Workflow, object_info: ObjectInfo, nets: tuple[str, str] = ("tiny_sd15_a", "tiny_sd15_b")
                     ) -> Workflow:
    """A copy of a shipped workflow with the tiny test models and images: it runs in seconds on a CPU.

    Its engines have the size that the tests' other engines have, so that they are built once.
    """
    workflow = copy.deepcopy(workflow)
    types = {n["type"] for n in workflow["nodes"]}

    def put(target: str, **widgets: Any) -> None:
        for widget, value in widgets.items():
            set_widget(workflow, target, widget, value, object_info)

    transformers = not types.isdisjoint(("UNETLoader", "LTXAVTextEncoderLoader"))
    for node in workflow["nodes"] if transformers else ():
        node["widgets_values"] = [f"{TINY[value]}.safetensors" if value in TINY else value
                                  for value in node.get("widgets_values", ())]
    if "CheckpointLoaderSimple" in types and not transformers:
        put("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors")
    for title in [n["title"] for n in workflow["nodes"] if "title" in n]:
        number = next((int(word) for word in title.split() if word.isdigit()), 1)
        if title.startswith("Load ControlNet") and not transformers:
            put(title, control_net_name=f"{nets[(number - 1) % 2]}.safetensors")
        elif title.startswith(("Control image", "Picture")):
            put(title, image=("control_a.png", "control_b.png")[(number - 1) % 2])
    for engine in {"TRTAccelerate", "TRTUNetEngine", "TRTControlNetEngine"} & types:
        put(engine, min_size=64, opt_size=128, max_size=512, max_images=4, max_tokens=616)
    if "LoraLoader" in types:
        put("LoraLoader", lora_name="tiny_sd15_lora.safetensors")
    for latent in SIZES.keys() & types:
        put(latent, **dict(zip(("width", "height", "length"), SIZES[latent], strict=False)))
    if "LTXVEmptyLatentAudio" in types:
        put("LTXVEmptyLatentAudio", frames_number=9)
    if "KSampler" in types:
        put("KSampler", steps=4)
    if "TRTStream" in types:
        put("TRTStream", steps=2)
    if "LoadDA3Model" in types:
        put("LoadDA3Model", model_name="no_depth_model.safetensors")
    if "LoadVideo" in types:
        put("LoadVideo", file="tiny_video.mp4")
    return workflow
