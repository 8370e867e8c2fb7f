"""Contents of the shipped workflows, as data: nodes, links, and where things stand."""

from __future__ import annotations

import copy
from typing import Any

from workflow_parts import ENGINE, LOADER, SD15, SDXL, Family, Recipe, group, node, with_downloads
from workflow_to_prompt import ObjectInfo, Workflow, set_widget
from workflow_variants import build_only, compare, img2img, stack, text_to_image

NOTE = """# {title} with two ControlNets on engines

1. **1 Models**: choose your checkpoint and your ControlNets.
2. **3 ControlNets**: put in *Control image 1 ({first})* and *Control image 2 ({second})*; each **strength** is on \
*TRT Apply ControlNet*.
3. Press **Run**. The first run builds the three engines of **2 Engines**, which takes minutes; later runs find them.

The first line of *TRT Report* says how many networks ran on engines, *What ran where* shows every call, and \
*Save Image* keeps the picture.

{hint}*More ControlNets*: raise **rows** on *TRT Apply ControlNet*. *Other image sizes*: the engines take \
{least} to {most} pixels and one image at a time; for others choose **sizes** on the engine nodes.
"""


def two_controlnets(name: str, family: Family) -> Recipe:
    """A checkpoint and two ControlNets, all three on engines, stacked in one node."""
    sizes = {"when_missing": "build now"}  # the numbers stay 0: what fits the model
    (first, first_file), (second, second_file) = family.nets
    note = NOTE.format(title=family.title, first=first, second=second, hint=family.hint, least=family.min_size,
                       most=family.max_size)
    nodes: dict[str, dict[str, Any]] = {
        "note": node("MarkdownNote", "How to use this workflow", {"text": note}, size=(330, 380)),
        "checkpoint": node("CheckpointLoaderSimple", widgets={"ckpt_name": family.checkpoint}, size=LOADER),
        "net_1": node("ControlNetLoader", f"Load ControlNet 1 ({first})", {"control_net_name": first_file},
                      size=LOADER),
        "net_2": node("ControlNetLoader", f"Load ControlNet 2 ({second})", {"control_net_name": second_file},
                      size=LOADER),
        "unet_engine": node("TRTUNetEngine", None, sizes, {"model": "checkpoint.MODEL"}, ENGINE),
        "engine_1": node("TRTControlNetEngine", "TRT ControlNet Engine 1", sizes,
                         {"control_net": "net_1.CONTROL_NET"}, ENGINE),
        "engine_2": node("TRTControlNetEngine", "TRT ControlNet Engine 2", sizes,
                         {"control_net": "net_2.CONTROL_NET"}, ENGINE),
        "image_1": node("LoadImage", f"Control image 1 ({first})", {"image": "example.png"}, size=(280, 330)),
        "image_2": node("LoadImage", f"Control image 2 ({second})", {"image": "example.png"}, size=(280, 330)),
        "positive": node("CLIPTextEncode", "Prompt", {"text": "a house by a lake, morning light, photograph"},
                         {"clip": "checkpoint.CLIP"}, (300, 130)),
        "negative": node("CLIPTextEncode", "Negative prompt", {"text": "blurry, low quality, text, watermark"},
                         {"clip": "checkpoint.CLIP"}, (300, 130)),
        "apply": node(
            "TRTApplyControlNet", None, {"rows": "2", "rows.strength_1": 0.7, "rows.strength_2": 0.4},
            {"positive": "positive.CONDITIONING", "negative": "negative.CONDITIONING",
             "rows.control_net_1": "engine_1.control_net", "rows.image_1": "image_1.IMAGE",
             "rows.control_net_2": "engine_2.control_net", "rows.image_2": "image_2.IMAGE"}, (300, 370)),
        "patch": node("TRTSamplerPatch", None, {}, {"model": "checkpoint.MODEL", "engine": "unet_engine.engine"},
                      (300, 140)),
        "latent": node("EmptyLatentImage", None, {"width": family.size, "height": family.size, "batch_size": 1},
                       size=(300, 0)),
        "sampler": node(
            "KSampler", None,
            {"seed": 20, "control_after_generate": "fixed", "steps": 20, "cfg": 7.0, "sampler_name": "euler",
             "scheduler": "normal", "denoise": 1.0},
            {"model": "patch.model", "positive": "apply.positive", "negative": "apply.negative",
             "latent_image": "latent.LATENT"}, (300, 0)),
        "report": node("TRTReport", None, {}, {"after": "sampler.LATENT"}, (360, 230)),
        "decode": node("VAEDecode", None, {}, {"samples": "report.after", "vae": "checkpoint.VAE"}, (360, 0)),
        "ran": node("PreviewImage", "What ran where", {}, {"images": "report.plot"}, (360, 390)),
        "save": node("SaveImage", None, {"filename_prefix": "hybrid-trt"}, {"images": "decode.IMAGE"}, (360, 340)),
    }
    return Recipe(name, f"{family.title} - two ControlNets", with_downloads(nodes, family.downloads), [
        group("1 Models", "#3f789e", ["note", "checkpoint", "net_1", "net_2"]),
        group("2 Engines", "#8A8", ["unet_engine", "engine_1", "engine_2"]),
        group("3 ControlNets", "#b58b2a", ["image_1", "image_2"], ["positive", "negative", "apply"]),
        group("4 Sample", "#a1309b", ["patch", "latent", "sampler", "decode"], ["report", "ran", "save"]),
    ])


RECIPES = (
    text_to_image(),
    two_controlnets("sd15_two_controlnets", SD15),
    two_controlnets("sdxl_two_controlnets", SDXL),
    img2img(),
    stack(),
    build_only(),
    compare(),
)


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

    put("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors")
    for title in [n["title"] for n in workflow["nodes"] if "title" in n]:
        number = next((int(word) for word in title.split() if word.isdigit()), 1)
        if title.startswith("Load ControlNet"):
            put(title, control_net_name=f"{nets[(number - 1) % 2]}.safetensors")
        elif title.startswith(("Control image", "Picture")):
            put(title, image=("control_a.png", "control_b.png")[(number - 1) % 2])
    for engine in {"TRTAccelerate", "TRTUNetEngine", "TRTControlNetEngine"} & types:
        put(engine, min_size=64, opt_size=128, max_size=512, max_images=4, max_tokens=616)
    if "EmptyLatentImage" in types:
        put("EmptyLatentImage", width=128, height=128)
    if "KSampler" in types:
        put("KSampler", steps=4)
    return workflow
