"""The routes below /hybrid_trt: what they answer, and everything that they refuse, each with a sentence."""

from __future__ import annotations

import gzip
import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import pytest
from comfy_process import ComfyProcess
from drawn_workflows import drawn
from fake_engine import publish
from hybrid_trt.architectures.shapes import SIZE_NAMES, RequestedSizes
from hybrid_trt.backends import AUTO, backends
from hybrid_trt.engine_library import Library, LibraryError
from our_routes import OURS, ask, post
from safetensors.numpy import save_file

PROMPT = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "no such file"}},
    "2": {"class_type": "TRTUNetEngine", "inputs": {"model": ["1", 0], "max_size": 512}},
}


DRAWN = drawn({"load": "Loader", "s": "Sampler"}, "load.0 s.0")
NESTED: list = []
for _ in range(900):
    NESTED = [NESTED]


@pytest.fixture
def engine(comfy: ComfyProcess) -> Iterator[Path]:
    """The folder of an engine in the server's library."""
    root = comfy.base / "models" / "trt_engines"
    folder = root / publish(root)
    yield folder
    if folder.exists():
        Library.remove(folder)


def test_the_list_says_what_there_is(comfy: ComfyProcess, engine: Path) -> None:
    status, answer = ask(comfy, "GET", "/engines")
    assert status == 200
    found = next(e for e in answer["engines"] if e["name"] == engine.name)
    assert found.items() >= {"label": "routes.safetensors", "kind": "unet", "backend": "onnxruntime", "state": "ready",
                             "precision": "float16", "rel_err": 1e-6, "seconds": 2.0}.items()
    assert answer["bytes"] >= found["bytes"] > 0
    assert answer["free"] > 0


def test_verify_tells_whole_from_damaged(comfy: ComfyProcess, engine: Path) -> None:
    assert ask(comfy, "POST", f"/engines/{engine.name}/verify") == (200, {"ok": True, "text": ""})
    (engine / "model.onnx").write_bytes(b"enginE")
    status, answer = ask(comfy, "POST", f"/engines/{engine.name}/verify")
    assert (status, answer["ok"]) == (200, False)
    assert "damaged" in answer["text"]


def test_delete_removes_the_engine_and_nothing_else(comfy: ComfyProcess, engine: Path) -> None:
    others = {p for p in engine.parent.iterdir() if p != engine}
    status, answer = ask(comfy, "DELETE", f"/engines/{engine.name}")
    assert (status, answer["deleted"]) == (200, engine.name)
    assert {p for p in engine.parent.iterdir()} == others
    assert ask(comfy, "DELETE", f"/engines/{engine.name}")[0] == 404


def test_the_list_tells_when_an_engine_was_last_used(comfy: ComfyProcess, engine: Path) -> None:
    def listed() -> str | None:
        return next(e["last_used"] for e in ask(comfy, "GET", "/engines")[1]["engines"] if e["name"] == engine.name)

    assert listed() is None
    (engine / "last_used").touch()
    assert listed()[:10] == datetime.now(timezone.utc).isoformat()[:10]


@pytest.mark.parametrize(("method", "path"), [
    ("DELETE", "/engines/{}"), ("POST", "/engines/{}/verify"),
])
@pytest.mark.parametrize(
    "name",
    ["nothing", "con", "NUL.txt", "sd15.", "sd15%20", "%2e%2e", "..%2f..%2fcheckpoints", "%2fetc", ".building-1-x",
     "sd15", "%00", "*"],
)
def test_nothing_but_engines_can_be_named(comfy: ComfyProcess, engine: Path, method: str, path: str, name: str) -> None:
    status, answer = ask(comfy, method, path.format(name))
    assert status == 404
    assert engine.is_dir()
    assert isinstance(answer, str) or answer["error"].endswith("nothing was done.")


@pytest.mark.fault("the list of engines is asked for while a manifest has figures of a wrong type",
                   see="the list; that engine is called broken")
