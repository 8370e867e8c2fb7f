"""Room on the GPU for a build: ComfyUI unloads its models, at a moment when no prompt is computing with them.

A prompt that runs is waited for; ComfyUI's own thread unloads between two prompts. A prompt that itself waits for a
build is not: it computes nothing, so its node unloads the models there and then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from comfy import model_management
from server import PromptServer

log = logging.getLogger(__name__)

POLL = 0.2
UNLOAD_SECONDS = 20.0
"""Seconds that ComfyUI gets for unloading; a build goes on without."""
FLAG = "unload_models"
"""ComfyUI's own word for it, as its menu sends it."""

_asked: list[threading.Event] = []
_lock = threading.Lock()
_waiting = 0


def make_room(device: torch.device, tell: Callable[[str], None]) -> None:
    """Have ComfyUI unload its models; called by the thread that builds.

    Args:
        tell: called several times a second; may raise to cancel.
    """
    server = PromptServer.instance
    if server is None:
        return
    queue = server.prompt_queue
    unloaded = threading.Event()
    flagged = False
    with _lock:
        _asked.append(unloaded)
    try:
        while not unloaded.is_set():
            if not _waiting:
                if flagged and FLAG not in queue.get_flags(reset=False):
                    break  # ComfyUI has taken it, between two prompts
                if not flagged:
                    queue.set_flag(FLAG, True)
                    flagged = True
            tell("waiting for the running prompt")
            unloaded.wait(POLL)
        deadline = time.monotonic() + UNLOAD_SECONDS
        while not unloaded.is_set() and _holds_models(device) and time.monotonic() < deadline:
            if queue.get_tasks_remaining():
                break  # the next prompt has begun: it loads models, and ComfyUI sees what the build takes
            tell("waiting for memory")
            unloaded.wait(POLL)
    finally:
        with _lock:
            _asked.remove(unloaded)


@contextmanager
def waiting_prompt() -> Iterator[Callable[[], None]]:
    """Mark that a node waits for a build; yields a function that the node calls meanwhile."""
    global _waiting
    with _lock:
        _waiting += 1
    try:
        yield _give_room
    finally:
        with _lock:
            _waiting -= 1


def _give_room() -> None:
    """Unload all models if a build requested it; called by the prompt's own thread."""
    with _lock:
        asked = [event for event in _asked if not event.is_set()]
    if not asked:
        return
    log.info("Hybrid TRT: ComfyUI unloads its models for a build on the GPU")
    model_management.unload_all_models()
    model_management.soft_empty_cache()
    for event in asked:
        event.set()


def _holds_models(device: torch.device) -> bool:
    return any(entry.device == device for entry in list(model_management.current_loaded_models))
