"""The faster of engine and native serves where weights are streamed: timed once for a GPU's memory, and remembered."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.sample
import pytest
import token_networks
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from compiling import COMPILES
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor import session as live_session
from hybrid_trt.backends.torch_inductor import weight_places
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.engine_library.manifest import PACK_VERSION, TIMES_NAME
from hybrid_trt.sampling import model_wrapper, native_weights, streamed_choice
from hybrid_trt.sampling.call_stats import CallTimes
from hybrid_trt.sampling.engine_status import status
from patched import LIMIT, Failing, Patched, sampling_node, with_lora
from token_calls import profile_of

pytestmark = COMPILES
FILE, STEPS, SLOW = "tiny_flux1_unet", 3, 0.15


@pytest.fixture(scope="module")
def library(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Library:
    network = NativeNetwork.of_model(token_networks.load(str(models[FILE])), FILE)
    found = Library([tmp_path_factory.mktemp("library")])
    order = BuildOrder(network, "float32", profile_of(network), backends()["torch"])
    build_engine(order, found, lambda *_: None)
    return found


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that a call takes by the clock of the stats, whatever this machine does beside."""
    found, run, native = {"engine": 0.02, "native": 0.02}, LiveSession._call, model_wrapper.with_residuals_copied
    now = [0.0]

    def on_engine(*given: object) -> object:
        now[0] += found["engine"]
        return run(*given)

    def natively(*given: object) -> object:
        now[0] += found["native"]
        return native(*given)

    monkeypatch.setattr(LiveSession, "_call", on_engine)
    monkeypatch.setattr(model_wrapper, "with_residuals_copied", natively)
    monkeypatch.setattr(CallTimes, "_now", lambda _times: now[0])
    return found


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A double of a GPU: the part of the weights that finds room there, and its memory in bytes."""
    found, load = {"part": 0.5, "room": 8e9}, LiveSession.load

    def limited(self: LiveSession, most: float = math.inf) -> None:
        load(self, min(most, found["part"] * self.live.weights.most_bytes))

    monkeypatch.setattr(native_weights, "has_memory_of_its_own", lambda _device: True)
    monkeypatch.setattr(weight_places, "STREAMED_FROM", 0)
    monkeypatch.setattr(live_session, "room_to_compute", lambda _: 0)
    monkeypatch.setattr(LiveSession, "owns_weights", lambda *_: True)  # as under dynamic VRAM
    monkeypatch.setattr(LiveWeights, "_shares", lambda *_: False)
    monkeypatch.setattr(LiveSession, "load", limited)
    monkeypatch.setattr(model_management, "MAX_PINNED_MEMORY", 1 << 34)
    monkeypatch.setattr(model_management, "pin_memory", lambda _tensor: False)  # nothing can be pinned without a GPU
    monkeypatch.setattr(streamed_choice, "_room", lambda _device: found["room"])
    return found


@pytest.fixture
def patched(models: dict[str, Path], library: Library, memory: Any, seconds: Any) -> Iterator[Patched]:
    """The model anew, with an engine of which nothing was timed yet."""
    times_file(library).unlink(missing_ok=True)
    yield anew(models, library)
    model_management.unload_all_models()


def anew(models: dict[str, Path], library: Library) -> Patched:
    return Patched(token_networks.load(str(models[FILE])), library, "torch")


def times_file(library: Library) -> Path:
    return library.engines()[0].folder / TIMES_NAME


def runs(engine: Patched, count: int = 1, side: int = 12) -> list[str]:
    """List which of engine and native served each of some runs; each picture is native's."""
    found = []
    for _ in range(count):
        latent, stats = sampled(engine.model, side), engine.handle.stats
        assert relative_error(latent, sampled(engine.native, side)) <= LIMIT
        assert STEPS in (stats.engine, stats.native)
        found.append("engine" if stats.engine else "native")
    return found


def why(engine: Patched) -> str:
    """The report's words on a run that native served, and what to do."""
    stats, (reason,) = engine.handle.stats, engine.handle.stats.reasons
    return f"{stats.details[reason]}. {stats.advice(Reason(reason))}"


