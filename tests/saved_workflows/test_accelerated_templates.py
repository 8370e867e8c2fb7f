"""ComfyUI's own templates of served families: accelerated, and run on tiny models, each makes the same picture."""

from __future__ import annotations

import copy
import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import template_clicks
from comfy_process import ComfyProcess
from hybrid_trt.saved_workflows.accelerate import accelerate
from hybrid_trt.saved_workflows.graph import Workflow, WorkflowError
from hybrid_trt.saved_workflows.to_prompt import is_link, to_prompt
from scenarios import CONDITIONING, SETTINGS, latent_of, node, relative_difference

SERVED = re.compile(rb'"[^"]*(?:sd_?xl|v1-5|sd_?1\.?5|dreamshaper)[^"/]*\.safetensors"', re.IGNORECASE)
PACKAGES = Path(sysconfig.get_paths()["purelib"])
#: Models of other families beside these have no tiny ones; what they make is left out. SVD makes a film of the picture.
NOT_RUN = ("SaveVideo",)
#: There is no tiny CLIP, so prompts come from a test node; and no tiny CLIP vision, which would add to prompts.
PASSED_BY = {"unCLIPConditioning": "conditioning"}
FILES = {path.stem: path for path in sorted(PACKAGES.glob("comfyui_workflow_templates*/templates/*.json"))
         if SERVED.search(path.read_bytes())}  # fmt: skip
TEMPLATES = [name for name, path in FILES.items() if {"KSampler", "KSamplerAdvanced", "SamplerCustom"} & {
    one["type"] for one in json.loads(path.read_bytes()).get("nodes", ())}]  # fmt: skip


def tiny(prompt: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt on the tiny models of SDXL, 128 pixels wide, with two steps, that saves its latents."""
    made = {"unet": node("UNETLoader", unet_name="tiny_sdxl_unet.safetensors", weight_dtype="default"),
            "vae": node("VAELoader", vae_name="tiny_sdxl_taesd.safetensors")}  # fmt: skip
    loaders = {name for name, entry in prompt.items() if entry["class_type"] == "CheckpointLoaderSimple"}

    def source(value: Any) -> Any:
        while is_link(value) and (passed := PASSED_BY.get(prompt[value[0]]["class_type"])):
            value = prompt[value[0]]["inputs"][passed]
        return {0: ["unet", 0], 2: ["vae", 0]}.get(value[1], value) if is_link(value) and value[0] in loaders else value

    for name, entry in prompt.items():
        kind, inputs = entry["class_type"], {key: source(value) for key, value in entry["inputs"].items()}
        if kind == "CLIPTextEncode":
            made[name] = node("TestConditioning", tokens=77, seed=len(inputs["text"]), **CONDITIONING["sdxl"])
        elif kind not in (*NOT_RUN, *PASSED_BY) and name not in loaders:
            small = {"width": 128, "height": 128, "steps": 2, "start_at_step": min(inputs.get("start_at_step", 0), 1),
                     "end_at_step": 1 if inputs.get("end_at_step", 0) < 100 else 10000}  # fmt: skip
            inputs |= {key: value for key, value in small.items() if key in inputs and not is_link(inputs[key])}
            made[name] = node(kind, **inputs | (SETTINGS if kind == "TRTAccelerate" else {}))
    (last,) = {tuple(entry["inputs"]["samples"]) for entry in made.values() if entry["class_type"] == "VAEDecode"
               and any(one["class_type"] in ("SaveImage", "PreviewImage") and one["inputs"]["images"][0] == name
                       for name, other in made.items() if other is entry for one in made.values())}  # fmt: skip
    return made | {"save": node("TestSaveLatent", latent=list(last), name="template")}


def test_there_are_templates_of_served_families() -> None:
    assert len(TEMPLATES) >= 5


def test_one_click_puts_an_engine_before_each_sampler_of_every_template_of_a_served_family(
    object_info: dict[str, Any],
) -> None:
    """Of templates with nodes that this ComfyUI does not have, only that something is added can be said."""
    plain, seen = [], 0
    for path in sorted(template_clicks.templates().glob("*.json")):
        workflow = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(workflow, dict) and any(map(
                template_clicks.family_of, template_clicks.diffusion_files(workflow)))):  # fmt: skip
            continue
        plain += [] if accelerate(Workflow(workflow)) else [path.stem]
        try:
            prompt = to_prompt(workflow, object_info)
        except WorkflowError:
            continue
        seen += 1
        plain += [f"{path.stem}: {entry['class_type']}" for entry in prompt.values()
                  if re.search("Sampler|Guider", entry["class_type"]) and any(
                      name.startswith("model") and unaccelerated(prompt, value)
                      for name, value in entry["inputs"].items())]  # fmt: skip
    assert plain == []
    assert seen > 80


def unaccelerated(prompt: dict[str, Any], value: Any) -> bool:
    """Tell whether a model comes from a loader of a served family without passing an engine's node."""
    while is_link(value) and (entry := prompt[value[0]])["class_type"] != "TRTAccelerate":
        if entry["class_type"] in template_clicks.LOADERS:
            names = (str(name).rpartition("/")[2] for name in entry["inputs"].values())
            return any(map(template_clicks.family_of, names))
        value = entry["inputs"].get("model")
    return False


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_accelerated_template_makes_the_picture_of_the_stock_one(
    sdxl: ComfyProcess, object_info: dict[str, Any], name: str
) -> None:
    stock = json.loads(FILES[name].read_text(encoding="utf-8"))
    changed = copy.deepcopy(stock)
    added = accelerate(Workflow(changed))
    assert {one["type"] for one in added} == {"TRTAccelerate"}
    native = latent_of(sdxl.queue(tiny(to_prompt(stock, object_info))))
    prompt = tiny(to_prompt(changed, object_info))
    (last,) = [entry["inputs"]["latent"] for entry in prompt.values() if entry["class_type"] == "TestSaveLatent"]
    history = sdxl.queue(prompt | {"report": node("TRTReport", after=last)}, timeout=120)
    report = history.output("report", "report")[0]
    assert report["unet"]["engine"] >= 2
    assert report["unet"]["native"] == 0
    assert relative_difference(latent_of(history), native) <= 1e-5
