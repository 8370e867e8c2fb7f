"""The shipped workflows of transformers: Flux.1, Z-Image, Krea 2 and Qwen-Image, each with ComfyUI's own loaders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workflow_parts import (
    CONTROLS,
    ENGINES,
    LOADER,
    MODELS,
    SAMPLE,
    Nodes,
    Published,
    Recipe,
    accelerate,
    apply,
    group,
    latent,
    node,
    note,
    prompts,
    recipe,
    results,
    sampler,
)
from workflow_variants import FIRST_RUN, TOLD


@dataclass(frozen=True)
class Transformer(Published):
    """A family whose model, text encoders and VAE are files of their own.

    Attributes:
        encoders: files of the text encoders, one or two.
        kind: how the loader of text encoders calls the family.
        shift: ModelSamplingAuraFlow's, or None where the family needs none.
        sampling: widgets of its sampler.
    """

    model: str
    encoders: tuple[str, ...]
    kind: str
    vae: str
    shift: float | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


UNION = "FLUX.1-dev-ControlNet-Union-Pro-2.0.safetensors"
QWEN_ENCODER, QWEN_VAE = "qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_image_vae.safetensors"
QWEN_FILES = {QWEN_ENCODER: "Comfy-Org/Qwen-Image_ComfyUI/split_files/text_encoders",
              QWEN_VAE: "Comfy-Org/Qwen-Image_ComfyUI/split_files/vae"}
FLUX1 = Transformer(
    title="Flux.1",
    size=1024,
    downloads={
        "flux1-dev.safetensors": "Comfy-Org/flux1-dev",
        "clip_l.safetensors": "comfyanonymous/flux_text_encoders",
        "t5xxl_fp16.safetensors": "comfyanonymous/flux_text_encoders",
        "ae.safetensors": "Comfy-Org/Lumina_Image_2.0_Repackaged/split_files/vae",
    },
    model="flux1-dev.safetensors",
    encoders=("clip_l.safetensors", "t5xxl_fp16.safetensors"),
    kind="flux",
    vae="ae.safetensors",
    sampling={"steps": 20, "cfg": 1.0, "scheduler": "simple"},
)
ZIMAGE = Transformer(
    title="Z-Image",
    size=1024,
    downloads={
        "z_image_turbo_bf16.safetensors": "Comfy-Org/z_image_turbo/split_files/diffusion_models",
        "qwen_3_4b.safetensors": "Comfy-Org/z_image_turbo/split_files/text_encoders",
        "ae.safetensors": "Comfy-Org/z_image_turbo/split_files/vae",
    },
    model="z_image_turbo_bf16.safetensors",
    encoders=("qwen_3_4b.safetensors",),
    kind="lumina2",
    vae="ae.safetensors",
    shift=3.0,
    sampling={"steps": 8, "cfg": 1.0, "sampler_name": "res_multistep", "scheduler": "simple"},
)
KREA2 = Transformer(
    title="Krea 2",
    size=1024,
    downloads={
        "krea2_turbo_fp8_scaled.safetensors": "Comfy-Org/Krea-2/diffusion_models",
        "qwen3vl_4b_fp8_scaled.safetensors": "Comfy-Org/Krea-2/text_encoders",
        QWEN_VAE: "Comfy-Org/Krea-2/vae",
    },
    model="krea2_turbo_fp8_scaled.safetensors",
    encoders=("qwen3vl_4b_fp8_scaled.safetensors",),
    kind="krea2",
    vae=QWEN_VAE,
    sampling={"steps": 8, "cfg": 1.0, "scheduler": "simple"},
)
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
CHOOSE = "choose your model, its text encoder and its VAE."
VAE_TOO = "*TRT Accelerate* takes the model and its VAE, and hands out both accelerated."


def flux_text_to_image() -> Recipe:
    """Flux.1 makes a picture of a prompt, with guidance in place of a negative prompt."""
    text = f"""# Flux.1, accelerated

A prompt becomes a picture, the same one as without this pack, only sooner.

1. **1 Models**: choose your model, its text encoders and its VAE.
2. {FIRST_RUN}

{VAE_TOO} **guidance** says how closely the picture follows the prompt; changing it needs no new build. {TOLD}
"""
    nodes = {"note": note(text, 340)} | _loaders(FLUX1) | _accelerate(FLUX1) | _prompt("guidance") | _guidance()
    return _recipe("flux1_text_to_image", FLUX1, "text to image", nodes, ["positive", "guidance", "negative", "latent"])


def flux_controlnet() -> Recipe:
    """Flux.1 with a union ControlNet, which is told what its picture shows."""
    text = f"""# Flux.1 with a ControlNet, accelerated

A picture holds the shape of a new one by its edges. The ControlNet is accelerated with the model.

