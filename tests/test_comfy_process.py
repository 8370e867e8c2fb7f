"""The test bench itself: a real ComfyUI samples with the tiny models, and a ControlNet visibly changes the result."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from comfy_process import ComfyProcess, History, PromptRejected

Prompt = dict[str, dict[str, Any]]


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node of an API-format prompt; a link is [node id, output index]."""
    return {"class_type": class_type, "inputs": inputs}


def sampler(model: list[Any], positive: list[Any], negative: list[Any], latent: list[Any]) -> dict[str, Any]:
    """Four steps at cfg 5: enough for two conditionings in a batch and a schedule with a beginning and an end."""
    return node("KSampler", model=model, positive=positive, negative=negative, latent_image=latent, seed=7, steps=4,
                cfg=5.0, sampler_name="euler", scheduler="normal", denoise=1.0)


def native_prompt(prompt_text: str = "a lighthouse") -> Prompt:
    """Text to image with the tiny checkpoint, stock nodes only."""
    return {
        "checkpoint": node("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors"),
        "positive": node("CLIPTextEncode", clip=["checkpoint", 1], text=prompt_text),
        "negative": node("CLIPTextEncode", clip=["checkpoint", 1], text="blurry"),
        "latent": node("EmptyLatentImage", width=128, height=128, batch_size=1),
        "sampler": sampler(["checkpoint", 0], ["positive", 0], ["negative", 0], ["latent", 0]),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["checkpoint", 2]),
        "image": node("SaveImage", images=["decode", 0], filename_prefix="bench/native"),
    }


def controlled_prompt(family: str, control: str | None, name: str, unet: str | None = None,
                      image: str = "control_a.png") -> Prompt:
    """Sample with or without one ControlNet on random conditioning; the latent goes to disk under `name`."""
    shape = {"sd15": {"width": 768, "pooled": 0}, "sdxl": {"width": 2048, "pooled": 1280}}[family]
    prompt = {
        "unet": node("UNETLoader", unet_name=unet or f"tiny_{family}_unet.safetensors", weight_dtype="default"),
        "positive": node("TestConditioning", tokens=77, seed=1, **shape),
        "negative": node("TestConditioning", tokens=77, seed=2, **shape),
        "latent": node("EmptyLatentImage", width=128, height=128, batch_size=1),
        "sampler": sampler(["unet", 0], ["positive", 0], ["negative", 0], ["latent", 0]),
        "save": node("TestSaveLatent", latent=["sampler", 0], name=name),
    }
    if control:
        prompt["hint"] = node("LoadImage", image=image)
        prompt["controlnet"] = node("ControlNetLoader", control_net_name=control)
        prompt["apply"] = node("ControlNetApplyAdvanced", positive=["positive", 0], negative=["negative", 0],
                               control_net=["controlnet", 0], image=["hint", 0], strength=1.0, start_percent=0.0,
                               end_percent=1.0)
        prompt["sampler"]["inputs"] |= {"positive": ["apply", 0], "negative": ["apply", 1]}
    return prompt


def latent_of(history: History) -> numpy.ndarray:
    """The latent that TestSaveLatent wrote."""
    path, shape = history.output("save", "latent")
    latent = numpy.load(path)
    assert list(latent.shape) == shape
    assert numpy.isfinite(latent).all()
    return latent


def relative_difference(value: numpy.ndarray, reference: numpy.ndarray) -> float:
    """How far `value` is from `reference`, as a share of the reference's size."""
    return float(numpy.linalg.norm(value - reference) / numpy.linalg.norm(reference))


def test_text_to_image_with_the_tiny_checkpoint(comfy: ComfyProcess) -> None:
    first = comfy.queue(native_prompt())
    (image,) = first.output("image", "images")
    path = comfy.base / "output" / image["subfolder"] / image["filename"]
    assert path.stat().st_size > 5_000  # a picture of one colour is a few hundred bytes
    assert first.seconds > 0

    again = comfy.queue(native_prompt("a cat"))
    assert again.ok
    assert "checkpoint" in again.cached
    assert "positive" not in again.cached


@pytest.mark.parametrize(("family", "control", "unet"), [
    ("sd15", "tiny_sd15_a", None),
    ("sd15", "tiny_sd15_flat_a", "tiny_sd15_flat_unet.safetensors"),
    ("sd15", "tiny_sd15_control_lora", None),
    ("sd15", "tiny_sd15_t2i", "tiny_sd15_t2i_unet.safetensors"),
    ("sdxl", "tiny_sdxl_a", None),
])
def test_a_control_and_its_image_change_the_latent(comfy: ComfyProcess, family: str, control: str,
                                                   unet: str | None) -> None:
    file = f"{control}.safetensors"
    plain = latent_of(comfy.queue(controlled_prompt(family, None, f"{control}_off", unet)))
    steered = latent_of(comfy.queue(controlled_prompt(family, file, f"{control}_on", unet)))
    other = latent_of(comfy.queue(controlled_prompt(family, file, f"{control}_other", unet, "control_b.png")))
    assert relative_difference(steered, plain) > 0.1
    assert relative_difference(other, steered) > 0.1


def test_lora_changes_the_latent(comfy: ComfyProcess) -> None:
    prompt = controlled_prompt("sd15", None, "lora_off")
    plain = latent_of(comfy.queue(prompt))
    prompt["lora"] = node("LoraLoaderModelOnly", model=["unet", 0], lora_name="tiny_sd15_lora.safetensors",
                          strength_model=1.0)
    prompt["sampler"]["inputs"]["model"] = ["lora", 0]
    prompt["save"]["inputs"]["name"] = "lora_on"
    assert relative_difference(latent_of(comfy.queue(prompt)), plain) > 0.1


def test_an_invalid_prompt_is_rejected_with_the_node_that_is_wrong(comfy: ComfyProcess) -> None:
    prompt = native_prompt()
    prompt["sampler"]["inputs"]["steps"] = 0
    with pytest.raises(PromptRejected) as rejected:
        comfy.queue(prompt)
    assert list(rejected.value.node_errors) == ["sampler"]


def test_a_failing_node_is_named(comfy: ComfyProcess) -> None:
    prompt = controlled_prompt("sd15", None, "wrong_width")
    prompt["positive"]["inputs"]["width"] = 100
    history = comfy.queue(prompt)
    assert (history.status, history.error_node, history.error_type) == ("error", "sampler", "KSampler")
    assert history.error
