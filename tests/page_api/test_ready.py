"""A worker that is ready is warm: its engines are open before the first prompt, which opens and builds nothing."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from builds import until
from comfy_process import ComfyProcess
from hybrid_trt.page_api import ready_routes
from hybrid_trt.page_api.own_prompts import WARM_NOW, Warming
from our_routes import ask, post
from scenarios import A, Prompt, Scenario, latent_of, native_latent, prompt, relative_difference

LIMIT = 1e-5
OPENED = "Hybrid TRT: opened "
WORK = Scenario(controls=(A,), steps=4, width=64, height=64)
MISSING = "no_such_model.safetensors"


def ready(comfy: ComfyProcess) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of GET /ready."""
    return ask(comfy, "GET", "/ready", headers={})


def warmed(comfy: ComfyProcess, name: str, patience: float = 60) -> dict[str, Any]:
    """Wait until a workflow has warmed a server or failed to, and return what /ready tells of it."""
    def found() -> dict[str, Any] | None:
        told = {one["name"]: one for one in ready(comfy)[1]["warmed"]}
        return told[name] if told[name]["state"] in ("warm", "failed") else None

    assert until(found, patience)
    return found()


def files(comfy: ComfyProcess) -> dict[Path, int]:
    """Return the files that prompts saved or showed, with the time of their last change."""
    folders = (comfy.base / "output", comfy.base / "temp")
    return {path: path.stat().st_mtime_ns for one in folders for path in one.rglob("*") if path.is_file()}


def work(seed: int, **changes: Any) -> Prompt:
    return prompt(WORK.but(seed=seed, **changes), engines=True, name=f"ready_{seed}")


