"""Live frames: a program or a page gives frames while the node runs, and takes their pictures.

The newest frame wins, and so does the newest picture: one of each waits, whatever the speed of either side. A session
has one client at a time; the next may come after it while the node runs. Nothing here knows how either is connected.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from comfy import model_management

from .frames import Changes, Frame

LOOK_EVERY = 0.1
"""Seconds without a frame after which frames in work are finished; a node that waits looks at *Interrupt* as often."""

_sessions: dict[str, LiveSession] = {}
"""The open session of each device."""
_lock = threading.Lock()
_watchers: list[Callable[[str, bool], None]] = []


class Busy(Exception):
    """Somebody else is connected already; the text is a sentence for the user."""


@dataclass
class Counts:
    """Numbers of frames that came, of frames that were computed, and of pictures; other frames were dropped."""

    received: int = 0
    taken: int = 0
    answered: int = 0


@dataclass(eq=False)
class Client:
    """Client that gives frames to a session and takes their pictures; its first frame has the number ``first``."""

    wake: Callable[[], None]
    first: int
    refused: str = ""
    """The sentence on why a change was refused; empty once it is sent."""
    ended: str = ""
    """The sentence that says why the session is over."""


class LiveSession:
    """Frames of one run of a node that takes them live; a ``Source``. All of it may be called from any thread.

    Attributes:
        settings: the settings that may be changed, with the values of the latest frame.
        steps_as_batch: True if pictures come later by as many frames as there are steps, less one.
        stopped: True if its client ended the stream.
        over: why no more frames are taken, a sentence; empty while frames are taken.
    """

    def __init__(self, node: str, settings: Changes, patience: float, steps_as_batch: bool = False):
        self.node, self.settings, self.steps_as_batch = node, settings, steps_as_batch
        self.token = secrets.token_urlsafe(24)
        self.counts = Counts()
        self.stopped = False
        self.over = ""
        self._patience = patience
        self._turn = threading.Condition()
        self._client: Client | None = None
        self._alone_since = time.monotonic()
        self._frame: Frame | None = None
        self._changes: Changes | None = None
        self._picture: tuple[int, torch.Tensor] | None = None

    # the node's side

    def frames(self) -> Iterator[Frame | None]:
        """Yield the newest frame each time, until somebody stops the stream or no client comes.

        Raises:
            comfy.model_management.InterruptProcessingException: the user interrupts the prompt.
        """
        idle = True
        while not self.over:
            frame = self._next()
            if frame is not None or not idle:
                yield frame
            idle = frame is None

    def _next(self) -> Frame | None:
        """Return the newest frame; None if none comes within a moment, or none will any more."""
        model_management.throw_exception_if_processing_interrupted()
        with self._turn:
            if self._frame is None and not self.over:
                self._turn.wait(LOOK_EVERY)
            if self._frame is None or self.over:
                alone = self._client is None and time.monotonic() - self._alone_since > self._patience
                if alone and not self.over:
                    self.over = f"No page or program sent frames for {self._patience:g} s, so the stream ended."
                return None
            frame, changes = replace(self._frame, changes=self._changes), self._changes
            self._frame = self._changes = None
            self.counts.taken += 1
            if changes is not None:
                self.settings = merged(self.settings, changes)
            return frame

    def ready(self) -> bool:
        """Tell whether the next frame is there."""
        with self._turn:
            return self._frame is not None

    def give(self, number: int, picture: torch.Tensor) -> None:
        """Take a picture, shape (1, H, W, 3), on the CPU; it replaces a picture that the client has not taken."""
        with self._turn:
            self.counts.answered += 1
            client = self._client
            if client is None or number < client.first:  # its client has gone
                return
            self._picture = (number, picture)
        client.wake()

    def refuse(self, why: str, settings: Changes) -> None:
        """Tell the client that changes were refused; ``settings`` are the current ones."""
        with self._turn:
            self.settings, client = settings, self._client
            if client is None:
                return
            client.refused = why
        client.wake()

    def end(self, why: str) -> None:
        """End the client's connection; it may still take the last picture."""
        with self._turn:
            self.over, client = self.over or why, self._client
            self._frame = self._changes = None
            self._turn.notify_all()
        if client is not None:
            client.ended = self.over
            client.wake()

    # the client's side

    @property
    def now(self) -> Changes:
        """Return the settings that may be changed, with the next frame's values."""
        with self._turn:
            return self.settings if self._changes is None else merged(self.settings, self._changes)

    def join(self, wake: Callable[[], None]) -> Client:
        """Return a new client; ``wake`` is called from the node's thread when a picture is there or the end has come.

        Raises:
            Busy: there is a client, or the session is over.
        """
        with self._turn:
            if self.over:
                raise Busy(self.over)
            if self._client is not None:
                raise Busy("Another page or program sends frames to this stream already; stop it there first.")
            self._client = Client(wake, self.counts.received)
            return self._client

    def count(self) -> int:
        """Count a frame that has come, and return its number."""
        with self._turn:
            self.counts.received += 1
            return self.counts.received - 1

    def put(self, client: Client, number: int, image: torch.Tensor) -> None:
        """Offer a frame, shape (1, H, W, 3), 0 to 1; it replaces a frame that still waits."""
        with self._turn:
            if client is self._client:
                self._frame = Frame(number, image)
                self._turn.notify_all()

    def change(self, client: Client, changes: Changes) -> None:
        """Change settings from the next frame on."""
        with self._turn:
            if client is self._client:
                self._changes = changes if self._changes is None else merged(self._changes, changes)

    def take(self, client: Client) -> tuple[int, torch.Tensor] | None:
        """Return the newest picture and the number of its frame, counted from the client's first; each only once."""
        with self._turn:
            if client is not self._client:
                return None
            taken, self._picture = self._picture, None
            return taken and (taken[0] - client.first, taken[1])

    def stop(self) -> None:
        """Let the node end after the picture that it computes."""
        with self._turn:
            self.stopped, self.over = True, self.over or "The stream was stopped."
            self._turn.notify_all()

    def leave(self, client: Client) -> None:
        """Make room for another client; changes of settings stay."""
        with self._turn:
            if client is self._client:
                self._client = self._frame = self._picture = None
                self._alone_since = time.monotonic()