1. **1 Models**: choose your models. The ControlNet is *diffusion_pytorch_model.safetensors* of \
*Shakker-Labs/FLUX.1-dev-ControlNet-Union-Pro-2.0*, saved under the name shown.
2. **3 ControlNet**: put in *Control image 1 (edges)*; its **strength**, **start** and **end** are on \
*TRT Apply ControlNet*.
3. {FIRST_RUN}

*Type of control* says what the picture shows. Union Pro 2 sees it by itself; Union and Union Pro need it. A \
ControlNet of InstantX works in the same place.
"""
    net = node("ControlNetLoader", "Load ControlNet 1 (edges)", {"control_net_name": UNION}, size=LOADER)
    kind = node("SetUnionControlNetType", "Type of control", {"type": "canny/lineart/anime_lineart/mlsd"},
                {"control_net": "net_1.CONTROL_NET"}, LOADER)
    image = node("LoadImage", "Control image 1 (edges)", {"image": "example.png"}, size=(280, 330))
    nodes = {"note": note(text, 420)} | _loaders(FLUX1) | {"net_1": net, "kind": kind} | _accelerate(FLUX1)
    nodes["accelerate"]["inputs"]["control_net_1"] = "kind.CONTROL_NET"
    nodes |= {"image_1": image} | _prompt("guidance") | _guidance() | apply(((0.7, 0.0, 0.8),))
    nodes["apply"]["inputs"] |= {"positive": "guidance.CONDITIONING", "vae": "accelerate.vae"}
    nodes |= latent(FLUX1, "EmptySD3LatentImage") | {
        "sampler": sampler("latent.LATENT", applied=True, settings=FLUX1.sampling)} | results()
    return recipe("flux1_controlnet", FLUX1, "ControlNet", nodes, [
        group("1 Models", MODELS, ["note"], ["model", "encoders", "vae", "net_1", "kind"]),
        group("2 Accelerate", ENGINES, ["accelerate"]),
        group("3 ControlNet", CONTROLS, ["positive", "guidance", "negative"], ["image_1", "apply"]),
        group("4 Sample", SAMPLE, ["latent", "sampler", "decode", "report"], ["ran", "save"]),
    ])


def zimage_text_to_image() -> Recipe:
    """Z-Image makes a picture of a prompt in few steps."""
    text = f"""# Z-Image, accelerated

A prompt becomes a picture, the same one as without this pack, only sooner.

1. **1 Models**: {CHOOSE}
2. {FIRST_RUN}

{VAE_TOO} The prompt is encoded once for all steps. LoRAs go before *TRT Accelerate*. {TOLD}
"""
    nodes = {"note": note(text, 340)} | _loaders(ZIMAGE) | _accelerate(ZIMAGE) | _prompt("positive")
    return _recipe("zimage_text_to_image", ZIMAGE, "text to image", nodes, ["positive", "negative", "latent"])


def krea_text_to_image() -> Recipe:
    """Krea 2 makes a picture of a prompt in few steps."""
    text = f"""# Krea 2, accelerated

A prompt of any length becomes a picture, the same one as without this pack, only sooner.

1. **1 Models**: {CHOOSE}
2. {FIRST_RUN}

{VAE_TOO} LoRAs go before *TRT Accelerate*. {TOLD}
"""
    nodes = {"note": note(text, 340)} | _loaders(KREA2) | _accelerate(KREA2) | _prompt("positive")
    return _recipe("krea2_text_to_image", KREA2, "text to image", nodes, ["positive", "negative", "latent"])


def qwen_text_to_image() -> Recipe:
    """Qwen-Image makes a picture of a prompt and a negative prompt."""
    text = f"""# Qwen-Image, accelerated

A prompt of any length becomes a picture, the same one as without this pack, only sooner.

1. **1 Models**: {CHOOSE}
2. {FIRST_RUN}

{VAE_TOO} ControlNets of InstantX go through *TRT Accelerate* too. {TOLD}
"""
    nodes = {"note": note(text, 340)} | _loaders(QWEN_IMAGE) | _accelerate(QWEN_IMAGE) | prompts("encoders.CLIP")
    return _recipe("qwen_text_to_image", QWEN_IMAGE, "text to image", nodes, ["positive", "negative", "latent"])


def qwen_edit() -> Recipe:
    """Qwen-Image-Edit changes a picture as its prompt says."""
    text = f"""# Qwen-Image-Edit, accelerated

A picture is changed as the prompt says; the rest of it stays.

1. **1 Models**: {CHOOSE}
2. **3 Picture and prompt**: put in *Picture to change*, and say in *Prompt* what shall be different.
3. {FIRST_RUN}