@pytest.mark.parametrize("parity", [
    {"rel_err": 1e-6, "native_ms": "1", "engine_ms": "2"}, {"rel_err": 1e-6, "native_ms": [], "engine_ms": {}},
    {"rel_err": None}, {"rel_err": "1"}, {"rel_err": 1e-6, "native_rel_err": {}}, {"rel_err": 1e-6, "refit_s": "long"},
    {"rel_err": 1e-6, "native_ms": True, "engine_ms": 1}, {"rel_err": 1e-6, "native_ms": -1, "engine_ms": 1},
])  # fmt: skip
def test_figures_of_a_wrong_type_are_told_as_a_broken_engine(comfy: ComfyProcess, engine: Path, parity: Any) -> None:
    path = engine / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parity": parity}))
    status, answer = ask(comfy, "GET", "/engines")
    assert status == 200
    (found,) = (one for one in answer["engines"] if one["name"] == engine.name)
    assert found["state"] == "broken"
    assert "parity." in found["reason"]


def test_figures_that_nobody_measured_are_told_in_strict_json(comfy: ComfyProcess, engine: Path) -> None:
    path = engine / "manifest.json"
    parity = {"rel_err": 1e-6, "native_ms": 1e15, "engine_ms": 5e-324}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parity": parity}))
    status, answer = ask(comfy, "GET", "/engines")
    assert status == 200
    json.dumps(answer, allow_nan=False)


