"""Prompts of transformers on tiny models: random conditioning stands in for text encoders, none of which is tiny.

The nodes of ``tests/comfy_test_nodes`` make it, and load what ComfyUI's own loaders read off no file.
"""

from __future__ import annotations

from typing import Any

from tiny_transformers import FLUX1, FLUX2, KREA2, LTX2, MINIMAX_H3, QWEN_IMAGE, ZIMAGE
from workflow_to_prompt import Prompt

#: Tiny model -> width of its prompt, and of the pooled one.
WIDTHS = {
    "tiny_flux1_unet": (FLUX1["context_in_dim"], FLUX1["vec_in_dim"]),
    "tiny_flux1_fill_unet": (FLUX1["context_in_dim"], FLUX1["vec_in_dim"]),
    "tiny_flux2_klein_unet": (FLUX2["context_in_dim"], 0),
    "tiny_zimage": (ZIMAGE["cap_feat_dim"], 0),
    "tiny_krea2": (KREA2["txtlayers"] * KREA2["txtdim"], 0),
    "tiny_qwen_image": (QWEN_IMAGE["joint_attention_dim"], 0),
    "tiny_minimax_h3_pruned": (MINIMAX_H3["text_dim"], 0),
    "tiny_ltx23_checkpoint": (2 * LTX2["caption_channels"], 0),
    **dict.fromkeys(("tiny_wan", "tiny_wan_low_noise", "tiny_wan22_i2v"), (4096, 0)),
}
LOADED_BY = {"tiny_qwen_image": "TestTokenNetwork"}
"""Models that a test node loads."""
ENCODERS = ("CLIPLoader", "DualCLIPLoader", "LTXAVTextEncoderLoader")
TEXTS = ("CLIPTextEncode", "TextEncodeQwenImageEditPlus", "MiniMaxH3ImageToVideo")
MEGAPIXEL = ("FluxKontextImageScale", "ImageScaleToTotalPixels")
"""Nodes that make a megapixel of whatever comes."""
SOUNDS = ("VAEDecodeAudio", "LTXVAudioVAEDecode")
LOADERS = {"UNETLoader": "unet_name", "CheckpointLoaderSimple": "ckpt_name"}


def without_text_encoders(prompt: Prompt) -> Prompt:
    """Return a prompt with random conditioning of the model's width in place of each encoded text.

    A picture that an editing text encoder takes becomes a reference, as that encoder makes it one. Sound is silence:
    no VAE of sound is tiny.
    """
    model = next(entry["inputs"][LOADERS[entry["class_type"]]] for entry in prompt.values()
                 if entry["class_type"] in LOADERS).removesuffix(".safetensors")  # fmt: skip
    kinds = {entry["class_type"] for entry in prompt.values()}
    width, pooled = WIDTHS[model]
    made: Prompt = {}
    latents: dict[str, str] = {}
    for name, entry in prompt.items():
        kind, inputs = entry["class_type"], entry["inputs"]
        if kind in ENCODERS:
            continue
        if kind in TEXTS:
            seed = len(inputs.get("text") or inputs.get("prompt") or "")
            entry = _node("TestConditioning", tokens=32, width=width, pooled=pooled, seed=seed)
        elif kind in MEGAPIXEL:
            entry = _node("ImageScale", image=inputs["image"], upscale_method="area", crop="disabled", width=128,
                          height=128)  # fmt: skip
        elif kind in SOUNDS:
            entry = _node("EmptyAudio", duration=1.0, sample_rate=44100, channels=2)
        elif kind == "LTXVEmptyLatentAudio":
            entry = _node("TestLatent", seed=1, channels=8, height=inputs["frames_number"], width=16)
        elif kind == "ModelPatchLoader":
            entry = _node("TestFunPatch", version="1")
        elif kind == "UNETLoader" and "ModelPatchLoader" in kinds:  # Fun control wants more layers
            entry = _node(kind, **inputs | {"unet_name": "tiny_zimage_16.safetensors"})
        elif kind == "UNETLoader" and model in LOADED_BY:
            entry = _node(LOADED_BY[model], **inputs)
        elif kind == "VAELoader" and model.startswith("tiny_minimax_h3"):
            entry = _node("TestH3VAE", **inputs)
        made[name] = entry
        if kind == "MiniMaxH3ImageToVideo":
            latents[name] = f"{name} latent"
            made[latents[name]] = _node("EmptyMiniMaxH3LatentAV", **{
                size: inputs[size] for size in ("width", "height", "length")})  # fmt: skip
        for picture in (one for one in ("image1", "image2", "image3") if "vae" in inputs and one in inputs):
            made[f"{name} before {picture}"] = made[name]
            made[f"{name} {picture}"] = _node("VAEEncode", pixels=inputs[picture], vae=inputs["vae"])
            made[name] = _node("ReferenceLatent", conditioning=[f"{name} before {picture}", 0],
                               latent=[f"{name} {picture}", 0])  # fmt: skip
    for entry in made.values():  # the second output of a text that is a size too
        entry["inputs"] = {key: [latents[value[0]], 0] if _is_second(value, latents) else value
                           for key, value in entry["inputs"].items()}  # fmt: skip
    return made


def _is_second(value: Any, nodes: dict[str, str]) -> bool:
    return isinstance(value, list) and value[0] in nodes and value[1] == 1


def _node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}