A second and a third picture go into *Prompt* and *Negative prompt*, and the text calls them picture 2 and \
picture 3. {VAE_TOO} {TOLD}
"""
    nodes = {"note": note(text, 400)} | _loaders(QWEN_EDIT) | _accelerate(QWEN_EDIT)
    nodes["image"] = node("LoadImage", "Picture to change", {"image": "example.png"}, size=(280, 330))
    nodes["scaled"] = node("FluxKontextImageScale", None, {}, {"image": "image.IMAGE"}, (300, 0))
    nodes["encode"] = node("VAEEncode", None, {}, {"pixels": "scaled.IMAGE", "vae": "accelerate.vae"}, (300, 0))
    for key, title, words in (("positive", "Prompt", "make it winter, snow on the roof"),
                              ("negative", "Negative prompt", "")):  # fmt: skip
        nodes[f"{key}_text"] = node(
            "TextEncodeQwenImageEditPlus", title, {"prompt": words},
            {"clip": "encoders.CLIP", "vae": "accelerate.vae", "image1": "scaled.IMAGE"}, (300, 160))
        nodes[key] = node("FluxKontextMultiReferenceLatentMethod", f"How pictures go in ({title.lower()})",
                          {"reference_latents_method": "index_timestep_zero"},
                          {"conditioning": f"{key}_text.CONDITIONING"}, (300, 0))
    nodes["even"] = node("CFGNorm", None, {"strength": 1.0}, {"model": "shift.MODEL"}, (300, 0))
    nodes["sampler"] = sampler("encode.LATENT", "even.patched_model", settings=QWEN_EDIT.sampling)
    nodes |= results()
    return recipe("qwen_edit", QWEN_EDIT, "edit", nodes, [
        group("1 Models", MODELS, ["note"], ["model", "encoders", "vae"]),
        group("2 Accelerate", ENGINES, ["accelerate", "shift", "even"]),
        group("3 Picture and prompt", CONTROLS, ["image", "scaled", "encode"],
              ["positive_text", "negative_text", "positive", "negative"]),
        group("4 Sample", SAMPLE, ["sampler", "decode", "report"], ["ran", "save"]),
    ])


def _loaders(family: Transformer) -> Nodes:
    """A model, its text encoders and its VAE."""
    several = len(family.encoders) > 1
    files = {f"clip_name{i if several else ''}": file for i, file in enumerate(family.encoders, start=1)}
    return {
        "model": node("UNETLoader", None, {"unet_name": family.model}, size=LOADER),
        "encoders": node("DualCLIPLoader" if several else "CLIPLoader", None, files | {"type": family.kind},
                         size=LOADER),
        "vae": node("VAELoader", None, {"vae_name": family.vae}, size=LOADER),
    }


def _accelerate(family: Transformer) -> Nodes:
    """The one node that runs a model and its VAE; behind it the family's shift."""
    nodes = accelerate(model="model.MODEL", vae="vae.VAE")
    if family.shift is not None:
        nodes["shift"] = node("ModelSamplingAuraFlow", None, {"shift": family.shift}, {"model": "accelerate.model"},
                              (300, 0))
    return nodes


def _prompt(last: str) -> Nodes:
    """A prompt for models that are sampled without CFG, which look at no negative one."""
    nodes = prompts("encoders.CLIP")
    nodes["negative"] = node("ConditioningZeroOut", "No negative prompt", {},
                             {"conditioning": f"{last}.CONDITIONING"}, (300, 0))
    return nodes


def _guidance() -> Nodes:
    """Guidance, which Flux.1 takes beside the prompt."""
    return {"guidance": node("FluxGuidance", None, {"guidance": 3.5}, {"conditioning": "positive.CONDITIONING"},
                             (300, 0))}  # fmt: skip


def _recipe(name: str, family: Transformer, title: str, nodes: Nodes, prompt: list[str]) -> Recipe:
    """A prompt becomes a picture: what all families have in common."""
    model = "shift.MODEL" if "shift" in nodes else "accelerate.model"
    nodes |= latent(family, "EmptyLatentImage" if family is KREA2 else "EmptySD3LatentImage")
    nodes["sampler"] = sampler("latent.LATENT", model, settings=family.sampling)
    if "guidance" in nodes:
        nodes["sampler"]["inputs"]["positive"] = "guidance.CONDITIONING"
    nodes |= results()
    return recipe(name, family, title, nodes, [
        group("1 Models", MODELS, ["note"], ["model", "encoders", "vae"]),
        group("2 Accelerate", ENGINES, ["accelerate", *(["shift"] if "shift" in nodes else [])]),
        group("3 Prompt", CONTROLS, prompt),
        group("4 Sample", SAMPLE, ["sampler", "decode", "report"], ["ran", "save"]),
    ])


TRANSFORMERS = (flux_text_to_image(), flux_controlnet(), zimage_text_to_image(), krea_text_to_image(),
                qwen_text_to_image(), qwen_edit())
