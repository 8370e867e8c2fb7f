"""Every node of ComfyUI's own that takes a MODEL and gives one, with inputs that make it act on the tiny models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ONE_IS_ENOUGH = "model/merging/model specific"  # the same code for one layout after the other

SETTINGS: dict[str, dict[str, Any]] = {
    "ContextWindowsManual": {"context_length": 1, "context_overlap": 0, "dim": 0},
    "EasyCache": {"reuse_threshold": 3.0, "start_percent": 0.0},
    "HyperTile": {"tile_size": 64, "max_depth": 0},
    "LoraLoaderBypassModelOnly": {"lora_name": "tiny_sd15_lora.safetensors"},
    "LoraLoaderModelOnly": {"lora_name": "tiny_sd15_lora.safetensors"},
    "ModelMergeBlocks": {"input": 0.5, "middle": 0.5, "out": 0.5},
    "ModelMergeSimple": {"ratio": 0.5},
    "MultiGPU_WorkUnits": {"max_gpus": 1},
    "PatchModelAddDownscale": {"block_number": 1, "end_percent": 1.0},
    "TomePatchModel": {"ratio": 0.5},
    "TorchCompileModel": {"backend": "cudagraphs"},
    "UNetCrossAttentionMultiply": {"q": 1.3},
    "UNetSelfAttentionMultiply": {"q": 1.3},
    "UNetTemporalAttentionMultiply": {"self_structural": 1.3},
}
"""Inputs of nodes whose defaults would change nothing, or need something that is not here."""


def default(spec: list[Any]) -> Any:
    """The value that the page puts into an input."""
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    choices = kind if isinstance(kind, list) else options.get("options", [""])
    return options.get("default", options.get("min", choices[0] if choices else ""))


def inputs_of(info: dict[str, Any]) -> dict[str, Any] | None:
    """Inputs for a node, models left out, or None when it wants things that this graph does not have."""
    inputs = {}
    for name, spec in info["input"].get("required", {}).items():
        if isinstance(spec[0], list) or spec[0] in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"):
            inputs[name] = default(spec)
        elif spec[0] == "CONDITIONING":
            inputs[name] = ["negative", 0]
        elif spec[0] == "LATENT_OPERATION":
            inputs[name] = ["operation", 0]
        elif spec[0] != "MODEL":
            return None
    return inputs


def model_nodes(every: Mapping[str, Any]) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Class -> names of its model inputs, other inputs; ``every`` is ComfyUI's object_info."""
    found = {}
    for name, info in every.items():
        models = [key for key, spec in info["input"].get("required", {}).items() if spec[0] == "MODEL"]
        if models and info["output"][:1] == ["MODEL"] and info["category"] != ONE_IS_ENOUGH:
            inputs = inputs_of(info)
            if inputs is not None:
                found[name] = (models, inputs | SETTINGS.get(name, {}))
    return found