def missing(good: Prompt) -> Prompt:
    """A workflow whose model is not on this machine."""
    return {**good, "unet": {"class_type": "UNETLoader", "inputs": {"unet_name": MISSING, "weight_dtype": "default"}}}


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of a workflow that runs and of one that does not."""
    folder = tmp_path_factory.mktemp("orders")
    good, bad = folder / "good.json", folder / "bad.json"
    good.write_text(json.dumps(work(1)), encoding="utf-8")
    bad.write_text(json.dumps(missing(work(1))), encoding="utf-8")
    return good, bad


@pytest.fixture(scope="module")
def worker(sd15: ComfyProcess, orders: tuple[Path, Path]) -> Iterator[ComfyProcess]:
    """A second server on the folders and the engines of the first, which warms with both workflows."""
    named = {"HYBRID_TRT_WARM": os.pathsep.join(map(str, orders))}
    with ComfyProcess(sd15.comfyui, sd15.base, log=sd15.base / "worker.log", environment=named) as process:
        yield process


@pytest.mark.fault("a workflow that shall warm a worker cannot run",
                   see="the worker is not ready, and `/ready` has ComfyUI's reason")
def test_a_worker_is_ready_once_all_its_workflows_have_run_and_no_sooner(
    worker: ComfyProcess, sd15: ComfyProcess, orders: tuple[Path, Path]
) -> None:
    good, bad = map(str, orders)
    reference, before = native_latent(sd15, WORK.but(seed=2)), files(worker)
    status, told = ready(worker)
    assert status == 503
    assert not told["ready"]
    done = warmed(worker, good)
    assert done["state"] == "warm", done
    assert (done["engine"] > 0, done["native"]) == (True, 0)
    assert worker.log_text().count(OPENED) == 2

    failed = warmed(worker, bad)
    assert failed["text"].startswith(f"{bad} did not run to its end, so this server is not ready: {MISSING} is missing")
    status, told = ready(worker)
    assert (status, told["ready"], told["waits_for"]) == (503, False, [failed["text"]])

    assert post(worker, "/warm", {"workflow": work(1), "name": bad})[0] == 202  # what its file should have said
    assert warmed(worker, bad)["state"] == "warm"
    status, told = ready(worker)
    assert (status, told["ready"], told["waits_for"]) == (200, True, [])
    assert told["devices"] == ["cpu"]
    assert told["backends"]["onnxruntime"] is None
    assert told["backends"]["tensorrt"], "it says why it does not run here"
    warm = {engine["name"] for engine in told["engines"] if engine["warm"]}
    assert files(worker) == before, "warming saves nothing"

    history = worker.queue(work(2))
    assert files(worker) != before, "the work saves"
    assert relative_difference(latent_of(history), reference) <= LIMIT
    rows = history.output("report", "report")[0]["rows"]
    assert [(row["engine"] > 0, row["native"]) for row in rows] == [(True, 0)] * 2
    assert {row["engine_name"] for row in rows} == warm
    assert worker.log_text().count(OPENED) == 2, "the first prompt opens nothing"
    assert worker.get("/hybrid_trt/builds") == []


def test_a_server_that_nobody_warms_is_ready_at_once(sd15: ComfyProcess) -> None:
    status, told = ready(sd15)
    assert (status, told["ready"], told["warmed"]) == (200, True, [])


def test_what_cannot_warm_is_refused_with_comfyuis_reason_and_changes_nothing(sd15: ComfyProcess) -> None:
    good = work(3)
    assert ask(sd15, "POST", "/warm", json.dumps({"workflow": good}).encode(), {})[0] == 403
    for body, why in (
        ({"workflow": missing(good)}, f"{MISSING} is missing: put it where UNETLoader (node unet) looks"),
        ({"workflow": {**good, "x": {"class_type": "NoSuchNode", "inputs": {}}}}, "NoSuchNode"),
        ({"workflow": {"nodes": [], "links": []}}, "Export (API)"),
        ({"workflow": {"load": good["unet"]}}, "Prompt has no outputs"),
        ({"workflow": good, "name": ""}, "name"),
        ({}, "Export (API)"),
    ):
        status, told = post(sd15, "/warm", body)
        assert (status, why in told["error"]) == (400, True), told
    assert ready(sd15)[1]["warmed"] == []


@pytest.mark.fault("a workflow that warms a worker fails while it runs",
                   see="the worker is not ready until a workflow of that name has run; `/ready` has ComfyUI's reason")
def test_a_workflow_that_fails_while_it_warms_holds_work_back_until_it_runs(sd15: ComfyProcess) -> None:
    good = work(4, steps=1)
    narrow = {"class_type": "TestConditioning", "inputs": {**good["positive"]["inputs"], "width": 5}}
    fails = {**good, "positive": narrow}
    assert post(sd15, "/warm", {"workflow": fails})[0] == 202
    failed = warmed(sd15, "workflow")
    assert "KSampler (node sampler): " in failed["text"]
    assert ready(sd15)[0] == 503
    assert post(sd15, "/warm", {"workflow": good})[0] == 202
    assert warmed(sd15, "workflow")["state"] == "warm"
    assert ready(sd15)[0] == 200


BUILDS = {"when_missing": "build now", "max_size": 192, "opt_size": 128, "backend": "onnxruntime"}
UNBUILT = {"unet": "tiny_sd15_flat_unet", "controls": (), "steps": 2, "settings": BUILDS}
"""Work whose engine is in no library."""


def test_warming_builds_nothing_and_says_so(sd15: ComfyProcess) -> None:
    builds = sd15.get("/hybrid_trt/builds")
    assert post(sd15, "/warm", {"workflow": work(5, **UNBUILT)})[0] == 202
    done = warmed(sd15, "workflow")
    assert (done["state"], done["engine"], done["native"], done["reasons"]) == ("warm", 0, 2, {"no engine": 2})
    assert sd15.get("/hybrid_trt/builds") == builds


def test_a_hundred_who_ask_at_once_are_answered_by_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr(ready_routes, "_facts", lambda: looks.append(time.sleep(0.05)) or {})
    monkeypatch.setattr(ready_routes, "_recent", None)
    monkeypatch.setattr(ready_routes, "_warmed", {"a": Warming("a")})

    async def ask_all() -> set[int]:
        answers = [ready_routes._ready(make_mocked_request("GET", "/ready")) for _ in range(100)]
        return {one.status for one in await asyncio.gather(*answers)}

    async def asked() -> None:
        assert await ask_all() == {503}
        assert await ask_all() == {503}
        assert len(looks) == 1
        ready_routes._warmed["a"].state = WARM_NOW
        assert await ask_all() == {200}
        assert len(looks) == 2, "whoever is told of a warm server is told of its engines too"

    asyncio.run(asked())
