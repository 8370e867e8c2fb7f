"""Prompts of transformers on tiny models: random conditioning stands in for text encoders, none of which is tiny.

The nodes of ``tests/comfy_test_nodes`` make it, and load what ComfyUI's own loader reads off no file.
"""

from __future__ import annotations

from typing import Any

from tiny_transformers import FLUX1, KREA2, QWEN_IMAGE, ZIMAGE
from workflow_to_prompt import Prompt

#: Tiny model -> width of its prompt, and of the pooled one.
WIDTHS = {
    "tiny_flux1_unet": (FLUX1["context_in_dim"], FLUX1["vec_in_dim"]),
    "tiny_zimage": (ZIMAGE["cap_feat_dim"], 0),
    "tiny_krea2": (KREA2["txtlayers"] * KREA2["txtdim"], 0),
    "tiny_qwen_image": (QWEN_IMAGE["joint_attention_dim"], 0),
}
LOADED_BY = {"tiny_qwen_image": "TestTokenNetwork"}
"""Models that a test node loads."""
ENCODERS = ("CLIPLoader", "DualCLIPLoader")


def without_text_encoders(prompt: Prompt) -> Prompt:
    """Return a prompt with random conditioning of the model's width in place of each encoded text.

    A picture that an editing text encoder takes becomes a reference, as that encoder makes it one.
    """
    (loader,) = (entry for entry in prompt.values() if entry["class_type"] == "UNETLoader")
    model = loader["inputs"]["unet_name"].removesuffix(".safetensors")
    width, pooled = WIDTHS[model]
    made: Prompt = {}
    for name, entry in prompt.items():
        kind, inputs = entry["class_type"], entry["inputs"]
        if kind in ENCODERS:
            continue
        if kind in ("CLIPTextEncode", "TextEncodeQwenImageEditPlus"):
            seed = len(inputs.get("text") or inputs.get("prompt") or "")
            entry = _node("TestConditioning", tokens=32, width=width, pooled=pooled, seed=seed)
        elif kind == "FluxKontextImageScale":  # to a megapixel, whatever comes
            entry = _node("ImageScale", image=inputs["image"], upscale_method="area", crop="disabled", width=128,
                          height=128)  # fmt: skip
        elif kind == "UNETLoader" and model in LOADED_BY:
            entry = _node(LOADED_BY[model], **inputs)
        made[name] = entry
        if "image1" in inputs and "vae" in inputs:
            made[f"{name} text"] = entry
            made[f"{name} latent"] = _node("VAEEncode", pixels=inputs["image1"], vae=inputs["vae"])
            made[name] = _node("ReferenceLatent", conditioning=[f"{name} text", 0], latent=[f"{name} latent", 0])
    return made


def _node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}
