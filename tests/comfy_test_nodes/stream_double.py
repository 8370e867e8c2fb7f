"""Stands for TRT Stream in tests of the transport: it takes live frames, and its picture is the frame's negative."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

from comfy import model_management
from comfy_api.latest import io


def _live() -> tuple[Any, Any]:
    """Return the pack's modules of live sessions and of frames."""
    return tuple(
        next(m for name, m in sys.modules.items() if name.endswith(f".streaming.{one}")) for one in ("live", "frames")
    )


def stream_double(hidden: Any, seconds: float, patience: float, turn: int, fail_at: int) -> io.NodeOutput:
    """Serve live frames, each for some seconds, and tell what became of them."""
    live, frames = _live()
    now = frames.Changes(prompt="a cat", strengths=(1.0, 0.5), seed=turn, steps=1, denoise=0.5, cfg=1.0)
    told = {"numbers": [], "sizes": [], "changes": []}
    with live.open_session(hidden.unique_id, now, patience) as session:
        for frame in session.frames():
            if frame is None:
                continue
            if frame.number == fail_at:
                raise RuntimeError("the double was told to fail")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                model_management.throw_exception_if_processing_interrupted()
                time.sleep(0.005)
            session.give(frame.number, 1 - frame.image)
            told["numbers"].append(frame.number)
            told["sizes"].append(list(frame.image.shape))
            if frame.changes is not None:
                told["changes"].append([frame.number, asdict(frame.changes)])
    return io.NodeOutput(ui={**told, "counts": [asdict(session.counts)]})
