"""An engine for a GPU computes what native does on that GPU before it serves. A double of the GPU: the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builds import small_network
from fake_engine import publish_engine, query_of
from hybrid_trt.architectures.families.stable_diffusion import UNetArchitecture
from hybrid_trt.architectures.shapes import Profile, Range, TensorSpec
from hybrid_trt.backends.onnxruntime import OnnxRuntimeBackend
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder import check
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_builder.worker import validate
from hybrid_trt.engine_library import BuildError, Engine, Library, Reason, Unavailable, measurements, trust
from hybrid_trt.engine_library.disk import Settings, write_settings
from hybrid_trt.page_api.node_states import engine_json

PROFILE = Profile({"B": Range(1, 2, 2), "H": Range(4, 8, 12), "W": Range(4, 8, 12), "T": Range(77, 77, 77)})
CUDA = torch.device("cuda", 0)
HERE, ELSEWHERE = "sm_89 NVIDIA RTX of a test", "sm_120 NVIDIA RTX of another test"


class OnGpu(OnnxRuntimeBackend):
    """ONNX Runtime, said to run on the GPU."""

    def cannot_run(self, device: torch.device) -> None:
        return None

    def options(self, settings: Settings) -> dict[str, Any]:
        return {"level": settings.tensorrt_level}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a GPU and a secret of its own."""
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    for module in (builder, check):
        monkeypatch.setattr(module, "gpu_of", lambda device: HERE if device.type == "cuda" else "")


def build(folder: Path, precision: str = "float32", **changes: Any) -> tuple[Engine, list[dict]]:
    """The engine of a small UNet for the GPU, and the tasks that it took; ``changes`` are of the check's."""
    tasks = []

    def run(task: dict, progress: Callable, log: Callable, environment: Mapping[str, str]) -> dict:
        tasks.append(task)
        if task["step"] == "check":
            task = {**task, "device": "cpu", "timed": None, **changes}
        return builder.run_here(task, progress, log, environment)

    order = BuildOrder(small_network(), precision, PROFILE, OnGpu(), CUDA)
    return builder.build_engine(order, Library([folder]), lambda *_: None, run=run), tasks


def why_not(engine: Engine, gpu: str) -> str:
    with pytest.raises(Unavailable) as refused:
        Library([engine.folder.parent]).find(query_of(engine, gpu), lambda _: None)
    assert refused.value.fallback.reason is Reason.UNCHECKED
    return refused.value.fallback.detail


def test_a_build_runs_its_engine_on_the_gpu_at_least_best_and_largest_size_and_keeps_the_figures(
    tmp_path: Path,
) -> None:
    write_settings(tmp_path, Settings(tensorrt_level=3))
    engine, tasks = build(tmp_path)
    assert tasks[0]["then"]["options"] == {"level": 3}
    assert [task["step"] for task in tasks] == ["export", "check"]
    task = tasks[-1]
    assert task["device"] == "cuda"
    assert [sizes["H"] for sizes in task["extremes"][:3]] == [4, 8, 12]
    assert task["timed"] == {"B": 2, "H": 8, "W": 8, "T": 77}
    record = trust.record_of(engine)
    assert (record.verdict, record.gpu) == (trust.BUILT, HERE)
    assert len(record.parity["cases"]) == 2 * len(task["extremes"]), "two timesteps"
    assert 0 < record.parity["rel_err"] <= 1e-4
    assert engine.manifest.seconds["proof"] > 0
    assert not (engine.folder / "model.onnx").with_name("weights.bin").exists()
    assert Library([tmp_path]).find(query_of(engine, HERE), lambda _: None) == [engine]
    assert build(tmp_path)[1] == [], "nothing has to be done twice"


@pytest.mark.parametrize(("sample", "start", "end"), [("timestep", 900, 50), ("sigma", 0.95, 0.05)])
def test_an_engine_is_compared_near_both_ends_of_its_familys_own_timesteps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: str, start: float, end: float
) -> None:
    seen, own, specs = [], validate.function_of, UNetArchitecture.engine_inputs

    def inputs(*args: Any) -> list[TensorSpec]:
        return [replace(spec, sample=sample) if spec.name == "timesteps" else spec for spec in specs(*args)]

    def watched(task: dict) -> tuple[torch.nn.Module, torch.nn.Module]:
        function, module = own(task)
        function.register_forward_pre_hook(lambda _, given: seen.append((given[1].unique().item(), given[-1].any())))
        return function, module

    monkeypatch.setattr(UNetArchitecture, "engine_inputs", inputs)
    monkeypatch.setattr(validate, "function_of", watched)
    engine, tasks = build(tmp_path)
    expected = [(start, True), (end, False)] * len(tasks[-1]["extremes"])
    assert [(pytest.approx(time), bool(residual)) for time, residual in seen] == expected
    assert [case["symbols"]["t"] for case in trust.record_of(engine).parity["cases"]] == [t for t, _ in expected]


