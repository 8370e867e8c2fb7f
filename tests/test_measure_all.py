"""Measurements side by side on one machine: no two share a GPU, and none begins that would not end in time."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pack import ROOT

LOGS = """import json, os, sys, time
began = time.time(); time.sleep(0.5)
open(sys.argv[1], "w").write(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], began, time.time()]))"""


@pytest.fixture
def measure_all() -> Any:
    spec = importlib.util.spec_from_file_location("measure_all", ROOT / "benchmarks" / "measure_all.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure_all"] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are shared out on Linux alone")
def test_no_two_measurements_share_a_gpu_and_none_begins_too_late(
    measure_all: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [["{python}", "-c", LOGS, "{out}"]]
    wanted = {f"{gpus}_{n}": measure_all.Measurement(command, 1, gpus) for n in range(3) for gpus in (2, 1)}
    wanted["late"] = measure_all.Measurement(command, 10_000)
    monkeypatch.setattr(measure_all, "MEASUREMENTS", wanted)
    options = argparse.Namespace(
        comfyui=tmp_path, base=tmp_path / "base", out=tmp_path, python=sys.executable, ray="", before="")
    (tmp_path / "again.txt").write_text("1_2")
    told = tmp_path / "ended.txt"
    measure_all.measure(measure_all.Machine(options, 3), list(wanted), time.monotonic() + 600, told)
    lines = told.read_text().splitlines()
    assert lines[-1] == "over; left out: ['late']"
    assert {line.split()[0]: line.split()[1] for line in lines[:-1]} == dict.fromkeys(wanted.keys() - {"late"}, "0")
    assert sum(line.startswith("1_2 ") for line in lines) == 2, "what again.txt names is measured once more"
    seen = [json.loads((tmp_path / f"{name}.json").read_text()) for name in wanted if name != "late"]
    for number, (gpus, began, ended) in enumerate(seen):
        for others, other_began, other_ended in seen[number + 1 :]:
            if began < other_ended and other_began < ended:
                assert not set(gpus.split(",")) & set(others.split(","))


def test_each_command_names_files_and_options_that_there_are(measure_all: Any) -> None:
    commands = [command for one in measure_all.MEASUREMENTS.values() for command in one.commands]
    for command in commands:
        files = [ROOT / word for word in command if word.endswith(".py")]
        assert files
        assert all(file.is_file() for file in files), command
        if "pytest" not in command:
            source = files[0].read_text(encoding="utf-8")
            assert all(f'"{word}"' in source for word in command if word.startswith("--")), command
