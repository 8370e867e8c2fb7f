"""Live frames over the WebSocket of a real server: order, newest frame first, and everything that is refused."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import weakref
import zlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import folder_paths
import numpy
import pytest
from comfy_process import ComfyProcess
from hybrid_trt.page_api.live_routes import MAX_FIRST, Connection, Hello
from hybrid_trt.streaming import live, pictures
from hybrid_trt.streaming.frames import Changes
from live_client import Client, double, image, joined, opened, run_client, run_stream, same
from our_routes import ask
from PIL import Image

from nodes import LoadImage


@pytest.mark.parametrize("sent", ["raw", "png", "jpeg"])
@pytest.mark.parametrize("wanted", ["raw", "png", "jpeg"])
def test_each_picture_comes_back_with_its_number(comfy: ComfyProcess, sent: str, wanted: str) -> None:
    async def act(client: Client) -> None:
        for n in range(3):
            number, picture = await client.shown(image(n, 96, 64), sent)
            assert number == n
            if "jpeg" in (sent, wanted):
                assert (picture - (1 - image(n, 96, 64))).abs().mean() < 0.02
            else:
                assert same(picture, 1 - image(n, 96, 64))

    assert run_client(comfy, double(), act, format=wanted).output("stream", "numbers") == [0, 1, 2]


def test_the_newest_frame_wins_and_the_order_stays(comfy: ComfyProcess) -> None:
    came: list[int] = []

    async def act(client: Client) -> None:
        for n in range(60):
            await client.frame(image(n))
            await asyncio.sleep(0.01)
        while not came or came[-1] != 59:
            number, picture = await client.picture()
            assert same(picture, 1 - image(number)), "each picture is of the frame that its number names"
            came.append(number)

    history = run_client(comfy, double(seconds=0.2), act)
    assert came == sorted(set(came))
    assert 2 <= len(came) < 60, "a frame takes 200 ms, and they came faster: most are dropped"
    assert history.output("stream", "numbers") == came
    assert history.output("stream", "counts") == [{"received": 60, "taken": len(came), "answered": len(came)}]


@pytest.mark.fault("a live client takes pictures more slowly than they are made",
                   see="the newest picture; the stream does not wait")
def test_a_slow_client_gets_the_newest_picture_and_holds_up_nothing(comfy: ComfyProcess) -> None:
    came: list[int] = []

    async def act(client: Client) -> None:
        for n in range(60):
            await client.frame(image(n, 1024, 512))
            await asyncio.sleep(0.02)
        while not came or came[-1] != 59:
            came.append((await client.picture())[0])

    history = run_client(comfy, double(), act)
    assert came == sorted(set(came))
    assert len(came) < len(history.output("stream", "numbers")), "what it did not take in time was replaced"


@pytest.mark.slow
@pytest.mark.fault("a live client never takes its pictures",
                   see="it loses its place after 10 seconds; another may join")
def test_a_client_that_takes_nothing_loses_its_place(comfy: ComfyProcess) -> None:
    async def act(token: str) -> None:
        async with joined(comfy, token) as client:
            client.socket._reader._protocol.pause_reading()  # nothing is read, not even the server's pings
            with suppress(ConnectionError):
                for n in range(1000):
                    await client.frame(image(n % 5, 1024, 512))
                    await asyncio.sleep(0.02)
            async with joined(comfy, token) as other:
                number, picture = await other.shown(image(7))
                assert number == 0
                assert same(picture, 1 - image(7))
                await other.stop()

    assert run_stream(comfy, double(patience=60.0), act).ok


@pytest.mark.fault("a live client is gone in the middle of a stream",
                   see="the stream waits for another, 30 seconds long")
def test_a_client_that_is_gone_makes_room_and_none_of_its_pictures_go_to_the_next(comfy: ComfyProcess) -> None:
    async def act(token: str) -> None:
        async with joined(comfy, token) as client:
            await client.shown(image(0))
            await client.ask({"seed": 5})
            await client.frame(image(1))  # is computed when the client is gone
            await asyncio.sleep(0.7)  # time enough to begin it, and not to end it
            client.socket._response.connection.transport.abort()
        async with joined(comfy, token) as client:
            assert client.told[0]["ready"]["seed"] == 5, "what was changed stays"
            number, picture = await client.shown(image(2))
            assert number == 0
            assert same(picture, 1 - image(2))
            await client.stop()

    assert run_stream(comfy, double(seconds=1.5), act).output("stream", "numbers") == [0, 1, 2]


@pytest.mark.fault("a second client wants to join a live stream",
                   see="it is refused in one sentence; the first goes on")
def test_a_second_client_is_refused_and_the_first_goes_on(comfy: ComfyProcess) -> None:
    async def act(token: str) -> None:
        async with joined(comfy, token) as client:
            async with opened(comfy) as other:
                assert "sends frames to this stream already" in (await other.ask({"token": token}))["error"]
                assert (await other.socket.receive(60)).type is aiohttp.WSMsgType.CLOSE
                assert other.socket.close_code == 1008
            assert (await client.shown(image(0)))[0] == 0
            await client.stop()

    assert run_stream(comfy, double(), act).ok


@pytest.mark.fault("a live client has no token, or one of another stream", see="it is refused in one sentence")
def test_only_the_streams_own_token_opens_it(comfy: ComfyProcess) -> None:
    tokens: list[str] = []

    async def act(token: str) -> None:
        for message, words in [
            ({"token": token[:-1] + ("a" if token[-1] != "a" else "b")}, "not the token"),
            ({"token": ""}, "not the token"),
            ({"token": None}, "not understood"),
            ({}, "has no token"),
            ("{", "no JSON"),
            ([token], "no object"),
            ({"token": token, "format": "gif"}, "none of jpeg, png, raw"),
            ({"token": token, "more": 1}, "unknown"),
            *(({"token": old}, "not the token") for old in tokens),
        ]:
            async with opened(comfy) as client:
                assert words in (await client.ask(message))["error"]
                assert (await client.socket.receive(60)).type is aiohttp.WSMsgType.CLOSE
        async with opened(comfy) as client:
            await client.frame(image(0))
            assert "no text with the stream's token" in (await client.text())["error"]
        tokens.append(token)
        async with joined(comfy, token) as client:
            await client.stop()

    for _ in range(2):
        assert run_stream(comfy, double(), act).ok
    assert tokens[0] != tokens[1]


@pytest.mark.fault("a page of another site opens a live stream", see="it is refused")
def test_pages_of_other_sites_get_neither_the_token_nor_a_connection(comfy: ComfyProcess) -> None:
    here = f"127.0.0.1:{comfy.port}"
    foreign = [
        {"Origin": "http://evil.example"},
        {"Origin": "http://evil.example", "Host": "my-computer"},
        {"Origin": "http://evil.example", "Host": "evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://{here}", "Sec-Fetch-Site": "cross-site"},
    ]

    async def act(token: str) -> None:
        for headers in foreign:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with opened(comfy, headers):
                    pass
            assert refused.value.status == 403, headers
            assert ask(comfy, "POST", "/live/token", headers={"X-Hybrid-TRT": "1"} | headers)[0] == 403, headers
        for headers in ({}, {"Origin": f"http://{here}"}):
            assert ask(comfy, "POST", "/live/token", headers=headers)[0] == 403, "without our header"
        assert ask(comfy, "GET", "/live/token")[0] in (404, 405)
        assert token not in json.dumps(comfy.get("/queue"))
        async with opened(comfy, {"Origin": f"http://{here}"}) as client:
            assert "ready" in await client.ask({"token": token})
            await client.stop()

    assert run_stream(comfy, double(), act).ok


@pytest.mark.fault("a live client sends values that are none", see="one sentence; the stream goes on as it was")
def test_wrong_values_are_told_and_the_stream_goes_on(comfy: ComfyProcess) -> None:
    told: list[tuple[Any, str]] = [
        ("{", "no JSON"), ("[]", "no object"), ({"size": 3}, "unknown"),
        ({"steps": 0}, "from 1 to 8"), ({"steps": 9}, "from 1 to 8"), ({"steps": 2.5}, "no whole number"),
        ({"steps": True}, "no whole number"), ({"denoise": 1.1}, "from 0 to 1"), ('{"cfg": NaN}', "no JSON"),
        ('{"cfg": 1e999}', "no JSON"), ({"seed": -1}, "no whole number"), ({"seed": 2**64}, "no whole number"),
        ({"prompt": 5}, "no text"), ({"prompt": "\0"}, "no text"), ({"prompt": "a" * 10001}, "no text"),
        ({"strengths": [1]}, "has 1 numbers"), ({"strengths": [1, 11]}, "from 0 to 10"),
        ({"strengths": "11"}, "no list"), ({"negative": "ugly"}, "connect CLIP"), ({"stop": 1}, "comes alone"),
        ({"stop": True, "seed": 1}, "alone"), ("[" * 5000, "nested"), ({"prompt": "a" * 70000}, "characters"),
    ]  # fmt: skip

    async def act(client: Client) -> None:
        for message, words in told:
            answer = await client.ask(message)
            assert words in answer["error"], (message, answer)
            assert answer["error"].endswith(".")
        assert (await client.shown(image(0)))[0] == 0

    history = run_client(comfy, double(), act)
    assert "changes" not in history.outputs["stream"] or history.output("stream", "changes") == []


def png_of(width: int, height: int) -> bytes:
    """A PNG whose pixels are a few bytes of nothing, whatever size it says."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.fault("a live client sends frames that are none, or too large", see="one sentence; the frame is left out")
