"""A build that main memory has no room for is refused before it starts, with both figures."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from builds import ROOT, contents, order, pretend, slow_backend, small_network
from fake_engine import publish_engine
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.backends import backends
from hybrid_trt.backends.tensorrt.version8.backend import BACKEND as VERSION8
from hybrid_trt.comfy_model import main_memory
from hybrid_trt.engine_builder import resources
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.check import check_engine
from hybrid_trt.engine_builder.worker.main import in_json
from hybrid_trt.engine_library import BuildError, Library, trust
from hybrid_trt.sessions.gpu_memory import is_out_of_memory

BUILDS = ROOT / "benchmarks" / "results" / "builds.json"


@pytest.mark.fault("main memory has too little room for a build", see="an error in one sentence, with both figures")
def test_a_build_without_room_in_main_memory_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any) -> dict:
        raise AssertionError("a process was started")

    monkeypatch.setattr(resources, "available_bytes", lambda: 700_000_000)
    with pytest.raises(BuildError) as refused:
        build_engine(order(small_network(), backends()["onnxruntime"]), Library([tmp_path]), lambda *_: None, run=run)
    text = str(refused.value)
    assert "small_1.safetensors with onnxruntime needs about 1.0 GB of main memory and 0.7 GB are available" in text
    assert text.endswith("not started and the normal model keeps running; close other programs or unload ComfyUI's "
                         "models, then build again")  # fmt: skip
    assert contents(tmp_path) == []


def test_a_network_that_is_too_large_for_one_backend_is_told_of_a_smaller_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available_bytes", lambda: 8_000_000_000)
    sdxl = 5_134_927_368
    resources.check_memory(backends()["onnxruntime"], sdxl, "sdxl")
    with pytest.raises(BuildError, match=r"12\.3 GB .* 8\.0 GB are available.* onnxruntime, which needs 5\.6 GB"):
        resources.check_memory(backends()["tensorrt_rtx"], sdxl, "sdxl")


@pytest.mark.fault("main memory has too little room for a check", see="an error in one sentence, with both figures")
def test_a_check_without_room_in_main_memory_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any) -> dict:
        raise AssertionError("a process was started")

    wanted, engine = order(small_network(), backends()["onnxruntime"]), publish_engine(tmp_path)
    monkeypatch.setattr(resources, "available_bytes", lambda: 700_000_000)
    with pytest.raises(BuildError, match=r"^checking the engine of small_1.* needs about 1\.0 GB of main memory and"):
        check_engine(wanted, Library([tmp_path]), engine, lambda *_: None, print, run)
    assert contents(tmp_path) == [engine.folder.name]
    assert trust.built_here(engine), "nothing was found out about it"


@pytest.mark.fault("an engine for large pictures alone is compared on the CPU",
                   see="nothing: the comparison stays small")
def test_what_runs_on_a_cpu_is_small_though_the_engine_takes_large_pictures_alone(tmp_path: Path) -> None:
    """The attention of one picture of 1024 px took gigabytes for each head, in a network of any size."""
    tasks: list[dict] = []

    def run(task: dict, *given: Any) -> dict:
        tasks.append(task)
        return pretend(task, *given)

    sides = Range(128, 128, 128)
    profile = Profile({"B": Range(2, 2, 2), "H": sides, "W": sides, "T": Range(77, 77, 77)})
    with slow_backend() as slow:
        build_engine(order(small_network(), slow, profile), Library([tmp_path]), lambda *_: None, run=run)
    assert tasks[0]["compared"] == [tasks[0]["traced"]]
    assert math.prod(tasks[0]["traced"][name] for name in "BHW") <= 8192
    assert 0 < tasks[0]["memory"] < resources.available_bytes(), "and Linux does not have to end anything"
    assert "memory" not in tasks[1]


@pytest.mark.parametrize("error", [
    MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("CUDA error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("Failed to allocate memory for requested buffer of size 1073741824"), RuntimeError("std::bad_alloc"),
])  # fmt: skip
def test_all_words_for_a_lack_of_memory_are_known(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert in_json(error)["kind"] == "build"
    assert not is_out_of_memory(ValueError("the network takes other sizes"))


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = resources.available_bytes()
    assert outside > 0
    monkeypatch.setattr(main_memory, "CGROUP", tmp_path)
    for name, text in (("memory.current", "900000000"), ("memory.stat", "anon 5\ninactive_file 200000000\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "memory.max").write_text("1000000000\n")
    assert resources.available_bytes() == 300_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert resources.available_bytes() > 300_000_000


def test_the_estimate_covers_what_builds_were_measured_to_take() -> None:
    rows = json.loads(BUILDS.read_text(encoding="utf-8"))["builds"]
    measured = {(row["network"], row["backend"]) for row in rows}
    names = [f"{family} {kind}, float16" for family in ("SD1.5", "SDXL") for kind in ("unet", "controlnet")]
    assert measured == set(itertools.product(names, ("tensorrt_rtx", "onnxruntime")))
    for row in rows:
        taken = 1e9 * max(row[step]["of_that_private_gb"] for step in ("export_and_check", "build"))
        estimate = resources.needed_bytes(backends()[row["backend"]], row["weights_bytes"])
        assert taken <= estimate <= 2 * taken, row["network"]


def test_the_estimate_covers_what_builds_of_tensorrt_8_were_seen_to_take() -> None:
    """Seen was what is resident, the mapped file of weights included, which gives way when others want the room."""
    found = json.loads(BUILDS.with_name("tensorrt86_h200.json").read_text(encoding="utf-8"))
    later = found["second_run"]
    seen = [("sdxl_unet", later["sdxl"]["peak_host_gb_seen"])]
    own, _for_any_weights = found["third_run"]["builds"]  # the other one took 27.6 GB at the most
    for row in [*found["builds"], *later["any_weights_builds"], later["level_5"], own]:
        (peak,) = (value for name, value in row.items() if name.endswith("peak_host_gb"))
        seen.append((row["case"], peak))
    assert len(seen) == 9
    sizes = {"sd15_controlnet": 722_558_240, "sd15_unet": 1_719_041_928, "sdxl_unet": 5_134_927_368}
    for case, peak in seen:
        (weights,) = (size for name, size in sizes.items() if case.startswith(name))
        asked = resources.FIXED + VERSION8.build_memory(weights)
        assert peak * 1e9 - weights <= asked <= 1.2 * peak * 1e9, case
