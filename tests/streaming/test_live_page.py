"""The live panel: a real Chromium with a fake webcam streams through TRT Stream, and changes it while it runs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from browser import chromium, comfy_page
from comfy_process import ComfyProcess
from engine_page import EnginePage
from hybrid_trt.streaming import pictures
from live_stream import by_stock_nodes, live
from our_routes import ask
from playwright.sync_api import Locator, WebSocket

pytestmark = pytest.mark.browser

FAKE_WEBCAM = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
#: Keep the page's WebSockets from now on where a test can close them.
KEEP_SOCKETS = """() => { const Own = WebSocket; window.opened = [];
    window.WebSocket = class extends Own { constructor(...given) { super(...given); window.opened.push(this); } }; }"""


class Wire:
    """All that goes through the WebSockets of live streams, in order."""

    def __init__(self, page: EnginePage):
        self.sockets: list[WebSocket] = []
        self.sent: list[Any] = []
        self.came: list[Any] = []
        page.page.page.on("websocket", self._opened)

    def _opened(self, socket: WebSocket) -> None:
        if socket.url.endswith("/hybrid_trt/live"):
            self.sockets.append(socket)
            socket.on("framesent", lambda data: self.sent.append(data))
            socket.on("framereceived", lambda data: self.came.append(data))

    def frames(self) -> list[bytes]:
        """The frames that were sent; the index of each is its number."""
        return [data for data in self.sent if isinstance(data, bytes)]

    def pictures(self) -> dict[int, bytes]:
        """The pictures that came, by number."""
        return {struct.unpack_from("<I", data)[0]: data[4:] for data in self.came if isinstance(data, bytes)}

    def told(self) -> list[dict[str, Any]]:
        """The texts that came."""
        return [json.loads(data) for data in self.came if isinstance(data, str)]

    def first_after(self, name: str) -> int:
        """The number of the first frame that was sent after a change of a setting."""
        change = next(i for i, data in enumerate(self.sent) if isinstance(data, str) and name in json.loads(data))
        return sum(isinstance(data, bytes) for data in self.sent[:change])


@pytest.fixture(scope="module")
def opened(comfy: ComfyProcess) -> Iterator[EnginePage]:
    with chromium(*FAKE_WEBCAM) as browser, comfy_page(browser, comfy.url, width=1366, height=900) as page:
        yield EnginePage(page, "live")


@pytest.fixture
def panel(opened: EnginePage) -> Iterator[Locator]:
    """The open panel beside a workflow with TRT Stream."""
    raw = opened.page.page
    opened.page.errors.clear()
    raw.evaluate("prompt => app.loadApiJson(prompt, 'live')", live(steps=1))
    raw.wait_for_function("() => app.graph.nodes.some(n => n.type === 'TRTStream')")
    opened.page.settle()
    raw.get_by_role("button", name="TRT live").click()
    panel = raw.locator(".hybrid-trt-live")
    panel.wait_for()
    for side in ("Width", "Height"):
        panel.get_by_label(side).fill("64")
    yield panel
    raw.get_by_role("button", name="TRT live").click()
    assert not opened.page.errors


def until(opened: EnginePage, wanted: Any, what: str, seconds: int = 40) -> None:
    """Wait for something on the wire."""
    for _ in range(seconds * 20):
        if wanted():
            return
        opened.page.page.wait_for_timeout(50)
    raise AssertionError(
        f"no {what} within {seconds} s; the panel says "
        f"{opened.page.page.locator('.hybrid-trt-live-words').inner_text()!r}"
    )


def alike(jpeg: bytes, frame: bytes, comfy: ComfyProcess, **changed: Any) -> float:
    """The mean difference of a picture from stock nodes' picture of a frame, both as JPEG."""
    wanted = pictures.write(by_stock_nodes(comfy, pictures.read(frame), steps=1, **changed), "jpeg")
    return float((pictures.read(jpeg) - pictures.read(wanted)).abs().mean())


def test_twenty_frames_of_a_webcam_come_back_in_order_and_change_at_once(
    opened: EnginePage, panel: Locator, comfy: ComfyProcess
) -> None:
    wire = Wire(opened)
    opened.shot("before")
    panel.get_by_role("button", name="Start with webcam").click()
    until(opened, lambda: len(wire.pictures()) >= 20, "20 pictures")
    opened.shot("running")
    panel.get_by_text("pictures a second").wait_for()
    for label, value, change in [
        ("Seed", "123", {"seed": 123}),
        ("Strength 1", "0.25", {"strengths": [0.25]}),
        ("Prompt", "a dog in snow", {"prompt": "a dog in snow"}),
    ]:
        panel.get_by_label(label, exact=True).fill(value)
        until(opened, lambda change=change: {"changed": change} in wire.told(), f"answer to {change}")
        until(
            opened, lambda change=change: max(wire.pictures()) > wire.first_after(*change) + 1, f"picture with {change}"
        )
    panel.get_by_role("button", name="Stop").click()
    until(opened, lambda: ask(comfy, "POST", "/live/token")[0] == 409, "end")
    panel.get_by_text("Stopped.").wait_for()

    numbers = [struct.unpack_from("<I", data)[0] for data in wire.came if isinstance(data, bytes)]
    assert numbers == sorted(set(numbers))
    assert len(wire.frames()) <= 1.3 * len(numbers), "the page sends no faster than pictures come"
    frames, came = wire.frames(), wire.pictures()
    seed, strength, prompt = (wire.first_after(name) for name in ("seed", "strengths", "prompt"))
    changed: dict[str, Any] = {}
    for number, change in [
        (5, {}),
        (seed, {"seed": 123}),
        (strength, {"strength": 0.25}),
        (prompt, {"prompt": "a dog in snow"}),
    ]:
        number = next(n for n in range(number, number + 3) if n in came)  # two frames later at most
        if change:
            assert alike(came[number], frames[number], comfy, **changed) > 0.003, "the change is seen"
        changed |= change
        assert alike(came[number], frames[number], comfy, **changed) < 0.002, (number, changed)


