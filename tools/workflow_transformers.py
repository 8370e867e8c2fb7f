"""The shipped workflows of transformers that make pictures, each with ComfyUI's own loaders."""

from __future__ import annotations

from typing import Any

from workflow_families import (
    FILL,
    FLUX1,
    FUN,
    KLEIN,
    KONTEXT,
    KREA2,
    KREA2_LORA,
    QWEN_EDIT,
    QWEN_IMAGE,
    UNION,
    ZIMAGE,
    ZIMAGE_LORA,
    Transformer,
)
from workflow_parts import (
    CONTROLS,
    ENGINES,
    LOADER,
    MODELS,
    SAMPLE,
    Nodes,
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

CHOOSE = "choose your model, its text encoder and its VAE."
VAE_TOO = "*TRT Accelerate* takes the model and its VAE, and hands out both accelerated."
PICTURE = "A prompt becomes a picture, the same one as without this pack, only sooner."
LONG_PROMPT = "A prompt of any length becomes a picture, the same one as without this pack, only sooner."
LAST = group("4 Sample", SAMPLE, ["sampler", "decode", "report"], ["ran", "save"])


def words(head: str, what: str, *steps: str, more: str) -> str:
    """The text of a note: a headline, what becomes of what, numbered steps, and more."""
    numbered = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, start=1))
    return f"# {head}, accelerated\n\n{what}\n\n{numbered}\n\n{more}\n"


def text_to_image(name: str, family: Transformer, text: str, title: str = "text to image", dtype: str = "default"
                  ) -> Recipe:
    """A prompt becomes a picture: what all families have in common."""
    nodes = {"note": note(text, 340)} | loaders(family, dtype) | _accelerate(family) | conditioned(family)
    nodes |= latent(family, family.latent) | {"sampler": _sampler(family, "latent.LATENT")} | results()
    prompt = [key for key in ("positive", "guidance", "negative", "latent") if key in nodes]
    return recipe(name, family, title, nodes, [*_first(nodes), group("3 Prompt", CONTROLS, prompt), LAST])


def flux_controlnet() -> Recipe:
    """Flux.1 with a union ControlNet, which is told what its picture shows."""
    text = words(
        "Flux.1 with a ControlNet",
        "A picture holds the shape of a new one by its edges. The ControlNet is accelerated with the model.",
        "**1 Models**: choose your models. The ControlNet is *diffusion_pytorch_model.safetensors* of "
        "*Shakker-Labs/FLUX.1-dev-ControlNet-Union-Pro-2.0*, saved under the name shown.",
        "**3 ControlNet**: put in *Control image 1 (edges)*; its **strength**, **start** and **end** are on "
        "*TRT Apply ControlNet*.", FIRST_RUN,
        more="*Type of control* says what the picture shows. Union Pro 2 sees it by itself; Union and Union Pro need "
        "it. A ControlNet of InstantX works in the same place.")
    net = node("ControlNetLoader", "Load ControlNet 1 (edges)", {"control_net_name": UNION}, size=LOADER)
    kind = node("SetUnionControlNetType", "Type of control", {"type": "canny/lineart/anime_lineart/mlsd"},
                {"control_net": "net_1.CONTROL_NET"}, LOADER)
    nodes = {"note": note(text, 420)} | loaders(FLUX1) | {"net_1": net, "kind": kind} | _accelerate(FLUX1)
    nodes["accelerate"]["inputs"]["control_net_1"] = "kind.CONTROL_NET"
    nodes |= {"image_1": _picture("Control image 1 (edges)")} | conditioned(FLUX1) | apply(((0.7, 0.0, 0.8),))
    nodes["apply"]["inputs"] |= {"positive": "guidance.CONDITIONING", "vae": "accelerate.vae"}
    nodes |= latent(FLUX1, FLUX1.latent) | {
        "sampler": sampler("latent.LATENT", applied=True, settings=FLUX1.sampling)} | results()
    return recipe("flux1_controlnet", FLUX1, "ControlNet", nodes, [
        *_first(nodes, "net_1", "kind"),
        group("3 ControlNet", CONTROLS, ["positive", "guidance", "negative"], ["image_1", "apply"]),
        group("4 Sample", SAMPLE, ["latent", "sampler", "decode", "report"], ["ran", "save"]),
    ])


