"""A farm renders what one ComfyUI does: every picture once, whatever dies, and only for those who have the token."""

from __future__ import annotations

import ast
import base64
import http.client
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from builds import until
from comfy_process import ComfyProcess, PromptRejected
from environment import TORCH_PACKAGES
from farm_process import TOKEN, FarmProcess, comfyui_of, farm_environment, kill_while_it_renders
from pack import ROOT
from PIL import Image
from scenarios import A, Prompt, Scenario, node, prompt
from setup_downloads import COMFYUI_VERSION

FARM_PYTHON = os.environ.get("HYBRID_TRT_FARM_PYTHON", "")
needs_ray = pytest.mark.skipif(not FARM_PYTHON, reason="there is no Ray here: tools/environment.py --farm brings it")
BUILDS = {"when_missing": "build now", "backend": "onnxruntime", "opt_size": 64, "max_size": 96}
SEEDS = range(1, 41)
BUILT = "Hybrid TRT: built "


def work(seed: int = 0, size: int = 64, steps: int = 1) -> Prompt:
    """A picture by a UNet and a ControlNet, whose engines are built where they are missing; it has no report."""
    made = prompt(Scenario(controls=(A,), steps=steps, width=size, height=size, seed=seed, settings=BUILDS), True, "")
    del made["save"], made["report"]
    made["vae"] = node("VAELoader", vae_name="tiny_kl.safetensors")
    made["decode"] = node("VAEDecode", samples=["sampler", 0], vae=["vae", 0])
    made["picture"] = node("SaveImage", images=["decode", 0], filename_prefix="farm/picture")
    for one in made.values():
        if "seed" in one["inputs"]:  # the client sets each of them
            one["inputs"]["seed"] = seed
    return made


def pixels(source: Any) -> numpy.ndarray:
    with Image.open(source) as picture:
        return numpy.array(picture)


def part(name: str) -> types.ModuleType:
    """Return a module of the farm that needs no Ray, without the repository's root on sys.path."""
    if "farm" not in sys.modules:
        sys.modules["farm"] = package = types.ModuleType("farm")
        package.__path__ = [str(ROOT / "farm")]
    return importlib.import_module(f"farm.{name}")


