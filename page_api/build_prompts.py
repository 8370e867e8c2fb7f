"""The page's prompts that only order builds: to their user the job is the build, so they leave no job behind."""

from __future__ import annotations

import threading
import time

from server import PromptServer

PATIENCE = 3600.0
"""Seconds that a prompt may take from its first engine node to its end: other models may have to be loaded."""
INTERVAL = 0.002

_awaited: set[str] = set()


def forget_when_done(prompt_id: str) -> None:
    """Take a running prompt out of ComfyUI's history once it has ended well, before a page asks for the history.

    ComfyUI has no word for a prompt that is nobody's job; its page tells the end of whatever the history holds. One
    that failed stays, so that the page shows its error.
    """
    queue = PromptServer.instance.prompt_queue if PromptServer.instance is not None else None
    if queue is None or prompt_id in _awaited:
        return
    _awaited.add(prompt_id)

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE
        while prompt_id not in queue.history and time.monotonic() < deadline:
            time.sleep(INTERVAL)
        _awaited.discard(prompt_id)
        with queue.mutex:  # ComfyUI fills the entry in while it holds it
            if (queue.history.get(prompt_id, {}).get("status") or {}).get("status_str") == "success":
                queue.history.pop(prompt_id)

    threading.Thread(target=wait, name="hybrid-trt-order", daemon=True).start()
