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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from . import folders, pictures
from .pictures import Pictures
from .prompts import Prompt, prepared
from .settings import WorkerSettings

Event = dict[str, Any]
PATIENCE = 20.0
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
        self._cleaning: asyncio.Future | None = None

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

        Args:
            brought: pictures that it reads.

        Raises:
            ComfyLost: ComfyUI ended meanwhile.
        """
        name = str(uuid.uuid4())
        try:
            try:
                prompt = await asyncio.to_thread(pictures.put, prompt, brought, self._temporary)
            except OSError as error:
                yield {"event": "failed", "error": f"The worker cannot write the request's pictures: {error}"}
                return
            async with self._http.ws_connect("/ws", params={"clientId": name}, max_msg_size=MAX_MESSAGE) as socket_:
                refused = await self._submit(name, prepared(prompt, name))
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
        finally:  # to its end, also where whoever asked goes away meanwhile
            self._cleaning = asyncio.ensure_future(self._clean(name))
            await asyncio.shield(self._cleaning)

    def stop(self) -> None:
        """End ComfyUI, by closing what its guard reads; remove its folder."""
        if self._process is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE + 5)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    @property
    def _temporary(self) -> Path:
        """ComfyUI's temporary folder."""
        return self.folder / "temp"

    def _command(self, port: int) -> list[str]:
        base = ["--base-directory", self.settings.base] if self.settings.base else []
        return [self.settings.python, str(Path(self.settings.comfyui) / "main.py"), "--listen", "127.0.0.1",
                "--port", str(port), *base, "--output-directory", str(self.folder), "--temp-directory",
                str(self.folder), "--database-url", "sqlite:///:memory:", "--disable-auto-launch",
                *self.settings.arguments]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        """Return our variables, less those of Ray and those that lead to this interpreter's packages."""
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
                told = await answer.json()
        except aiohttp.ClientConnectionError:
            return False
        failed = [one["text"] for one in told["warmed"] if one["state"] == "failed"]
        if failed:
            raise ComfyLost(" ".join(failed))
        return told["ready"]

    async def _submit(self, name: str, prompt: Prompt) -> dict[str, Any] | None:
        """Queue a prompt; return ComfyUI's reason where it refuses any part of it."""
        async with self._http.post("/prompt", json={"prompt": prompt, "client_id": name, "prompt_id": name}) as answer:
            if answer.content_type != "application/json":
                message = f"ComfyUI failed when it checked the workflow ({answer.status}); its log says where."
                return {"error": {"message": message}, "node_errors": {}}
            told = await answer.json()
        if answer.status == 200 and not told.get("node_errors"):
            return None
        error = told.get("error") or {"message": "ComfyUI refused a part of the workflow."}
        return {"error": error, "node_errors": told.get("node_errors", {})}

    async def _end(self, name: str) -> Event:
        """Return how a prompt ended, with its pictures and its report."""
        async with self._http.get(f"/history/{name}") as answer:
            entry = (await answer.json())[name]
        if entry["status"]["status_str"] != "success":
            told = dict(entry["status"]["messages"]).get("execution_error", {})
            return {"event": "failed", "error": told.get("exception_message", "The prompt was interrupted.").strip(),
                    "node": told.get("node_id"), "node_type": told.get("node_type")}  # fmt: skip
        made, reports = [], []
        for node, output in entry["outputs"].items():
            reports += output.get("report", [])
            made += [await self._picture(name, node, file) for file in output.get("images", [])]
        return {"event": "done", "pictures": made, "report": reports}

    async def _picture(self, name: str, node: str, file: dict[str, str]) -> dict[str, str]:
        async with self._http.get("/view", params=file) as answer:
            answer.raise_for_status()
            data = base64.b64encode(await answer.read()).decode()
        folder = file["subfolder"].removeprefix(name).strip("/")
        return {"node": node, "name": file["filename"], "folder": folder, "type": file["type"], "data": data}

    async def _clean(self, name: str) -> None:
        """Forget a prompt, whatever became of it: ComfyUI's queue, its history, and the files it saved."""
        for route, body in (("/queue", {"delete": [name]}), ("/interrupt", {"prompt_id": name}),
                            ("/history", {"delete": [name]})):  # fmt: skip
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await (await self._http.post(route, json=body)).read()
        for left in (self.folder / name, self._temporary / pictures.FOLDER):
            shutil.rmtree(left, ignore_errors=True)

    def _log_tail(self) -> str:
        text = (self.folder / "comfyui.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-20:])


async def _progress(socket_: aiohttp.ClientWebSocketResponse, name: str) -> AsyncIterator[Event]:
    """Yield the steps of a prompt until it has ended."""
    async for message in socket_:
        if message.type is not aiohttp.WSMsgType.TEXT:  # a preview
            continue
        told = message.json()
        data = told.get("data") or {}
        if data.get("prompt_id") != name:
            continue
        if told["type"] == "executing" and data["node"] is None:
            return  # ComfyUI says it once the history has the prompt
        if told["type"] == "progress":
            yield {"event": "progress", "node": data["node"], "value": data["value"], "max": data["max"]}
    raise ComfyLost("ComfyUI ended while it ran the prompt.")