def test_native_computes_exactly_while_an_engine_is_held_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU float32 convolutions are rounded to TF32 by default: native's error would be taken for the engine's."""
    asked, own = [], validate.function_of

    def watched(task: dict) -> tuple[torch.nn.Module, torch.nn.Module]:
        function, module = own(task)
        function.register_forward_pre_hook(lambda *_: asked.append(torch.backends.cudnn.allow_tf32))
        return function, module

    monkeypatch.setattr(validate, "function_of", watched)
    _engine, tasks = build(tmp_path)
    assert asked == [False] * 2 * len(tasks[-1]["extremes"])
    assert torch.backends.cudnn.allow_tf32 is True, "prompts and the clock have torch's default"


@pytest.mark.fault("a built engine computes something else on its GPU", see="an error in one sentence; it is not kept")
def test_an_engine_that_differs_from_native_on_its_gpu_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="made of .* differs from the normal model by .* so it is not used"):
        build(tmp_path, limit=0.0)
    assert list(tmp_path.glob("*/manifest.json")) == []


def test_in_half_precision_its_error_stands_beside_natives_own(tmp_path: Path) -> None:
    engine, _tasks = build(tmp_path, "float16")
    parity = trust.record_of(engine).parity
    assert parity["against"] == "native in float32 on the CPU"
    assert 1e-4 < parity["native_rel_err"] < 5e-3
    assert 1e-4 < parity["rel_err"] <= 1.2 * parity["native_rel_err"]
    assert engine_json(engine)["native_rel_err"] == parity["native_rel_err"]
    assert engine.manifest.parity["native_rel_err"] > 0, "its graph was judged so too"


@pytest.mark.parametrize("error", [
    Unavailable(Reason.UNCHECKED, "there is not enough GPU memory to compare it with native now"),
    BuildError("the builder was ended by SIGKILL while timing the normal model"),
], ids=["no memory", "killed"])  # fmt: skip
def test_an_engine_whose_proof_could_not_end_is_kept_and_waits_for_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def ended(_task: dict, _progress: Callable) -> dict:
        raise error

    monkeypatch.setitem(builder.STEPS, "check", ended)
    engine, _tasks = build(tmp_path)
    assert "has not run on a GPU yet" in why_not(engine, HERE)


def test_another_gpu_is_another_matter(tmp_path: Path) -> None:
    engine, _tasks = build(tmp_path)
    detail = why_not(engine, ELSEWHERE)
    assert detail == f"{engine.folder.name} has run on {HERE} and was not compared with the normal model on {ELSEWHERE}"
    assert Library([tmp_path]).find(query_of(engine, ""), lambda _: None) == [engine]


@pytest.mark.parametrize("name", ["model.onnx", "engine.trt", "B2-H8-W8.bin"])
def test_what_was_built_without_a_gpu_is_checked_on_one_before_it_serves_there(tmp_path: Path, name: str) -> None:
    engine = publish_engine(tmp_path, name=name)
    assert Library([tmp_path]).find(query_of(engine, ""), lambda _: None) == [engine]
    assert "has not run on a GPU yet and was not compared with the normal model on" in why_not(engine, HERE)
    assert Library([tmp_path]).unchecked(query_of(engine, HERE), lambda _: None) == engine, "Check engine finds it"


def test_the_page_is_told_how_fast_an_engine_was_in_its_proof(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path)
    assert engine_json(engine)["speed"] is None
    figures = {"rel_err": 2e-3, "native_rel_err": 3e-3, "native_ms": 8.0, "engine_ms": 2.5}
    trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT, parity=figures, gpu=HERE))
    facts = engine_json(engine)
    assert (facts["rel_err"], facts["native_rel_err"], facts["speed"]) == (2e-3, 3e-3, 3.2)


def test_blocks_that_were_timed_alone_say_nothing_of_a_whole_call(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path)
    for relative_time in (0.45, 1.1):
        parity = {"rel_err": 2e-3, "relative_time": relative_time}
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT, parity=parity, gpu=HERE))
        assert measurements.relative_time(engine, HERE) == relative_time
        assert measurements.call_times([engine]) is None, "the report says how much faster a call is by this"
        assert engine_json(engine)["speed"] is None
