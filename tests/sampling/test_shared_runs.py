"""Whole runs on several GPUs that share tokens: when one GPU goes on, what the report says, and what stays behind."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import token_networks
import torch
from comfy import model_management
from comfy_execution.graph import DynamicPrompt
from fake_recorder import Recorder
from hybrid_trt.architectures.user_attention import gathers
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.comfyui_internals import Feature
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.nodes.engine_nodes import TRTAccelerate
from hybrid_trt.sampling import several_gpus
from hybrid_trt.sampling.report import report_text
from hybrid_trt.sessions import shared_call
from hybrid_trt.sessions.shared_call import Exchange
from shared_gpus import FLUX, LIMIT, STEPS, devices, sample, seconds_are, shared, split, tokens_of_calls, two
from token_calls import Patched

__all__ = ["devices"]  # a fixture: pytest finds it by name


@two
@pytest.mark.parametrize("failing", [0, 1])
def test_a_gpu_that_fails_leaves_the_run_to_one_gpu(
    failing: int, devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sample(token_networks.load(str(models["tiny_flux1_unet"])))
    with shared(models["tiny_flux1_unet"], tmp_path) as engine:
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

    with shared(models["tiny_flux1_unet"], tmp_path) as engine:
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
    with shared(models["tiny_flux1_unet"], tmp_path) as engine:
        for _ in range(2):
            assert relative_error(sample(engine.model), expected) <= LIMIT
            assert engine.handle.stats.native == 0
        assert "that of several differ by" in engine.handle.stats.remark


@two
def test_the_report_tells_what_a_step_takes_in_both_ways(
    devices: int, models: dict[str, Path], tmp_path: Path
) -> None:
    with shared(models["tiny_flux1_unet"], tmp_path) as engine:
        for _ in range(2):
            sample(engine.model)
            said = report_text([engine.handle.stats])
            assert "2 GPUs share the tokens of each step: 1.4 s instead of 2.5 s." in said


@two
def test_one_gpu_computes_latents_of_a_size_at_which_several_are_not_faster(
    devices: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger = FLUX.of("flux", shape=(1, 16, 16, 18))
    with shared(models["tiny_flux1_unet"], tmp_path) as engine:
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
    with shared(models["tiny_flux1_unet"], tmp_path) as engine:
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
    with shared(models["tiny_flux1_unet"], tmp_path) as engine:
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
def test_all_gpus_are_one_where_engines_on_several_are_switched_off(
    devices: int, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_gpus, "works", lambda feature: feature is not Feature.SEVERAL_GPUS)
    assert not split(token_networks.load(str(models["tiny_flux1_unet"]))).get_additional_models_with_key("multigpu")


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
