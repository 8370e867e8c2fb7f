"""Engines from elsewhere in a real ComfyUI: native until they were compared with it, whatever their key says."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from builds import until
from comfy_process import ComfyProcess
from fake_engine import publish
from hybrid_trt.engine_library import Library
from scenarios import Scenario, compare, prompt

OURS = {"X-Hybrid-TRT": "1"}
SETTINGS = {"max_size": 128, "max_images": 1, "max_tokens": 77}
UNET = Scenario(controls=(), settings=SETTINGS)


def ask(comfy: ComfyProcess, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", comfy.port, timeout=60)
    try:
        connection.request(method, f"/hybrid_trt{path}", body, OURS)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def exported(comfy: ComfyProcess) -> tuple[str, bytes]:
    """The name of an engine that this server built, and the file that carries it; the library has none any more."""
    result = compare(comfy, UNET.but(settings=SETTINGS | {"when_missing": "build now"}))
    assert result.unet["engine"] == 4
    name = result.report["rows"][0]["engine_name"]
    made = ask(comfy, "POST", f"/engines/{name}/export")[1]
    file = comfy.base / "output" / made["subfolder"] / made["filename"]
    data = file.read_bytes()
    file.unlink()
    for engine in ask(comfy, "GET", "/engines")[1]["engines"]:
        assert ask(comfy, "DELETE", f"/engines/{engine['name']}")[0] == 200
    return name, data


def negated(data: bytes) -> bytes:
    """The same engine with the signs of its output turned, under its true key and with the true hashes of its files."""
    import onnx

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    model = onnx.load_model_from_string(members["model.onnx"])
    output = model.graph.output[0].name
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name == output:
                node.output[i] = "before_the_lie"
    model.graph.node.append(onnx.helper.make_node("Neg", ["before_the_lie"], [output]))
    members["model.onnx"] = model.SerializeToString()
    manifest = json.loads(members["manifest.json"])
    manifest["files"]["model.onnx"] = {
        "bytes": len(members["model.onnx"]), "sha256": hashlib.sha256(members["model.onnx"]).hexdigest()}
    members["manifest.json"] = json.dumps(manifest).encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def imported(comfy: ComfyProcess, name: str, data: bytes) -> str:
    """Import an engine; the state that the panel shows."""
    status, answer = ask(comfy, "POST", "/engines/import", data)
    assert (status, answer.get("name")) == (200, name), answer
    (engine,) = (e for e in ask(comfy, "GET", "/engines")[1]["engines"] if e["name"] == name)
    return engine["state"]


def press_build(comfy: ComfyProcess, scenario: Scenario) -> dict[str, Any]:
    """As the page's button does; the job when it has ended."""
    graph = prompt(scenario, engines=True, name="button")
    graph["unet_engine"]["inputs"] |= {"when_missing": "build in background"}
    assert comfy.queue(graph, extra_data={"hybrid_trt_build": {"nodes": ["unet_engine"]}}).ok
    job = ask(comfy, "GET", "/builds")[1][-1]
    assert until(lambda: ask(comfy, "GET", f"/builds/{job['id']}")[1]["state"] not in ("queued", "running"), 120)
    return ask(comfy, "GET", f"/builds/{job['id']}")[1]


def test_a_lying_engine_never_serves_and_an_honest_one_does_after_its_check(
    comfy: ComfyProcess, exported: tuple[str, bytes]
) -> None:
    name, data = exported
    assert imported(comfy, name, negated(data)) == "unchecked"
    result = compare(comfy, UNET.but(seed=71))
    assert result.error == 0
    assert result.unet == {"engine": 0, "native": 4, "reasons": {"not checked here": 4}}
    assert "was not compared with native on this machine" in result.history.output("unet_engine", "text")[0]
    graph = prompt(UNET.but(seed=71), engines=True, name="engine")
    body = json.dumps({"prompt": graph, "nodes": ["unet_engine"]}).encode()
    assert ask(comfy, "POST", "/nodes", body)[1]["nodes"]["unet_engine"]["state"] == "unchecked"

    job = press_build(comfy, UNET.but(seed=71))
    assert job["state"] == "failed"
    assert "differs from native by 2.00e+00" in job["message"]
    result = compare(comfy, UNET.but(seed=72))
    assert (result.error, result.unet["engine"]) == (0, 0)
    assert "differs from native by 2.00e+00" in result.report["rows"][0]["details"]["broken engine"]

    assert imported(comfy, name, data) == "unchecked", "what was found of the other says nothing of this one"
    result = compare(comfy, UNET.but(seed=73, settings=SETTINGS | {"when_missing": "build now"}))
    assert result.error <= 1e-5
    assert result.unet == {"engine": 4, "native": 0, "reasons": {}}
    last = ask(comfy, "GET", "/builds")[1][-1]
    assert last["engine"] == name
    phases = " ".join(ask(comfy, "GET", f"/builds/{last['id']}")[1]["log"])
    assert ("comparing with native" in phases, "exporting" in phases) == (True, False)
    (engine,) = ask(comfy, "GET", "/engines")[1]["engines"]
    assert engine["state"] == "ready"
    assert engine["last_used"]
    assert ask(comfy, "POST", "/engines/delete_unused", b'{"days": 1}')[1]["deleted"] == []


def test_an_engine_that_another_machine_signed_is_unchecked(comfy: ComfyProcess, exported: tuple[str, bytes]) -> None:
    name, data = exported
    if not ask(comfy, "GET", "/engines")[1]["engines"]:
        imported(comfy, name, data)
    record = Path(comfy.base) / "models" / "trt_engines" / name / "checked_here.json"
    record.write_text('{"verdict": "built", "why": "", "parity": {}, "signature": "' + "0" * 64 + '"}')
    result = compare(comfy, UNET.but(seed=74))
    assert (result.error, result.unet["reasons"]) == (0, {"not checked here": 4})


def test_an_export_that_finds_no_folder_is_told(comfy: ComfyProcess) -> None:
    root, out = comfy.base / "models" / "trt_engines", comfy.base / "output" / "trt_engines"
    name = publish(root, weights="f" * 64)
    kept = out.with_name("kept")
    if out.exists():
        out.rename(kept)
    out.write_text("a file")
    try:
        status, answer = ask(comfy, "POST", f"/engines/{name}/export")
        assert status == 409
        assert "could not be exported to" in answer["error"]
    finally:
        out.unlink()
        if kept.exists():
            kept.rename(out)
        Library.remove(root / name)
