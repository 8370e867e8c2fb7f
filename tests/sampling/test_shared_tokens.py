"""A step with a single call on several GPUs: they share its tokens, and the picture is native's.

The further GPUs are doubles, the CPU under other names.
"""

from __future__ import annotations

import gc
import itertools
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import token_networks
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.nested_tensor import NestedTensor
from comfy_execution.graph import DynamicPrompt
from compiling import COMPILES
from fake_recorder import Recorder
from family_contract import Prompt, drawing
from hybrid_trt.architectures import architectures
from hybrid_trt.architectures.shapes import Dim, TensorSpec
from hybrid_trt.architectures.shared_tokens import put_together, shares, taken
from hybrid_trt.architectures.user_attention import gathers
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.nodes.engine_nodes import TRTAccelerate
from hybrid_trt.sampling import several_gpus
from hybrid_trt.sampling.report import report_text
from hybrid_trt.sampling.several_gpus import TRIED, on_all_gpus
from hybrid_trt.sessions import shared_call
from hybrid_trt.sessions.shared_call import Exchange
from model_families import FAMILIES, ltx2
from pack import ROOT
from tiny_transformers import let_comfyui_load_zimage
from token_calls import Patched, profile_of

LIMIT, STEPS = 1e-5, 3
NAMED = {family.name: family for family in FAMILIES}


@dataclass(frozen=True)
class Case:
    """A prompt of a family, and how its tokens are divided.

    Attributes:
        prompt: its name among the family's; ``changes`` are made to it.
        tensor: has the picture's tokens, ``units`` times ``each``; GPUs have whole units.
    """

    prompt: str
    tensor: str
    units: int
    each: int
    changes: Mapping[str, Any] = field(default_factory=dict)

    def of(self, kind: str, **changes: Any) -> Prompt:
        return replace(NAMED[kind].prompts[self.prompt], **{"cfg": 1.0, **self.changes, **changes})

    def tokens(self, devices: int) -> list[int]:
        """The tokens of each GPU."""
        return [size * self.each for _, size in shares(self.units, devices)]


