"""Starts a farm of its own for tests, with Ray's interpreter, and talks to it over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest
from builds import until
from comfy_process import ComfyProcess
from pack import ROOT
from scenarios import A, Prompt, Scenario, node, prompt

FARM_PYTHON = os.environ.get("HYBRID_TRT_FARM_PYTHON", "")
needs_ray = pytest.mark.skipif(not FARM_PYTHON, reason="there is no Ray here: tools/environment.py --farm brings it")
TOKEN = "a-token-for-tests-alone"
PATIENCE = 120.0
BUILDS = {"when_missing": "build now", "backend": "onnxruntime", "opt_size": 64, "max_size": 96}


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


def farm_environment() -> dict[str, str]:
    """Variables of the farm and of those who ask it."""
    soon = {"RAY_metrics_report_interval_ms": "500"}
    return os.environ | soon | {"HYBRID_TRT_FARM_TOKEN": TOKEN, "PYTHONPATH": ""}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class FarmProcess:
    """A farm on a free port of loopback, for as long as the `with` block lasts. Its workers use a server's folders."""

    def __init__(self, python: str, comfy: ComfyProcess, folder: Path, *arguments: str) -> None:
        self.python, self.comfy, self.folder, self.arguments = python, comfy, folder, arguments
        self.port, self.metrics_port = free_port(), free_port()
        self.log = folder / "farm.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def work(self) -> Path:
        """The folder in which each worker has one of its own."""
        return self.folder / "work"

    def __enter__(self) -> FarmProcess:
        command = [self.python, "-m", "farm", "serve", "--cpu", "--comfyui", str(self.comfy.comfyui), "--python",
                   sys.executable, "--base", str(self.comfy.base), "--port", str(self.port), "--work", str(self.work),
                   "--metrics-port", str(self.metrics_port), *self.arguments]  # fmt: skip
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                             env=farm_environment())  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = self.family()
        self.end()
        if self.wait(60) is None:
            self._process.kill()
        for process in psutil.wait_procs(family, timeout=30)[1]:
            process.kill()

    def end(self) -> None:
        """Ask the farm to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the farm's own process, and none of those that it started."""
        self._process.kill()

    def wait(self, patience: float) -> int | None:
        """Return the farm's exit status, None where it does not end in time."""
        until(lambda: self._process.poll() is not None, patience)
        return self._process.poll()

    def until_ready(self, workers: int = 2, patience: float = PATIENCE) -> FarmProcess:
        """Wait until so many workers are ready."""
        def ready() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"the farm ended:\n{self.log.read_text()}")
            try:
                return self.ask("GET", "/ready")[1].get("workers", 0) >= workers
            except (OSError, ValueError, AttributeError):
                return False

        assert until(ready, patience), self.log.read_text()
        return self

    def family(self) -> list[psutil.Process]:
        """Return all processes that the farm started."""
        return psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []

    def workers(self) -> list[psutil.Process]:
        """Return the processes of the workers that have a ComfyUI."""
        return [process for process in self.family() if _guard_of(process)]

    def ask(self, method: str, path: str, body: Any = None, token: str | None = TOKEN) -> tuple[int, Any]:
        """Return status and JSON of a request; a list of events where the farm streams them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            if "ndjson" in (answer.headers["Content-Type"] or ""):
                return answer.status, [json.loads(line) for line in text.splitlines()]
            return answer.status, json.loads(text)
        finally:
            connection.close()

    @contextmanager
    def asking(self, workflow: Prompt) -> Iterator[http.client.HTTPResponse]:
        """Ask for a workflow, and go away at the end of the `with` block, whatever became of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        body, header = json.dumps({"workflow": workflow}), {"Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", "/render", body, header)
        answer = connection.getresponse()
        try:
            yield answer
        finally:
            answer.close()
            connection.close()

    def metrics(self) -> dict[tuple[str, str], float]:
        """Return the farm's own metrics: the sum of all workers, by name and the first label that is the farm's."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[tuple[str, str], float] = defaultdict(float)
        for line in lines:
            if match := re.match(r"ray_hybrid_trt_farm_(\w+)\{(.*)\} (\S+)$", line):
                label = re.search(r'\b(?:end|by)="([^"]*)"', match[2])
                found[match[1], label[1] if label else ""] += float(match[3])
        return dict(found)

    def client(self, *arguments: str) -> subprocess.Popen[str]:
        """Start ``python -m farm render`` with arguments."""
        command = [self.python, "-m", "farm", "render", *arguments, "--url", self.url]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, env=farm_environment())  # fmt: skip


def left_of(farm: FarmProcess) -> list[Path]:
    """Return the files of prompts that a farm's workers have, once nothing runs there: an answer ends before."""
    files: list[Path] = []

    def none() -> bool:
        files[:] = [path for path in farm.work.glob("*/*/**/*") if path.is_file()]
        return not files

    until(none, 10)
    return files


def comfyui_of(worker: psutil.Process) -> psutil.Process:
    """Return the process of a worker's ComfyUI."""
    (comfyui,) = _guard_of(worker).children()
    return comfyui


def _guard_of(worker: psutil.Process) -> psutil.Process | None:
    with suppress(psutil.NoSuchProcess):  # it ends just now
        return next((child for child in worker.children() if "guard.py" in " ".join(child.cmdline())), None)
    return None


def runs_a_prompt(worker: psutil.Process) -> bool:
    """Tell whether the ComfyUI of a worker runs a prompt."""
    command = comfyui_of(worker).cmdline()
    url = f"http://127.0.0.1:{command[command.index('--port') + 1]}/queue"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bool(json.load(answer)["queue_running"])


def kill_while_it_renders(worker: psutil.Process) -> None:
    """Kill a worker that has a prompt: its ComfyUI is stopped before, so that one it has does not end."""
    comfyui = comfyui_of(worker)
    comfyui.suspend()
    time.sleep(2)
    worker.kill()
    comfyui.resume()
