"""A step with a single call on several GPUs: they share its tokens, and the picture is native's."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import token_networks
import torch
from comfy.nested_tensor import NestedTensor
from compiling import COMPILES
from family_contract import drawing
from hybrid_trt.architectures import architectures
from hybrid_trt.architectures.shapes import Dim, TensorSpec
from hybrid_trt.architectures.shared_tokens import put_together, shares, taken
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.several_gpus import TRIED
from hybrid_trt.sessions.shared_call import Exchange
from model_families import ltx2
from pack import ROOT
from shared_gpus import FLUX, LIMIT, NAMED, STEPS, Case, devices, sample, shared, tokens_of_calls, two

__all__ = ["devices"]  # a fixture: pytest finds it by name

CASES = [pytest.param(kind, case, id=f"{kind}: {case.prompt}") for kind, case in (
    ("flux", FLUX),
    ("flux", Case("a reference", "image", 12 + 36, 1)),
    ("wan", Case("text to video", "video", 4, 5 * 3, {"shape": (1, 16, 5, 8, 6)})),
    ("wan", Case("a picture", "video", 4, 9)),
    ("wan", Case("two control videos", "video", 4, 9)),
    ("zimage", Case("two lengths", "picture", 5, 32, {"shape": (1, 16, 30, 20)})),
    ("qwen_image", Case("one length", "image", 4, 3)),
    ("qwen_image", Case("references", "image", 4, 3)),
    ("qwen_image21", Case("one length", "image", 48, 1)),
    ("qwen_image21", Case("references", "image", 48, 1)),
    ("krea2", Case("one length", "image", 4, 3)),
    ("krea2", Case("references", "image", 4, 3)),
    ("anima", Case("one length", "image", 11, 3, {"shape": (1, 16, 1, 22, 6)})),
    ("hunyuan_video", Case("a picture and text by byT5, no CFG", "video", 4, 15)),  # columns, as 5 rows are less even
    ("hunyuan_video", Case("original", "video", 4, 9)),
    ("hunyuan_video", Case("a still picture", "video", 7, 5)),
    ("minimax_h3", Case("first and last frame", "video", 4, 21)),
    ("ltx2", Case("text", "video", 60, 1)),
    ("ltx2", Case("a reference of sound", "video", 60, 1)),
    ("ltx2", Case("2.3", "video", 60, 1, {"words": (12, 12)})))]  # fmt: skip


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_gpus_share_the_tokens_of_a_single_call_and_the_picture_is_natives(
    kind: str, case: Case, devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = case.of(kind)
    path, whole, parts = models[prompt.file], case.units * case.each, case.tokens(devices)
    expected = prompt.sample(token_networks.load(str(path)))
    calls = tokens_of_calls(monkeypatch, case.tensor)
    with shared(path, tmp_path) as engine:
        for first in (True, False):
            calls.clear()
            assert relative_error(prompt.sample(engine.model), expected) <= LIMIT
            tried = [[whole] * (step < TRIED) for step in range(STEPS)] if first else [[]] * STEPS
            of_steps = [[*parts, *alone] for alone in tried]
            assert sorted(calls) == sorted(n for step in of_steps for n in step)
            assert f"{devices} GPUs share the tokens of each step" in engine.handle.stats.remark
            assert (engine.handle.stats.engine, engine.handle.stats.native) == (STEPS, 0), "a call, however shared"


@COMPILES
@two
@pytest.mark.parametrize(("kind", "case"), [
    pytest.param(kind, case, id=kind, marks=[pytest.mark.slow] * (kind != "flux"))
    for kind, case in dict(case.values for case in reversed(CASES)).items()])  # fmt: skip
def test_compiled_blocks_share_tokens_too_however_late_a_gpu_reads_the_others(
    kind: str, case: Case, devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code writes to its buffers again, whoever reads them."""
    prompt, copy = case.of(kind), Exchange._copy
    path = models[prompt.file]

    def late(self: Exchange, place: int, rank: int, *rest: Any) -> None:
        time.sleep(0.02 * rank)
        copy(self, place, rank, *rest)

    monkeypatch.setattr(Exchange, "_copy", late)
    expected = prompt.sample(token_networks.load(str(path)))
    with shared(path, tmp_path, build=True) as engine:
        assert relative_error(prompt.sample(engine.model), expected) <= LIMIT
        assert engine.handle.session.serving
        assert "2 GPUs share" in engine.handle.stats.remark


