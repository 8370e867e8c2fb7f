"""The test bench itself: a real ComfyUI samples with the tiny models, and a ControlNet visibly changes the result."""

from __future__ import annotations

from typing import Any

import pytest
from comfy_process import ComfyProcess, PromptRejected
from scenarios import Control, Prompt, Scenario, control_effect, native_latent, node, prompt, relative_difference

PLAIN = Scenario(controls=())


def text_to_image(text: str = "a lighthouse", **sampling: Any) -> Prompt:
    """Text to image with the tiny checkpoint, stock nodes only."""
    given = {"seed": 7, "steps": 4, "cfg": 5.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    return {
        "checkpoint": node("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors"),
        "positive": node("CLIPTextEncode", clip=["checkpoint", 1], text=text),
        "negative": node("CLIPTextEncode", clip=["checkpoint", 1], text="blurry"),
        "latent": node("EmptyLatentImage", width=128, height=128, batch_size=1),
        "sampler": node("KSampler", model=["checkpoint", 0], positive=["positive", 0], negative=["negative", 0],
                        latent_image=["latent", 0], **given | sampling),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["checkpoint", 2]),
        "image": node("SaveImage", images=["decode", 0], filename_prefix="bench/native"),
    }


def test_text_to_image_with_the_tiny_checkpoint(comfy: ComfyProcess) -> None:
    first = comfy.queue(text_to_image())
    (image,) = first.output("image", "images")
    path = comfy.base / "output" / image["subfolder"] / image["filename"]
    assert path.stat().st_size > 5_000  # a picture of one colour is a few hundred bytes
    assert first.seconds > 0

    again = comfy.queue(text_to_image("a cat"))
    assert again.ok
    assert "checkpoint" in again.cached
    assert "positive" not in again.cached


@pytest.mark.parametrize(("family", "control", "unet"), [
    ("sd15", "tiny_sd15_a", None),
    ("sd15", "tiny_sd15_flat_a", "tiny_sd15_flat_unet"),
    ("sd15", "tiny_sd15_control_lora", None),
    ("sd15", "tiny_sd15_t2i", "tiny_sd15_t2i_unet"),
    ("sdxl", "tiny_sdxl_a", None),
])
def test_a_control_and_its_image_change_the_latent(
    comfy: ComfyProcess, family: str, control: str, unet: str | None
) -> None:
    steered = Scenario(family, unet=unet, controls=(Control(control, image=1),))
    other = native_latent(comfy, steered.but(controls=(Control(control, image=2),)))
    assert control_effect(comfy, steered) > 0.1
    assert relative_difference(other, native_latent(comfy, steered)) > 0.1


def test_lora_changes_the_latent(comfy: ComfyProcess) -> None:
    lora = ("LoraLoaderModelOnly", {"lora_name": "tiny_sd15_lora.safetensors", "strength_model": 1.0})
    changed = native_latent(comfy, PLAIN.but(loras_before=(lora,)))
    assert relative_difference(changed, native_latent(comfy, PLAIN)) > 0.1


def test_an_invalid_prompt_is_rejected_with_the_node_that_is_wrong(comfy: ComfyProcess) -> None:
    with pytest.raises(PromptRejected) as rejected:
        comfy.queue(text_to_image(steps=0))
    assert list(rejected.value.node_errors) == ["sampler"]


def test_a_failing_node_is_named(comfy: ComfyProcess) -> None:
    wrong = prompt(PLAIN, engines=False, name="wrong_width")
    wrong["positive"]["inputs"]["width"] = 100
    history = comfy.queue(wrong)
    assert (history.status, history.error_node, history.error_type) == ("error", "sampler", "KSampler")
    assert history.error
