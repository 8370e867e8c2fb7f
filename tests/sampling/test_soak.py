"""One server for hundreds of prompts with mishaps between them: no wrong picture, no error, no growing memory.

CI runs thirty prompts. The long one is a thousand: `make test ARGS="-m slow tests/sampling/test_soak.py"`.
HYBRID_TRT_SOAK="seed=1 count=1000 seconds=900 out=soak.json" chooses otherwise, and keeps its figures.
With `device=gpu` the server runs on the GPU in half precision, and the GPU's memory is read too: be alone there.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import soak
import torch
from comfy_process import ComfyProcess
from pack import ROOT
from scenarios import A, B, Scenario, latent_of, prompt

GROWTH = 0.01
FLOOR = {"memory": 0, "private": 0, "reserved": 20 << 20, "card": 64 << 20}
"""Bytes that may come and go: torch takes 20 MiB at once of a GPU, and a driver more with each kind of kernel."""
CHOICES = {"seed": "1", "count": "1000", "seconds": "inf", "out": "", "device": "cpu"}


def assert_sound(seen: soak.Figures, log: str) -> None:
    """Hold what a soak saw against what is promised, but for memory."""
    assert not seen.wrong, "\n".join(seen.wrong[:5])
    assert soak.tracebacks_of_ours(log) == []
    assert seen.engine_calls > seen.native_calls / 4, f"too little of it runs on engines: {seen}"


def growing(seen: soak.Figures) -> dict[str, list[int]]:
    """Return the readings that grow over the last half, by 1 % and by more than comes and goes."""
    found = {name: getattr(seen, name) for name in FLOOR}
    return {name: readings for name, readings in found.items() if len(readings) > 2
            and soak.growth(readings) >= max(FLOOR[name], GROWTH * max(readings))}  # fmt: skip


@pytest.mark.fault("prompts of all kinds are interrupted, unloaded and changed in one server",
                   see="nothing, or normal speed with a reason")
def test_thirty_prompts_with_mishaps_between_them_give_natives_pictures(sd15: ComfyProcess) -> None:
    before = len(sd15.log_text())
    seen = soak.Soak(sd15, seed=1, long=False, readings=2).run(30)
    assert_sound(seen, sd15.log_text()[before:])
    assert len(seen.reasons) >= 3, "too little falls back"
    assert seen.mishaps, "nothing happens between prompts"


def test_memory_that_grows_over_the_last_half_is_told() -> None:
    gigabyte = [10**9] * 10
    first_half, taken_back = [5 * 10**8, 7 * 10**8, 9 * 10**8, *gigabyte[:7]], [*gigabyte[:6], 8 * 10**8, *gigabyte[:3]]
    leak = [10**9 + 3 * 10**6 * i for i in range(10)]
    assert growing(soak.Figures(1, memory=taken_back, private=first_half, reserved=leak, card=leak)) == {}
    large = [8 * one for one in leak]
    assert growing(soak.Figures(1, memory=leak, private=leak, reserved=large, card=large)) == {
        "memory": leak, "private": leak, "reserved": large, "card": large}  # fmt: skip


@pytest.fixture
def chosen() -> dict[str, str]:
    """Choices of the long soak."""
    return CHOICES | dict(word.split("=") for word in os.environ.get("HYBRID_TRT_SOAK", "").split())


@pytest.fixture
def long_server(
    chosen: dict[str, str], environment: Any, models: dict[str, Path], tmp_path: Path
) -> Iterator[ComfyProcess]:
    """A server of its own, with engines, that keeps no results of old prompts: memory would grow with them."""
    base = environment.base
    shutil.rmtree(base / "models" / "trt_engines", ignore_errors=True)
    (base / "custom_nodes").mkdir(exist_ok=True)
    for name, target in (("hybrid-trt", ROOT), ("comfy_test_nodes", ROOT / "tests" / "comfy_test_nodes")):
        if not (base / "custom_nodes" / name).exists():
            (base / "custom_nodes" / name).symlink_to(target, target_is_directory=True)
    (tmp_path / "index.html").write_text("<html></html>")
    arguments = ["--cache-classic", "--front-end-root", str(tmp_path)]
    with ComfyProcess(environment.comfyui, base, arguments=arguments, log=base / "soak.log",
                      cpu=chosen["device"] == "cpu") as process:
        wanted = Scenario(controls=(A, B), settings={"when_missing": "build now"})
        latent_of(process.queue(prompt(wanted, True, "build"), timeout=900))
        yield process


@pytest.mark.fault("one server runs for hundreds of prompts with deletions, damage and builds",
                   see="nothing, or normal speed with a reason; memory stays")
@pytest.mark.slow
def test_a_thousand_prompts_with_mishaps_and_builds_give_natives_pictures_and_memory_stays(
    long_server: ComfyProcess, chosen: dict[str, str]
) -> None:
    running = soak.Soak(long_server, int(chosen["seed"]), long=True, readings=20)
    seen = running.run(int(chosen["count"]), float(chosen["seconds"]))
    errors = soak.tracebacks_of_ours(long_server.log_text())
    if chosen["out"]:
        Path(chosen["out"]).write_text(json.dumps(record(seen, errors, chosen), indent=1) + "\n")
    assert_sound(seen, long_server.log_text())
    assert seen.mishaps["delete"], "nothing was deleted"
    assert growing(seen) == {}


def record(seen: soak.Figures, errors: list[str], chosen: dict[str, str]) -> dict[str, Any]:
    """Return the figures of a soak with how and where they were made."""
    said = " ".join(f"{name}={value}" for name, value in chosen.items() if name != "out" and value != CHOICES[name])
    memory = {name: {"half": readings[len(readings) // 2 - 1], "end": readings[-1],
                     "growth": round(soak.growth(readings) / max(readings), 5)}
              for name in FLOOR if len(readings := getattr(seen, name)) > 2}  # fmt: skip
    return {
        "command": f'HYBRID_TRT_SOAK="{said} out=soak.json" pytest -n 0 -m slow tests/sampling/test_soak.py',
        "machine": torch.cuda.get_device_name(0) if chosen["device"] != "cpu" else f"a CPU, {os.cpu_count()} cores",
        "python": platform.python_version(), "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        **vars(seen) | {"wrong": len(seen.wrong), "errors": len(errors)}, "memory_at": memory,
    }  # fmt: skip
