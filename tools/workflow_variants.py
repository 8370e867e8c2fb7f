"""The shipped workflows of Stable Diffusion: with ControlNets, repainted, and with advanced nodes."""

from __future__ import annotations

from typing import Any

from workflow_parts import (
    CONTROLS,
    ENGINE,
    ENGINES,
    MODELS,
    SAMPLE,
    SD15,
    SETTINGS,
    Family,
    Nodes,
    Recipe,
    accelerate,
    apply,
    control_images,
    group,
    latent,
    loaders,
    node,
    note,
    prompts,
    recipe,
    results,
    sampler,
)

RANGES = ((0.8, 0.0, 1.0), (0.6, 0.0, 0.7))
"""Strength, start and end of each row of the stack."""
TWO = ((0.7, 0.0, 1.0), (0.4, 0.0, 1.0))
FIRST_RUN = "Press **Run**. The first run builds what is missing, which takes minutes; later runs find it."
TOLD = "*TRT Report* says how many models were accelerated, *What ran where* shows every call, and *Save Image* " \
    "keeps the picture."
SIZES = "NVIDIA cards accelerate every size, others {} to {} pixels; choose more on *TRT Accelerate*."
LAST = group("4 Sample", SAMPLE, ["sampler", "decode", "report"], ["ran", "save"])


def two_controlnets(name: str, family: Family) -> Recipe:
    """A checkpoint and two ControlNets, all three accelerated by one node and stacked in another."""
    (first, _), (second, _) = family.nets[:2]
    text = f"""# {family.title} with two ControlNets, accelerated

Two pictures hold the shape of a new one: one by its {first}, one by its {second}.

1. **1 Models**: choose your checkpoint and your ControlNets.
2. **3 ControlNets**: put in *Control image 1 ({first})* and *Control image 2 ({second})*; each **strength** is on \
*TRT Apply ControlNet*.
3. {FIRST_RUN}

{TOLD}

{family.hint}*More ControlNets*: *TRT Accelerate* takes four; raise **rows** on *TRT Apply ControlNet*. \
{SIZES.format(family.min_size, family.max_size)}
"""
    nodes = {"note": note(text, 380)} | _accelerated(family, 2, TWO) | latent(family)
    nodes |= {"sampler": sampler("latent.LATENT", applied=True)} | results()
    return recipe(name, family, "two ControlNets", nodes, [
        group("1 Models", MODELS, ["note", "checkpoint", "net_1", "net_2"]),
        group("2 Accelerate", ENGINES, ["accelerate"]),
        group("3 ControlNets", CONTROLS, ["image_1", "image_2"], ["positive", "negative", "apply"]),
        group("4 Sample", SAMPLE, ["latent", "sampler", "decode"], ["report", "ran", "save"]),
    ])


def repaint() -> Recipe:
    """A picture is repainted, held by one ControlNet."""
    text = f"""# Repaint with a ControlNet, accelerated

A picture is painted anew, and a ControlNet holds its shape, so that much may change.

1. **1 Models**: choose your checkpoint and your ControlNet.
2. **3 Pictures and prompt**: put in *Picture to repaint* and *Control image 1 (edges)*, for example its edges.
3. {FIRST_RUN}

**denoise** on *KSampler* says how much may change, **strength** on *TRT Apply ControlNet* how firmly the shape is \
held. {SIZES.format(256, 1024)}
"""
    nodes = {"note": note(text)} | _accelerated(SD15, 1, RANGES[:1]) | _picture()
    nodes |= {"sampler": sampler("encode.LATENT", applied=True, denoise=0.65)} | results()
    return recipe("sd15_img2img_controlnet", SD15, "repaint with a ControlNet", nodes, [
        group("1 Models", MODELS, ["note", "checkpoint", "net_1"]),
        group("2 Accelerate", ENGINES, ["accelerate"]),
        group("3 Pictures and prompt", CONTROLS, ["image", "image_1"], ["positive", "negative", "apply", "encode"]),
        LAST,
    ])


def advanced() -> Recipe:
    """An engine node for each model, with settings of its own."""
    text = f"""# Advanced: a node for each engine

Two ControlNets again, with one node for each engine, so that each has settings of its own: sizes, precision, \
backend.

1. **1 Models**: choose your checkpoint and your ControlNets.
2. **2 Engines**: choose the settings. *TRT UNet Engine* finds or builds the engine, and *TRT Sampler Patch* runs the \
model on it. *TRT ControlNet Engine 1* and *2* give out a ControlNet that runs on its engine.
3. {FIRST_RUN}

*TRT Accelerate* does all this in one node; workflows made of these nodes keep running.
"""
    nodes = {"note": note(text, 380)} | loaders(SD15, 2)
    nodes["unet_engine"] = node("TRTUNetEngine", None, SETTINGS, {"model": "checkpoint.MODEL"}, ENGINE)
    for i in (1, 2):
        nodes[f"engine_{i}"] = node("TRTControlNetEngine", f"TRT ControlNet Engine {i}", SETTINGS,
                                    {"control_net": f"net_{i}.CONTROL_NET"}, ENGINE)
    nodes |= control_images(SD15, 2) | prompts() | apply(TWO, "engine_{}.control_net")
    nodes["patch"] = node("TRTSamplerPatch", None, {},
                          {"model": "checkpoint.MODEL", "engine": "unet_engine.engine"}, (300, 140))
    nodes |= latent(SD15) | {"sampler": sampler("latent.LATENT", "patch.model", applied=True)}
    nodes |= results(vae="checkpoint.VAE")
    return recipe("sd15_advanced", SD15, "advanced nodes", nodes, [
        group("1 Models", MODELS, ["note", "checkpoint", "net_1", "net_2"]),
        group("2 Engines", ENGINES, ["unet_engine", "engine_1", "engine_2"]),
        group("3 ControlNets", CONTROLS, ["image_1", "image_2"], ["positive", "negative", "apply"]),
        group("4 Sample", SAMPLE, ["patch", "latent", "sampler", "decode"], ["report", "ran", "save"]),
    ])


def _accelerated(family: Family, nets: int, ranges: tuple[Any, ...]) -> Nodes:
    """Loaders, the one node, pictures and prompts, up to the stack of ControlNets."""
    return (loaders(family, nets) | accelerate(nets) | control_images(family, nets) | prompts() | apply(ranges))


def _picture() -> Nodes:
    """A picture as a latent."""
    return {
        "image": node("LoadImage", "Picture to repaint", {"image": "example.png"}, size=(280, 330)),
        "encode": node("VAEEncode", None, {}, {"pixels": "image.IMAGE", "vae": "accelerate.vae"}, (300, 0)),
    }
