"""TRT Compare: numbers that are right, a picture of the difference, and nothing broken that passes as the same."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from comfy_process import ComfyProcess, PromptRejected
from hybrid_trt.nodes import compare as module
from hybrid_trt.nodes.compare import Comparison, compare, words
from PIL import Image
from scenarios import Scenario, node
from scenarios import prompt as prompt_of


def picture(seed: int = 1, count: int = 1, width: int = 24, height: int = 16) -> torch.Tensor:
    return torch.rand(count, height, width, 3, generator=torch.Generator().manual_seed(seed))


def changed(by: float, where: tuple[int, int, int, int] = (0, 3, 4, 1), count: int = 1) -> torch.Tensor:
    """The picture with one value that is off."""
    found = picture(count=count) * 0.5
    found[where] += by
    return found


def test_the_same_picture_is_told_as_such() -> None:
    found = compare(picture(), picture())
    assert (found.psnr, found.ssim, found.largest, found.tone) == (math.inf, 1.0, 0.0, "good")
    assert words(found, 1) == "The same picture: no value differs."
    assert not found.picture.any()


def test_psnr_and_the_largest_difference_are_those_of_their_formulas() -> None:
    found = compare(picture() * 0.5, changed(0.25))
    assert found.largest == pytest.approx(0.25)
    assert found.psnr == pytest.approx(10 * math.log10(24 * 16 * 3 / 0.25**2))
    text = words(found, 1)
    assert text.startswith(f"Some difference: PSNR {found.psnr:.1f} dB"), "few pixels, but plain to see"
    assert words(compare(picture() * 0.5, changed(0.01)), 1).startswith("Hardly a difference: PSNR 70.6 dB")
    assert words(compare(picture(), picture(2)), 1).startswith("Different pictures: PSNR ")
    assert "63.8 of 255 (25.00%)" in text


def test_the_difference_is_made_as_bright_as_it_can_be_and_says_how_much() -> None:
    normal, other = picture() * 0.5, changed(0.004)
    found = compare(normal, other)
    assert found.shown == 200
    assert found.picture.max() == pytest.approx(0.8, rel=1e-3)
    assert found.picture[0, 3, 4].tolist() == pytest.approx([0, 0.8, 0], abs=1e-3)
    assert "shown 200 times as bright" in words(found, 1)
    own = compare(normal, other, amplify=1000)
    assert (own.shown, float(own.picture.max())) == (1000, 1.0)


def test_of_several_pictures_the_worst_one_counts() -> None:
    found = compare(picture(count=8) * 0.5, changed(0.25, (5, 3, 4, 1), 8))
    assert found.psnr == pytest.approx(compare(picture() * 0.5, changed(0.25)).psnr)
    assert "Of 8 pictures these are the figures of the worst." in words(found, 8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["normal", "accelerated", "both"])
def test_a_value_that_is_no_number_never_passes_as_equal(value: float, which: str) -> None:
    normal, other = picture(), picture()
    if which != "accelerated":
        normal[0, 3, 4, 1] = value
    if which != "normal":
        other[0, 3, 4, 1] = value
    found = compare(normal, other)
    assert (found.psnr, found.ssim, found.tone) == (0.0, 0.0, "bad")
    assert found.largest >= 1
    assert found.picture[0, 3, 4, 1] == 1
    assert found.picture.isfinite().all()
    text = words(found, 1)
    assert text.startswith("Broken: ")
    assert ("both pictures" if which == "both" else f"the {which} picture") in text


@pytest.mark.parametrize("other", [
    picture(width=32), picture(count=2), torch.rand(1, 16, 24, 4), torch.rand(16, 24, 3), torch.rand(0, 16, 24, 3)])
def test_pictures_of_other_sizes_are_refused_in_one_sentence(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="The pictures cannot be compared: normal is 1 of 24x16 px, accel") as refusal:
        compare(picture(), other)
    assert "same size and number" in str(refusal.value)


def test_ssim_is_torchmetrics_of_each_picture_and_the_worst_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    def measure(preds: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((preds, target, options))
        return torch.tensor([0.75, 0.5][len(calls) - 1])

    for name in ("torchmetrics", "torchmetrics.functional", "torchmetrics.functional.image"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torchmetrics.functional.image"].structural_similarity_index_measure = measure
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    found = compare(picture(count=2), picture(2, count=2))
    assert found.ssim == 0.5
    assert "SSIM 0.5000" in words(found, 2)
    assert [tuple(call[0].shape) for call in calls] == [(1, 3, 16, 24)] * 2
    assert all(options == {"data_range": 1.0} for _, _, options in calls)
    assert torch.equal(calls[0][1][0], picture(count=2)[0].movedim(-1, 0))


@pytest.mark.parametrize("how", ["missing", "broken", "small"])
def test_without_ssim_a_sentence_says_why(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None if how == "missing" else object())
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    found = compare(picture(height=8 if how == "small" else 16), picture(2, height=8 if how == "small" else 16))
    assert isinstance(found.ssim, str)
    said = {"missing": "pip install torchmetrics", "broken": "cannot be loaded", "small": "11 px"}[how]
    assert said in words(found, 1).splitlines()[-1]


def test_figures_are_strict_json() -> None:
    for found in (compare(picture(), picture()), compare(picture(), picture() * math.nan)):
        assert isinstance(found, Comparison)
        json.dumps(module._for_json(found), allow_nan=False)


def prompt(first: str, second: str) -> dict[str, Any]:
    return {
        "a": node("LoadImage", image=first), "b": node("LoadImage", image=second),
        "compare": node("TRTCompare", normal=["a", 0], accelerated=["b", 0], amplify=0),
        "save": node("SaveImage", images=["compare", 0], filename_prefix="compare"),
        "text": node("PreviewAny", source=["compare", 1]), "psnr": node("PreviewAny", source=["compare", 2]),
    }


def test_real_pictures_in_comfyui(comfy: ComfyProcess) -> None:
    history = comfy.queue(prompt("control_a.png", "control_b.png"))
    (numbers,) = history.output("compare", "numbers")
    first, second = (numpy.asarray(Image.open(comfy.base / "input" / f"control_{letter}.png").convert("RGB"), float)
                     for letter in "ab")  # fmt: skip
    difference = numpy.abs(first - second) / 255
    assert numbers["psnr"] == pytest.approx(10 * math.log10(1 / (difference**2).mean()), rel=1e-4)
    assert numbers["largest"] == pytest.approx(difference.max(), rel=1e-5)
    assert f"{numbers['psnr']:.1f} dB" in history.output("text", "text")[0]
    assert float(history.output("psnr", "text")[0]) == numbers["psnr"]
    (saved,) = history.output("save", "images")
    drawn = numpy.asarray(Image.open(Path(comfy.base) / "output" / saved["filename"]), float) / 255
    assert numpy.abs(drawn - numbers["shown"] * difference).max() <= 1 / 255
    assert history.output("compare", "images"), "the node shows the difference itself"

    same = comfy.queue(prompt("control_a.png", "control_a.png"))
    assert same.output("compare", "tone") == ["good"]
    assert same.output("compare", "numbers") == [
        {"same": True, "psnr": None, "ssim": 1.0, "largest": 0.0, "shown": 1000}]  # fmt: skip


def test_a_report_shows_the_comparisons_figures_in_one_line_on_request(comfy: ComfyProcess) -> None:
    sampled = prompt_of(Scenario(controls=(), width=64, height=64, steps=1), True, "compared")
    graph = sampled | {name: one for name, one in prompt("control_a.png", "control_b.png").items() if name != "save"}
    before = comfy.queue(sampled).output("report", "text")[0]
    graph["report"]["inputs"]["comparison"] = ["compare", 1]
    graph["sampler"]["inputs"]["seed"] += 1  # else ComfyUI would have kept what it sampled
    history = comfy.queue(graph)
    *others, line = history.output("report", "text")[0].splitlines()
    (numbers,) = history.output("compare", "numbers")
    assert "TRT Compare" not in before
    assert len(others) == len(before.splitlines())
    assert line.startswith("TRT Compare: Different pictures: PSNR ")
    assert f"{numbers['psnr']:.1f} dB" in line
    assert f" {255 * numbers['largest']:.3g} of 255 " in line
    assert numbers["ssim"] is None or f"SSIM {numbers['ssim']:.4f}" in line

    graph["b"] = graph["a"]
    assert comfy.queue(graph).output("report", "text")[0].splitlines()[-1] == (
        "TRT Compare: The same picture: no value differs.")  # fmt: skip


def test_unequal_sizes_end_the_prompt_in_a_sentence(comfy: ComfyProcess) -> None:
    graph = prompt("control_a.png", "control_a.png")
    graph["small"] = node("ImageScale", image=["b", 0], upscale_method="area", width=64, height=32, crop="disabled")
    graph["compare"]["inputs"]["accelerated"] = ["small", 0]
    try:
        history = comfy.queue(graph)
    except PromptRejected as rejected:
        pytest.fail(str(rejected))
    assert history.status == "error"
    assert "The pictures cannot be compared: normal is 1 of " in history.error
    assert "accelerated is 1 of 64x32 px" in history.error
