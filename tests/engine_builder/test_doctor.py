"""The report for support: whole whatever is missing or broken, and with nothing personal in it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from builds import backend, network, order, queue, until
from comfy_process import ComfyProcess
from fake_engine import publish, publish_engine
from hybrid_trt.comfy_model import hash_cache
from hybrid_trt.engine_builder import jobs as jobs_module
from hybrid_trt.engine_builder.command_line import main as cli_module
from hybrid_trt.engine_builder.doctor import SECRETS, KeptWarnings, Place, as_text, hider, report
from hybrid_trt.engine_library import BuildError, Library, fleet_key, trust
from our_routes import ask
from pack import ROOT
from scenarios import Scenario, prompt

__all__ = ["backend", "network", "queue"]  # fixtures: pytest finds them by name

SECTIONS = ["versions", "card", "backends", "library", "settings", "last errors"]
USER = "alice.smith"


@pytest.fixture(autouse=True)
def own_hash_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_cache, "_folder", None)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user, with the folder of her key; nothing of it may be told."""
    folder = tmp_path / "home" / USER
    folder.mkdir(parents=True)
    for name in ("USER", "USERNAME", "LOGNAME"):
        monkeypatch.setenv(name, USER)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    monkeypatch.setenv("HYBRID_TRT_KEY_FOLDER", str(folder / "keys"))
    return folder


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command in this process; returns what it prints."""
    assert cli_module.main(["doctor", *arguments]) == 0
    return capsys.readouterr().out


def private(home: Path) -> list[str]:
    """Words that no report may hold: the user's name, folders, and the secret in each spelling."""
    key = (home / "keys" / "hybrid-trt" / "local.key").read_bytes()
    return ["alice", str(home), "Secret Project", key.hex(), base64.b64encode(key).decode()]


def test_a_report_tells_versions_backends_and_each_engine_and_nothing_personal(
    environment: Any, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = home / "Secret Project" / "engines"
    library.mkdir(parents=True)
    good, broken = publish(library), publish(library, weights="b" * 64, label="broken.safetensors")
    foreign = publish_engine(library, made_here=False).folder.name
    cut = publish(library, weights="c" * 64, label="cut.safetensors")
    (library / broken / "manifest.json").write_text("{")
    (library / cut / "model.onnx").write_bytes(b"")
    (library / ".settings.json").write_text('{"limit_gb": 12, "build_minutes": "five"}')
    folders = ("--library", str(library), "--comfyui", str(environment.comfyui), "--device", "cpu")
    text = doctor(capsys, *folders)
    data = json.loads(text)
    assert list(data) == SECTIONS
    versions = data["versions"]
    assert versions["torch"] == torch.__version__
    assert versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions["ComfyUI"])
    assert data["backends"]["auto takes"] == "onnxruntime"
    assert data["backends"]["onnxruntime"].startswith("serves, version ")
    assert "needs an NVIDIA GPU" in data["backends"]["tensorrt"]
    assert data["library"]["folders"] == ["<library 1>"]
    assert data["library"]["engines"] == {"ready": 1, "stale": 1, "broken": 2}
    engines = {one["engine"]: one for one in data["library"]["contents"]}
    assert {name: one["trusted"] for name, one in engines.items()} == {
        good: True, broken: False, foreign: False, cut: True}  # fmt: skip
    assert engines[foreign]["state"] == "stale"
    assert "was not built on this machine" in engines[foreign]["why"]
    assert {engines[name]["state"] for name in (broken, cut)} == {"broken"}
    assert "has 0 bytes" in engines[cut]["why"]
    assert any("settings are not readable" in line for line in data["last errors"]["warnings"])
    for words in private(home):
        assert words.lower() not in text.lower(), words


