"""Starts a real ComfyUI process and talks to it over HTTP: for tests, demo and benchmarks. Standard library only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

#: No first-run dialogs, no leftover workflow: a fresh browser shows the canvas at once.
USER_SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.InstalledVersion": "1.47.12", "Comfy.Workflow.Persist": False,
                 "Comfy.Minimap.Visible": False}
POLL_SECONDS = 0.05


class ComfyProcessError(RuntimeError):
    """The server did not start, died or does not answer. The message ends with the tail of its log."""


class PromptRejected(RuntimeError):
    """ComfyUI's validation refused a prompt, or a part of it. `node_errors` says what is wrong, by node id."""

    def __init__(self, error: Any, node_errors: dict[str, Any]) -> None:
        self.error = error
        self.node_errors = node_errors
        super().__init__(json.dumps({"error": error, "node_errors": node_errors}, indent=1))


class PromptTimeout(TimeoutError):
    """A prompt did not end in time; it has been interrupted."""


@dataclass(frozen=True)
class History:
    """End of one prompt, as ComfyUI's history tells it."""

    prompt_id: str
    status: str  #: 'success', 'error' or 'interrupted'
    outputs: dict[str, dict[str, Any]]  #: what output nodes returned for the page, by node id
    messages: list[tuple[str, dict[str, Any]]]  #: events with their data, in order
    seconds: float  #: from execution_start to the end, by the server's clock (milliseconds)
    cached: list[str]  #: ids of the nodes that were not run again
    error: str | None  #: what the failing node raised, as 'Type: message'
    error_node: str | None  #: that node's id
    error_type: str | None  #: that node's class
    traceback: str | None

    @property
    def ok(self) -> bool:
        """Return whether every output was produced."""
        return self.status == "success"

    def output(self, node_id: str, key: str) -> list[Any]:
        """One output of a node, or an error that shows what there is instead."""
        if not self.ok:
            raise RuntimeError(f"prompt ended with {self.status} in node {self.error_node} ({self.error_type}): "
                               f"{self.error}\n{self.traceback or ''}")
        try:
            return self.outputs[node_id][key]
        except KeyError:
            raise KeyError(f"no output {key!r} of node {node_id}; there are {self.outputs}") from None

    @classmethod
    def from_json(cls, prompt_id: str, entry: dict[str, Any]) -> History:
        """Read one entry of GET /history/<id>."""
        status = entry.get("status") or {}
        messages = [(name, data) for name, data in status.get("messages", [])]
        events = dict(messages)
        failed = events.get("execution_error") or events.get("execution_interrupted") or {}
        state = "interrupted" if "execution_interrupted" in events else status.get("status_str", "unknown")
        stamps = [data["timestamp"] for _, data in messages if "timestamp" in data]
        begin = events.get("execution_start", {}).get("timestamp", stamps[0] if stamps else 0)
        return cls(
            prompt_id=prompt_id,
            status=state,
            outputs=entry.get("outputs", {}),
            messages=messages,
            seconds=(stamps[-1] - begin) / 1000 if stamps else 0.0,
            cached=[str(node) for node in events.get("execution_cached", {}).get("nodes", [])],
            error=(f"{failed['exception_type']}: {failed['exception_message'].strip()}"
                   if "exception_type" in failed else None),
            error_node=failed.get("node_id"),
            error_type=failed.get("node_type"),
            traceback="".join(failed["traceback"]) if failed.get("traceback") else None,
        )