def zimage_control() -> Recipe:
    """Z-Image with Fun control, which is a part of the model and of its engine."""
    text = words(
        "Z-Image with Fun control",
        "A picture holds the shape of a new one: by its edges, depth, pose or lines.",
        "**1 Models**: choose your model, its text encoder, its VAE and its Fun control.",
        "**3 Prompt and picture**: put in *Control image 1 (edges)*.", FIRST_RUN,
        more="*Fun control* goes before *TRT Accelerate*: one engine computes both. Its **strength** and its "
        f"picture may change without a new build. {TOLD}")
    patch = node("ModelPatchLoader", None, {"name": FUN}, size=LOADER)
    control = node("ZImageFunControlnet", "Fun control", {"strength": 1.0}, {
        "model": "model.MODEL", "model_patch": "patch.MODEL_PATCH", "vae": "vae.VAE", "image": "image_1.IMAGE"}, LOADER)
    nodes = {"note": note(text, 380)} | loaders(ZIMAGE) | {
        "patch": patch, "image_1": _picture("Control image 1 (edges)"), "control": control}
    nodes |= _accelerate(ZIMAGE, "control.MODEL") | conditioned(ZIMAGE) | latent(ZIMAGE, ZIMAGE.latent)
    nodes |= {"sampler": _sampler(ZIMAGE, "latent.LATENT")} | results()
    return recipe("zimage_control", ZIMAGE, "Fun control", nodes, [
        group("1 Models", MODELS, ["note"], ["model", "encoders", "vae", "patch"]),
        group("2 Accelerate", ENGINES, ["control", "accelerate", "shift"]),
        group("3 Prompt and picture", CONTROLS, ["image_1"], ["positive", "negative", "latent"]), LAST,
    ])


def zimage_compared() -> Recipe:
    """Z-Image twice: by ComfyUI alone and accelerated."""
    text = """# With and without, side by side

The same picture twice: in **4 Without** by ComfyUI alone, in **5 Accelerated** with *TRT Accelerate*. *Save Image* \
keeps both side by side (left without), *TRT Compare* says how much differs and shows it (black: nothing), *What ran \
where* every call.

1. **1 Models**: choose your model, its text encoder and its VAE.
2. **3 Prompt**: say what the picture shows.
3. Press **Run** twice, and compare the times that ComfyUI shows on the two samplers. The first run also builds.

Half precision rounds differently in an engine, so a faint difference is normal.
"""
    nodes = {"note": note(text, 380)} | loaders(ZIMAGE) | _accelerate(ZIMAGE) | conditioned(ZIMAGE)
    nodes |= latent(ZIMAGE, ZIMAGE.latent) | {
        "sampler": _sampler(ZIMAGE, "latent.LATENT", title="KSampler (accelerated)")} | results()
    nodes["native_shift"] = _shift(ZIMAGE, "model.MODEL")
    nodes["native_sampler"] = sampler("latent.LATENT", "native_shift.MODEL", title="KSampler (without)",
                                      settings=ZIMAGE.sampling)
    nodes["native_decode"] = node("VAEDecode", "VAE Decode (without)", {},
                                  {"samples": "native_sampler.LATENT", "vae": "vae.VAE"}, (360, 0))
    nodes["both"] = node("ImageStitch", None, {"direction": "right"},
                         {"image1": "native_decode.IMAGE", "image2": "decode.IMAGE"}, (360, 0))
    nodes["compare"] = node("TRTCompare", None, {},
                            {"normal": "native_decode.IMAGE", "accelerated": "decode.IMAGE"}, (360, 460))
    nodes["save"]["inputs"] = {"images": "both.IMAGE"}
    return recipe("zimage_compare", ZIMAGE, "with and without", nodes, [
        *_first(nodes),
        group("3 Prompt", CONTROLS, ["positive", "negative", "latent"]),
        group("4 Without", MODELS, ["native_shift", "native_sampler", "native_decode"]),
        group("5 Accelerated", SAMPLE, ["sampler", "decode", "report", "ran"]),
        group("6 Compare", ENGINES, ["compare"], ["both", "save"]),
    ])