def test_frames_that_are_none_are_told_and_the_stream_goes_on(comfy: ComfyProcess) -> None:
    whole, raw = pictures.write(image(0), "jpeg"), pictures.write(image(0), "raw")
    told = [
        (b"", "can be read"), (b"GIF89a" + bytes(100), "can be read"), (whole[:300], "can be read"),
        (whole[:20], "can be read"), (png_of(64, 64), "can be read"), (png_of(60000, 60000), "can be read"),
        (png_of(9000, 9000), "this one has 9000x9000"), (png_of(63, 64), "this one has 63x64"),
        (raw[:-1], "3 bytes"), (raw + b"0", "3 bytes"), (raw[:8], "whole header"),
        (b"RGB8" + struct.pack("<II", 2**32 - 1, 2**32 - 1), "64 to 2048"), (b"RGB8" + bytes(8), "64 to 2048"),
        (b"RGB8" + struct.pack("<II", 3840, 2160) + bytes(3 * 3840 * 2160), "this one has 3840x2160"),
    ]  # fmt: skip

    async def act(token: str) -> None:
        async with joined(comfy, token) as client:
            for data, words in told:
                await client.socket.send_bytes(data)
                assert words in (await client.text())["error"], data[:20]
            number, picture = await client.shown(image(1))
            assert number == 14, "frames that were left out are counted"
            assert same(picture, 1 - image(1))
            with suppress(ConnectionError):  # the server may end the connection before it has all
                await client.socket.send_bytes(bytes(pictures.MAX_BYTES + 1))
                ended = await client.socket.receive(60)
                assert ended.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
        async with joined(comfy, token) as client:
            await client.stop()

    assert run_stream(comfy, double(), act).output("stream", "numbers") == [14]


