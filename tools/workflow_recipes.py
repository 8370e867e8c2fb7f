"""The shipped workflows in the order in which they are made, and what makes them run on tiny models."""

from __future__ import annotations

import copy
from typing import Any

from workflow_parts import SD15, SDXL, Recipe
from workflow_streams import depth_and_pose, video, webcam
from workflow_to_prompt import ObjectInfo, Workflow, set_widget
from workflow_transformers import (
    FLUX1,
    KREA2,
    QWEN_EDIT,
    QWEN_ENCODER,
    QWEN_IMAGE,
    QWEN_VAE,
    TRANSFORMERS,
    UNION,
    ZIMAGE,
)
from workflow_variants import (
    advanced,
    compare,
    repaint,
    two_controlnets,
)

RECIPES: tuple[Recipe, ...] = (
    two_controlnets("sd15_two_controlnets", SD15),
    two_controlnets("sdxl_two_controlnets", SDXL),
    repaint(),
    compare(),
    advanced(),
    webcam(),
    depth_and_pose(),
    video(),
    *TRANSFORMERS,
)
#: Files that transformers' workflows name -> tiny ones. No text encoder is tiny: that file is only there to be chosen.
TINY = {
    FLUX1.model: "tiny_flux1_unet", ZIMAGE.model: "tiny_zimage", KREA2.model: "tiny_krea2",
    QWEN_IMAGE.model: "tiny_qwen_image", QWEN_EDIT.model: "tiny_qwen_image", UNION: "tiny_flux1_union",
    FLUX1.vae: "tiny_flux_kl", QWEN_VAE: "tiny_qwen_vae",
    **dict.fromkeys((*FLUX1.encoders, *ZIMAGE.encoders, *KREA2.encoders, QWEN_ENCODER), "no_text_encoder"),
}  # fmt: skip


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

    for node in workflow["nodes"] if "UNETLoader" in types else ():
        node["widgets_values"] = [f"{TINY[value]}.safetensors" if value in TINY else value
                                  for value in node.get("widgets_values", ())]
    if "CheckpointLoaderSimple" in types:
        put("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors")
    for title in [n["title"] for n in workflow["nodes"] if "title" in n]:
        number = next((int(word) for word in title.split() if word.isdigit()), 1)
        if title.startswith("Load ControlNet") and "UNETLoader" not in types:
            put(title, control_net_name=f"{nets[(number - 1) % 2]}.safetensors")
        elif title.startswith(("Control image", "Picture")):
            put(title, image=("control_a.png", "control_b.png")[(number - 1) % 2])
    for engine in {"TRTAccelerate", "TRTUNetEngine", "TRTControlNetEngine"} & types:
        put(engine, min_size=64, opt_size=128, max_size=512, max_images=4, max_tokens=616)
    if "LoraLoader" in types:
        put("LoraLoader", lora_name="tiny_sd15_lora.safetensors")
    for latent in {"EmptyLatentImage", "EmptySD3LatentImage"} & types:
        put(latent, width=128, height=128)
    if "KSampler" in types:
        put("KSampler", steps=4)
    if "TRTStream" in types:
        put("TRTStream", steps=2)
    if "LoadDA3Model" in types:
        put("LoadDA3Model", model_name="no_depth_model.safetensors")
    if "LoadVideo" in types:
        put("LoadVideo", file="tiny_video.mp4")
    return workflow
