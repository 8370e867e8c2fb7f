"""A backend's build in a process of its own: heard, ended, and its end told in words."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import slow
from builds import PROFILE, PROMPTLY, ROOT, children, gone, slow_backend, until
from hybrid_trt import backends
from hybrid_trt.engine_builder import worker_process
from hybrid_trt.engine_builder.worker.main import _keep_to, in_json
from hybrid_trt.engine_builder.worker_process import run_in_worker
from hybrid_trt.engine_builder.worker_tasks import stack_of
from hybrid_trt.engine_library import BuildError

Build = Callable[..., dict]


@pytest.fixture
def task(tmp_path: Path) -> Iterator[dict]:
    """The backend's step of a build whose graph nobody reads."""
    folder = tmp_path / "library" / "work"
    folder.mkdir(parents=True)
    with slow_backend():
        yield {
            "step": "build", "folder": str(folder), "precision": "float32", "inputs": [], "outputs": [],
            "profile": PROFILE.to_json(), "onnx": "model.onnx", "target": "any", "backend": "slow",
            "backend_folders": list(backends.__path__), "any_weights": False, "options": {},
        }


@pytest.fixture
def build(task: dict, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Runs the step with the slow backend behaving as told."""

    def run(behaviour: str, progress: Any = None, log: Any = None) -> dict:
        monkeypatch.setenv("HYBRID_TRT_TEST_BUILD", behaviour)
        return run_in_worker(task, progress or (lambda *_: None), log or (lambda _: None))

    return run


def test_the_result_comes_back_and_the_process_is_gone(build: Build, task: dict) -> None:
    phases = []
    result = build("finish", lambda phase, _: phases.append(phase))
    assert result["files"] == ["engine.slow"]
    assert (Path(task["folder"]) / "engine.slow").stat().st_size == 4000
    assert "compiling" in phases
    assert children() == []


def test_paths_of_other_packs_that_are_no_text_are_left_out(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/some/pack")])
    assert build("finish")["files"] == ["engine.slow"]


def test_whatever_is_printed_is_log_and_disturbs_nothing(build: Build) -> None:
    lines: list[str] = []
    assert build("print,finish", log=lines.append)["files"]
    assert {"from Python", "from below Python", "a warning"} <= set(lines)


@pytest.mark.skipif(sys.platform != "linux", reason="another limit there")
def test_a_builder_and_its_threads_have_the_stack_that_the_backend_needs(
    build: Build, task: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(backend: Any) -> list[str]:
        lines: list[str] = []
        monkeypatch.setenv("HYBRID_TRT_TEST_BUILD", "stack,finish")
        assert run_in_worker(task, lambda *_: None, lines.append, stack_of(backend))["files"]
        return [line for line in lines if line.startswith("stack")]

    import resource

    usual, wanted = resource.getrlimit(resource.RLIMIT_STACK)[0], 96 << 20
    if not 0 < usual < wanted:
        pytest.skip("the usual stack of this machine is as large")
    assert told(SimpleNamespace(build_stack=wanted)) == [f"stack {wanted} None", f"stack of threads {wanted}"]
    assert told(SimpleNamespace(build_stack=0))[0] == f"stack {usual} None"
    assert told(SimpleNamespace(build_stack=1))[0] == f"stack {usual} None", "it has more already"
    assert stack_of(backends.backends()["onnxruntime"]) == {}


@pytest.mark.skipif(sys.platform == "win32", reason="another way there")
def test_it_steps_back_behind_the_server(build: Build) -> None:
    seen = []

    def progress(phase: str, _fraction: float) -> None:
        if phase == "compiling":
            seen.extend(child.nice() for child in children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build("silence", progress)
    assert seen == [min(19, os.nice(0) + 10)]


def test_on_windows_it_is_started_with_a_lower_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double: Windows' flags, which Python has there alone."""
    monkeypatch.setattr(worker_process.os, "name", "nt")
    monkeypatch.setattr(subprocess, "CREATE_NO_WINDOW", 0x08000000, raising=False)
    monkeypatch.setattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0x00004000, raising=False)
    options = worker_process._apart()
    monkeypatch.undo()
    assert options == {"creationflags": 0x08004000}


def test_progress_is_told_every_second_though_the_backend_is_silent(build: Build) -> None:
    calls = []

    def progress(phase: str, _fraction: float) -> None:
        calls.append(time.monotonic())
        if phase == "compiling" and len(calls) > 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build("silence", progress)
    assert median(b - a for a, b in zip(calls, calls[1:], strict=False)) < 1.0


@pytest.mark.parametrize(("code", "still"), [("while True: pass", False), ("import time; time.sleep(60)", True)])
def test_a_process_that_computes_shows_signs_of_life_and_one_that_waits_does_not(
    monkeypatch: pytest.MonkeyPatch, code: str, still: bool
) -> None:
    monkeypatch.setattr(worker_process, "LOOK", 0.05)
    monkeypatch.setattr(worker_process, "BUSY", 0.1)
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        time.sleep(0.5)  # what its start takes counts for neither
        pulse = worker_process.Pulse(process.pid)
        assert until(lambda: pulse.still_for() > 1.5, 60 if still else 3) == still
        process.kill()


