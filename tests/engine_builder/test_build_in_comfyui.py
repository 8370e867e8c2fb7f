"""Builds inside a real ComfyUI: prompts go on, the engine serves afterwards, a killed server leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import slow
from builds import PROMPTLY, ROOT, children, contents, gone, until
from comfy_process import ComfyProcess
from machine import Machine
from scenarios import Scenario, compare, latent_of, native_latent, node, prompt, relative_difference

IN_BACKGROUND = {"when_missing": "build in background", "max_size": 256, "max_images": 1}
BUILD_NOW = {**IN_BACKGROUND, "when_missing": "build now"}
FLAT = Scenario(unet="tiny_sd15_flat_unet", controls=(), settings=IN_BACKGROUND, width=64, height=64)
OTHER = Scenario(unet="tiny_sd15_other_unet", controls=(), settings=IN_BACKGROUND, width=64, height=64)


def builds(comfy: ComfyProcess) -> list[dict[str, Any]]:
    """The server's jobs, the oldest first."""
    return comfy.get("/hybrid_trt/builds")


def running(comfy: ComfyProcess, phase: str | None = None) -> list[dict[str, Any]]:
    return [job for job in builds(comfy) if job["state"] == "running" and phase in (None, job["phase"])]


def report(history: Any) -> dict[str, Any]:
    return history.output("report", "report")[0]["unet"]


def test_prompts_go_on_while_an_engine_is_built_and_the_next_one_uses_it(comfy: ComfyProcess) -> None:
    reference = native_latent(comfy, FLAT)
    before = [job["id"] for job in builds(comfy)]  # other tests on this server build too
    graph = prompt(FLAT, engines=True, name="background")
    first = comfy.queue(graph)
    assert relative_difference(latent_of(first), reference) == 0
    assert report(first) == {"engine": 0, "native": 4, "reasons": {"no engine": 4}}
    assert "being built in the background" in first.output("unet_engine", "text")[0]

    (job,) = [job for job in builds(comfy) if job["id"] not in before]
    assert job["label"] == "tiny_sd15_flat_unet.safetensors"
    stamps, slowest, done = [], 0.0, 0
    while comfy.get(f"/hybrid_trt/builds/{job['id']}")["state"] in ("queued", "running"):
        began = time.monotonic()
        seen = comfy.get(f"/hybrid_trt/builds/{job['id']}")
        slowest = max(slowest, time.monotonic() - began)
        stamps.append(seen["seconds"])
        if not done:
            assert comfy.queue(prompt(FLAT.but(seed=500), engines=False, name="meanwhile")).ok
            done += seen["state"] == "running"
        time.sleep(0.1)
    ended = comfy.get(f"/hybrid_trt/builds/{job['id']}")
    assert ended["state"] == "done", ended["message"]
    assert done, "no prompt ran during the build"
    assert slowest < 5, "the server stood still"
    assert stamps == sorted(stamps)
    assert any("comparing with the normal model" in line for line in ended["log"])

    second = comfy.queue(graph)
    assert report(second) == {"engine": 4, "native": 0, "reasons": {}}
    assert relative_difference(latent_of(second), reference) <= 1e-5
    assert "onnxruntime float32, 1 image, 64 to 256 px" in second.output("unet_engine", "text")[0]
    assert set(comfy.queue(graph).cached) == set(graph), "nothing runs again without need"


@pytest.mark.fault("a build is cancelled in any of its phases", see="it ends promptly; nothing is left")
def test_a_build_in_the_background_can_be_cancelled_and_stays_so(comfy: ComfyProcess) -> None:
    graph = prompt(OTHER, engines=True, name="cancelled")
    assert comfy.queue(graph).ok
    assert until(lambda: running(comfy, "exporting"), 60)
    (job,) = running(comfy)
    processes = children(comfy.pid)
    assert processes
    began = time.monotonic()
    assert comfy.post(f"/hybrid_trt/builds/{job['id']}/cancel", headers={"X-Hybrid-TRT": "1"})["cancelled"]
    assert gone(processes)
    library = comfy.base / "models" / "trt_engines"
    assert until(lambda: not list(library.glob(".building-*")), PROMPTLY)
    assert time.monotonic() - began < PROMPTLY
    again = comfy.queue(graph)
    assert "Its build was cancelled" in again.output("unet_engine", "text")[0]
    assert not running(comfy)


@pytest.mark.fault("a prompt is interrupted while it waits for its build", see="the build ends promptly")
def test_interrupting_a_prompt_that_waits_for_its_build_cancels_the_build(comfy: ComfyProcess) -> None:
    number = comfy.submit(prompt(OTHER.but(settings=BUILD_NOW), engines=True, name="interrupted"))
    assert until(lambda: running(comfy, "preparing the export"), 60)
    processes = children(comfy.pid)
    began = time.monotonic()
    comfy.interrupt(number)
    history = comfy.wait(number, timeout=60)
    assert history.status == "interrupted"
    assert gone(processes)
    assert time.monotonic() - began < PROMPTLY
    assert builds(comfy)[-1]["state"] == "cancelled"
    assert compare(comfy, FLAT).unet["engine"] == 4, "the server lives"


@pytest.mark.fault("a build is cancelled that a prompt waits for",
                   see="normal speed: *build failed*; the next run builds")
