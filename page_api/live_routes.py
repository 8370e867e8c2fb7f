"""Live frames over a WebSocket, for the page and for other programs.

A client asks for the session's token, opens the WebSocket, and sends it in its first message, for browsers send no
headers of ours there. Then each binary message is a frame, and each text changes settings. Pictures come back behind
4 bytes with the number of their frame (little endian), counted from 0 on this connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import WSMsgType, web
from server import PromptServer

from ..engine_library import schema
from ..engine_library.schema import MalformedInput
from ..streaming import live, pictures
from ..streaming.frames import Changes
from ..streaming.live import Busy, LiveSession, given
from ..streaming.pictures import FORMATS, BadFrame
from .http import PREFIX, Refused, answer, changes, check_origin, reads, strict_json

log = logging.getLogger(__name__)

EVENT = "hybrid_trt.live"
"""Tells every page that a node's live session has opened or ended."""
FIRST_MESSAGE_WITHIN = 10.0
MAX_FIRST = 64 << 10
"""Most bytes that are read of a client that has shown no token."""
HEARTBEAT = 20.0
"""Seconds between two pings: a client that does not answer is gone."""
SEND_WITHIN = 10.0
"""Seconds for sending a message: a client that takes longer is gone."""
ENDED, REFUSED = 1000, 1008
"""Codes for closing a WebSocket."""
MAX_TEXT = 64 << 10
MAX_PROMPT = 10_000
_UNSHOWN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that prompts may not have; line ends are allowed."""
NO_STREAM = "No TRT Stream runs live now; connect no frames to the node and run the workflow."


def register() -> None:
    """Add the routes to ComfyUI's server."""
    if PromptServer.instance is None:
        return
    PromptServer.instance.routes.post(f"{PREFIX}/live/token")(_token)
    PromptServer.instance.routes.get(f"{PREFIX}/live")(_connect)
    live.watch(lambda node, opened: PromptServer.instance.send_sync(EVENT, {"node": node, "open": opened}))


@changes
async def _token(_request: web.Request) -> web.Response:
    """Send the token of the running stream. It changes nothing, yet only ComfyUI's own page may read it."""
    session = next(iter(live.sessions()), None)
    if session is None:
        raise Refused(409, NO_STREAM)
    return answer({"token": session.token, "node": session.node})


@reads
async def _connect(request: web.Request) -> web.StreamResponse:
    check_origin(request)
    socket = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=pictures.MAX_BYTES, compress=False)
    if not socket.can_prepare(request):
        raise Refused(400, "This is the address of a WebSocket, and the request opens none; nothing was done.")
    door = Door(request)
    await socket.prepare(request)
    try:
        session, hello = await _first_message(socket)
        connection = Connection(socket, session, hello)
        door.open()
    except (Busy, Refused) as refusal:
        await _goodbye(socket, str(refusal), REFUSED)
        return socket
    try:
        await connection.serve()
    except Exception:
        log.exception("Hybrid TRT: a live connection failed, so it ends; its client may connect again")
    finally:
        session.leave(connection.client)
        if not socket.closed and request.transport is not None:
            request.transport.abort()  # a client that takes no messages takes no goodbye either
    return socket