def packed(kind: str, orientation: int = 1, **options: Any) -> bytes:
    """A picture of a ramp in a mode of PIL, with an EXIF orientation."""
    ramp = numpy.linspace(0, 1, 96 * 64).reshape(64, 96)
    if kind == "I;16":
        pixels = Image.fromarray((ramp * 65535).astype(numpy.uint16))
    else:
        pixels = Image.fromarray((ramp * 255).astype(numpy.uint8)).convert("RGB").convert(kind)
    exif, file = Image.Exif(), BytesIO()
    exif[0x0112] = orientation
    pixels.save(file, exif=exif, **options)
    return file.getvalue()


@pytest.mark.parametrize("data", [
    packed("I;16", format="PNG"),
    *(packed(mode, format="PNG") for mode in ("L", "LA", "RGBA", "P", "1")),
    *(packed("RGB", orientation, format="JPEG", quality=100, subsampling=0) for orientation in (1, 3, 6, 8)),
], ids=["16-bit grey", "L", "LA", "RGBA", "P", "1", "as it is", "upside down", "to the right", "to the left"])
def test_a_frame_is_read_as_comfyuis_loader_reads_it(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frame").write_bytes(data)
    monkeypatch.setattr(folder_paths, "get_annotated_filepath", lambda _name: str(tmp_path / "frame"))
    wanted = LoadImage().load_image("frame")[0].float()
    found = pictures.read(data)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 2.01 / 255, "two decoders of JPEG"
    assert len(found.unique()) > 1, "neither white nor black"


def test_an_interrupt_and_an_error_end_the_connection_with_words(comfy: ComfyProcess) -> None:
    async def interrupted(token: str) -> None:
        async with joined(comfy, token) as client:
            await client.shown(image(0))
            await asyncio.to_thread(comfy.interrupt)
            assert "interrupted" in (await client.text())["ended"]
            assert (await client.socket.receive(60)).type is aiohttp.WSMsgType.CLOSE

    async def failed(token: str) -> None:
        async with joined(comfy, token) as client:
            await client.shown(image(0))
            await client.frame(image(1))
            assert "ended with an error" in (await client.text())["ended"]

    assert run_stream(comfy, double(), interrupted).status == "interrupted"
    history = run_stream(comfy, double(fail_at=1), failed)
    assert (history.status, history.error) == ("error", "RuntimeError: the double was told to fail")
    told = {"error": "No TRT Stream runs live now; connect no frames to the node and run the workflow."}
    assert ask(comfy, "POST", "/live/token") == (409, told)


def test_a_stream_without_a_client_ends_by_itself(comfy: ComfyProcess) -> None:
    async def nobody(token: str) -> None:
        await asyncio.sleep(0)

    async def leaves(token: str) -> None:
        async with joined(comfy, token) as client:
            await client.shown(image(0))
            await asyncio.sleep(2.5)  # longer than a stream waits for a client; this one is there

    assert run_stream(comfy, double(patience=2.0), nobody).ok
    assert run_stream(comfy, double(patience=2.0), leaves).output("stream", "numbers") == [0]


def resident(comfy: ComfyProcess) -> int:
    """Return the MB of memory that a server has in use."""
    status = Path(f"/proc/{comfy.pid}/status").read_text(encoding="utf-8")
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) >> 10