@pytest.fixture
def bare_packages(tmp_path: Path) -> Path:
    """All packages of this Python, but none that exports, builds or runs a file."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for package in Path(torch.__file__).parents[1].iterdir():
        if not re.match("onnx|polygraphy|tensorrt", package.name, re.IGNORECASE):
            (folder / package.name).symlink_to(package)
    return folder


def test_without_backends_and_comfyui_it_tells_what_to_install(home: Path, bare_packages: Path) -> None:
    """In a Python of its own, as a user runs it; the library is not there either."""
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "engine_builder", "doctor", "--library", str(home / "none"), "--comfyui", "/x"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(bare_packages)}, capture_output=True, text=True, check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    versions, served = told["versions"], told["backends"]
    assert versions["ComfyUI"].startswith("/x holds no ComfyUI")
    assert versions["missing packages"].startswith("onnx, polygraphy; run pip install -r requirements.txt")
    assert served["onnxruntime"].startswith("cannot serve: onnxruntime is not installed (python install.py")
    assert served["tensorrt"].startswith("cannot serve: ")
    assert versions["torch"] == torch.__version__
    assert told["library"]["folders"] == ["<library 1> (not there yet)"]
    assert told["library"]["engines"] == {}
    assert str(home) not in ended.stdout
    assert not (home / "none").exists(), "a report writes nothing"


def test_without_torch_and_without_any_package_it_still_reports(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "engine").mkdir()
    (library / "engine" / "manifest.json").write_text("[")
    command = [sys.executable, "-S", "-m", "engine_builder", "doctor", "--library", str(library)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert list(data) == SECTIONS
    assert "No module named 'torch'" in data["versions"]["torch"]
    assert "torch is not installed" in data["backends"]
    (engine,) = data["library"]["contents"]
    assert (engine["engine"], engine["state"], engine["trusted"]) == ("engine", "broken", False)


@pytest.mark.parametrize("another", [True, False], ids=["another ComfyUI is known", "none is known"])
def test_no_library_or_one_that_is_a_file_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    wrong = tmp_path / "nothing"
    if another:
        monkeypatch.setenv("COMFYUI_PATH", str(Path(folder_paths.__file__).parent))
    else:
        monkeypatch.delenv("COMFYUI_PATH", raising=False)
    data = json.loads(doctor(capsys, "--comfyui", str(wrong)))
    assert "holds no ComfyUI" in data["library"]
    (tmp_path / "file").write_text("no folder")
    folders = ("--library", str(tmp_path / "file"), "--comfyui", str(wrong))
    data = json.loads(doctor(capsys, *folders, "--device", "no device"))
    assert list(data) == SECTIONS
    assert data["library"]["engines"] == {}
    assert "is no device" in data["card"]


def test_one_part_that_fails_keeps_none_of_the_others(tmp_path: Path) -> None:
    """A driver, a package or a disk may fail in any way."""
    def fails() -> Any:
        raise RuntimeError("CUDA driver initialization failed")

    publish(tmp_path)
    data = report(Place(None, Library([tmp_path]), fails), lambda: [])
    assert data["card"] == data["backends"] == "not known: RuntimeError: CUDA driver initialization failed"
    assert data["library"]["contents"][0]["trusted"] is True
    assert data["versions"]["torch"] == torch.__version__


def test_failed_builds_and_warnings_are_told_with_the_end_of_their_log(
    queue: Any, network: Any, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(_order: Any, _library: Any, progress: Callable, log_line: Callable, **_: Any) -> None:
        progress("exporting", 0.5)
        log_line(f"writing {tmp_path}/x.onnx")
        raise BuildError(f"the disk of {tmp_path} is full")

    monkeypatch.setattr(jobs_module, "build_engine", build)
    with closing(KeptWarnings()) as warnings:
        assert queue.submit(order(network, backend), Library([tmp_path])).wait(60)
        place = Place(None, Library([tmp_path]), lambda: torch.device("cpu"), jobs=queue.jobs())
        data = report(place, lambda: warnings.lines)
    (failed,) = data["last errors"]["failed builds"]
    assert failed["build"] == network.label
    assert failed["why"] == "The disk of <library 1> is full."
    assert "writing <library 1>/x.onnx" in failed["log"]
    assert any("was not built: The disk of <library 1> is full." in line for line in data["last errors"]["warnings"])
    assert str(tmp_path) not in as_text(data)


def limit(comfy: ComfyProcess, gigabytes: float) -> None:
    comfy.post("/hybrid_trt/settings", {"limit_gb": gigabytes}, headers={"X-Hybrid-TRT": "1"})


def test_the_page_gets_the_report_of_its_server_with_builds_that_failed_there(comfy: ComfyProcess) -> None:
    def busy() -> bool:
        states = [job["state"] for job in comfy.get("/hybrid_trt/builds")]
        return "queued" in states or "running" in states or any(comfy.get("/queue").values())

    limit(comfy, 1e-6)
    try:
        assert until(lambda: not busy(), 60), "prompts and builds of the server's tests before"
        for folder in (comfy.base / "models" / "trt_engines").glob("[!.]*_*"):  # and what they left
            shutil.rmtree(folder)
        settings = {"when_missing": "build now", "backend": "onnxruntime"}
        scenario = Scenario(controls=(), width=64, height=64, steps=1, settings=settings)
        comfy.queue(prompt(scenario, True, "doctor"), timeout=120)
        text = ask(comfy, "GET", "/doctor")[1]["text"]
    finally:
        limit(comfy, 0)
    data = json.loads(text)
    started = data["settings"]["ComfyUI was started with"]
    assert "--cpu" in started
    assert "--fast" not in started, "nobody gave it"
    assert data["settings"]["limit_gb"] == 1e-06
    failed = data["last errors"]["failed builds"]
    assert any(one["build"] == "tiny_sd15_unet.safetensors" and "the settings allow" in one["why"] for one in failed)
    assert re.search("error: Hybrid TRT: the engine for .* was not built", text)
    for path in (comfy.base / "models" / "trt_engines", Path.home()):
        assert len(path.parts) < 2 or f"{path}/" not in text


LIBRARY = Path("/srv/engines")


@pytest.mark.parametrize(("text", "hidden"), [
    ("in /home/alice.smith/ComfyUI/models", "in ~/ComfyUI/models"),
    ("of /home/alice.smith is full", "of ~ is full"),
    (r"in \\home\\alice.smith\\x", r"in ~\\x"),
    ("/srv/engines is full", "<library 1> is full"),
    ("/srv/engines-of-bob/a.onnx", "/srv/engines-of-bob/a.onnx"),
    ("/mnt/alice.smith/a.onnx", "/mnt/<user>/a.onnx"),
    ("Alice.Smith's engines", "<user>'s engines"),
    ("see https://github.com/hybrid-trt/hybrid-trt", "see https://github.com/hybrid-trt/hybrid-trt"),
    ("CUDA 12/13, 3 GB/s; 1 / 2; fp16/fp8", "CUDA 12/13, 3 GB/s; 1 / 2; fp16/fp8"),
    ('pip install "tensorrt>=10.1,<12"', 'pip install "tensorrt>=10.1,<12"'),
])
def test_folders_and_names_are_taken_out_of_every_text(text: str, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", USER)
    monkeypatch.setenv("HOME", f"/home/{USER}")
    assert hider([LIBRARY])([{"why": text}]) == [{"why": hidden}]


def test_a_key_that_is_not_there_is_told_and_none_is_made(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads(doctor(capsys, "--library", str(tmp_path / "library"), "--device", "cpu"))
    assert told["library"]["secret of this machine"].startswith("none yet")
    assert trust.key_stamp() is None


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps no such rights")
def test_it_tells_whether_a_fleet_key_is_in_use_and_never_the_key(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, secret, path = ("--library", str(tmp_path / "library"), "--device", "cpu"), "5ec4e7" * 11, tmp_path / "key"
    monkeypatch.delenv(fleet_key.VARIABLE, raising=False)
    assert '"fleet key": "none"' in doctor(capsys, *options)
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    monkeypatch.setenv(fleet_key.VARIABLE, str(path))
    told = doctor(capsys, *options)
    assert '"fleet key": "in use"' in told
    assert path.read_text() not in told
    path.chmod(0o644)
    assert "may be read by other users" in doctor(capsys, *options)
    monkeypatch.setenv(fleet_key.VARIABLE, secret)
    told = doctor(capsys, *options)
    assert f'"{fleet_key.VARIABLE}": "set"' in told
    assert "cannot be read" in told
    assert secret not in told, "somebody took the variable for the key's place"


def test_every_secret_that_is_read_from_the_environment_is_in_the_list_of_secrets() -> None:
    named: set[str] = set()
    for part in ("engine_library", "engine_builder", "page_api", "farm"):
        for file in (ROOT / part).rglob("*.py"):
            named |= set(re.findall(r"\b(?:HYBRID_TRT|RAY)_\w+", file.read_text(encoding="utf-8")))
    secret = {name for name in named if re.search("TOKEN|SECRET|PASSWORD|KEY$", name)}
    assert {"HYBRID_TRT_FARM_TOKEN", "HYBRID_TRT_FLEET_KEY", "RAY_AUTH_TOKEN"} <= secret
    assert secret == set(SECRETS)


@pytest.mark.fault("a report is made where secrets are in the environment", see="their values stand nowhere in it")
@pytest.mark.parametrize("name", sorted(SECRETS))
def test_no_secret_of_the_environment_is_told_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "s3cr3t+of/the(farm)"
    monkeypatch.setenv(name, secret)
    monkeypatch.setenv("HYBRID_TRT_WARM", f"http://{secret}@x")
    place = Place(None, Library([tmp_path]), lambda: torch.device("cpu"))
    told = json.dumps(report(place, lambda: [f"the farm refused {secret}."]))
    assert "s3cr3t" not in told
    assert name == "RAY_AUTH_TOKEN" or f'"{name}": "set"' in told


@pytest.mark.parametrize(("text", "hidden"), [
    ("proxy http://jane:pa55@word@proxy.corp:3128/x", "proxy http://<login>@<host>:3128/x"),
    ("mysql+pymysql://jane@db.corp/x", "mysql+pymysql://<login>@<host>/x"),
    ("jane:pa55word@10.1.2.3:80 is away", "<login>@<host>:80 is away"),
    ("git+https://github.com/owner/name@v1", "git+https://github.com/owner/name@v1"),
    ("process 12 on Render-7.studio.example holds it", "process 12 on <host> holds it"),
    ("process 12 on render-7 holds it", "process 12 on <host> holds it"),
    ("render-77 and prerender-7", "render-77 and prerender-7"),
])
def test_logins_and_this_machines_name_are_taken_out(text: str, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "render-7.studio.example")
    assert hider([])(text) == hidden


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps no such rights")
def test_a_key_that_others_may_read_is_among_the_warnings(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trust.sign("make it")
    (home / "keys" / "hybrid-trt" / "local.key").chmod(0o644)
    told = doctor(capsys, "--library", str(tmp_path / "library"), "--device", "cpu")
    assert "~/keys/hybrid-trt/local.key may be read by other users" in told
