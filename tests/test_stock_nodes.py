"""Every node of ComfyUI's own that takes a MODEL and gives one acts as in native, wherever it stands in the graph.

Slow: about four minutes. `make test ARGS="-m slow tests/test_stock_nodes.py"`
"""

from __future__ import annotations

from typing import Any

import pytest
from comfy_process import ComfyProcess, PromptRejected
from scenarios import Prompt, Scenario, latent_of, node, prompt, relative_difference

LIMIT = 1e-5
SCENARIO = Scenario(steps=2)
ONE_IS_ENOUGH = "model/merging/model specific"  # the same code for one layout after the other
PLACES = ("after the sampler patch", "before the sampler patch only", "before the engine")

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
"""Where the defaults would change nothing, or need something that is not here."""


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


def model_nodes(comfy: ComfyProcess) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Class -> names of its model inputs, other inputs."""
    found = {}
    for name, info in comfy.object_info().items():
        models = [key for key, spec in info["input"].get("required", {}).items() if spec[0] == "MODEL"]
        if models and info["output"][:1] == ["MODEL"] and info["category"] != ONE_IS_ENOUGH:
            inputs = inputs_of(info)
            if inputs is not None:
                found[name] = (models, inputs | SETTINGS.get(name, {}))
    return found


def graph(name: str, models: list[str], inputs: dict[str, Any], place: str | None) -> Prompt:
    """The scenario with one more model node; natively without a place."""
    built = prompt(SCENARIO, place is not None, "stock")
    built["operation"] = node("LatentOperationTonemapReinhard", multiplier=0.5)
    built["other"] = node("UNETLoader", unet_name="tiny_sd15_other_unet.safetensors", weight_dtype="default")
    built["stock"] = node(name, **inputs)
    followers = {None: ["sampler"], PLACES[0]: ["sampler"], PLACES[1]: ["patch"], PLACES[2]: ["patch", "unet_engine"]}
    source = built[followers[place][0]]["inputs"]["model"]
    for follower in followers[place]:
        built[follower]["inputs"]["model"] = ["stock", 0]
    for key, model in zip(models, [source, ["other", 0]], strict=False):
        built["stock"]["inputs"][key] = model
    return built


@pytest.mark.slow
def test_every_stock_model_node_acts_as_in_native(sd15: ComfyProcess) -> None:
    wrong, tried = {}, 0
    for name, (models, inputs) in sorted(model_nodes(sd15).items()):
        try:
            native = sd15.queue(graph(name, models, inputs, None))
        except PromptRejected:
            continue  # it wants a file that is not here
        if not native.ok:
            continue  # it is made for another family of models
        tried += 1
        for place in PLACES:
            history = sd15.queue(graph(name, models, inputs, place), timeout=300)
            error = relative_difference(latent_of(history), latent_of(native)) if history.ok else history.error
            if not (history.ok and error <= LIMIT):
                wrong[f"{name}, {place}"] = error
    assert wrong == {}
    assert tried > 50, "the list of nodes was not read"