@pytest.mark.fault("many programs without a token send huge first messages",
                   see="nothing is read beyond 64 KB; they are refused after 10 seconds")
def test_first_messages_are_no_way_to_fill_the_memory(comfy: ComfyProcess) -> None:
    async def send() -> None:
        with suppress(ConnectionError, asyncio.TimeoutError):
            async with opened(comfy) as client:
                await asyncio.wait_for(client.socket.send_bytes(bytes(MAX_FIRST * 400)), 4)

    async def watched() -> int:
        before, most = resident(comfy), 0
        sending = asyncio.gather(*(send() for _ in range(12)))
        while not sending.done():
            most = max(most, resident(comfy))
            await asyncio.sleep(0.1)
        return most - before

    assert asyncio.run(watched()) <= 60
    assert comfy.get("/queue"), "it serves on"


def test_a_frame_that_comes_with_the_first_message_is_not_lost(comfy: ComfyProcess) -> None:
    async def act(token: str) -> None:
        async with opened(comfy) as client:
            await client.socket.send_str(json.dumps({"token": token, "format": "raw"}))
            await client.frame(image(0, 1024, 1024))
            assert "ready" in await client.text()
            assert same((await client.picture())[1], 1 - image(0, 1024, 1024))
            await client.stop()

    assert run_stream(comfy, double(), act).output("stream", "numbers") == [0]


@pytest.mark.fault("a live stream is asked for as a page is", see="an error in one sentence")
def test_a_request_that_opens_no_websocket_is_told_so(comfy: ComfyProcess) -> None:
    for headers in ({}, {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "1"}):
        status, told = ask(comfy, "GET", "/live", headers=headers)
        assert status == 400
        assert "WebSocket" in told["error"]


@pytest.mark.slow
def test_two_thousand_frames_leave_no_memory_behind(comfy: ComfyProcess) -> None:
    used: list[int] = []

    async def act(client: Client) -> None:
        for n in range(2000):
            await client.shown(image(n % 7, 256, 256))
            if n % 100 == 99:
                used.append(resident(comfy))

    assert run_client(comfy, double(), act).ok
    assert max(used[10:]) - max(used[:10]) <= 10, used


def test_a_client_that_still_takes_a_picture_when_the_stream_ends_gets_the_last_one_too() -> None:
    session, sent = live.LiveSession("1", Changes(), 5.0), []

    class Socket:
        """Takes so long for the first picture that the stream ends meanwhile, with another one."""

        async def send_bytes(self, data: bytes) -> None:
            sent.append(struct.unpack_from("<I", data)[0])
            if sent == [0]:
                session.give(1, image(1))
                session.end("The stream has ended.")

        async def send_str(self, text: str) -> None:
            sent.append(json.loads(text))

        async def close(self, code: int) -> None:
            sent.append(code)

    async def serve() -> None:
        connection = Connection(Socket(), session, Hello(session.token, "raw"))
        session.give(0, image(0))
        await asyncio.wait_for(connection._send(), 10)

    asyncio.run(serve())
    assert sent == [0, 1, {"ended": "The stream has ended."}, 1000]


def test_a_gpu_has_one_live_stream_at_a_time_and_an_end_frees_all() -> None:
    with live.open_session("1", Changes(seed=1), 5.0) as session:
        with pytest.raises(live.Busy, match="Another TRT Stream"), live.open_session("2", Changes(), 5.0):
            pass
        client = session.join(lambda: None)
        frame = image(0)
        session.put(client, session.count(), frame)
        kept = weakref.ref(frame)
        del frame
        assert kept() is not None
    assert client.ended == "The stream has ended."
    assert live.sessions() == []
    assert kept() is None, "a frame that nobody took is gone"
    with live.open_session("2", Changes(), 5.0):
        pass
