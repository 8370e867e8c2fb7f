"""A build that main memory has no room for is refused before it starts, with both figures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from builds import ROOT, contents, order, small_network
from hybrid_trt.backends import backends
from hybrid_trt.backends.tensorrt import version8
from hybrid_trt.engine_builder import resources
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_library import BuildError, Library

BUILDS = ROOT / "benchmarks" / "results" / "builds.json"


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


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = resources.available_bytes()
    assert outside > 0
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
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
        asked = resources.FIXED + version8.build_memory(weights)
        assert peak * 1e9 - weights <= asked <= 1.2 * peak * 1e9, case