def test_a_prompt_that_builds_first_runs_native_after_a_cancel_and_the_next_one_builds(comfy: ComfyProcess) -> None:
    graph = prompt(OTHER.but(settings=BUILD_NOW), engines=True, name="anew")
    number = comfy.submit(graph)
    assert until(lambda: running(comfy, "preparing the export"), 60)
    (job,) = running(comfy)
    assert comfy.post(f"/hybrid_trt/builds/{job['id']}/cancel", headers={"X-Hybrid-TRT": "1"})["cancelled"]
    cancelled = comfy.wait(number, timeout=60)
    assert cancelled.ok, cancelled.error
    assert report(cancelled) == {"engine": 0, "native": 4, "reasons": {"build failed": 4}}
    assert "the build was cancelled" in cancelled.output("unet_engine", "text")[0]
    assert not running(comfy)
    again = comfy.submit(graph)
    assert until(lambda: running(comfy), 60), "the next press of Run builds it"
    comfy.interrupt(again)
    assert comfy.wait(again, timeout=60).status == "interrupted"


@pytest.mark.fault("another machine builds the engine that a prompt waits for",
                   see="normal speed at once: *another machine builds it*")
def test_a_prompt_runs_native_while_another_machine_builds_its_engine_and_builds_when_that_has_given_up(
    comfy: ComfyProcess,
) -> None:
    graph = prompt(OTHER.but(settings=BUILD_NOW | {"max_size": 320}), engines=True, name="elsewhere")
    number = comfy.submit(graph)
    assert until(lambda: running(comfy, "preparing the export"), 60)
    library = comfy.base / "models" / "trt_engines"
    (lock,) = (path.name for path in library.glob(".*.lock") if not path.name.startswith(".building-"))
    comfy.interrupt(number)
    assert comfy.wait(number, timeout=60).status == "interrupted"
    other = Machine(library, "another machine", silence=5.0)
    try:
        assert until(lambda: other.ask(f"take {lock}"), 60)
        for _ in range(2):  # the second is not answered from ComfyUI's cache
            began = time.monotonic()
            native = comfy.queue(graph)
            assert report(native) == {"engine": 0, "native": 4, "reasons": {"another machine builds it": 4}}
            (text,) = native.output("unet_engine", "text")
            assert f"nother machine builds it: process {other.process.pid} on " in text
            assert "Same picture, normal speed; nothing to do: it is used as soon as it is in the library." in text
            assert time.monotonic() - began < 60
        assert not running(comfy)
        other.ask("give")
        number = comfy.submit(graph)
        assert until(lambda: running(comfy, "preparing the export"), 60), "the next press of Run builds it"
        comfy.interrupt(number)
        assert comfy.wait(number, timeout=60).status == "interrupted"
    finally:
        other.end()


@pytest.fixture
def own_server(environment: Any, models: dict[str, Path], tmp_path: Path) -> Iterator[ComfyProcess]:
    """A server with a library of its own, to be killed; the pack lies in a folder that is no identifier."""
    base = tmp_path / "base"
    (base / "custom_nodes").mkdir(parents=True)
    (base / "custom_nodes" / "hybrid-trt 0.1").symlink_to(ROOT, target_is_directory=True)
    (base / "custom_nodes" / "comfy_test_nodes").symlink_to(ROOT / "tests" / "comfy_test_nodes")
    (base / "models").mkdir()
    for folder in (environment.base / "models").iterdir():
        if folder.is_dir() and folder.name != "trt_engines":
            (base / "models" / folder.name).symlink_to(folder.resolve(), target_is_directory=True)
    with ComfyProcess(environment.comfyui, base) as process:
        yield process
    shutil.rmtree(base)


def kill(server: ComfyProcess) -> list[psutil.Process]:
    """End a server as the out-of-memory killer does; returns what it had running."""
    processes = children(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    return processes


@pytest.mark.fault("ComfyUI is killed in any phase of a build",
                   see="nothing half: the next start builds, or has the engine")
@pytest.mark.parametrize("phase", slow.cases(
    {"reading": "reading weights", "exporting": "exporting", "compiling": "building with", "checking": "comparing with",
     "publishing": "saving"}, slow=("reading", "compiling", "checking", "publishing")))  # fmt: skip
def test_a_killed_server_leaves_nothing_and_the_next_start_builds(own_server: ComfyProcess, phase: str) -> None:
    library = own_server.base / "models" / "trt_engines"
    own_server.queue({"hold": node("TestHoldBuilds", phase=phase)})
    own_server.submit(prompt(FLAT.but(settings=BUILD_NOW), engines=True, name="killed"))
    assert until(lambda: any(job["phase"].startswith(phase) for job in running(own_server)), 90)
    builders = kill(own_server)
    assert builders or phase in ("reading weights", "saving"), "these need none"
    assert gone(builders, PROMPTLY)
    assert all(name.startswith(".") for name in contents(library)), "no engine, whole or half"
    assert list(library.glob(".building-*")) or phase == "reading weights", "what the next start has to sweep"
    own_server.start()
    last = own_server.queue(prompt(FLAT.but(settings=BUILD_NOW), engines=True, name="built"), timeout=120)
    assert report(last)["engine"] == 4
    assert list(library.glob(".building-*")) == list(library.glob("*.lock")) == []
    assert len(list(library.glob("*/manifest.json"))) == 1