@pytest.mark.fault("a builder wants more memory than there is", see="an error in one sentence; Linux ends nothing")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux grants memory that is not there")
def test_memory_beyond_that_of_a_task_is_refused_to_its_process(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(1000))

    def child() -> None:
        held = psutil.Process().memory_info().vms
        _keep_to({"memory": held + 50_000_000, "weights_file": str(weights)})
        try:
            bytearray(held + 1_000_000_000)
        except MemoryError as error:
            told = in_json(error)
            os._exit(0 if (told["kind"], "close other programs" in str(told)) == ("build", True) else 2)
        os._exit(3)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0


@slow.when("silence")
@pytest.mark.parametrize("behaviour", ["silence", "hold_the_gil", "helper,silence"])
def test_a_cancel_ends_it_with_all_its_helpers_promptly(build: Build, behaviour: str) -> None:
    seen: list[psutil.Process] = []
    raised = 0.0

    def progress(phase: str, fraction: float) -> None:
        nonlocal seen, raised
        if phase == "compiling":
            seen = children()
            raised = time.monotonic()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(behaviour, progress)
    assert len(seen) == (2 if "helper" in behaviour else 1)
    assert gone(seen)
    assert time.monotonic() - raised < PROMPTLY


@pytest.mark.fault("the builder crashes", see="an error in one sentence")
@pytest.mark.parametrize(("behaviour", "says"), [
    ("segfault", r"ended by SIGSEGV while starting.*last words: about to crash"),
    ("killed", r"ended by SIGKILL, most often because the machine ran out of memory.*smaller profile"),
    ("exit", r"ended with exit status 3"),
    ("error", r"RuntimeError: the compiler is confused"),
])  # fmt: skip
def test_a_crash_is_told_in_a_sentence(build: Build, behaviour: str, says: str) -> None:
    with pytest.raises(BuildError) as failed:
        build(behaviour)
    text = str(failed.value)
    assert re.search(says, text), text
    assert "the normal model keeps running" in text
    assert children() == []


IMPORTS = """
import sys
import torch

def started():
    raise AssertionError("CUDA was started")

torch.cuda._lazy_init = started
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
import comfy_kitchen
comfy_kitchen.int8_attention_is_available = torch.cuda.get_device_capability  # as later versions do
sys.path.append({support!r})
sys.path.insert(0, {builder!r})
from standalone import load_pack
load_pack()
from hybrid_trt.comfy_model.comfyui_shims import import_comfyui
import_comfyui({comfyui!r})
from hybrid_trt import architectures, backends
from hybrid_trt.engine_builder.worker import onnx_export, parity, steps
from hybrid_trt.comfy_model import snapshot
assert architectures.architectures() and backends.backends() and "comfy.ldm.modules.attention" in sys.modules
print(hasattr(sys.modules["comfy.ldm.modules.attention"], "ComfyAttention"))
"""


@pytest.mark.parametrize("newer", slow.cases({"as it is": False, "newer": True}, ["as it is"]))
def test_the_imports_of_a_build_leave_the_gpu_alone(
    environment: Any, monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    """A double: a GPU that says no more than that it is there. Later versions of ComfyUI ask it what it can do."""
    support = ROOT / "tests" / "support"
    if newer:
        monkeypatch.setenv("PYTHONPATH", str(support / "newer_child"))
    places = {"builder": str(ROOT / "engine_builder"), "comfyui": str(environment.comfyui), "support": str(support)}
    code = IMPORTS.format(**places)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(newer)


SERVER = """
import json, sys
sys.path[:0] = [{support!r}, {tools!r}]
import pack
from hybrid_trt.engine_builder.worker.main import _keep_to, in_json
from hybrid_trt.engine_builder.worker_process import run_in_worker
run_in_worker(json.loads({task!r}), lambda *_: None, print)
"""


@pytest.mark.fault("ComfyUI is killed while a builder runs", see="nothing: the builder ends too")
@slow.when("silence")
@pytest.mark.parametrize("behaviour", ["silence", "hold_the_gil"])
def test_it_dies_with_the_server(task: dict, monkeypatch: pytest.MonkeyPatch, behaviour: str) -> None:
    import json

    monkeypatch.setenv("HYBRID_TRT_TEST_BUILD", behaviour)
    code = SERVER.format(support=str(ROOT / "tests" / "support"), tools=str(ROOT / "tools"), task=json.dumps(task))
    server = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert until(lambda: children(server.pid), 60)
        assert until((Path(task["folder"]) / "engine.slow").exists, 60)
        child = children(server.pid)
        time.sleep(0.2)
        os.kill(server.pid, signal.SIGKILL)
        assert gone(child)
    finally:
        server.kill()
        server.wait()
