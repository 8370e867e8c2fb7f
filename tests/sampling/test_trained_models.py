"""Trained models paint the emoji that a prompt names: the same picture natively and through engines."""

from __future__ import annotations

import json

import numpy
import pytest
import torch
from comfy_process import ComfyProcess, History
from demo_models import EMOJI, STEPS, emoji, put, with_trained_models
from kornia.metrics import psnr, ssim
from pack import ROOT
from PIL import Image
from workflow_to_prompt import bypass, set_widget, to_prompt

WORKFLOW = json.loads((ROOT / "workflows" / "SD 1.5 - two ControlNets.json").read_text(encoding="utf-8"))
LEAST_PSNR, LEAST_SSIM = 80.0, 0.99999
"""Limits for pictures of 8 bits a colour. 80 dB: of 49,152 values 31 may be off by one. 89 to 95 dB were found."""
NEARER = 5.0
"""Decibels by which a picture is nearer to its emoji than to any other; 9 to 16 were found."""


@pytest.fixture(scope="module")
def trained(comfy: ComfyProcess) -> ComfyProcess:
    """The shared server, with the trained models."""
    put(comfy.comfyui, comfy.base)
    return comfy


def as_tensor(picture: numpy.ndarray) -> torch.Tensor:
    """Return a picture of 8 bits as one from 0 to 1, (1, 3, height, width)."""
    return torch.tensor(picture).permute(2, 0, 1)[None] / 255


def paint(comfy: ComfyProcess, name: str, steps: int, engines: bool = False, strength: float = 0.7
          ) -> tuple[History, torch.Tensor]:
    """Paint an emoji; return what ran, and the saved picture."""
    info = comfy.object_info()
    workflow = with_trained_models(WORKFLOW, info, name)
    for node, widget, value in (
        ("KSampler", "steps", steps), ("TRTApplyControlNet", "rows.strength_1", strength),
        ("TRTAccelerate", "when_missing", "build now"), ("TRTAccelerate", "max_size", 256),
    ):
        set_widget(workflow, node, widget, value, info)
    if not engines:
        bypass(workflow, ("TRTAccelerate", "TRTReport", "PreviewImage"))
    prompt = to_prompt(workflow, info)
    history = comfy.queue(prompt, timeout=300)
    (save,) = (i for i, node in prompt.items() if node["class_type"] == "SaveImage")
    (saved,) = history.output(save, "images")
    with Image.open(comfy.base / "output" / saved["subfolder"] / saved["filename"]) as file:
        return history, as_tensor(numpy.asarray(file.convert("RGB")))


def alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two pictures are within the limits."""
    return psnr(first, second, 1.0) >= LEAST_PSNR and ssim(first, second, 11).mean() >= LEAST_SSIM


def check(comfy: ComfyProcess, name: str, steps: int) -> torch.Tensor:
    """Hold what is promised of an emoji's picture; return native's."""
    native = paint(comfy, name, steps)[1]
    history, engine = paint(comfy, name, steps, engines=True)
    (report,) = (out["report"][0] for out in history.outputs.values() if "report" in out)
    assert [(row["engine"], row["native"]) for row in report["rows"]] == [(2 * steps, 0), (steps, 0), (1, 0)]
    assert alike(native, engine), f"PSNR {psnr(native, engine, 1.0)}, SSIM {ssim(native, engine, 11).mean()}"
    near = {other: float(psnr(native, as_tensor(picture), 1.0)) for other, picture in emoji().items()}
    assert near.pop(name) > max(near.values()) + NEARER
    return native


def test_engines_paint_the_emoji_that_the_normal_model_paints(trained: ComfyProcess) -> None:
    native = check(trained, EMOJI[0], 5)
    weaker = paint(trained, EMOJI[0], 5, strength=0.69)[1]
    assert not alike(native, weaker), "a ControlNet that acts a hundredth less is seen"


@pytest.mark.slow
@pytest.mark.parametrize("name", EMOJI[1:])
def test_engines_paint_each_emoji_with_all_steps(trained: ComfyProcess, name: str) -> None:
    check(trained, name, STEPS)
