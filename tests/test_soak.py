"""One server for hundreds of prompts with mishaps between them: no wrong picture, no error, no growing memory.

CI runs twenty prompts. The long one is a thousand: `make test ARGS="-m slow tests/test_soak.py"`.
HYBRID_TRT_SOAK="seed=1 count=1000 seconds=900 out=soak.json" chooses otherwise, and keeps its figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfy_process import ComfyProcess
from soak import Figures, Soak, tracebacks_of_ours

GROWTH = 0.01
CHOICES = {"seed": "1", "count": "1000", "seconds": "inf", "out": ""}


def assert_sound(seen: Figures, log: str) -> None:
    """Hold what a soak saw against what is promised, but for memory."""
    assert not seen.wrong, "\n".join(seen.wrong[:5])
    assert tracebacks_of_ours(log) == []
    assert seen.engine_calls > seen.native_calls / 4, f"too little of it runs on engines: {seen}"


@pytest.mark.fault("prompts of all kinds are interrupted, unloaded and changed in one server")
def test_twenty_prompts_with_mishaps_between_them_give_natives_pictures(sd15: ComfyProcess) -> None:
    before = len(sd15.log_text())
    seen = Soak(sd15, seed=1, long=False, readings=2).run(20)
    assert_sound(seen, sd15.log_text()[before:])
    assert len(seen.reasons) >= 3, "too little falls back"
    assert seen.mishaps, "nothing happens between prompts"


@pytest.fixture
def long_server(sd15: ComfyProcess) -> Iterator[ComfyProcess]:
    """A second server, which keeps no results of old prompts: memory would grow with them."""
    with ComfyProcess(sd15.comfyui, sd15.base, arguments=["--cache-classic"], log=sd15.base / "soak.log") as process:
        yield process


@pytest.mark.fault("one server runs for hundreds of prompts with deletions, damage and builds")
@pytest.mark.slow
def test_a_thousand_prompts_with_mishaps_and_builds_give_natives_pictures_and_memory_stays(
    long_server: ComfyProcess,
) -> None:
    chosen = CHOICES | dict(word.split("=") for word in os.environ.get("HYBRID_TRT_SOAK", "").split())
    soak = Soak(long_server, int(chosen["seed"]), long=True, readings=20)
    seen = soak.run(int(chosen["count"]), float(chosen["seconds"]))
    if chosen["out"]:
        Path(chosen["out"]).write_text(json.dumps({**vars(seen), "growth": seen.growth}, indent=1))
    assert_sound(seen, long_server.log_text())
    assert seen.mishaps["delete"], "nothing was deleted"
    assert seen.growth < GROWTH, f"memory grows: {seen.memory}"
