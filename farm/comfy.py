"""One headless ComfyUI on loopback: started, asked for pictures, and ended."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from . import folders, pictures
from .pictures import Pictures
from .prompts import Prompt, prepared, texts_of
from .settings import WorkerSettings

Event = dict[str, Any]
T = TypeVar("T")
END_SECONDS = 20.0
MAX_MESSAGE = 256 << 20


class ComfyLost(Exception):
    """ComfyUI ended, does not answer, or cannot become ready; the text says why."""


class Comfy:
    """A ComfyUI process of our own, on a free port of loopback."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.folder, self._lock = folders.take(Path(settings.work), settings.farm)
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._turn = asyncio.Lock()
        self._savers: set[str] = set()

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start ComfyUI, and return when it is warm.

        Raises:
            ComfyLost: it ended, or a workflow failed to warm it.
        """
        await asyncio.to_thread(folders.remove_left, Path(self.settings.work), self.settings.farm)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._http = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=None, sock_read=120))
        with (self.folder / "comfyui.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("guard.py")), *self._command(port)],
                cwd=self.settings.comfyui, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment(),
            )  # fmt: skip
        while not await self._is_warm():
            await asyncio.sleep(0.2)

    async def render(self, prompt: Prompt, brought: Pictures) -> AsyncIterator[Event]:
        """Run a workflow and yield its events; the last one is ``done``, ``failed`` or ``refused``.

        It begins after the clean-up of the prompt before, and ends after its own clean-up.

        Args:
            brought: pictures that the workflow reads.

        Raises:
            ComfyLost: ComfyUI ended meanwhile.
        """
        name = str(uuid.uuid4())
        await self._turn.acquire()
        try:
            try:
                ready = await _to_its_end(asyncio.to_thread(self._ready, name, prompt, brought))
            except ValueError as error:
                yield {"event": "refused", "error": {"message": str(error)}, "node_errors": {}}
                return
            except OSError as error:
                yield {"event": "failed", "error": f"The worker cannot write the request's pictures: {error}"}
                return
            async with self._http.ws_connect("/ws", params={"clientId": name}, max_msg_size=MAX_MESSAGE) as socket_:
                refused = await _to_its_end(self._submit(name, ready))
                if refused is not None:
                    yield {"event": "refused", **refused}
                    return
                yield {"event": "started"}
                async for event in _progress(socket_, name):
                    yield event
            yield await self._end(name)
        except aiohttp.ClientResponseError as error:
            yield {"event": "failed", "error": f"ComfyUI answered {error.status} for {error.request_info.url.path}."}
        except (aiohttp.ClientError, OSError) as error:
            raise ComfyLost(f"ComfyUI does not answer: {error!r}") from error
        finally:
            await _to_its_end(self._clean(name, prompt))

    def stop(self) -> None:
        """End ComfyUI by closing its guard's input; remove its folder."""
        if self._process is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS + 5)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def _ready(self, name: str, prompt: Prompt, brought: Pictures) -> Prompt:
        """Write a workflow's pictures, and return the workflow for ComfyUI.

        Raises:
            ValueError: one of its inputs leads to other workers' files.
        """
        ready = pictures.put(prompt, brought, self.folder / "temp")
        comfyui, base = Path(self.settings.comfyui), Path(self.settings.base or self.settings.comfyui)
        texts = (text for node in ready.values() for text in texts_of(node["inputs"]))
        folders.check_paths(texts, self.folder, (base / "input", comfyui))
        return prepared(ready, name, self._savers)

    def _command(self, port: int) -> list[str]:
        base = ["--base-directory", self.settings.base] if self.settings.base else []
        return [self.settings.python, str(Path(self.settings.comfyui) / "main.py"), *self.settings.arguments,
                "--listen", "127.0.0.1", "--port", str(port), *base, "--output-directory", str(self.folder / "output"),
                "--temp-directory", str(self.folder), "--database-url", "sqlite:///:memory:",
                "--disable-auto-launch"]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        """Return our variables, without Ray's and without variables that lead to this interpreter's packages."""
        gone = ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS")
        kept = {name: value for name, value in os.environ.items() if name not in gone and not name.startswith("RAY_")}
        warm = {"HYBRID_TRT_WARM": os.pathsep.join(self.settings.warm)} if self.settings.warm else {}
        threads = {"OMP_NUM_THREADS": self.settings.threads} if self.settings.threads else {}
        return kept | warm | threads | {"PYTHONUNBUFFERED": "1"}

    async def _is_warm(self) -> bool:
        if not self.alive:
            raise ComfyLost(f"ComfyUI ended before it was ready; its log ends with:\n{self._log_tail()}")
        try:
            async with self._http.get("/hybrid_trt/ready") as answer:
                if answer.status == 404:
                    raise ComfyLost(f"The ComfyUI at {self.settings.comfyui} has no Hybrid TRT: see its log above.\n"
                                    f"{self._log_tail()}")  # fmt: skip
                state = await answer.json()
        except aiohttp.ClientConnectionError:
            return False
        failed = [one["text"] for one in state["warmed"] if one["state"] == "failed"]
        if failed:
            raise ComfyLost(" ".join(failed))
        return state["ready"]

    async def _submit(self, name: str, prompt: Prompt) -> dict[str, Any] | None:
        """Queue a prompt; return ComfyUI's reason where it refuses any part of it."""
        async with self._http.post("/prompt", json={"prompt": prompt, "client_id": name, "prompt_id": name}) as answer:
            if answer.content_type != "application/json":
                message = f"ComfyUI failed when it checked the workflow ({answer.status}); its log says where."
                return {"error": {"message": message}, "node_errors": {}}
            refusal = await answer.json()
        if answer.status == 200 and not refusal.get("node_errors"):
            return None
        error = refusal.get("error") or {"message": "ComfyUI refused a part of the workflow."}
        return {"error": error, "node_errors": refusal.get("node_errors", {})}

    async def _end(self, name: str) -> Event:
        """Return how a prompt ended, with its pictures and its report."""
        entry = (await self._history(name))[name]
        if entry["status"]["status_str"] != "success":
            error = dict(entry["status"]["messages"]).get("execution_error", {})
            return {"event": "failed", "error": error.get("exception_message", "The prompt was interrupted.").strip(),
                    "node": error.get("node_id"), "node_type": error.get("node_type")}  # fmt: skip
        made, reports = [], []
        for node, output in entry["outputs"].items():
            reports += output.get("report", [])
            made += [await self._picture(node, file) for file in output.get("images", [])]
        return {"event": "done", "pictures": made, "report": reports}

    async def _history(self, name: str) -> dict[str, Any]:
        async with self._http.get(f"/history/{name}") as answer:
            return await answer.json()

    async def _picture(self, node: str, file: dict[str, str]) -> dict[str, str]:
        async with self._http.get("/view", params=file) as answer:
            answer.raise_for_status()
            data = base64.b64encode(await answer.read()).decode()
        return {"node": node, "name": file["filename"], "folder": file["subfolder"], "type": file["type"], "data": data}

    async def _clean(self, name: str, prompt: Prompt) -> None:
        """End a prompt in any state, remove its leftovers, and let the next prompt begin."""
        pause = 0.05
        try:
            while self.alive and await self._had(name):  # a node may run on for long
                await asyncio.sleep(pause := min(2 * pause, 2))
            for node, output in (await self._history(name)).get(name, {}).get("outputs", {}).items():
                if output.get("images") and node in prompt:
                    self._savers.add(prompt[node]["class_type"])
            await self._tell("/history", {"delete": [name]})
        except (aiohttp.ClientError, OSError):
            pass  # no answer: the next prompt will see that
        finally:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(folders.empty, self.folder)
            self._turn.release()

    async def _had(self, name: str) -> bool:
        """Tell whether ComfyUI has a prompt to run or runs it, and take it back."""
        async with self._http.get("/queue") as answer:
            prompts = [item for part in (await answer.json()).values() for item in part]
        if all(item[1] != name for item in prompts):
            return False
        await self._tell("/queue", {"delete": [name]})
        await self._tell("/interrupt", {"prompt_id": name})
        return True

    async def _tell(self, route: str, body: dict[str, Any]) -> None:
        async with self._http.post(route, json=body) as answer:
            await answer.read()

    def _log_tail(self) -> str:
        text = (self.folder / "comfyui.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-20:])


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work after its end, also if the awaiting task is cancelled meanwhile."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


async def _progress(socket_: aiohttp.ClientWebSocketResponse, name: str) -> AsyncIterator[Event]:
    """Yield the steps of a prompt until it has ended."""
    async for message in socket_:
        if message.type is not aiohttp.WSMsgType.TEXT:  # a preview
            continue
        event = message.json()
        data = event.get("data") or {}
        if data.get("prompt_id") != name:
            continue
        if event["type"] == "executing" and data["node"] is None:
            return  # ComfyUI says it once the history has the prompt
        if event["type"] == "progress":
            yield {"event": "progress", "node": data["node"], "value": data["value"], "max": data["max"]}
    raise ComfyLost("ComfyUI ended while it ran the prompt.")