def merged(before: Changes, after: Changes) -> Changes:
    """Return settings after both changes."""
    return replace(before, **given(after))


def given(changes: Changes) -> dict[str, Any]:
    """Return the settings that have a value."""
    values = ((field.name, getattr(changes, field.name)) for field in fields(changes))
    return {name: value for name, value in values if value is not None}


@contextmanager
def open_session(
    node: str, settings: Changes, patience: float, steps_as_batch: bool = False
) -> Iterator[LiveSession]:
    """Let a client join for as long as the block lasts; ``settings`` has the settings that may be changed.

    Args:
        patience: seconds to wait for a client, the first or the next.

    Raises:
        Busy: another node streams live on this device.
    """
    session = LiveSession(node, settings, patience, steps_as_batch)
    device = str(model_management.get_torch_device())
    with _lock:
        if device in _sessions:
            raise Busy("Another TRT Stream runs live on this GPU, so this one did not start; stop that one first.")
        _sessions[device] = session
    _tell(node, True)
    try:
        yield session
        session.end("The stream has ended.")
    except model_management.InterruptProcessingException:
        session.end("The stream was interrupted.")
        raise
    finally:
        with _lock:
            del _sessions[device]
        session.end("The stream ended with an error; ComfyUI's page and log say more.")
        _tell(node, False)


def sessions() -> list[LiveSession]:
    """Return the sessions that take frames."""
    with _lock:
        return [session for session in _sessions.values() if not session.over]


def session_of(token: str) -> LiveSession | None:
    """Return the session that a token belongs to."""
    found = (known for known in sessions() if secrets.compare_digest(known.token.encode(), token.encode()))
    return next(found, None)


def watch(watcher: Callable[[str, bool], None]) -> None:
    """Call ``watcher`` with a node's id when its session opens (True) or ends (False)."""
    _watchers.append(watcher)


def _tell(node: str, opened: bool) -> None:
    for watcher in _watchers:
        with suppress(RuntimeError):  # the server's loop is closed: ComfyUI ends
            watcher(node, opened)
