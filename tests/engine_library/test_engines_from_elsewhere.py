"""Engines that this machine did not sign, in a real ComfyUI: native until they are built again."""

from __future__ import annotations

import http.client
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builds import until
from comfy_process import ComfyProcess
from scenarios import Scenario, compare, prompt

OURS = {"X-Hybrid-TRT": "1"}
SETTINGS = {"max_size": 128, "max_images": 1, "max_tokens": 77}
UNET = Scenario(controls=(), settings=SETTINGS, width=64, height=64)
FORGED = '{"verdict": "built", "why": "", "parity": {}, "gpu": "", "signature": "' + "0" * 64 + '"}'


def ask(comfy: ComfyProcess, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", comfy.port, timeout=60)
    try:
        connection.request(method, f"/hybrid_trt{path}", body, OURS)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def press_build(comfy: ComfyProcess, scenario: Scenario) -> dict[str, Any]:
    """As the page's button does; the job when it has ended."""
    graph = prompt(scenario, engines=True, name="button")
    graph["unet_engine"]["inputs"] |= {"when_missing": "build in background"}
    assert comfy.queue(graph, extra_data={"hybrid_trt_build": {"nodes": ["unet_engine"]}}).ok
    job = ask(comfy, "GET", "/builds")[1][-1]
    assert until(lambda: ask(comfy, "GET", f"/builds/{job['id']}")[1]["state"] not in ("queued", "running"), 120)
    return ask(comfy, "GET", f"/builds/{job['id']}")[1]


@pytest.mark.fault("an engine arrives with a forged record of its check",
                   see="normal speed: *stale engine*; **Build engine** replaces it")
@pytest.mark.slow
def test_an_engine_from_elsewhere_never_serves_and_a_press_on_build_replaces_it(comfy: ComfyProcess) -> None:
    shutil.rmtree(comfy.base / "models" / "trt_engines", ignore_errors=True)  # other tests' engines may fit as well
    result = compare(comfy, UNET.but(seed=70, settings=SETTINGS | {"when_missing": "build now"}))
    assert result.unet["engine"] == 4
    name = result.report["rows"][0]["engine_name"]
    folder = Path(comfy.base) / "models" / "trt_engines" / name
    (folder / "checked_here.json").write_text(FORGED)
    (engine,) = (e for e in ask(comfy, "GET", "/engines")[1]["engines"] if e["name"] == name)
    assert engine["state"] == "stale"

    result = compare(comfy, UNET.but(seed=71))
    assert result.error == 0
    assert result.unet == {"engine": 0, "native": 4, "reasons": {"stale engine": 4}}
    assert "was not built on this machine" in result.history.output("unet_engine", "text")[0]
    graph = prompt(UNET.but(seed=71), engines=True, name="engine")
    body = json.dumps({"prompt": graph, "nodes": ["unet_engine"]}).encode()
    assert ask(comfy, "POST", "/nodes", body)[1]["nodes"]["unet_engine"]["state"] == "stale"

    job = press_build(comfy, UNET.but(seed=71))
    assert (job["state"], job["engine"]) == ("done", name)
    assert "exporting" in " ".join(job["log"]), "built anew, not only compared"
    result = compare(comfy, UNET.but(seed=72))
    assert result.error <= 1e-5
    assert result.unet == {"engine": 4, "native": 0, "reasons": {}}
