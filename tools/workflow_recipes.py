"""What the shipped workflows consist of, as data: nodes, links, and where things stand."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from workflow_to_prompt import ObjectInfo, Workflow, set_widget


@dataclass(frozen=True)
class Recipe:
    """One workflow.

    Attributes:
        nodes: by key: type, title, widgets by name, inputs by name as "key.output", size as (width, least height).
        groups: title, colour, columns of node keys from left to right, each from top to bottom.
    """

    name: str
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Family:
    """What differs between the families of models. Nets are (what the image shows, file name)."""

    title: str
    checkpoint: str
    nets: tuple[tuple[str, str], tuple[str, str]]
    size: int
    max_size: int
    downloads: dict[str, str]
    hint: str = ""


SD15 = Family(
    title="SD 1.5",
    checkpoint="v1-5-pruned-emaonly-fp16.safetensors",
    nets=(
        ("edges", "control_v11p_sd15_canny_fp16.safetensors"),
        ("depth", "control_v11f1p_sd15_depth_fp16.safetensors"),
    ),
    size=512,
    max_size=1024,
    downloads={
        "v1-5-pruned-emaonly-fp16.safetensors": "Comfy-Org/stable-diffusion-v1-5-archive",
        "control_v11p_sd15_canny_fp16.safetensors": "comfyanonymous/ControlNet-v1-1_fp16_safetensors",
        "control_v11f1p_sd15_depth_fp16.safetensors": "comfyanonymous/ControlNet-v1-1_fp16_safetensors",
    },
)
SDXL = Family(
    title="SDXL",
    checkpoint="sd_xl_base_1.0.safetensors",
    nets=(
        ("edges", "controlnet-canny-sdxl-1.0_fp16.safetensors"),
        ("depth", "controlnet-depth-sdxl-1.0_fp16.safetensors"),
    ),
    size=1024,
    max_size=1536,
    downloads={"sd_xl_base_1.0.safetensors": "stabilityai/stable-diffusion-xl-base-1.0"},
    hint="The ControlNets are *diffusion_pytorch_model.fp16.safetensors* of *diffusers/controlnet-canny-sdxl-1.0* and "
    "*diffusers/controlnet-depth-sdxl-1.0*, saved under the names shown.\n\n",
)
NOTE = """# {title} with two ControlNets on engines

1. **Models**: choose your checkpoint and your ControlNets.
2. **ControlNets**: put in your two control images ({first}, {second}) and set the strengths.
3. Press **Run**.

The first run builds an engine for each network and takes minutes. It is kept in *models/trt_engines*, so later runs \
start at once. If a network cannot run on its engine it runs native, and *TRT Report* says why.

{hint}*More ControlNets*: raise **rows** on *TRT Apply ControlNet*. *Other image sizes*: \
stay between **min_size** and **max_size** of the engine nodes, or change these.
"""
#: With room for the status that the node shows after a run.
ENGINE = (370, 300)
LOADER = (330, 0)


def two_controlnets(name: str, family: Family) -> Recipe:
    """A checkpoint and two ControlNets, all three on engines, stacked in one node."""
    sizes = {"when_missing": "build now", "opt_size": family.size, "max_size": family.max_size}
    (first, first_file), (second, second_file) = family.nets
    note = NOTE.format(title=family.title, first=first, second=second, hint=family.hint)
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
        "report": node("TRTReport", None, {}, {"after": "sampler.LATENT"}, (360, 170)),
        "decode": node("VAEDecode", None, {}, {"samples": "report.after", "vae": "checkpoint.VAE"}, (360, 0)),
        "text": node("PreviewAny", "What ran where", {}, {"source": "report.report"}, (360, 190)),
        "save": node("SaveImage", None, {"filename_prefix": "hybrid-trt"}, {"images": "decode.IMAGE"}, (360, 340)),
    }
    return Recipe(name, _with_downloads(nodes, family.downloads), [
        group("1 Models", "#3f789e", ["note", "checkpoint", "net_1", "net_2"]),
        group("2 Engines", "#8A8", ["unet_engine", "engine_1", "engine_2"]),
        group("3 ControlNets", "#b58b2a", ["image_1", "image_2"], ["positive", "negative", "apply"]),
        group("4 Sample", "#a1309b", ["patch", "latent", "sampler"], ["report", "decode", "text", "save"]),
    ])


def node(
    type: str,
    title: str | None = None,
    widgets: dict[str, Any] | None = None,
    inputs: dict[str, str] | None = None,
    size: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """One node of a recipe."""
    return {"type": type, "title": title, "widgets": widgets or {}, "inputs": inputs or {}, "size": size}


def group(title: str, colour: str, *columns: list[str]) -> dict[str, Any]:
    """One group of a recipe."""
    return {"title": title, "color": colour, "columns": list(columns)}


def _with_downloads(nodes: dict[str, dict[str, Any]], repositories: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Let ComfyUI's page offer the download of the models that a loader names."""
    folders = {"ckpt_name": "checkpoints", "control_net_name": "controlnet"}
    for entry in nodes.values():
        for widget, folder in folders.items():
            file = entry["widgets"].get(widget)
            if file in repositories:
                url = f"https://huggingface.co/{repositories[file]}/resolve/main/{file}"
                entry["models"] = [{"name": file, "url": url, "directory": folder}]
    return nodes


RECIPES = (two_controlnets("sd15_two_controlnets", SD15), two_controlnets("sdxl_two_controlnets", SDXL))


def with_tiny_models(workflow: Workflow, object_info: ObjectInfo, nets: tuple[str, str] = ("tiny_sd15_a", "tiny_sd15_b")
                     ) -> Workflow:
    """A copy of a two-ControlNet workflow with the tiny test models and images: it runs in seconds on a CPU.

    Its engines have the size that the tests' other engines have, so that they are built once.
    """
    workflow = copy.deepcopy(workflow)

    def put(target: str, **widgets: Any) -> None:
        for widget, value in widgets.items():
            set_widget(workflow, target, widget, value, object_info)

    put("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors")
    for number, (net, image) in enumerate(zip(nets, ("control_a.png", "control_b.png"), strict=True), start=1):
        titles = [n["title"] for n in workflow["nodes"] if "title" in n]
        put(next(t for t in titles if t.startswith(f"Load ControlNet {number}")), control_net_name=f"{net}.safetensors")
        put(next(t for t in titles if t.startswith(f"Control image {number}")), image=image)
    for engine in ("TRTUNetEngine", "TRTControlNetEngine"):
        put(engine, min_size=64, opt_size=128, max_size=512)
    put("EmptyLatentImage", width=128, height=128)
    put("KSampler", steps=4)
    return workflow