def qwen_edit() -> Recipe:
    """Qwen-Image-Edit changes a picture as its prompt says, with up to two others to refer to."""
    text = words(
        "Qwen-Image-Edit", "A picture is changed as the prompt says; the rest of it stays.", f"**1 Models**: {CHOOSE}",
        "**3 Pictures and prompt**: put in *Picture 1 to change*, and say in *Prompt* what shall be different.",
        FIRST_RUN,
        more="The prompt calls the others image 2 and image 3. Bypass *Picture 2* or *Picture 3* where you need fewer; "
        f"another number of pictures needs no new build. {VAE_TOO} {TOLD}")
    nodes = {"note": note(text, 400)} | loaders(QWEN_EDIT) | _accelerate(QWEN_EDIT)
    nodes |= _changed("Picture 1 to change")
    pictures = {"image1": "scaled.IMAGE"}
    for number in (2, 3):
        nodes[f"image_{number}"] = _picture(f"Picture {number}")
        pictures[f"image{number}"] = f"image_{number}.IMAGE"
    for key, title, said in (("positive", "Prompt", "put the lamp of image 2 and the chair of image 3 into image 1"),
                             ("negative", "Negative prompt", "")):  # fmt: skip
        nodes[f"{key}_text"] = node("TextEncodeQwenImageEditPlus", title, {"prompt": said},
                                    {"clip": "encoders.CLIP", "vae": "accelerate.vae", **pictures}, (300, 160))
        nodes[key] = node("FluxKontextMultiReferenceLatentMethod", f"How pictures go in ({title.split()[0].lower()})",
                          {"reference_latents_method": "index_timestep_zero"},
                          {"conditioning": f"{key}_text.CONDITIONING"}, (300, 0))
    nodes["even"] = node("CFGNorm", None, {"strength": 1.0}, {"model": "shift.MODEL"}, (300, 0))
    nodes["sampler"] = sampler("encode.LATENT", "even.patched_model", settings=QWEN_EDIT.sampling)
    nodes |= results()
    return recipe("qwen_edit", QWEN_EDIT, "edit", nodes, [
        *_first(nodes),
        group("3 Pictures and prompt", CONTROLS, ["image", "scaled", "encode"], ["image_2", "image_3"],
              ["positive_text", "negative_text", "positive", "negative"]), LAST,
    ])


def klein_edit() -> Recipe:
    """Flux.2 klein changes a picture as its prompt says, in four steps."""
    text = words(
        "Flux.2 klein", "A picture is changed as the prompt says, in four steps.", f"**1 Models**: {CHOOSE}",
        "**3 Picture and prompt**: put in *Picture to change*, and say in *Prompt* what shall be different.",
        FIRST_RUN,
        more="For a second picture copy *The picture goes in* and *VAE Encode*, and put them behind the first. "
        f"{VAE_TOO} {TOLD}")
    nodes = {"note": note(text, 400)} | loaders(KLEIN) | _accelerate(KLEIN) | _changed()
    nodes["scaled"] = node("ImageScaleToTotalPixels", None, {"upscale_method": "nearest-exact", "megapixels": 1.0},
                           {"image": "image.IMAGE"}, (300, 0))
    nodes["size"] = node("GetImageSize", None, {}, {"image": "scaled.IMAGE"}, (300, 0))
    nodes |= conditioned(KLEIN) | _reference()
    size = {"width": "size.width", "height": "size.height"}
    nodes["negative"]["inputs"]["conditioning"] = "reference.CONDITIONING"
    nodes["latent"] = node(KLEIN.latent, None, {"batch_size": 1}, size, (300, 0))
    nodes["kind"] = node("KSamplerSelect", None, {"sampler_name": "euler"}, {}, (300, 0))
    nodes["sigmas"] = node("Flux2Scheduler", None, {"steps": 4}, size, (300, 0))
    nodes["sampler"] = custom_sampler("accelerate.model", "reference.CONDITIONING", "latent.LATENT", KLEIN.sampling)
    nodes |= results("sampler.output")
    return recipe("flux2_edit", KLEIN, "klein edit", nodes, [
        *_first(nodes),
        group("3 Picture and prompt", CONTROLS, ["image", "scaled", "size"],
              ["positive", "encode", "reference", "negative"]),
        group("4 Sample", SAMPLE, ["latent", "kind", "sigmas", "sampler"], ["decode", "report", "ran"], ["save"]),
    ])


def kontext_edit() -> Recipe:
    """Flux.1 Kontext changes a picture as its prompt says."""
    text = words(
        "Flux.1 Kontext", "A picture is changed as the prompt says; the rest of it stays.",
        "**1 Models**: choose your model, its text encoders and its VAE.",
        "**3 Picture and prompt**: put in *Picture to change*, and say in *Prompt* what shall be different.",
        FIRST_RUN,
        more=f"**guidance** says how closely the picture follows the prompt. {VAE_TOO} {TOLD}")
    nodes = {"note": note(text, 400)} | loaders(KONTEXT) | _accelerate(KONTEXT) | _changed()
    nodes |= conditioned(KONTEXT) | _reference()
    nodes["guidance"]["inputs"]["conditioning"] = "reference.CONDITIONING"
    nodes |= {"sampler": _sampler(KONTEXT, "encode.LATENT")} | results()
    return recipe("flux1_kontext", KONTEXT, "Kontext edit", nodes, [
        *_first(nodes),
        group("3 Picture and prompt", CONTROLS, ["image", "scaled", "encode"],
              ["positive", "reference", "guidance", "negative"]), LAST,
    ])