def sampled(model: ModelPatcher, side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    prompt = [[torch.randn(1, 9, 64, generator=generator), {"pooled_output": torch.randn(1, 768, generator=generator)}]]
    noise = torch.randn(1, 16, side, side, generator=generator)
    with sampling_node(), torch.inference_mode():
        return comfy.sample.sample(model, noise, STEPS, 1.0, "euler", "simple", prompt, prompt,
                                   torch.zeros_like(noise), seed=7, disable_pbar=True)  # fmt: skip


def test_the_faster_of_engine_and_native_serves_once_both_were_timed(
    patched: Patched, seconds: dict[str, float]
) -> None:
    seconds["engine"] = SLOW
    assert runs(patched, 2) == ["engine"] * 2
    assert runs(patched) == ["native"]
    assert re.search("this run times the normal model; the engine takes 0.15 s a call", why(patched))
    assert "later runs use the faster of both" in why(patched)
    assert runs(patched, 2) == ["native"] * 2
    assert re.search("a call takes 0.02 s on the normal model, and 0.15 s on the engine", why(patched))
    assert "free GPU memory" in why(patched)
    assert (patched.handle.stats.times, patched.handle.session.loaded) == (None, False)


def test_an_engine_that_is_faster_stays_and_the_report_says_by_how_much(
    patched: Patched, seconds: dict[str, float], models: dict[str, Path], library: Library
) -> None:
    seconds["native"] = SLOW
    assert runs(patched, 4) == ["engine", "engine", "native", "engine"]
    remark = patched.handle.stats.remark
    assert re.search("GB of the weights stay on the GPU; .* in each step: 0.02 s a call instead of 0.15 s", remark)
    assert remark in status(patched.handle)
    assert patched.handle.stats.times is None
    assert runs(anew(models, library), 2) == ["engine"] * 2, "another server knows it too"


def test_larger_pictures_need_no_timing_where_the_engine_won_and_smaller_ones_none_where_it_lost(
    patched: Patched, seconds: dict[str, float]
) -> None:
    seconds["native"] = SLOW
    runs(patched, 3)
    assert runs(patched, 3, side=16) == ["engine"] * 3
    seconds |= {"native": 0.02, "engine": SLOW}
    assert runs(patched, 4, side=8) == ["engine", "native", "native", "native"], "weights are streamed already"
    assert runs(patched, 1, side=6) == ["native"]
    assert runs(patched, 1, side=12) == ["engine"]


def test_pictures_of_changing_sizes_are_each_timed(patched: Patched, seconds: dict[str, float]) -> None:
    seconds["engine"] = SLOW
    served = [runs(patched, side=side)[0] for side in (12, 16) * 4]
    assert served[-2:] == ["native"] * 2
    assert served[:3] == ["engine"] * 3


def test_another_amount_of_memory_is_timed_anew(
    patched: Patched, seconds: dict[str, float], memory: dict[str, Any]
) -> None:
    seconds["engine"] = SLOW
    assert runs(patched, 4) == ["engine", "engine", "native", "native"]
    memory |= {"part": 2.0, "room": 24e9}
    assert runs(patched, 4) == ["engine"] * 4, "nothing is streamed"
    memory |= {"part": 0.5, "room": 8.9e9}
    assert runs(patched) == ["native"], "near enough"
    memory["room"] = 9.1e9
    assert runs(patched, 2) == ["engine"] * 2


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"version": "0", "rows": {}}', f'{{"version": "{PACK_VERSION}", "rows": {{"": [[1]]}}}}']
)
def test_a_damaged_file_of_times_is_as_none(
    patched: Patched, models: dict[str, Path], library: Library, seconds: dict[str, float], damage: str
) -> None:
    seconds["engine"] = SLOW
    runs(patched, 4)
    ((row,),) = json.loads(times_file(library).read_text())["rows"].values()
    assert row[:2] == [8e9, 16 * 12 * 12]
    times_file(library).write_text(damage)
    assert runs(anew(models, library), 3) == ["engine", "engine", "native"]


@pytest.mark.parametrize(("engine", "serves"), [(1.029, "engine"), (1.031, "native")])
def test_an_engine_may_be_slower_by_three_percent(
    patched: Patched, seconds: dict[str, float], engine: float, serves: str
) -> None:
    seconds |= {"native": 1.0, "engine": engine}
    assert runs(patched, 4)[3] == serves


def test_a_run_that_was_cut_short_says_nothing(patched: Patched, seconds: dict[str, float]) -> None:
    seconds["engine"] = SLOW
    runs(patched, 2)
    broken = Failing(model_wrapper.with_residuals_copied, 1, error=RuntimeError("interrupted"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_wrapper, "with_residuals_copied", broken)
        with pytest.raises(RuntimeError, match="interrupted"):
            sampled(patched.model, 12)
    assert runs(patched, 2) == ["native"] * 2


def test_memory_counts_what_models_hold_there_whoever_holds_it(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    native, device, found = token_networks.load(str(models[FILE])), torch.device("cpu"), set()
    monkeypatch.setattr(model_management, "is_device_cpu", lambda _device: False)
    for held in (0, 3e9, 7.3e9):
        holder = SimpleNamespace(load_device=device, loaded_size=lambda held=held: held)
        with monkeypatch.context() as patch:
            patch.setattr(model_management, "get_free_memory", lambda _device, held=held: 8.4e9 - held)
            patch.setattr(model_management, "loaded_models", lambda holder=holder: [holder, None])
            found.add(streamed_choice._room(device))
    assert found == {8.4e9}
    where = [streamed_choice._where(device, one) for one in (native, with_lora(native, ends="qkv.weight"))]
    state = model_management.vram_state.name.lower()
    assert where == [state, f"{state}, patched weights"], "native applies patches in each call where it streams"
    monkeypatch.setattr(model_management, "vram_state", model_management.VRAMState.NO_VRAM)
    assert streamed_choice._where(device, native) == "no_vram", "native loads less of the model there"