class ComfyProcess:
    """A ComfyUI server of our own on a free loopback port, for as long as the `with` block lasts."""

    def __init__(self, comfyui: Path, base: Path, python: Path | str = sys.executable, arguments: Sequence[str] = (),
                 log: Path | None = None, cpu: bool = True, environment: dict[str, str] | None = None,
                 start_timeout: float = 180.0) -> None:
        """Say what to start; `start` or `with` starts it.

        `base` is ComfyUI's --base-directory: models, custom_nodes, input, output, temp and user lie there.
        `environment` is added to our own variables. `cpu=False` leaves the choice of the device to ComfyUI.
        """
        self.comfyui = Path(comfyui).resolve()
        self.base = Path(base).resolve()
        self.python = str(python)
        self.arguments = list(arguments)
        self.log = Path(log) if log else self.base / "comfyui.log"
        self.cpu = cpu
        self.environment = dict(environment or {})
        self.start_timeout = start_timeout
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        # A proxy set for the outside world must not get requests for the loopback interface.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def url(self) -> str:
        """The server's address, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id while the server runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def __enter__(self) -> ComfyProcess:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> ComfyProcess:
        """Start the server and return when it answers."""
        if self.pid is not None:
            raise ComfyProcessError(f"ComfyUI runs already, as process {self.pid}")
        self._prepare_base()
        if not self.port:  # a server that starts again is found where it was
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        command = [self.python, str(self.comfyui / "main.py"), "--listen", "127.0.0.1", "--port", str(self.port),
                   "--base-directory", str(self.base), "--database-url", "sqlite:///:memory:", "--disable-api-nodes",
                   "--disable-auto-launch", *(["--cpu"] if self.cpu else []), *self.arguments]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(command, cwd=self.comfyui, stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=subprocess.STDOUT,
                                             env=os.environ | {"PYTHONUNBUFFERED": "1"} | self.environment)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, patience: float = 20.0) -> None:
        """End the server: ask, wait, then kill. Only ever the process that this object started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()

    def log_text(self) -> str:
        """Return what this server has written so far."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """GET a path and return its JSON (None for an empty answer)."""
        return self._request(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, data: Any = None, timeout: float = 30.0, headers: dict[str, str] | None = None) -> Any:
        """POST JSON to a path and return the JSON answered (None for an empty answer)."""
        return self._request(urllib.request.Request(
            self.url + path, data=json.dumps({} if data is None else data).encode(),
            headers={"Content-Type": "application/json"} | (headers or {}), method="POST"), timeout)

    def object_info(self, node: str | None = None) -> dict[str, Any]:
        """All node descriptions by class name, or just one node's."""
        return self.get("/object_info") if node is None else self.get(f"/object_info/{node}")[node]

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Interrupt what runs now, or only that prompt."""
        self.post("/interrupt", {"prompt_id": prompt_id} if prompt_id else {})

    def free(self) -> None:
        """Unload all models and drop all cached node outputs before the next prompt runs."""
        self.post("/free", {"unload_models": True, "free_memory": True})
        # ComfyUI does it between two prompts: without one of our own it might come after the caller's next one
        self.run_unrelated_prompt()

    def run_unrelated_prompt(self) -> None:
        """Run a prompt that shares nothing with any other, as when a user turns to another workflow."""
        self.queue({"1": {"class_type": "PreviewAny", "inputs": {"source": ["2", 0]}},
                    "2": {"class_type": "PrimitiveInt", "inputs": {"value": time.monotonic_ns() % 2**31}}})

    def submit(
        self, prompt: dict[str, Any], client_id: str | None = None, extra_data: dict[str, Any] | None = None
    ) -> str:
        """Queue an API-format prompt and return its id at once; PromptRejected when any node of it is invalid."""
        body: dict[str, Any] = {"prompt": prompt, "extra_data": extra_data or {}}
        if client_id:
            body["client_id"] = client_id
        try:
            answer = self.post("/prompt", body)
        except urllib.error.HTTPError as failure:
            if failure.code != 400:
                raise
            answer = json.loads(failure.read() or b"{}")
            raise PromptRejected(answer.get("error"), answer.get("node_errors", {})) from None
        if answer.get("node_errors"):  # the valid outputs were queued without the others: half a result is none
            self.post("/queue", {"delete": [answer["prompt_id"]]})
            self.interrupt(answer["prompt_id"])
            raise PromptRejected("some outputs of the prompt are invalid", answer["node_errors"])
        return answer["prompt_id"]

    def wait(self, prompt_id: str, timeout: float = 120.0, poll: float = POLL_SECONDS) -> History:
        """Wait until a queued prompt has ended, whatever way it ended.

        Args:
            poll: seconds between two questions; each takes the server's threads some milliseconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            if entry := self.get(f"/history/{prompt_id}").get(prompt_id):
                return History.from_json(prompt_id, entry)
            self._check_alive()
            if time.monotonic() > deadline:
                self.post("/queue", {"delete": [prompt_id]})
                self.interrupt(prompt_id)
                raise PromptTimeout(f"prompt {prompt_id} did not end within {timeout:.0f} s; log:\n{self._log_tail()}")
            time.sleep(poll)

    def queue(
        self, prompt: dict[str, Any], timeout: float = 120.0, extra_data: dict[str, Any] | None = None
    ) -> History:
        """Run an API-format prompt to its end. A failing node is no exception here: see `History.status`."""
        return self.wait(self.submit(prompt, extra_data=extra_data), timeout)

    def _prepare_base(self) -> None:
        """Make the folders that ComfyUI lists, and the settings of its only user unless there are some."""
        for folder in ("models", "custom_nodes", "input", "output", "temp", "user/default"):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        settings = self.base / "user/default/comfy.settings.json"
        if not settings.exists():
            settings.write_text(json.dumps(USER_SETTINGS, indent=4), encoding="utf-8")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        while True:
            self._check_alive()
            try:
                self.get("/system_stats", timeout=5)
                return
            except ComfyProcessError:
                if time.monotonic() > deadline:
                    raise ComfyProcessError(f"ComfyUI did not answer within {self.start_timeout:.0f} s; log:\n"
                                            f"{self._log_tail()}") from None
            time.sleep(0.1)

    def _check_alive(self) -> None:
        if self._process is None:
            raise ComfyProcessError("ComfyUI has not been started")
        if (code := self._process.poll()) is not None:
            raise ComfyProcessError(f"ComfyUI ended with exit status {code}; log:\n{self._log_tail()}")

    def _request(self, request: urllib.request.Request, timeout: float) -> Any:
        """Send one request. An HTTP error status stays urllib's HTTPError; no answer at all is a ComfyProcessError."""
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                body = answer.read()
        except urllib.error.HTTPError:
            raise
        except OSError as failure:
            self._check_alive()
            raise ComfyProcessError(f"{request.get_method()} {request.full_url}: {failure}; log:\n"
                                    f"{self._log_tail()}") from failure
        return json.loads(body) if body else None

    def _log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])