def fill() -> Recipe:
    """Flux.1 Fill paints the masked part of a picture anew."""
    text = words(
        "Flux.1 Fill", "The masked part of a picture is painted anew; the rest of it stays.",
        "**1 Models**: choose your model, its text encoders and its VAE.",
        "**3 Picture and prompt**: put in *Picture with a mask*. Right-click it and open the mask editor to paint the "
        "mask. Say in *Prompt* what shall be there.", FIRST_RUN,
        more=f"Another mask, picture or **guidance** needs no new build. {VAE_TOO} {TOLD}")
    nodes = {"note": note(text, 400)} | loaders(FILL) | _accelerate(FILL)
    nodes["soft"] = node("DifferentialDiffusion", None, {"strength": 1.0}, {"model": "accelerate.model"}, (300, 0))
    nodes |= {"image": _picture("Picture with a mask")} | conditioned(FILL)
    nodes["masked"] = node("InpaintModelConditioning", None, {"noise_mask": True}, {
        "positive": "guidance.CONDITIONING", "negative": "negative.CONDITIONING", "vae": "accelerate.vae",
        "pixels": "image.IMAGE", "mask": "image.MASK"}, (300, 0))
    nodes["sampler"] = sampler("masked.latent", "soft.MODEL", settings=FILL.sampling)
    nodes["sampler"]["inputs"] |= {"positive": "masked.positive", "negative": "masked.negative"}
    nodes |= results()
    return recipe("flux1_fill", FILL, "Fill", nodes, [
        *_first(nodes, after=("soft",)),
        group("3 Picture and prompt", CONTROLS, ["image"], ["positive", "guidance", "negative", "masked"]), LAST,
    ])


def loaders(family: Transformer, dtype: str = "default") -> Nodes:
    """A model with its LoRA, its text encoders and its VAE."""
    several = len(family.encoders) > 1
    files = {f"clip_name{i if several else ''}": file for i, file in enumerate(family.encoders, start=1)}
    made = {"model": node("UNETLoader", None, {"unet_name": family.model} | (
        {} if dtype == "default" else {"weight_dtype": dtype}), size=LOADER)}
    if family.lora is not None:
        made["lora"] = lora("Load LoRA", family.lora, "model.MODEL")
    return made | {
        "encoders": node("DualCLIPLoader" if several else "CLIPLoader", None, files | {"type": family.kind},
                         size=LOADER),
        "vae": node("VAELoader", None, {"vae_name": family.vae}, size=LOADER),
    }


def lora(title: str, file: tuple[str, float], model: str) -> dict[str, Any]:
    """A LoRA of the model alone."""
    return node("LoraLoaderModelOnly", title, {"lora_name": file[0], "strength_model": file[1]}, {"model": model},
                LOADER)


def conditioned(family: Transformer) -> Nodes:
    """The prompt, with guidance where a family takes it, and a negative prompt where the sampler looks at one."""
    nodes = prompts("encoders.CLIP", family.prompt)
    if family.sampling["cfg"] == 1.0:
        last = "positive" if family.guidance is None else "guidance"
        nodes["negative"] = node("ConditioningZeroOut", "No negative prompt", {},
                                 {"conditioning": f"{last}.CONDITIONING"}, (300, 0))
    if family.guidance is not None:
        nodes["guidance"] = node("FluxGuidance", None, {"guidance": family.guidance},
                                 {"conditioning": "positive.CONDITIONING"}, (300, 0))
    return nodes


