"""Parts of recipes of workflows: nodes, links, groups, and the models of each family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Nodes = dict[str, dict[str, Any]]

@dataclass(frozen=True)
class Recipe:
    """One workflow.

    Attributes:
        name: how tools and tests call it.
        title: "family - what it is": the file's name, which is all that ComfyUI's template browser shows of it.
        nodes: by key: type, title, widgets by name, inputs by name as "key.output", size as (width, least height).
        groups: title, colour, columns of node keys from left to right, each from top to bottom.
    """

    name: str
    title: str
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Published:
    """A family of models: its name, the size of its pictures, and each file's "owner/repository/folder"."""

    title: str
    size: int
    downloads: dict[str, str]


@dataclass(frozen=True)
class Family(Published):
    """Difference between the families whose models are checkpoints. Nets are (what the image shows, file name)."""

    checkpoint: str
    nets: tuple[tuple[str, str], ...]
    min_size: int
    max_size: int
    hint: str = ""


NETS_15 = "comfyanonymous/ControlNet-v1-1_fp16_safetensors"
SD15 = Family(
    title="SD 1.5",
    checkpoint="v1-5-pruned-emaonly-fp16.safetensors",
    nets=(
        ("edges", "control_v11p_sd15_canny_fp16.safetensors"),
        ("depth", "control_v11f1p_sd15_depth_fp16.safetensors"),
        ("pose", "control_v11p_sd15_openpose_fp16.safetensors"),
        ("lines", "control_v11p_sd15_lineart_fp16.safetensors"),
    ),
    size=512,
    min_size=256,
    max_size=1024,
    downloads={
        "v1-5-pruned-emaonly-fp16.safetensors": "Comfy-Org/stable-diffusion-v1-5-archive",
        "control_v11p_sd15_canny_fp16.safetensors": NETS_15,
        "control_v11f1p_sd15_depth_fp16.safetensors": NETS_15,
        "control_v11p_sd15_openpose_fp16.safetensors": NETS_15,
        "control_v11p_sd15_lineart_fp16.safetensors": NETS_15,
        "add_detail.safetensors": "OedoSoldier/detail-tweaker-lora",
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
    min_size=512,
    max_size=1536,
    downloads={"sd_xl_base_1.0.safetensors": "stabilityai/stable-diffusion-xl-base-1.0"},
    hint="The ControlNets are *diffusion_pytorch_model.fp16.safetensors* of *diffusers/controlnet-canny-sdxl-1.0* and "
    "*diffusers/controlnet-depth-sdxl-1.0*, saved under the names shown.\n\n",
)
#: With room for the status that the node shows after a run.
ENGINE = (370, 260)
LOADER = (330, 0)
MODELS, ENGINES, CONTROLS, SAMPLE = "#3f789e", "#8A8", "#b58b2a", "#a1309b"
"""Colours of groups."""
SETTINGS = {"when_missing": "build now"}
"""Widgets of nodes with engines; the sizes stay 0, which is what fits the model."""
FOLDERS = {"ckpt_name": "checkpoints", "control_net_name": "controlnet", "lora_name": "loras",
           "unet_name": "diffusion_models", "clip_name": "text_encoders", "clip_name1": "text_encoders",
           "clip_name2": "text_encoders", "text_encoder": "text_encoders", "vae_name": "vae",
           "model_name": "geometry_estimation", "name": "model_patches"}
"""Widgets that name a model's file, and the folder below models."""
APP = (
    ("CLIPTextEncode", ("text",)), ("TextEncodeQwenImageEditPlus", ("prompt",)), ("MiniMaxH3ImageToVideo", ("prompt",)),
    ("LoadImage", ("image",)), ("LoraLoader", ("lora_name", "strength_model")),
    ("LoraLoaderModelOnly", ("lora_name", "strength_model")), ("ZImageFunControlnet", ("strength",)),
    ("TRTApplyControlNet", ("rows.strength_1", "rows.strength_2", "rows.strength_3", "rows.strength_4")),
    ("CheckpointLoaderSimple", ("ckpt_name",)), ("UNETLoader", ("unet_name",)),
    ("EmptyLatentImage", ("width", "height")), ("EmptySD3LatentImage", ("width", "height")),
    *((kind, ("width", "height", "length")) for kind in (
        "EmptyHunyuanLatentVideo", "WanImageToVideo", "MiniMaxH3ImageToVideo", "EmptyLTXVLatentVideo")),
    ("FluxGuidance", ("guidance",)), ("KSampler", ("denoise", "seed")), ("KSamplerAdvanced", ("noise_seed",)),
    ("SamplerCustom", ("noise_seed",)), ("LoadVideo", ("file",)), ("TRTStream", ("denoise", "seed")),
)
"""Widgets that App mode shows, in this order."""
SAVES = ("SaveImage", "SaveVideo")


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


def with_downloads(nodes: Nodes, repositories: dict[str, str]) -> Nodes:
    """Let ComfyUI's page offer the download of the models that a loader names."""
    for entry in nodes.values():
        for widget, folder in FOLDERS.items():
            file = entry["widgets"].get(widget)
            if file in repositories:
                owner, repository, *place = repositories[file].split("/")
                url = "/".join(("https://huggingface.co", owner, repository, "resolve/main", *place, file))
                entry.setdefault("models", []).append({"name": file, "url": url, "directory": folder})
    return nodes


def app_mode(nodes: Nodes) -> dict[str, Any]:
    """Return what the page keeps of App mode: the widgets and the results that it shows, by node."""
    numbers = {key: str(number) for number, key in enumerate(nodes, start=1)}
    inputs = [[numbers[key], widget, *([{"description": entry["title"]}] if entry["title"] else [])]
              for kind, widgets in APP for key, entry in nodes.items() if entry["type"] == kind
              for widget in widgets if _in_app(widget, entry["widgets"])]
    return {"inputs": inputs, "outputs": [numbers[key] for key, entry in nodes.items() if entry["type"] in SAVES]}


def _in_app(widget: str, values: dict[str, Any]) -> bool:
    """Return whether a widget matters here; a whole denoise and the seed of no noise are nobody's choice."""
    return widget in values and (widget, values[widget]) not in (("denoise", 1.0), ("noise_seed", 0))


def note(text: str, height: int = 300) -> dict[str, Any]:
    """The words about a workflow."""
    return node("MarkdownNote", "How to use this workflow", {"text": text}, size=(330, height))


def loaders(family: Family, nets: int = 0) -> Nodes:
    """A checkpoint and the first ControlNets of a family."""
    nodes = {"checkpoint": node("CheckpointLoaderSimple", widgets={"ckpt_name": family.checkpoint}, size=LOADER)}
    for i, (shows, file) in enumerate(family.nets[:nets], start=1):
        title = f"Load ControlNet {i} ({shows})"
        nodes[f"net_{i}"] = node("ControlNetLoader", title, {"control_net_name": file}, size=LOADER)
    return nodes


def accelerate(nets: int = 0, model: str = "checkpoint.MODEL", vae: str | None = "checkpoint.VAE") -> Nodes:
    """The one node that runs a model, its VAE and the loaded ControlNets on engines."""
    inputs = {"model": model} | ({} if vae is None else {"vae": vae})
    inputs |= {f"control_net_{i}": f"net_{i}.CONTROL_NET" for i in range(1, nets + 1)}
    return {"accelerate": node("TRTAccelerate", None, SETTINGS, inputs, ENGINE)}


def control_images(family: Family, nets: int) -> Nodes:
    """A picture for each ControlNet."""
    return {
        f"image_{i}": node("LoadImage", f"Control image {i} ({shows})", {"image": "example.png"}, size=(280, 330))
        for i, (shows, _) in enumerate(family.nets[:nets], start=1)
    }


def prompts(clip: str = "checkpoint.CLIP", text: str = "a house by a lake, morning light, photograph") -> Nodes:
    """The prompt and the negative prompt."""
    return {
        "positive": node("CLIPTextEncode", "Prompt", {"text": text}, {"clip": clip}, (300, 130)),
        "negative": node("CLIPTextEncode", "Negative prompt", {"text": "blurry, low quality, text, watermark"},
                         {"clip": clip}, (300, 130)),
    }


def latent(family: Published, kind: str = "EmptyLatentImage") -> Nodes:
    """An empty latent of the size that a family was trained on."""
    widgets = {"width": family.size, "height": family.size, "batch_size": 1}
    return {"latent": node(kind, None, widgets, size=(300, 0))}


def apply(ranges: tuple[tuple[float, float, float], ...], accelerated: str = "accelerate.control_net_{}") -> Nodes:
    """The stack of ControlNets: strength, start and end of each."""
    widgets: dict[str, Any] = {"rows": str(len(ranges))}
    inputs = {"positive": "positive.CONDITIONING", "negative": "negative.CONDITIONING"}
    for i, (strength, start, end) in enumerate(ranges, start=1):
        widgets |= {f"rows.strength_{i}": strength, f"rows.start_{i}": start, f"rows.end_{i}": end}
        inputs |= {f"rows.control_net_{i}": accelerated.format(i), f"rows.image_{i}": f"image_{i}.IMAGE"}
    size = (300, 210 + 80 * len(ranges))  # Vue nodes are taller
    return {"apply": node("TRTApplyControlNet", None, widgets, inputs, size)}


def sampler(latent: str, model: str = "accelerate.model", applied: bool = False, denoise: float = 1.0,
            title: str | None = None, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """A sampler of a model, behind the prompts or behind the stack of ControlNets."""
    first, second = ("apply.positive", "apply.negative") if applied else (
        "positive.CONDITIONING", "negative.CONDITIONING")
    return node(
        "KSampler", title,
        {"seed": 20, "control_after_generate": "fixed", "steps": 20, "cfg": 7.0, "sampler_name": "euler",
         "scheduler": "normal", "denoise": denoise} | (settings or {}),
        {"model": model, "positive": first, "negative": second, "latent_image": latent}, (300, 0))


PICTURE = "report.latent or any"
"""The output of the report that hands the picture on, by the label that the page shows."""


def results(sampled: str = "sampler.LATENT", vae: str = "accelerate.vae") -> Nodes:
    """The picture behind the last sampler, and behind it the report and its chart."""
    return {
        "decode": node("VAEDecode", None, {}, {"samples": sampled, "vae": vae}, (360, 0)),
        "report": node("TRTReport", None, {}, {"after": "decode.IMAGE"}, (360, 230)),
        "ran": node("PreviewImage", "What ran where", {}, {"images": "report.chart"}, (360, 390)),
        "save": node("SaveImage", None, {"filename_prefix": "hybrid-trt"}, {"images": PICTURE}, (360, 340)),
    }


def video(fps: float, sampled: str, vae: str = "accelerate.vae", **sound: str) -> Nodes:
    """The video behind the last sampler, and behind it the report and its chart."""
    nodes = results(sampled, vae)
    nodes["joined"] = node("CreateVideo", None, {"fps": fps}, {"images": PICTURE, **sound}, (360, 0))
    nodes["save"] = node("SaveVideo", None, {"filename_prefix": "video/hybrid-trt"}, {"video": "joined.VIDEO"},
                         (360, 340))
    return nodes


def recipe(name: str, family: Published, title: str, nodes: Nodes, groups: list[dict[str, Any]]) -> Recipe:
    """A recipe whose models can be downloaded."""
    return Recipe(name, f"{family.title} - {title}", with_downloads(nodes, family.downloads), groups)