@pytest.mark.fault("the page's connection to a live stream breaks", see="it is made again; the stream waits")
def test_a_broken_connection_is_made_again_and_an_interrupt_ends_all(
    opened: EnginePage, panel: Locator, comfy: ComfyProcess
) -> None:
    wire = Wire(opened)
    opened.page.page.evaluate(KEEP_SOCKETS)
    panel.get_by_role("button", name="Start with webcam").click()
    until(opened, lambda: len(wire.pictures()) >= 2, "pictures")
    opened.page.page.evaluate("() => opened.at(-1).close()")
    panel.get_by_text("trying again").wait_for()
    before = len(wire.came)
    until(opened, lambda: len(wire.sockets) == 2 and len(wire.came) > before + 3, "picture of the second connection")
    panel.get_by_text("Running").wait_for()
    comfy.interrupt()
    panel.get_by_text("was interrupted").wait_for()
    opened.shot("interrupted")
    assert panel.locator("video").evaluate("video => video.srcObject") is None, "the camera is off"
    panel.get_by_role("button", name="Start with webcam").wait_for()


@pytest.mark.fault("the page cannot reach a live stream for some seconds",
                   see="it tries for as long as the stream waits")
def test_a_connection_is_tried_for_as_long_as_its_stream_waits(opened: EnginePage, panel: Locator) -> None:
    wire, raw = Wire(opened), opened.page.page
    raw.evaluate(KEEP_SOCKETS)
    panel.get_by_role("button", name="Start with webcam").click()
    until(opened, lambda: len(wire.pictures()) >= 2, "pictures")
    raw.set_viewport_size({"width": 1366, "height": 700})
    pace, camera = (panel.locator(part).bounding_box() for part in (".hybrid-trt-live-pace", "video"))
    assert pace["y"] + pace["height"] <= camera["y"], "the camera covers no words"
    opened.shot("camera")
    raw.set_viewport_size({"width": 1366, "height": 900})
    raw.route("**/hybrid_trt/live/token", lambda route: route.abort())
    raw.evaluate("() => opened.at(-1).close()")
    raw.wait_for_timeout(3500)
    raw.unroute("**/hybrid_trt/live/token")
    errors = [text for text in opened.page.errors if "ERR_FAILED" not in text]
    opened.page.errors[:] = errors  # the browser tells of the requests that were kept from the server
    before = len(wire.came)
    until(opened, lambda: len(wire.came) > before + 3, "picture of a later connection")
    panel.get_by_role("button", name="Stop").click()
    panel.get_by_text("Stopped.").wait_for()


def test_a_workflow_that_takes_no_live_frames_is_not_run(
    opened: EnginePage, panel: Locator, comfy: ComfyProcess
) -> None:
    opened.page.page.evaluate("() => app.graph.clear()")
    panel.get_by_role("button", name="Start with webcam").click()
    panel.get_by_text("has no TRT Stream that takes live frames").wait_for()
    opened.shot("no-node")
    assert comfy.get("/queue") == {"queue_running": [], "queue_pending": []}


def test_a_stream_that_is_stopped_before_it_begins_never_begins(
    opened: EnginePage, panel: Locator, comfy: ComfyProcess
) -> None:
    comfy.free()  # so that its models have to be loaded
    wire, before = Wire(opened), set(comfy.get("/history"))
    panel.get_by_role("button", name="Start with webcam").click()
    panel.get_by_text("Starting TRT Stream").wait_for()
    panel.get_by_role("button", name="Stop").click()
    panel.get_by_text("Stopped.").wait_for()
    opened.page.page.wait_for_timeout(1000)  # the page may be about to queue it, or not queue it any more
    queued = ("queue_running", "queue_pending")
    until(opened, lambda: not any(comfy.get("/queue")[name] for name in queued), "end of the prompt")
    for name, entry in comfy.get("/history").items():
        ends = [message for message, _ in entry["status"]["messages"]]
        assert name in before or "execution_interrupted" in ends, "it is no error"
    assert wire.frames() == []


def test_a_workflow_that_fails_before_its_stream_opens_is_told(
    opened: EnginePage, panel: Locator, comfy: ComfyProcess
) -> None:
    broken = comfy.base / "models" / "checkpoints" / "broken.safetensors"
    broken.write_bytes(b"none")
    try:
        prompt = live() | {"load": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": broken.name}}}
        opened.page.page.evaluate("prompt => app.loadApiJson(prompt, 'live')", prompt)
        opened.page.settle()
        panel.get_by_role("button", name="Start with webcam").click()
        panel.get_by_text("ended before its TRT Stream took frames").wait_for(timeout=60_000)
        opened.shot("failed")
        assert panel.locator("video").evaluate("video => video.srcObject") is None, "the camera is off"
    finally:
        broken.unlink()


def test_a_screen_is_streamed_too(opened: EnginePage, panel: Locator) -> None:
    wire = Wire(opened)
    panel.get_by_role("button", name="Start with screen").click()
    until(opened, lambda: len(wire.pictures()) >= 2, "pictures")
    panel.get_by_role("button", name="Stop").click()
    panel.get_by_text("Stopped.").wait_for()