def custom_sampler(model: str, positive: str, latent: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A sampler with steps of its own, and without a negative prompt."""
    return node("SamplerCustom", None, {"add_noise": True, "noise_seed": 20, "control_after_generate": "fixed"}
                | settings, {"model": model, "positive": positive, "negative": "negative.CONDITIONING",
                             "sampler": "kind.SAMPLER", "sigmas": "sigmas.SIGMAS", "latent_image": latent}, (300, 0))


def _sampler(family: Transformer, latent: str, title: str | None = None) -> dict[str, Any]:
    made = sampler(latent, "accelerate.model" if family.shift is None else "shift.MODEL", title=title,
                   settings=family.sampling)
    if family.guidance is not None:
        made["inputs"]["positive"] = "guidance.CONDITIONING"
    return made


def _accelerate(family: Transformer, model: str | None = None) -> Nodes:
    """The one node that runs a model and its VAE; behind it the family's shift."""
    nodes = accelerate(model=model or ("model.MODEL" if family.lora is None else "lora.MODEL"), vae="vae.VAE")
    return nodes if family.shift is None else nodes | {"shift": _shift(family, "accelerate.model")}


def _shift(family: Transformer, model: str) -> dict[str, Any]:
    return node("ModelSamplingAuraFlow", None, {"shift": family.shift}, {"model": model}, (300, 0))


def _picture(title: str) -> dict[str, Any]:
    return node("LoadImage", title, {"image": "example.png"}, size=(280, 330))


def _changed(title: str = "Picture to change") -> Nodes:
    """A picture in a size that suits the model, and its latent."""
    return {
        "image": _picture(title),
        "scaled": node("FluxKontextImageScale", None, {}, {"image": "image.IMAGE"}, (300, 0)),
        "encode": node("VAEEncode", None, {}, {"pixels": "scaled.IMAGE", "vae": "accelerate.vae"}, (300, 0)),
    }


def _reference() -> Nodes:
    return {"reference": node("ReferenceLatent", "The picture goes in", {}, {
        "conditioning": "positive.CONDITIONING", "latent": "encode.LATENT"}, (300, 0))}  # fmt: skip


def _first(nodes: Nodes, *more: str, after: tuple[str, ...] = ("shift", "even")) -> list[dict[str, Any]]:
    """The groups of models and of what accelerates them."""
    models = [key for key in ("model", "lora", "encoders", "vae", *more) if key in nodes]
    return [group("1 Models", MODELS, ["note"], models),
            group("2 Accelerate", ENGINES, ["accelerate", *(key for key in after if key in nodes)])]


TRANSFORMERS = (
    text_to_image("flux1_text_to_image", FLUX1, words(
        "Flux.1", PICTURE, "**1 Models**: choose your model, its text encoders and its VAE.", FIRST_RUN,
        more=f"{VAE_TOO} **guidance** says how closely the picture follows the prompt; changing it needs no new "
        f"build. {TOLD}")),
    flux_controlnet(),
    text_to_image("zimage_text_to_image", ZIMAGE, words(
        "Z-Image", PICTURE, f"**1 Models**: {CHOOSE}", FIRST_RUN,
        more=f"{VAE_TOO} The prompt is encoded once for all steps. LoRAs go before *TRT Accelerate*. {TOLD}")),
    text_to_image("krea2_text_to_image", KREA2, words(
        "Krea 2", LONG_PROMPT, f"**1 Models**: {CHOOSE}", FIRST_RUN,
        more=f"{VAE_TOO} LoRAs go before *TRT Accelerate*. {TOLD}")),
    text_to_image("qwen_text_to_image", QWEN_IMAGE, words(
        "Qwen-Image", LONG_PROMPT, f"**1 Models**: {CHOOSE}", FIRST_RUN,
        more=f"{VAE_TOO} ControlNets of InstantX go through *TRT Accelerate* too. {TOLD}")),
    qwen_edit(),
    text_to_image("zimage_lora", ZIMAGE_LORA, words(
        "Z-Image with a LoRA in fp8", "A LoRA changes the style of the picture, and the model with it is accelerated.",
        "**1 Models**: choose your model, your LoRA, the text encoder and the VAE.", FIRST_RUN,
        more="**weight_dtype** halves the memory of the model; choose *default* for full precision. All LoRAs go "
        "before *TRT Accelerate*. On NVIDIA cards another LoRA or **strength_model** needs no new build. "
        f"{TOLD}"), "LoRA in fp8", "fp8_e4m3fn"),
    zimage_control(),
    zimage_compared(),
    text_to_image("krea2_lora", KREA2_LORA, words(
        "Krea 2 with a LoRA", "A LoRA changes the style of the picture, and the model with it is accelerated.",
        "**1 Models**: choose your model, your LoRA, the text encoder and the VAE.", FIRST_RUN,
        more="This LoRA wants the words: muted minimalist sketch style. All LoRAs go before *TRT Accelerate*. On "
        f"NVIDIA cards another LoRA or **strength_model** needs no new build. {TOLD}"), "LoRA"),
    klein_edit(),
    kontext_edit(),
    fill(),
)
