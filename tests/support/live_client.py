"""Clients of live streams for tests: a prompt that streams in a real server, and a WebSocket to it."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import torch
from comfy_process import ComfyProcess, History
from hybrid_trt.streaming import pictures
from our_routes import ask

Prompt = dict[str, Any]


def double(**inputs: Any) -> Prompt:
    """A prompt of the test double of TRT Stream."""
    usual = {"seconds": 0.0, "patience": 60.0, "turn": 0, "fail_at": -1}
    return {"stream": {"class_type": "TestStreamDouble", "inputs": usual | inputs}}


def token_of(comfy: ComfyProcess, timeout: float = 180.0) -> str:
    """The token of the stream that runs; waits for it."""
    deadline = time.monotonic() + timeout
    while True:
        status, told = ask(comfy, "POST", "/live/token")
        if status == 200:
            return told["token"]
        assert status == 409, told
        assert time.monotonic() < deadline, told
        time.sleep(0.05)


def run_stream(
    comfy: ComfyProcess, prompt: Prompt, act: Callable[[str], Awaitable[None]], timeout: float = 180.0
) -> History:
    """Queue a prompt that streams, let ``act`` use the stream by its token, and return how the prompt ended."""
    queued = comfy.submit(prompt)
    try:
        asyncio.run(act(token_of(comfy, timeout)))
    except BaseException:
        comfy.interrupt(queued)
        comfy.wait(queued, timeout)
        raise
    return comfy.wait(queued, timeout)


def run_client(
    comfy: ComfyProcess, prompt: Prompt, act: Callable[[Client], Awaitable[None]], timeout: float = 180.0, **hello: Any
) -> History:
    """The same with a client that joins the stream and, when ``act`` is through, stops it."""

    async def joining(token: str) -> None:
        async with joined(comfy, token, **hello) as client:
            await act(client)
            assert await client.stop() == {"ended": "The stream was stopped."}

    return run_stream(comfy, prompt, joining, timeout)


@dataclass
class Client:
    """An open WebSocket; texts that came while pictures were waited for are in ``told``."""

    socket: aiohttp.ClientWebSocketResponse
    told: list[dict[str, Any]] = field(default_factory=list)

    async def frame(self, image: torch.Tensor, kind: str = "raw") -> None:
        """Send a frame."""
        await self.socket.send_bytes(pictures.write(image, kind))

    async def picture(self) -> tuple[int, torch.Tensor]:
        """Wait for the next picture, and return it behind its number."""
        while True:
            message = await self.socket.receive(120)
            if message.type is aiohttp.WSMsgType.BINARY:
                (number,) = struct.unpack_from("<I", message.data)
                return number, pictures.read(message.data[4:])
            assert message.type is aiohttp.WSMsgType.TEXT, (message, self.told)
            self.told.append(json.loads(message.data))

    async def shown(self, image: torch.Tensor, kind: str = "raw") -> tuple[int, torch.Tensor]:
        """Send a frame, and wait for the next picture."""
        await self.frame(image, kind)
        return await self.picture()

    async def ask(self, message: Any) -> dict[str, Any]:
        """Send a text, JSON unless it is one already, and return the answer; pictures before it are left out."""
        await self.socket.send_str(message if isinstance(message, str) else json.dumps(message))
        return await self.text()

    async def text(self) -> dict[str, Any]:
        """Wait for the next text."""
        while (message := await self.socket.receive(120)).type is aiohttp.WSMsgType.BINARY:
            pass
        assert message.type is aiohttp.WSMsgType.TEXT, message
        return json.loads(message.data)

    async def stop(self) -> dict[str, Any]:
        """End the stream, and return the server's last words."""
        return await self.ask({"stop": True})


@asynccontextmanager
async def opened(comfy: ComfyProcess, headers: dict[str, str] | None = None) -> AsyncIterator[Client]:
    """A WebSocket to the server, before its first message."""
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{comfy.url}/hybrid_trt/live", headers=headers, max_msg_size=1 << 26) as socket,
    ):
        yield Client(socket)


@asynccontextmanager
async def joined(comfy: ComfyProcess, token: str, **hello: Any) -> AsyncIterator[Client]:
    """A client of the stream; waits while the server has not noticed yet that the one before is gone."""
    deadline = time.monotonic() + 60
    while True:
        async with opened(comfy) as client:
            client.told.append(await client.ask({"token": token, "format": "raw", **hello}))
            if "already" in client.told[0].get("error", "") and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
                continue
            assert "ready" in client.told[0], client.told
            yield client
            return


def same(picture: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Tell whether two pictures agree up to the rounding of a whole step."""
    return picture.shape == wanted.shape and bool((picture - wanted).abs().max() <= 1.01 / 255)


def image(seed: int, width: int = 64, height: int = 64) -> torch.Tensor:
    """A soft frame, as JPEG keeps it nearly, in whole steps of 1/255, as PNG and raw keep it."""
    few = torch.rand((1, 3, 4, 4), generator=torch.Generator().manual_seed(seed))
    soft = torch.nn.functional.interpolate(few, (height, width), mode="bilinear")
    return soft.movedim(1, -1).mul(255).round().div(255)