@two
def test_with_cfg_each_gpu_has_a_whole_call(
    devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sample(token_networks.load(str(models["tiny_flux1_unet"])), 3.0)
    calls = tokens_of_calls(monkeypatch, "image")
    with shared(models["tiny_flux1_unet"], tmp_path) as engine:
        assert relative_error(sample(engine.model, 3.0), expected) <= LIMIT
    assert calls == [48] * 2 * STEPS


@two
def test_a_call_with_a_mask_in_attention_is_computed_by_one_gpu(
    devices: int, models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weighted = ltx2.guides(0.7)(drawing(7), (3, 4, 5))
    prompt = replace(NAMED["ltx2"].prompts["text"], cfg=1.0, entries=lambda _: {
        "keyframe_idxs": weighted["keyframe_idxs"],
        "guide_attention_entries": weighted["guide_attention_entries"]})  # fmt: skip
    path, mask = models[prompt.file], NestedTensor((weighted["denoise_mask"], torch.ones(1, 1, 5, 1)))
    expected = prompt.sample(token_networks.load(str(path)), noise_mask=mask)
    with shared(path, tmp_path) as engine:
        assert relative_error(prompt.sample(engine.model, noise_mask=mask), expected) <= LIMIT
        stats = engine.handle.stats
        assert (stats.engine, stats.native) == (STEPS, 0), stats.details
        assert "One GPU computed each step: attention has a mask for its guide tokens" in stats.remark
        assert "Traceback" not in caplog.text


@two
def test_a_share_that_is_as_long_as_the_prompt_is_computed_by_one_gpu(
    devices: int, models: dict[str, Path], tmp_path: Path
) -> None:
    """Attention of the picture and to the prompt could not be told apart."""
    prompt = replace(NAMED["ltx2"].prompts["text"], cfg=1.0, words=(30, 30))
    expected = prompt.sample(token_networks.load(str(models[prompt.file])))
    with shared(models[prompt.file], tmp_path) as engine:
        assert relative_error(prompt.sample(engine.model), expected) <= LIMIT
        assert "One GPU computed each step: a GPU's share would be empty" in engine.handle.stats.remark


def test_the_page_names_the_families_that_share_tokens() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    named = re.search(r"These models do so: (.+?)\.\n", page, re.S)[1].replace("\n", "")
    found = {known.sizes.family for known in architectures().values() if getattr(known, "shared", None) is not None}
    assert {name.strip() for name in re.split(r",| and ", named)} == found


def test_shares_of_tensors_are_put_together_as_they_were() -> None:
    rows = Dim("F") * Dim("R") * Dim("C")
    specs = [TensorSpec("tokens", "float32", (Dim("B"), rows, 4)), TensorSpec("pe", "float32", (Dim("R"), Dim("C"), 2)),
             TensorSpec("prompt", "float32", (Dim("B"), Dim("T"), 4))]  # fmt: skip
    sizes = {"B": 2, "F": 3, "R": 5, "C": 2, "T": 7}
    given = {spec.name: torch.randn(spec.shape(sizes)) for spec in specs}
    parts = [taken(specs, given, sizes, "R", *one) for one in shares(5, 3)]
    assert [part["pe"].shape[0] for part in parts] == [1, 2, 2]
    assert torch.equal(parts[1]["tokens"], given["tokens"].unflatten(1, (3, 5, 2))[:, :, 1:3].flatten(1, 3))
    each = [{**sizes, "R": size} for _, size in shares(5, 3)]
    found = put_together(specs, parts, each, "R")
    assert all(torch.equal(found[name], given[name]) for name in given)
