"""Parts of the farm, each alone: its token, its view of workflows, its container, and what imports what."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import re
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from environment import TORCH_PACKAGES
from farm_process import FARM_PYTHON, farm_environment, free_port, needs_ray, work
from pack import ROOT
from scenarios import node
from setup_downloads import COMFYUI_VERSION


def part(name: str) -> types.ModuleType:
    """Return a module of the farm that needs no Ray, without the repository's root on sys.path."""
    if "farm" not in sys.modules:
        sys.modules["farm"] = package = types.ModuleType("farm")
        package.__path__ = [str(ROOT / "farm")]
    return importlib.import_module(f"farm.{name}")


def ran(*arguments: str, before: tuple[str, ...] = (), given: str = "") -> subprocess.CompletedProcess[str]:
    """Run Ray's Python in the pack's folder."""
    return subprocess.run([*before, FARM_PYTHON, *arguments], cwd=ROOT, env=farm_environment(), input=given,
                          capture_output=True, text=True, check=False)  # fmt: skip


@needs_ray
def test_a_batch_that_cannot_be_rendered_is_told_in_a_sentence(tmp_path: Path) -> None:
    good, other, page = (tmp_path / f"{name}.json" for name in ("good", "other", "page"))
    good.write_text(json.dumps(work()), encoding="utf-8")
    other.write_text(json.dumps(work(steps=2)), encoding="utf-8")
    page.write_text('{"nodes": [], "links": []}', encoding="utf-8")
    out = tmp_path / "out"

    for workflow, seeds, status, words in (
        (good, "1", 1, "Seed 1 was not rendered: The farm does not answer"),
        (other, "1", 2, "has pictures of another workflow"),
        (page, "1", 2, "Export (API)"),
        (tmp_path / "missing.json", "1", 2, "cannot be read"),
        (good, "5-1", 2, "backwards"),
        (good, "all", 2, "1-100 or 7,9,20-30"),
    ):
        done = ran("-m", "farm", "render", str(workflow), "--seeds", seeds, "--out", str(out),
                   "--url", "http://127.0.0.1:9", "--patience", "0")  # fmt: skip
        assert (done.returncode, words in done.stderr.splitlines()[-1]) == (status, True), done.stderr
    assert [path.name for path in out.iterdir()] == ["workflow.sha256"]


@needs_ray
@pytest.mark.fault("the disk is full, or Ray is not installed, where a farm starts or its client writes",
                   see="an error in one sentence")
def test_what_a_farm_lacks_is_told_in_a_sentence(tmp_path: Path) -> None:
    workflow, file = tmp_path / "work.json", tmp_path / "file"
    workflow.write_text(json.dumps(work()), encoding="utf-8")
    file.write_text("no folder")
    render = ["render", str(workflow), "--seeds", "1", "--url", "http://127.0.0.1:9", "--out"]
    serve = ["serve", "--comfyui", str(tmp_path), "--cpu", "--port", "0", "--host"]
    no_ray = "import sys; sys.modules['ray'] = None\nfrom farm.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    for options, status, words in (
        (["-m", "farm", *render, str(file / "out")], 1, "The farm's render command ends ([Errno 20] Not a directory"),
        (["-m", "farm", *render, str(tmp_path / "full")], 1, "The farm's render command ends ([Errno 27] File too"),
        (["-m", "farm", *serve, "192.0.2.1"], 2, "The farm cannot listen at port 0 of 192.0.2.1: "),
        (["-c", no_ray, *serve, "127.0.0.1"], 2, "ray is not installed for this Python, so nothing is rendered: run"),
    ):  # fmt: skip
        limited = ("sh", "-c", 'ulimit -f 0; exec "$@"', "sh") if "Errno 27" in words else ()  # as a full disk
        done = ran(*options, before=limited)
        assert (done.returncode, words in done.stderr.splitlines()[-1]) == (status, True), done.stderr
        assert "Traceback" not in done.stderr


HOLDS_A_PORT = """
import socket, sys
from farm.serving import hold_port
try:
    held = hold_port("127.0.0.1", int(sys.argv[1]))
except ValueError as error:
    sys.exit(str(error))
ray = socket.socket()
for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as Ray does
    ray.setsockopt(socket.SOL_SOCKET, option, 1)
print("held", flush=True)
sys.stdin.readline()
ray.bind(held[0].getsockname())
ray.listen()
print("listens", flush=True)
sys.stdin.readline()
"""


@needs_ray
@pytest.mark.fault("a farm is started on a port that is taken",
                   see="an error in one sentence; the first farm serves on")