@pytest.fixture(scope="module")
def farm(comfy: ComfyProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm of two workers, on the folders of a server that runs beside it, without an engine."""
    shutil.rmtree(comfy.base / "models" / "trt_engines", ignore_errors=True)
    with FarmProcess(FARM_PYTHON, comfy, tmp_path_factory.mktemp("farm"), "--workers", "2") as process:
        yield process.until_ready()


@needs_ray
@pytest.mark.fault("a worker of a farm, and the program that asked, are killed while they render a batch")
def test_forty_prompts_give_the_pictures_of_one_process_though_a_worker_and_the_client_are_killed(
    farm: FarmProcess, comfy: ComfyProcess, tmp_path: Path
) -> None:
    out, workflow = tmp_path / "out", tmp_path / "workflow.json"
    workflow.write_text(json.dumps(work()), encoding="utf-8")
    command = (str(workflow), "--seeds", f"{SEEDS[0]}-{SEEDS[-1]}", "--out", str(out), "--at-once", "4")

    with farm.client(*command) as client:
        assert until(lambda: len(list(out.glob("[0-9]*.json"))) >= 10, 120), farm.log.read_text()
        client.kill()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("[0-9]*.json")}
    with farm.client(*command) as client:
        assert until(lambda: len(list(out.glob("[0-9]*.json"))) >= len(kept) + 5, 60)
        victim, _ = farm.workers()
        kill_while_it_renders(victim)
        said = client.communicate(timeout=120)[0]
    assert client.returncode == 0, said

    told = {seed: json.loads((out / f"{seed}.json").read_text()) for seed in SEEDS}
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "what is there is not rendered again"
    assert sum(one["attempts"] > 1 for one in told.values()) == 1, "the victim had one prompt"
    rows = [row for one in told.values() for row in one["report"][0]["rows"]]
    assert {(row["engine"], row["native"]) for row in rows} == {(1, 0)}
    assert len(rows) >= 2 * (len(SEEDS) - 4), "only what the killed client had asked for may be in ComfyUI's cache"
    built = [line for log in farm.work.glob("*/comfyui.log") for line in log.read_text().splitlines() if BUILT in line]
    assert len(built) == 2, built

    pictures = [pixels(out / f"{seed}_0.png") for seed in SEEDS]
    for seed, picture in zip(SEEDS, pictures, strict=True):
        (file,) = comfy.queue(work(seed)).output("picture", "images")
        assert (picture == pixels(comfy.base / "output" / file["subfolder"] / file["filename"])).all(), seed
    assert len({picture.tobytes() for picture in pictures}) == len(SEEDS)
    assert len(list(out.glob("*.png"))) == len(SEEDS)
    farm.until_ready(workers=2)


@needs_ray
def test_progress_is_streamed_and_the_answer_ends_with_pictures_and_report(farm: FarmProcess) -> None:
    status, events = farm.ask("POST", "/render", {"workflow": work(7, steps=3)})
    assert status == 200
    steps = [(one["value"], one["max"]) for one in events if one.get("node") == "sampler"]
    assert steps == sorted(set(steps) & {(1, 3), (2, 3), (3, 3)}), "ComfyUI leaves some out where steps are short"
    assert steps[-1] == (3, 3)
    done = events[-1]
    assert (events[0]["event"], done["event"], done["attempts"]) == ("started", "done", 1)
    (picture,) = done["pictures"]
    assert (picture["node"], picture["folder"]) == ("picture", "farm")
    assert pixels(io.BytesIO(base64.b64decode(picture["data"]))).shape == (64, 64, 3)
    assert list(farm.work.glob("*/*/farm")) == [], "what was sent is deleted"


@needs_ray
def test_prometheus_gets_prompts_calls_and_seconds(farm: FarmProcess) -> None:
    before = farm.metrics()
    assert [farm.ask("POST", "/render", {"workflow": work(seed)})[0] for seed in (90, 91)] == [200, 200]

    def grown(*key: str) -> float:
        return farm.metrics().get(key, 0) - before.get(key, 0)

    assert until(lambda: grown("prompts_total", "done") >= 2, 30), farm.metrics()
    assert grown("calls_total", "engine") >= 4
    assert grown("calls_total", "native") == 0
    assert grown("seconds_count", "") == grown("prompts_total", "done")
    assert grown("seconds_sum", "") > 0


@needs_ray
def test_only_the_ports_between_gate_and_workers_are_open_to_other_machines(farm: FarmProcess) -> None:
    listening = [(process.name(), connection.laddr.ip) for process in farm.family()
                 for connection in process.net_connections() if connection.status == psutil.CONN_LISTEN]  # fmt: skip
    assert len(listening) > 5
    wide = [name for name, ip in listening if ip.rpartition(":")[2] != "127.0.0.1"]
    assert all(name.startswith("ray::ServeReplica") for name in wide), listening


@needs_ray
def test_prompts_go_to_the_worker_that_has_their_models(farm: FarmProcess) -> None:
    def worker(seed: int) -> str:
        alone = prompt(Scenario(controls=(), steps=1, width=64, height=64, seed=seed), False, "")
        alone["vae"], alone["decode"] = work()["vae"], work()["decode"]
        alone["save"] = node("PreviewImage", images=["decode", 0])
        return farm.ask("POST", "/render", {"workflow": alone})[1][-1]["worker"]

    first = worker(1)
    time.sleep(2)  # workers tell the gate of their models a moment later
    assert {worker(seed) for seed in range(2, 10)} == {first}


@needs_ray
def test_a_prompt_whose_asker_goes_away_is_interrupted(farm: FarmProcess) -> None:
    def interrupted() -> int:
        return sum(log.read_text().count("Processing interrupted") for log in farm.work.glob("*/comfyui.log"))

    before, body = interrupted(), json.dumps({"workflow": work(1, 96, 5000)})
    connection = http.client.HTTPConnection("127.0.0.1", farm.port, timeout=60)
    connection.request("POST", "/render", body, {"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    while json.loads(answer.readline()).get("node") != "sampler":
        assert farm.ask("GET", "/ready")[1]["rendering"] == 1
    answer.close()
    connection.close()
    assert until(lambda: farm.ask("GET", "/ready")[1]["rendering"] == 0, 20)
    assert until(lambda: interrupted() == before + 1, 20)
    assert farm.ask("POST", "/render", {"workflow": work(1)})[1][-1]["event"] == "done"


@needs_ray
def test_without_the_token_nothing_is_rendered(farm: FarmProcess) -> None:
    for token in (None, "wrong", "a-token-for-tests-alone-", ""):
        status, told = farm.ask("POST", "/render", {"workflow": work()}, token)
        assert (status, "token" in told["error"]["message"]) == (401, True)
    assert farm.ask("GET", "/ready", token=None)[0] == 200


@needs_ray
@pytest.mark.fault("a farm gets a workflow that ComfyUI refuses")
def test_a_bad_workflow_is_refused_with_comfyuis_own_reason(farm: FarmProcess, comfy: ComfyProcess) -> None:
    wrong = work()
    wrong["unet"]["inputs"]["unet_name"] = "no_such_model.safetensors"
    with pytest.raises(PromptRejected) as native:
        comfy.submit(wrong)
    status, told = farm.ask("POST", "/render", {"workflow": wrong})
    assert (status, told["error"]) == (400, native.value.error)
    assert told["node_errors"]["unet"]["errors"] == native.value.node_errors["unet"]["errors"]
    lost = {"1": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "x"}}}
    status, told = farm.ask("POST", "/render", {"workflow": lost})
    assert (status, bool(told["error"]["message"])) == (400, True)
    for body in ({"workflow": {"nodes": []}}, {"workflow": []}, {}, [1], {"workflow": {"1": {"class_type": "X"}}}):
        status, told = farm.ask("POST", "/render", body)
        assert (status, "API format" in told["error"]["message"]) == (400, True)


@needs_ray
@pytest.mark.slow
@pytest.mark.fault("the ComfyUI of a farm's worker dies while it renders")
def test_where_comfyui_dies_another_worker_renders_its_prompt(farm: FarmProcess) -> None:
    farm.until_ready(workers=2)
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(farm.ask, "POST", "/render", {"workflow": work(seed, 96, 100)}) for seed in (1, 2, 3)]
        assert until(lambda: farm.ask("GET", "/ready")[1]["rendering"] == 3, 20)
        time.sleep(2)
        comfyui_of(farm.workers()[0]).kill()
        ends = [one.result()[1][-1] for one in running]
    assert [end["event"] for end in ends] == ["done"] * 3, ends
    assert sorted(end["attempts"] for end in ends) == [1, 1, 2]
    farm.until_ready(workers=2)


@needs_ray
@pytest.mark.fault("a farm is told to end while it renders")
def test_a_farm_that_ends_renders_what_it_has_and_takes_no_more(farm: FarmProcess) -> None:
    family = farm.family()
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(farm.ask, "POST", "/render", {"workflow": work(seed, 96, 12)}) for seed in (1, 2, 3)]
        assert until(lambda: farm.ask("GET", "/ready")[1]["rendering"] == 3, 20)
        farm.end()
        assert until(lambda: farm.ask("GET", "/ready")[0] == 503, 10)
        assert farm.ask("POST", "/render", {"workflow": work()})[0] == 503
        assert [one.result()[1][-1]["event"] for one in running] == ["done"] * 3
    assert farm.wait(60) == 0, farm.log.read_text()
    assert until(lambda: not any(process.is_running() for process in family), 30)


@needs_ray
@pytest.mark.slow
@pytest.mark.fault("a workflow that shall warm a farm cannot run")
def test_a_farm_that_cannot_be_warm_ends_with_comfyuis_reason(comfy: ComfyProcess, tmp_path: Path) -> None:
    wrong = work()
    wrong["unet"]["inputs"]["unet_name"] = "no_such_model.safetensors"
    (tmp_path / "wrong.json").write_text(json.dumps(wrong), encoding="utf-8")
    with FarmProcess(FARM_PYTHON, comfy, tmp_path, "--workers", "1", "--warm", str(tmp_path / "wrong.json")) as process:
        assert process.wait(180) == 1
    told = process.log.read_text().rpartition("The farm cannot start: ")[2]
    assert "no_such_model.safetensors is missing: put it where UNETLoader (node unet) looks" in told


@needs_ray
def test_a_batch_that_cannot_be_rendered_is_told_in_a_sentence(tmp_path: Path) -> None:
    good, other, page = (tmp_path / f"{name}.json" for name in ("good", "other", "page"))
    good.write_text(json.dumps(work()), encoding="utf-8")
    other.write_text(json.dumps(work(steps=2)), encoding="utf-8")
    page.write_text('{"nodes": [], "links": []}', encoding="utf-8")
    out = tmp_path / "out"

    def said(workflow: Path, seeds: str) -> tuple[int, str]:
        command = [FARM_PYTHON, "-m", "farm", "render", str(workflow), "--seeds", seeds, "--out", str(out), "--url",
                   "http://127.0.0.1:9", "--patience", "0"]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env=farm_environment(), capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.splitlines()[-1]

    for workflow, seeds, status, words in (
        (good, "1", 1, "Seed 1 was not rendered: The farm does not answer"),
        (other, "1", 2, "has pictures of another workflow"),
        (page, "1", 2, "Export (API)"),
        (tmp_path / "missing.json", "1", 2, "cannot be read"),
        (good, "5-1", 2, "backwards"),
        (good, "all", 2, "1-100 or 7,9,20-30"),
    ):
        code, line = said(workflow, seeds)
        assert (code, words in line) == (status, True), line
    assert [path.name for path in out.iterdir()] == ["workflow.sha256"]


@needs_ray
def test_containerfile_and_compose_file_are_without_complaints_of_their_linters() -> None:
    folder = ROOT / "farm" / "container"
    for command in (
        ["hadolint", str(folder / "Containerfile")],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(folder / "compose.yaml")],
    ):
        command[0] = str(Path(FARM_PYTHON).with_name(command[0]))
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_container_has_the_comfyui_and_the_torch_that_are_tested() -> None:
    text = (ROOT / "farm" / "container" / "Containerfile").read_text(encoding="utf-8")
    assert f"ARG COMFYUI=v{COMFYUI_VERSION}\n" in text
    pins = (ROOT / "tools" / "pins.txt").read_text(encoding="utf-8").splitlines()
    torch = " ".join(line for name in TORCH_PACKAGES for line in pins if line.startswith(f"{name}=="))
    assert f'ARG TORCH="{torch}"\n' in text


def test_a_token_is_made_once_and_only_its_owner_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = part("access")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(access.VARIABLE, raising=False)
    with pytest.raises(access.NoToken, match=access.VARIABLE):
        access.token(None)
    made = access.token(None, make=True)
    assert (len(made) >= 32, access.token(None, make=True), access.token(None)) == (True, made, made)
    assert access.token_file().stat().st_mode & 0o777 == 0o600
    assert [file.name for file in access.token_file().parent.iterdir()] == ["farm_token"]
    monkeypatch.setenv(access.VARIABLE, "short")
    with pytest.raises(access.NoToken, match="shorter than 16"):
        access.token(None)
    hashed = access.digest(made)
    admitted = [f"Bearer {made}", f"Basic {made}", made, f"Bearer {hashed}", f"Bearer {made}x", "Bearer", None]
    assert [access.admits(header, hashed) for header in admitted] == [True] + [False] * 6


def test_workflows_have_the_same_key_when_a_worker_that_ran_one_has_the_models_of_the_other() -> None:
    prompts, one = part("prompts"), work(1)
    lora = {**one, "lora": node("LoraLoaderModelOnly", lora_name="x.safetensors", model=["unet", 0], strength_model=1)}
    alone = {key: value for key, value in one.items() if "tiny_sd15_a" not in key}
    keys = [prompts.models_key(each) for each in (one, work(2, 96, 4), lora, alone)]
    assert (keys[0] == keys[1] == keys[2], keys[3] != keys[0]) == (True, True)


def test_a_workflow_keeps_its_own_report_and_its_pictures_go_to_a_folder_of_their_own() -> None:
    prompts, one = part("prompts"), work()
    before = json.dumps(one)
    ready = prompts.prepared(one, "here")
    assert ready["picture"]["inputs"]["filename_prefix"] == "here/farm/picture"
    assert ready[prompts.REPORT]["inputs"]["after"] == ["decode", 0]
    assert ready.keys() - one.keys() == {prompts.REPORT}
    reported = {**one, "mine": node("TRTReport", after=["sampler", 0])}
    assert prompts.prepared(reported, "here").keys() == reported.keys()
    assert json.dumps(one) == before


IMPORT_PACK = """
import asyncio, sys, types
sys.path[:0] = sys.argv[1:3]
import pack
pack.import_comfy()
import server, torch

def asked(*_, **__):
    raise AssertionError("CUDA was asked for")

for name in ("_lazy_init", "is_available", "device_count", "current_device", "get_device_properties", "init"):
    setattr(torch.cuda, name, asked)
from hybrid_trt.nodes import HybridTRT
import hybrid_trt.comfy_model.comfyui_internals as internals
internals.check()
asyncio.run(HybridTRT().get_node_list())
"""


def test_importing_the_pack_asks_for_no_cuda(tmp_path: Path) -> None:
    folders = [str(ROOT / "tests" / "support"), str(ROOT / "tools")]
    done = subprocess.run([sys.executable, "-c", IMPORT_PACK, *folders], cwd=tmp_path, stderr=subprocess.PIPE,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def imports(path: Path) -> set[str]:
    """Return the packages that a file imports, however deep; relative ones with their dots."""
    found = set()
    for step in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(step, ast.Import):
            found |= {name.name.split(".")[0] for name in step.names}
        elif isinstance(step, ast.ImportFrom):
            found.add("." * step.level + (step.module or "").split(".")[0])
    return found


def test_the_pack_imports_nothing_of_ray_or_the_farm_and_the_farm_nothing_of_the_pack() -> None:
    rooms = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    theirs = {"ray", "farm", ".farm", "..farm", "...farm", "aiohttp_cors", "tqdm"}
    packed = [file for room in rooms if room != "farm" for file in (ROOT / room).rglob("*.py")]
    for path in [ROOT / "__init__.py", *packed]:
        assert not imports(path) & theirs, path
    for path in (ROOT / "farm").glob("*.py"):
        named = imports(path)
        assert not any(name.startswith("..") for name in named), path
        assert not named & {"torch", "numpy", "comfy", "hybrid_trt", *rooms} - {"farm"}, path


@needs_ray
def test_the_farm_is_imported_without_torch_and_so_without_cuda() -> None:
    code = "import sys, farm.app, farm.serving, farm.render; sys.exit('torch' in sys.modules)"
    assert subprocess.run([FARM_PYTHON, "-c", code], cwd=ROOT, env=farm_environment(), check=False).returncode == 0
