"""Parts of recipes of workflows: nodes, links, groups, and the models of each family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
class Family:
    """Difference between the families of models. Nets are (what the image shows, file name)."""

    title: str
    checkpoint: str
    nets: tuple[tuple[str, str], tuple[str, str]]
    size: int
    min_size: int
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
    min_size=256,
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
    min_size=512,
    max_size=1536,
    downloads={"sd_xl_base_1.0.safetensors": "stabilityai/stable-diffusion-xl-base-1.0"},
    hint="The ControlNets are *diffusion_pytorch_model.fp16.safetensors* of *diffusers/controlnet-canny-sdxl-1.0* and "
    "*diffusers/controlnet-depth-sdxl-1.0*, saved under the names shown.\n\n",
)
#: With room for the status that the node shows after a run.
ENGINE = (370, 260)
LOADER = (330, 0)


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


def with_downloads(nodes: dict[str, dict[str, Any]], repositories: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Let ComfyUI's page offer the download of the models that a loader names."""
    folders = {"ckpt_name": "checkpoints", "control_net_name": "controlnet"}
    for entry in nodes.values():
        for widget, folder in folders.items():
            file = entry["widgets"].get(widget)
            if file in repositories:
                url = f"https://huggingface.co/{repositories[file]}/resolve/main/{file}"
                entry["models"] = [{"name": file, "url": url, "directory": folder}]
    return nodes