def test_a_farm_has_its_port_from_its_start_on_and_another_one_is_told_that_it_is_taken() -> None:
    """Ray takes seconds until it listens."""
    port = free_port()
    command = [FARM_PYTHON, "-c", HOLDS_A_PORT, str(port)]

    def second() -> str:
        return ran(*command[1:], given="\n\n").stderr.strip()

    taken = f"Port {port} of 127.0.0.1 is taken: end the farm that uses it, or use --port."
    with subprocess.Popen(command, cwd=ROOT, env=farm_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as first:  # fmt: skip
        assert first.stdout.readline() == "held\n"
        assert second() == taken
        print(file=first.stdin, flush=True)
        assert first.stdout.readline() == "listens\n"
        for _ in range(10):
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        assert second() == taken
        print(file=first.stdin, flush=True)
    assert second() == "", "it is free again"


BREAKS_OFF = """
import asyncio, sys
from aiohttp import ClientSession, web
from farm import render

asked = 0

async def answer(request):
    global asked
    asked += 1
    stream = web.StreamResponse()
    await stream.prepare(request)
    await stream.write(b'{"event": "started"}\\n')
    await asyncio.sleep(1)
    if asked < 3:
        request.transport.abort()
        return stream
    await stream.write(b'{"event": "done"}\\n')
    return stream

async def main():
    render.WAIT = 0.3
    app = web.Application()
    app.router.add_post("/render", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with ClientSession(f"http://127.0.0.1:{port}") as farm:
        print(await render._done(farm, {}, 0.6))
    await runner.cleanup()

asyncio.run(main())
"""


@needs_ray
def test_the_clients_patience_begins_where_an_answer_stops() -> None:
    done = ran("-c", BREAKS_OFF)
    assert done.stdout.strip() == "{'event': 'done'}", done.stderr


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


def test_half_a_character_in_a_models_name_is_left_to_comfyui_to_refuse() -> None:
    unet = {"class_type": "UNETLoader", "inputs": {"unet_name": "\ud83d.safetensors"}}
    assert part("prompts").models_key({"1": unet})


def test_a_workflow_keeps_its_own_report_and_what_it_saves_is_another_prompts_to_comfyui() -> None:
    prompts, one = part("prompts"), work()
    before = json.dumps(one)
    ready = prompts.prepared(one, "this", {"SaveImage", "PreviewImage"})
    assert ready["picture"]["inputs"] == {**one["picture"]["inputs"], prompts.MARK: "this"}
    assert [key for key, node in ready.items() if prompts.MARK in node["inputs"]] == ["picture"]
    assert ready[prompts.REPORT]["inputs"]["after"] == ["decode", 0]
    assert ready.keys() - one.keys() == {prompts.REPORT}
    reported = {**one, "mine": node("TRTReport", after=["sampler", 0])}
    assert prompts.prepared(reported, "this", ()).keys() == reported.keys()
    assert json.dumps(one) == before


def reading(*names: str) -> dict[str, Any]:
    """A workflow that reads pictures."""
    return {str(number): node("LoadImage", image=name) for number, name in enumerate(names)}


def test_a_requests_pictures_are_stored_by_their_content_and_the_workflow_reads_them_there(tmp_path: Path) -> None:
    pictures, workflow = part("pictures"), reading("a.png", "../../b.JPG", "a.png", "of the worker.png")
    data = {"a.png": b"one", "../../b.JPG": b"two"}
    brought = pictures.read(pictures.for_request(data), workflow)
    assert brought == data
    before = json.dumps(workflow)
    ready = pictures.put(workflow, brought, tmp_path / "temp")
    assert json.dumps(workflow) == before
    names = [one["inputs"]["image"] for one in ready.values()]
    files = [f"inputs/{hashlib.sha256(data[name]).hexdigest()}" for name in ("a.png", "../../b.JPG")]
    assert names == [f"{files[0]}.png [temp]", f"{files[1]}.jpg [temp]", f"{files[0]}.png [temp]", "of the worker.png"]
    there = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert there == {f"temp/{files[0]}.png": b"one", f"temp/{files[1]}.jpg": b"two"}
    again = pictures.put(reading("c.png"), {"c.png": b"one"}, tmp_path / "temp")
    assert again["0"] == ready["0"], "the same to ComfyUI"


@pytest.mark.fault("a request brings a file that is no picture, or that its workflow does not read",
                   see="status 400, with its name")
def test_a_request_with_a_wrong_picture_is_refused_with_its_name() -> None:
    read = part("pictures").read
    assert read(None, reading("a.png")) == {}
    for carried, words in (
        (["a.png"], '"inputs" is an object'), ({"b.png": "QQ=="}, "no input of the workflow has this value"),
        ({"a.sh": "QQ=="}, "'a.sh' is no picture's name"), ({"a.png": "not base64"}, "'a.png' is not in base64"),
        ({"a.png": 7}, "'a.png' is not in base64"), ({"a.png/../../x.py": "QQ=="}, "is no picture's name"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(words)):
            read(carried, reading("a.png", "a.sh", "a.png/../../x.py"))


def test_the_client_sends_pictures_of_its_folder_alone(tmp_path: Path) -> None:
    inputs, outside = tmp_path / "inputs", tmp_path / "secret.png"
    (inputs / "deep").mkdir(parents=True)
    for path in (outside, inputs / "a.png", inputs / "deep" / "b.webp", inputs / "unused.png", inputs / "notes.txt"):
        path.write_bytes(path.name.encode())
    (inputs / "link.png").symlink_to(outside)
    workflow = reading("a.png", "deep/b.webp", "../secret.png", str(outside), "link.png", "notes.txt", "absent.png")
    assert part("pictures").of_folder(workflow, inputs) == {"a.png": b"a.png", "deep/b.webp": b"b.webp"}


@pytest.mark.parametrize(
    ("cores", "workers", "each"), [([32], 2, 16), ([32, 32], 3, 16), ([64, 16], 2, 16), ([2], 8, 1), ([], 1, 1)])
def test_workers_of_a_machine_share_its_cores(cores: list[int], workers: int, each: int) -> None:
    assert part("settings").threads_each(cores, workers) == each


WORKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from farm import folders
folder, lock = folders.take(Path(sys.argv[2]), "before")
print(folder, flush=True)
time.sleep(60)
"""


@pytest.mark.fault("a farm's worker was killed and left its folder",
                   see="the next farm that starts there removes it; folders of living workers stay")
def test_folders_of_dead_workers_go_when_a_farm_starts_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    """Of this farm's own dead the pictures go, and the log stays."""
    folders = part("folders")
    (tmp_path / "mine").mkdir()
    own, lock = folders.take(tmp_path, "now")
    assert own.stat().st_mode & 0o777 == 0o700, "pictures are for no other user"
    for name in ("output/x.png", "temp/y.png", "comfyui.log"):
        (own / name).write_text("x", encoding="utf-8")
    lock.release()  # as one of this farm's that was killed
    with subprocess.Popen([sys.executable, "-c", WORKER, str(ROOT), str(tmp_path)], stdout=subprocess.PIPE,
                          text=True) as worker:  # fmt: skip
        left = Path(worker.stdout.readline().strip())
        (left / "comfyui.log").write_text("x", encoding="utf-8")
        folders.remove_left(tmp_path, "now")
        assert {path.name for path in tmp_path.iterdir()} == {"mine", own.name, left.name}
        worker.kill()
        worker.wait()
        folders.remove_left(tmp_path, "now")
    assert {path.name for path in tmp_path.iterdir()} == {"mine", own.name}
    assert [path.name for path in own.rglob("*") if path.suffix] == ["comfyui.log"]


GATE_WITH_WORKERS_THAT_DIE = """
import asyncio, json, sys
from farm.app import Gate
from ray.exceptions import RayActorError

class Workers:
    def __init__(self, *lives):
        self.lives, self.render = list(lives), self
    def options(self, **_):
        return self
    def remote(self, prompt, brought):
        return Running(self.lives.pop(0))

class Running:
    def __init__(self, life):
        self.life = life
    async def __aiter__(self):
        for event in self.life:
            yield {"event": event}
        raise RayActorError
    def cancel(self):
        cancelled.append(self.life)

async def told(*lives):
    return [event["event"] async for event in Gate.func_or_class(Workers(*lives), "")._events({}, {})]

async def left():
    events = Gate.func_or_class(Workers(["started", "done"]), "")._events({}, {})
    await anext(events)
    await events.aclose()
    return cancelled[-1]

cancelled = []
json.dump([asyncio.run(told(*lives)) for lives in json.loads(sys.argv[1])] + [asyncio.run(left())], sys.stdout)
"""


@needs_ray
@pytest.mark.fault("the ComfyUI of a farm's worker dies while it renders",
                   see="another worker renders the prompt, and a new one takes its place")
def test_a_prompt_that_has_ended_is_not_rendered_again_and_one_that_kills_workers_ends_after_three() -> None:
    lives = [[["started", "done"]], [["started"], ["done"]], [["refused"]], [[], ["started"], []]]
    done = ran("-c", GATE_WITH_WORKERS_THAT_DIE, json.dumps(lives))
    assert done.returncode == 0, done.stderr
    died = "worker died"
    first, second, third, last, left = json.loads(done.stdout.splitlines()[-1])
    assert (first, second, third) == (["started", "done"], ["started", died, "done"], ["refused"])
    assert last == [died, "started", died, died, "failed"]
    assert left == ["started", "done"], "what its asker left is cancelled"


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
    assert ran("-c", code).returncode == 0