class Door:
    """Stands before the protocol of a connection until its client has shown a token, and reads little of it."""

    def __init__(self, request: web.Request):
        self._protocol, self._transport, self._left = request.protocol, request.transport, MAX_FIRST
        if self._transport is not None:
            self._transport.set_protocol(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self._transport.pause_reading()
        self._protocol.data_received(data)

    def open(self) -> None:
        """Let everything through from now on."""
        if self._transport is not None:
            self._transport.set_protocol(self._protocol)
            self._transport.resume_reading()


async def _first_message(socket: web.WebSocketResponse) -> tuple[LiveSession, Hello]:
    try:
        message = await socket.receive(FIRST_MESSAGE_WITHIN)
    except asyncio.TimeoutError:
        raise Refused(
            408,
            f"No first message of {MAX_FIRST >> 10} KB at most came within {FIRST_MESSAGE_WITHIN:g} s, so the "
            "connection ends.",
        ) from None
    if message.type is not WSMsgType.TEXT:
        raise Refused(400, "The first message is no text with the stream's token, so the connection ends.")
    try:
        hello = read_hello(message.data)
    except MalformedInput as error:
        raise Refused(400, f"The first message was not understood: {error}; the connection ends.") from None
    session = live.session_of(hello.token)
    if session is None:
        raise Refused(403, "This is not the token of a stream that runs, so the connection ends; ask for it again.")
    return session, hello


async def _goodbye(socket: web.WebSocketResponse, text: str, code: int) -> None:
    """Tell why the connection ends, and end it: the reason of a close has room for few words, hence the message."""
    with suppress(ConnectionError, asyncio.TimeoutError):
        await asyncio.wait_for(socket.send_str(strict_json({"ended" if code == ENDED else "error": text})), SEND_WITHIN)
        await asyncio.wait_for(socket.close(code=code), SEND_WITHIN)


class Connection:
    """A client at its WebSocket: frames come in, pictures go out; of each, one waits at most."""

    def __init__(self, socket: web.WebSocketResponse, session: LiveSession, hello: Hello):
        self.socket, self.session, self.format = socket, session, hello.format
        self._frame = (0, b"")
        self._frame_came, self._news = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        self.client = session.join(lambda: loop.call_soon_threadsafe(self._news.set))

    async def serve(self) -> None:
        """Serve until the client or the session ends."""
        more = {"steps_as_batch": True} if self.session.steps_as_batch else {}
        await self._tell({"ready": given(self.session.now), **more})
        tasks = [asyncio.create_task(part()) for part in (self._receive, self._unpack, self._send)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, ConnectionError | asyncio.TimeoutError):
                raise error

    async def _receive(self) -> None:
        async for message in self.socket:
            if message.type is WSMsgType.BINARY:
                self._frame = (self.session.count(), message.data)
                self._frame_came.set()
            elif message.type is WSMsgType.TEXT:
                await self._change(message.data)

    async def _change(self, text: str) -> None:
        try:
            wanted = read_message(text, self.session.now)
        except MalformedInput as error:
            await self._tell({"error": f"The message was left out: {error}."})
            return
        if wanted is None:
            self.session.stop()
            return
        self.session.change(self.client, wanted)
        await self._tell({"changed": given(wanted)})

    async def _unpack(self) -> None:
        """Hand on the newest frame; frames that come while another is unpacked replace each other."""
        while True:
            await self._frame_came.wait()
            self._frame_came.clear()
            number, data = self._frame
            try:
                self.session.put(self.client, number, await asyncio.to_thread(pictures.read, data))
            except BadFrame as error:
                await self._tell({"error": str(error)})

    async def _send(self) -> None:
        """Send the newest picture whenever there is one, why a change was left out, and the end."""
        while True:
            await self._news.wait()
            self._news.clear()
            if why := self.client.refused:
                self.client.refused = ""
                await self._tell({"error": why})
            ended = self.client.ended  # read before the picture is taken, which then is the last picture
            if (taken := self.session.take(self.client)) is not None:
                number, picture = taken
                data = await asyncio.to_thread(pictures.write, picture, self.format)
                await asyncio.wait_for(self.socket.send_bytes(struct.pack("<I", number) + data), SEND_WITHIN)
            if ended:
                await _goodbye(self.socket, ended, ENDED)
                return

    async def _tell(self, data: dict[str, Any]) -> None:
        await asyncio.wait_for(self.socket.send_str(strict_json(data)), SEND_WITHIN)


@dataclass(frozen=True)
class Hello:
    """First message of a client: the token of the session, and the form that it wants pictures in."""

    token: str
    format: str


def read_hello(text: str) -> Hello:
    """Read the first message: {"token": ..., "format": "jpeg", "png" or "raw"}.

    Raises:
        MalformedInput: it is another message.
    """
    data = schema.mapping(_loads(text), "the first message", ("token",), ("format",))
    kind = schema.one_of(data.get("format", "jpeg"), "format", FORMATS)
    return Hello(schema.text(data["token"], "token", 100), kind)


def read_message(text: str, now: Changes) -> Changes | None:
    """Read a later message: settings by name, or {"stop": true}, which is None. ``now`` has the present settings.

    Raises:
        MalformedInput: a value is wrong, or its setting cannot be changed here.
    """
    data = schema.mapping(_loads(text), "the message", (), (*_READ, "stop"))
    if "stop" in data:
        if data["stop"] is not True or len(data) > 1:
            raise MalformedInput("stop is true, and comes alone")
        return None
    return Changes(**{name: _read(name, value, given(now)) for name, value in data.items()})


def _loads(text: str) -> Any:
    if len(text) > MAX_TEXT:
        raise MalformedInput(f"it has more than {MAX_TEXT} characters")
    return schema.loads(text)


def _read(name: str, value: object, now: Mapping[str, Any]) -> Any:
    if name not in now:
        raise MalformedInput(_FIXED.get(name, f"{name} cannot be changed on this TRT Stream"))
    read = _READ[name](value, name)
    if name == "strengths" and len(read) != len(now["strengths"]):
        raise MalformedInput(f"strengths has {len(read)} numbers, and this stream has {len(now['strengths'])}")
    return read


def _prompt(value: object, what: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_PROMPT or _UNSHOWN.search(value):
        raise MalformedInput(f"{what} is no text of at most {MAX_PROMPT} characters")
    return value


_NO_CLIP = "a prompt needs a text encoder: connect CLIP to TRT Stream"
_FIXED = {"prompt": _NO_CLIP, "negative": _NO_CLIP}
_READ: dict[str, Callable[[object, str], Any]] = {
    "prompt": _prompt,
    "negative": _prompt,
    "strengths": lambda value, what: tuple(
        schema.sequence(value, what, 16, lambda one, name: float(schema.number(one, name, 0, 10)))
    ),
    "seed": lambda value, what: schema.integer(value, what, 0, (1 << 64) - 1),
    "steps": lambda value, what: schema.integer(value, what, 1, 8),
    "denoise": lambda value, what: float(schema.number(value, what, 0, 1)),
    "cfg": lambda value, what: float(schema.number(value, what, 0, 30)),
}