def test_a_linked_folder_is_unlinked_and_no_more(comfy: ComfyProcess, engine: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / publish(tmp_path)
    link = engine.parent / "linked"
    link.symlink_to(elsewhere, target_is_directory=True)
    assert ask(comfy, "DELETE", "/engines/linked")[0] == 200
    assert not link.is_symlink()
    assert (elsewhere / "model.onnx").read_bytes() == b"engine"


CHANGES = [("DELETE", "/engines/{}"), ("POST", "/engines/{}/verify"), ("POST", "/builds/x/cancel"),
           ("POST", "/builds/clear"), ("POST", "/settings"), ("GET", "/doctor")]


@pytest.mark.fault("another site's page sends a request", see="it is refused")
@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize("headers", [
    {},
    OURS | {"Origin": "https://evil.example"},
    OURS | {"Origin": "null"},
    OURS | {"Sec-Fetch-Site": "cross-site"},
    OURS | {"Sec-Fetch-Site": "same-site"},
], ids=["no header", "origin", "null origin", "cross-site", "same-site"])  # fmt: skip
def test_other_sites_can_change_nothing(
    comfy: ComfyProcess, engine: Path, method: str, path: str, headers: dict[str, str]
) -> None:
    status, _ = ask(comfy, method, path.format(engine.name), b"x" if method == "POST" else None, headers)
    assert status == 403
    assert engine.is_dir()


def test_builds_that_have_ended_are_cleared_from_the_list(comfy: ComfyProcess) -> None:
    assert ask(comfy, "POST", "/builds/clear")[0] == 200
    assert all(job["state"] in ("queued", "running") for job in ask(comfy, "GET", "/builds")[1])
    assert post(comfy, "/builds/clear", {})[1] == {"cleared": 0}


def test_unknown_builds_are_told(comfy: ComfyProcess) -> None:
    assert ask(comfy, "GET", "/builds")[0] == 200
    for method, path in (("GET", "/builds/nothing"), ("POST", "/builds/nothing/cancel")):
        status, answer = ask(comfy, method, path)
        assert status == 404
        assert answer["error"].startswith("There is no such build")


@pytest.mark.parametrize(("data", "text"), [
    ([], "not a JSON object"),
    ({}, "needs a prompt"),
    ({"prompt": PROMPT, "nodes": "2"}, "needs a prompt"),
    ({"prompt": PROMPT, "nodes": ["2"] * 501}, "at most 500"),
    ({"prompt": PROMPT, "nodes": ["3"]}, "no engine node"),
    ({"prompt": PROMPT, "nodes": ["1"]}, "no engine node"),
    ({"prompt": PROMPT, "nodes": [{}]}, "no engine node"),
    ({"prompt": {"2": {"class_type": "TRTUNetEngine"}}, "nodes": ["2"]}, "no engine node"),
    ({"prompt": {"2": {"class_type": "TRTUNetEngine", "inputs": {"max_size": 10**400}}}, "nodes": ["2"]}, "a number"),
    ({"prompt": {"2": {"class_type": "TRTUNetEngine", "inputs": {"model": NESTED}}}, "nodes": ["2"]}, "nested"),
    ({"prompt": {"2": {"class_type": "TRTUNetEngine", "inputs": {"model": ["2", 0]}}}, "nodes": ["2"]}, "loop"),
    ({"prompt": {"2": {"class_type": "TRTUNetEngine", "inputs": {"model": ["9", 0]}}}, "nodes": ["2"]}, "no node '9'"),
])  # fmt: skip
def test_bad_questions_about_nodes_are_refused(comfy: ComfyProcess, data: Any, text: str) -> None:
    status, answer = post(comfy, "/nodes", data)
    assert status == 400
    assert text in answer["error"]


@pytest.mark.parametrize(("data", "text"), [
    ({"workflow": DRAWN}, "needs a workflow"),
    ({"workflow": [], "what": "add"}, "needs a workflow"),
    ({"workflow": {"nodes": []}, "what": "add"}, "no workflow in UI format"),
    ({"workflow": {**DRAWN, "nodes": [7]}, "what": "remove"}, "it is damaged"),
    ({"workflow": {**DRAWN, "groups": NESTED}, "what": "add"}, "nested more than 100 levels"),
])  # fmt: skip
def test_workflows_that_cannot_be_accelerated_are_refused(comfy: ComfyProcess, data: Any, text: str) -> None:
    status, answer = post(comfy, "/accelerate", data)
    assert status == 400
    assert text in answer["error"]


def test_what_was_left_as_it_was_is_told(comfy: ComfyProcess) -> None:
    twice = {**DRAWN["nodes"][0], "type": "Note", "outputs": []}
    for workflow, left in ((DRAWN, ""), ({**DRAWN, "nodes": [*DRAWN["nodes"], twice]}, "links 1 and nodes 1.")):
        status, answer = post(comfy, "/accelerate", {"workflow": workflow, "what": "add"})
        assert (status, answer["left"][-len(left):]) == (200, left)
        assert bool(answer["left"]) is bool(left)


@pytest.mark.fault("a request is huge or no JSON", see="an error in one sentence")
def test_huge_and_broken_bodies_are_refused(comfy: ComfyProcess) -> None:
    status, answer = ask(comfy, "POST", "/nodes", b" " * (3 << 20))
    assert (status, "larger than 2 MB" in answer["error"]) == (413, True)
    assert ask(comfy, "POST", "/nodes", b"{")[0] == 400
    assert ask(comfy, "POST", "/nodes", b"[" * 100_000)[0] == 400
    for number in (b"NaN", b"Infinity", b"1" * 5000):
        assert ask(comfy, "POST", "/settings", b'{"limit_gb": ' + number + b"}")[0] == 400


def test_a_number_that_json_cannot_give_back_is_refused(comfy: ComfyProcess) -> None:
    body = json.dumps({"workflow": {**DRAWN, "extra": {"x": "HERE"}}, "what": "add"}).replace('"HERE"', "1e999")
    status, answer = ask(comfy, "POST", "/accelerate", body.encode())
    assert (status, "larger than any number" in answer["error"]) == (400, True)


@pytest.mark.fault("a request's body is compressed, or is said to be", see="an error in one sentence, at once")
@pytest.mark.parametrize("path", ["/settings", "/nodes", "/accelerate", "/builds/clear"])
def test_compressed_bodies_are_refused_at_once(comfy: ComfyProcess, path: str) -> None:
    for encoding in ("deflate", "gzip"):
        connection = http.client.HTTPConnection("127.0.0.1", comfy.port, timeout=60)
        headers = OURS | {"Content-Encoding": encoding, "Content-Length": "2"}
        connection.request("POST", f"/hybrid_trt{path}", headers=headers)
        answer = connection.getresponse()  # the body was never sent
        assert (answer.status, "compressed" in json.load(answer)["error"]) == (415, True)
        connection.close()


@pytest.mark.parametrize("path", ["/settings", "/nodes", "/accelerate", "/builds/clear"])
def test_a_compressed_body_that_came_with_its_headers_is_refused(comfy: ComfyProcess, path: str) -> None:
    for encoding, body in (("deflate", b"{}"), ("gzip", gzip.compress(b"{}")[:-9]), ("gzip", gzip.compress(b"{}"))):
        connection = http.client.HTTPConnection("127.0.0.1", comfy.port, timeout=60)
        connection.request("POST", f"/hybrid_trt{path}", body, OURS | {"Content-Encoding": encoding})
        assert connection.getresponse().status in (400, 415)  # 400: aiohttp met the bad body before our code ran
        connection.close()


@pytest.mark.parametrize("change", [
    {"nodes": [{**DRAWN["nodes"][0], "pos": [10**400, 0]}, *DRAWN["nodes"][1:]]},
    {"nodes": [{**DRAWN["nodes"][0], "pos": [1.7e308, 0], "size": [1.7e308, 0]}, *DRAWN["nodes"][1:]]},
    {"last_node_id": int("9" * 4300)},
])
def test_a_workflow_with_numbers_beyond_json_comes_back_as_a_sentence(comfy: ComfyProcess, change: dict) -> None:
    status, answer = post(comfy, "/accelerate", {"workflow": {**DRAWN, **change}, "what": "add"})
    assert status == 400
    assert "it is damaged" in answer["error"]


def test_a_node_that_never_ran_is_unknown(comfy: ComfyProcess) -> None:
    status, answer = post(comfy, "/nodes", {"prompt": PROMPT, "nodes": ["2"]})
    assert status == 200
    told = {"state": "unknown", "build_helps": True, "run": None, "engine": None, "job": None}
    assert answer["nodes"]["2"].items() >= told.items()
    assert answer["orders"] == {}


@pytest.mark.parametrize(("tensors", "state"), [
    (("blocks.0.self_attn.q.weight", "patch_embedding.weight"), "unavailable"),
    (("double_blocks.0.img_attn.qkv.weight", "img_in.weight"), "unknown"),
    (("model.diffusion_model.input_blocks.0.0.weight",), "unknown"),
    (("down_blocks.0.resnets.0.conv1.weight",), "unknown"),
])  # fmt: skip
def test_a_model_of_another_family_is_told_before_anybody_presses_build(
    comfy: ComfyProcess, tensors: tuple[str, ...], state: str
) -> None:
    path = comfy.base / "models" / "diffusion_models" / f"told {hash(tensors)}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file({name: numpy.zeros(1, "float32") for name in tensors}, path)
    loader = {"class_type": "UNETLoader", "inputs": {"unet_name": path.name, "weight_dtype": "default"}}
    told = post(comfy, "/nodes", {"prompt": PROMPT | {"1": loader}, "nodes": ["2"]})[1]["nodes"]["2"]
    path.unlink()
    assert (told["state"], told["build_helps"]) == (state, state == "unknown")
    assert ("a family without engines" in told["text"]) == (state == "unavailable")


def test_the_key_of_a_node_is_what_it_stands_for(comfy: ComfyProcess) -> None:
    """Ids, titles, 'when_missing', the best size and 1 against 1.0 are no part of it; the model and the range are."""

    def key(prompt: dict, node: str = "2") -> str:
        return post(comfy, "/nodes", {"prompt": prompt, "nodes": [node]})[1]["nodes"][node]["key"]

    def changed(**inputs: Any) -> dict:
        return PROMPT | {"2": {"class_type": "TRTUNetEngine", "inputs": PROMPT["2"]["inputs"] | inputs}}

    inputs = {"model": ["8:1", 0], "max_size": 512}
    copied = {"8:1": PROMPT["1"], "8:2": {"class_type": "TRTUNetEngine", "inputs": inputs}}
    same = key(PROMPT)
    assert key(copied, "8:2") == same
    assert key(changed(when_missing="build now")) == same
    assert key(changed(max_size=512.0)) == same
    assert key(changed(opt_size=384)) == same, "an engine that is best at another size serves"
    assert key(changed(max_size=768)) != same
    assert key(changed(model=["1", 1])) != same
    other = {"1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "another"}}}
    assert key(PROMPT | other) != same


@pytest.fixture
def settings_file(comfy: ComfyProcess) -> Iterator[Path]:
    """The library's settings, gone after the test."""
    path = comfy.base / "models" / "trt_engines" / ".settings.json"
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


def test_the_limit_is_kept_and_refuses_what_does_not_fit(
    comfy: ComfyProcess, engine: Path, settings_file: Path
) -> None:
    folder = str(engine.parent)
    offered = {"folders": [folder], "backends": [AUTO, *backends()]}
    plain = {**offered, "limit_gb": 0.0, "build_minutes": 0.0, "tensorrt_level": 0}
    assert ask(comfy, "GET", "/settings") == (200, plain)
    assert post(comfy, "/settings", {"build_minutes": 90, "tensorrt_level": 2})[0] == 200
    changed = {"limit_gb": 1e-9, "build_minutes": 90.0, "tensorrt_level": 2}
    assert post(comfy, "/settings", {"limit_gb": 1e-9}) == (200, {**offered, **changed}), "the others stay"
    assert json.loads(settings_file.read_text())["limit_gb"] == 1e-9
    with pytest.raises(LibraryError, match="settings allow .* raise the limit"):
        Library([engine.parent]).check_limit(1, "A build")
    assert post(comfy, "/settings", {"limit_gb": 0})[0] == 200
    Library([engine.parent]).check_limit(1, "A build")


def test_the_page_is_told_the_choices_of_sizes_that_families_offer(comfy: ComfyProcess) -> None:
    status, told = ask(comfy, "GET", "/presets")
    assert (status, [one["family"] for one in told]) == (200, ["SDXL", "SD 1.5"])
    for one in told:
        RequestedSizes(**one["sizes"]).check()
        assert tuple(one["sizes"]) == SIZE_NAMES


@pytest.mark.fault("two tabs change settings at once", see="nothing: both are kept")
def test_settings_that_two_tabs_change_at_once_are_both_kept(comfy: ComfyProcess, settings_file: Path) -> None:
    for round_ in range(5):
        asked = {"limit_gb": 100 + round_, "build_minutes": 30 + round_, "tensorrt_level": 1 + round_ % 4}
        with ThreadPoolExecutor(len(asked)) as tabs:
            answers = tabs.map(lambda one: post(comfy, "/settings", dict([one])), asked.items())
            assert {status for status, _ in answers} == {200}
        kept = json.loads(settings_file.read_text())
        assert {name: kept[name] for name in asked} == asked


@pytest.mark.parametrize(("data", "status"), [
    ({"limit_gb": -1}, 409), ({"limit_gb": "10"}, 409), ({"limit_gb": True}, 409), ({"limit_gb": None}, 409),
    ({"limit_gb": 1e300}, 409), ({"limit_gb": 10**400}, 409), ({"limit_gb": NESTED}, 400), ({}, 400),
    ({"build_minutes": -1}, 409), ({"build_minutes": "long"}, 409), ({"tensorrt_level": 6}, 409),
    ({"tensorrt_level": 1.5}, 409), ({"limit_gb": 1, "more": 2}, 400), ({"folder": "/"}, 409), ([], 400),
])  # fmt: skip
def test_senseless_settings_are_refused(comfy: ComfyProcess, settings_file: Path, data: Any, status: int) -> None:
    found, answer = post(comfy, "/settings", data)
    assert found == status
    assert re.search(r"nothing was (changed|done)", answer["error"])
    assert not settings_file.exists()


@pytest.mark.fault("a stranger's name leads to this computer", see="it is refused")
@pytest.mark.parametrize(("host", "origin", "status"), [
    ("evil.example:{}", "http://evil.example:{}", 403),
    ("127.0.0.1.evil.example:{}", "http://127.0.0.1.evil.example:{}", 403),
    ("evil.example.:{}", "http://evil.example.:{}", 403),
    ("localhost:{}", "http://localhost:{}", 200),
    ("127.0.0.1:{}", "http://127.0.0.1:{}", 200),
    ("[::1]:{}", "http://[::1]:{}", 200),
    ("192.168.1.20:{}", "http://192.168.1.20:{}", 200),
    ("workshop:{}", "http://workshop:{}", 200),
    ("workshop.local:{}", "http://workshop.local:{}", 200),
    ("comfy.example", "https://comfy.example", 200),  # a proxy with a certificate
    ("comfy.example", None, 200),  # a program
])  # fmt: skip
def test_a_strangers_name_for_this_computer_changes_nothing(
    comfy: ComfyProcess, settings_file: Path, host: str, origin: str | None, status: int
) -> None:
    headers = OURS | {"Host": host.format(comfy.port)}
    if origin is not None:
        headers |= {"Origin": origin.format(comfy.port), "Sec-Fetch-Site": "same-origin"}
    assert ask(comfy, "POST", "/settings", b'{"limit_gb": 1}', headers)[0] == status
    assert settings_file.exists() == (status == 200)