CASES = [pytest.param(kind, case, id=f"{kind}: {case.prompt}") for kind, case in (
    ("flux", Case("two lengths", "image", 48, 1, {"shape": (1, 16, 16, 12)})),
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
FLUX = CASES[0].values[1]


@pytest.fixture(params=[2, 4])
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    let_comfyui_load_zimage()
    seconds_are(monkeypatch, 1.39, 2.54)
    found = [torch.device("cpu"), *(torch.device("cpu", number) for number in range(1, request.param))]
    monkeypatch.setattr(model_management, "get_all_torch_devices",
                        lambda exclude_current=False: found[int(exclude_current):])  # fmt: skip
    return request.param


def seconds_are(monkeypatch: pytest.MonkeyPatch, shared: float, alone: float) -> None:
    """Let calls that are computed in both ways seem to take so long; doubles of GPUs are slower than one."""
    seconds = itertools.cycle((shared, alone))
    monkeypatch.setattr(several_gpus, "_timed", lambda run, _device: (run(), next(seconds)))


two = pytest.mark.parametrize("devices", [2], indirect=True)


def sample(model: ModelPatcher, cfg: float = 1.0) -> torch.Tensor:
    return FLUX.of("flux", cfg=cfg).sample(model)


def split(model: ModelPatcher) -> ModelPatcher:
    with token_networks.told():
        return on_all_gpus(model)


@contextmanager
def shared(path: Path, devices: int, folder: Path, build: bool = False) -> Iterator[Patched]:
    """A model behind *MultiGPU CFG Split* and its engine."""
    network = NativeNetwork.of_model(split(token_networks.load(str(path))), "a transformer")
    if build:
        order = BuildOrder(network, "float32", profile_of(network), backends()["torch"])
        build_engine(order, Library([folder]), lambda *_: None)
    engine = Patched(network, folder, "torch")
    try:
        yield engine
    finally:
        engine.model.set_additional_models("multigpu", [])


def tokens_of_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """List the tokens of each call of a session from now on."""
    found, run = [], LiveSession.run

    def listed(self: LiveSession, given: dict[str, torch.Tensor], *rest: Any) -> dict[str, torch.Tensor]:
        found.append(given[name].shape[-2])
        return run(self, given, *rest)

    monkeypatch.setattr(LiveSession, "run", listed)
    return found


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_gpus_share_the_tokens_of_a_single_call_and_the_picture_is_natives(
    kind: str, case: Case, devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = case.of(kind)
    path, whole, parts = models[prompt.file], case.units * case.each, case.tokens(devices)
    expected = prompt.sample(token_networks.load(str(path)))
    calls = tokens_of_calls(monkeypatch, case.tensor)
    with shared(path, devices, tmp_path) as engine:
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
    with shared(path, devices, tmp_path, build=True) as engine:
        assert relative_error(prompt.sample(engine.model), expected) <= LIMIT
        assert engine.handle.session.serving
        assert "2 GPUs share" in engine.handle.stats.remark


@two
def test_with_cfg_each_gpu_has_a_whole_call(
    devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sample(token_networks.load(str(models["tiny_flux1_unet"])), 3.0)
    calls = tokens_of_calls(monkeypatch, "image")
    with shared(models["tiny_flux1_unet"], devices, tmp_path) as engine:
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
    with shared(path, devices, tmp_path) as engine:
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
    with shared(models[prompt.file], devices, tmp_path) as engine:
        assert relative_error(prompt.sample(engine.model), expected) <= LIMIT
        assert "One GPU computed each step: a GPU's share would be empty" in engine.handle.stats.remark


@two
@pytest.mark.parametrize("failing", [0, 1])
def test_a_gpu_that_fails_leaves_the_run_to_one_gpu(
    failing: int, devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sample(token_networks.load(str(models["tiny_flux1_unet"])))
    with shared(models["tiny_flux1_unet"], devices, tmp_path) as engine:
        gather, broken = Exchange.gather, []

        def fails(self: Exchange, rank: int) -> Any:
            def run(*given: torch.Tensor) -> Any:
                if rank == failing and not broken:
                    broken.append(rank)
                    raise RuntimeError("this GPU is gone")
                return own(*given)

            own = gather(self, rank)
            return run

        monkeypatch.setattr(Exchange, "gather", fails)
        assert relative_error(sample(engine.model), expected) <= LIMIT
        stats = engine.handle.stats
        assert (stats.engine, stats.native, broken) == (STEPS, 0, [failing])
        assert "One GPU computed each step: RuntimeError: this GPU is gone" in stats.remark
        assert relative_error(sample(engine.model), expected) <= LIMIT
        assert "2 GPUs share" in engine.handle.stats.remark, "the next run tries again"


@two
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("late", [0, 1, 2], ids=["loading", "in its first turn", "in its second"])
def test_a_gpu_that_the_others_wait_too_long_for_leaves_the_run_to_one_gpu(
    slow: int, late: int, devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, gather = sample(token_networks.load(str(models["tiny_flux1_unet"]))), Exchange.gather

    def waits(self: Exchange, rank: int) -> Any:
        calls, own = itertools.count(), gather(self, rank)

        def run(*given: torch.Tensor) -> Any:
            if next(calls) == late and rank == slow:
                time.sleep(1)
            return own(*given)

        return run

    with shared(models["tiny_flux1_unet"], devices, tmp_path) as engine:
        sample(engine.model)
        monkeypatch.setattr(shared_call, "PATIENCE", 0.3)
        monkeypatch.setattr(Exchange, "gather", waits)
        assert relative_error(sample(engine.model), expected) <= LIMIT
        stats = engine.handle.stats
        assert (stats.engine, stats.native) == (STEPS, 0)
        assert "One GPU computed each step" in stats.remark


@two
def test_a_wrong_result_of_several_gpus_is_found_before_it_is_used(
    devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sample(token_networks.load(str(models["tiny_flux1_unet"])))
    copy = Exchange._copy

    def wrong(self: Exchange, place: int, rank: int, other: int, into: list[torch.Tensor]) -> None:
        copy(self, place, rank, other, into)
        for part in into:
            part *= 1.1

    monkeypatch.setattr(Exchange, "_copy", wrong)
    with shared(models["tiny_flux1_unet"], devices, tmp_path) as engine:
        for _ in range(2):
            assert relative_error(sample(engine.model), expected) <= LIMIT
            assert engine.handle.stats.native == 0
        assert "that of several differ by" in engine.handle.stats.remark


@two
def test_the_report_tells_what_a_step_takes_in_both_ways(
    devices: int, models: dict[str, Path], tmp_path: Path
) -> None:
    with shared(models["tiny_flux1_unet"], devices, tmp_path) as engine:
        for _ in range(2):
            sample(engine.model)
            said = report_text([engine.handle.stats])
            assert "2 GPUs share the tokens of each step: 1.4 s instead of 2.5 s." in said


@two
def test_one_gpu_computes_latents_of_a_size_at_which_several_are_not_faster(
    devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger = FLUX.of("flux", shape=(1, 16, 16, 18))
    with shared(models["tiny_flux1_unet"], devices, tmp_path) as engine:
        seconds_are(monkeypatch, 0.04, 0.02)
        sample(engine.model)
        assert "The first 3 steps are computed by 2 GPUs and by one" in engine.handle.stats.remark
        assert "share" not in engine.handle.stats.remark
        calls = tokens_of_calls(monkeypatch, "image")
        sample(engine.model)
        assert calls == [48] * STEPS
        said = report_text([engine.handle.stats])
        assert "One GPU computed each step: it takes 20 ms, and 2 GPUs 40 ms." in said
        assert "share" not in said
        seconds_are(monkeypatch, 0.4, 0.8)
        larger.sample(engine.model)
        assert "share the tokens of each step: 400 ms instead of 800 ms" in engine.handle.stats.remark
        sample(engine.model)
        assert "One GPU computed each step" in engine.handle.stats.remark


@two
def test_one_gpu_has_captured_its_graph_before_its_call_is_timed_and_drops_it(
    devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared(models["tiny_flux1_unet"], devices, tmp_path) as engine:
        session, recorder, found = engine.handle.session, Recorder(), []
        session.graphs._capture = recorder
        monkeypatch.setattr(several_gpus, "_timed", lambda run, _device: (
            run(), found.append((recorder.captured, recorder.replayed)) or 2.0 - len(found) % 2))  # fmt: skip
        sample(engine.model)
        of_one_gpu = found[1::2]
        assert of_one_gpu[-2:] == [(1, 1), (1, 2)], "the last call is a replay alone"
        assert len(session.graphs) == 0


def test_each_gpu_keeps_its_thread_for_all_steps_and_prompts(
    devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread has cuDNN's plans of attention made anew."""
    used, run = set(), LiveSession.run

    def noted(self: LiveSession, *given: Any) -> dict[str, torch.Tensor]:
        if gathers():
            used.add((id(self), threading.get_ident()))
        return run(self, *given)

    monkeypatch.setattr(LiveSession, "run", noted)
    with shared(models["tiny_flux1_unet"], devices, tmp_path) as engine:
        for _ in range(2):
            sample(engine.model)
    assert len(used) == len({thread for _, thread in used}) == devices


@pytest.mark.parametrize("chosen", ["one", "all"])
def test_the_node_takes_as_many_gpus_as_it_says(
    chosen: str, devices: int, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models["tiny_flux1_unet"]
    prompt = {"1": {"class_type": "TRTAccelerate", "inputs": {"gpus": chosen}}}
    hidden = SimpleNamespace(dynprompt=DynamicPrompt(prompt), unique_id="1")
    monkeypatch.setattr(TRTAccelerate, "hidden", hidden, raising=False)
    with token_networks.told():
        model = token_networks.load(str(path))
        model = TRTAccelerate.execute(model, "use native", backend="torch", precision="auto", gpus=chosen).args[0]
    assert len(model.get_additional_models_with_key("multigpu")) == (devices - 1 if chosen == "all" else 0)
    assert relative_error(sample(model), sample(token_networks.load(str(path)))) <= LIMIT
    model.set_additional_models("multigpu", [])


@two
def test_a_split_behind_the_engine_node_is_told(devices: int, models: dict[str, Path], tmp_path: Path) -> None:
    path = models["tiny_flux1_unet"]
    engine = Patched(NativeNetwork.of_model(token_networks.load(str(path)), "flux"), tmp_path, "torch")
    engine.model = split(engine.model)
    assert relative_error(sample(engine.model), sample(token_networks.load(str(path)))) <= LIMIT
    said = "One GPU computed each step: GPUs share its tokens if MultiGPU CFG Split stands before the engine node"
    assert said in engine.handle.stats.remark


def wait_for_threads(before: set[threading.Thread], count: int) -> None:
    """Wait until so many of the GPUs' threads are left; those of a split that is gone take a moment to end."""
    def left() -> int:
        gc.collect()
        return sum(one.name.startswith("hybrid-trt-gpu") for one in set(threading.enumerate()) - before)

    for _ in range(200):
        if left() == count:
            return
        time.sleep(0.05)
    assert left() == count


def alive() -> dict[str, int]:
    """Numbers of things that would grow if a prompt left something behind."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    storages = {found.untyped_storage().data_ptr(): found.untyped_storage().nbytes() for found in tensors}
    return {"tensors": len(tensors), "bytes": sum(storages.values()), "threads": threading.active_count(),
            "loaded models": len(model_management.loaded_models())}  # fmt: skip


@two
@pytest.mark.parametrize("prompts", [10, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("anew", [False, True], ids=["kept", "split anew"])
def test_prompts_that_change_between_one_and_two_gpus_leave_nothing_behind(
    prompts: int, anew: bool, devices: int, models: dict[str, Path], tmp_path: Path
) -> None:
    model = token_networks.load(str(models["tiny_flux1_unet"]))
    expected, seen = sample(model), []
    before = set(threading.enumerate())
    one = Patched(NativeNetwork.of_model(model, "flux"), tmp_path, "torch")
    several = None
    for number in range(prompts):
        if number % 2 == 0:
            assert relative_error(sample(one.model), expected) <= LIMIT
            assert "GPU" not in one.handle.stats.remark
        else:
            if several is None or anew:
                several = Patched(NativeNetwork.of_model(split(model), "flux"), tmp_path, "torch")
            assert relative_error(sample(several.model), expected) <= LIMIT
            assert "2 GPUs share" in several.handle.stats.remark
            wait_for_threads(before, devices)
            seen.append(alive())
    assert seen[-1] == seen[2]
    several.model.set_additional_models("multigpu", [])


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
