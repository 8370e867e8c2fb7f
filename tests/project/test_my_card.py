"""The command that measures a user's own card: its table, and what it says of a card that is too small.

It runs here with a tiny model on a CPU, in a real ComfyUI.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pack import ROOT

sys.path += [str(ROOT / "benchmarks")]

import prompts
import small_cards
from large_cases import CASES

ENGINE = {"warm": 1.6, "warm_ran": [["torch", 8, 0]], "warm_rel_err": 0.0123, "reasons": []}


def measure(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "small_cards.py"), "--my-card", *arguments,
               "--comfyui", os.environ["HYBRID_TRT_COMFYUI"]]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400,
                          env=os.environ | environment)  # fmt: skip


def test_one_command_measures_a_card_and_leaves_only_figures(tmp_path: Path) -> None:
    done = measure("--tiny", "--cases", "zimage_512", "--base", str(tmp_path))
    assert done.returncode == 0, done.stderr
    title, _, row = (line for line in done.stdout.splitlines() if line.startswith("|"))
    assert title == "| model | normal | with engines | faster | latents differ by |"
    native, engine = json.loads((tmp_path / "my_card.json").read_text(encoding="utf-8"))["rows"]
    assert row == small_cards.table_row("zimage_512", native, engine)
    assert engine["warm_ran"] == [["onnxruntime", 8, 0]]
    assert engine["warm_rel_err"] <= 1e-5
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [], "the weights are gone"


def test_a_machine_without_room_is_told_what_it_lacks() -> None:
    done = measure(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "Too small for these models: 0.0 GB of GPU memory are free and 5 are needed" in done.stderr
    room = {what: float(least) for what, least in small_cards.NEEDS.items()}
    assert small_cards.lacking(room) == ""
    assert small_cards.lacking(room | {"disk space": 3.21}) == "3.2 GB of disk space are free and 9 are needed"


def test_the_table_says_how_much_faster_or_why_nothing_was_accelerated() -> None:
    assert small_cards.table_row("Z", {"warm": 2.4}, ENGINE) == "| Z | 2.40 s | 1.60 s | 1.50x | 1.2% |"
    without = ENGINE | {"warm_ran": [["torch", 0, 8]], "reasons": ["build failed"]}
    assert small_cards.table_row("Z", {"warm": 2.4}, without) == "| Z | 2.40 s | not accelerated: build failed | | |"


def test_the_models_that_it_takes_are_there() -> None:
    assert set(small_cards.MY_CARD) <= set(CASES)


def test_a_model_that_fails_stops_no_other_and_a_slow_one_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(bench: Any, way: str, free: float, other: None) -> dict[str, Any]:
        if bench.name == "broken":
            raise RuntimeError("out of memory")
        return ENGINE

    machine = {"gpu": "a card"}, {what: 12.0 for what in small_cards.NEEDS}
    monkeypatch.setattr(small_cards, "elsewhere", lambda call, *_: machine if call is small_cards.this_machine else 0)
    monkeypatch.setattr(small_cards, "Bench", lambda name, *_, made: SimpleNamespace(name=name, remove=lambda: None))
    monkeypatch.setattr(small_cards, "run", run)
    monkeypatch.setattr(small_cards, "NEXT_WITHIN", -1.0)
    options = SimpleNamespace(base=tmp_path, logs=tmp_path, out=tmp_path / "out.json", tiny=False,
                              cases=["broken", "first", "second"])  # fmt: skip
    assert [row.split(" | ")[0] for row in small_cards.measured(options)[2:]] == ["| first"]
    said = capsys.readouterr().out
    assert "broken: out of memory" in said
    assert "second: left out for time; --cases second measures it" in said


def test_windows_gets_a_junction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setitem(sys.modules, "_winapi", type("Api", (), {"CreateJunction": lambda *both: asked.append(both)}))
    monkeypatch.setattr(prompts, "os", type("Windows", (), {"name": "nt"}))
    prompts.link(tmp_path / "there", tmp_path)
    assert asked == [(str(tmp_path), str(tmp_path / "there"))]
