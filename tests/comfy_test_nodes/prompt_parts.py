"""Parts of a prompt's time: a thread looks at the stacks of the server's threads a thousand times a second.

Nothing is wrapped or replaced, so nothing runs in another way than without it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from comfy_api.latest import io

EVERY = 0.001
PACK = f"custom_nodes{os.sep}hybrid-trt"
PARTS = (
    ("queue: waits for a prompt", "execution.py", "get"),
    ("validation", "execution.py", "validate_prompt"),
    ("PNG", "nodes.py", "save_images"), ("image from disk", "nodes.py", "load_image"),
    ("hint", "controlnet.py", "preprocess_image"), ("hint", "utils.py", "common_upscale"),
    ("hint", "hint_cache.py", "make_hints"),
    ("VAE", "sd.py", "decode"), ("VAE", "sd.py", "encode"),
    ("load and prepare models", "sampler_helpers.py", "prepare_sampling"),
    ("load and prepare models", "model_management.py", "load_models_gpu"),
    ("load and prepare models", "model_patcher.py", "cleanup"),
    ("conditioning", "samplers.py", "process_conds"), ("noise", "sample.py", "prepare_noise"),
    ("preview and progress", "latent_preview.py", ""), ("preview and progress", "progress.py", ""),
    ("sampler: steps", "sampling.py", ""), ("sampler: around the steps", "samplers.py", ""),
    ("messages", "server.py", "send_sync"), ("memory: gc", "model_management.py", "soft_empty_cache"),
    ("node cache", "caching.py", ""), ("node execution", "execution.py", "execute"),
    ("between prompts", "main.py", "prompt_worker"),
)
"""Part, file and function (any, if empty); the innermost function of a stack that is named here decides."""


class Looker:
    """Counts, by part and by whose code is innermost, how often a server's thread was there."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.ours: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.looks, self._begun = 0, time.perf_counter()
        self._thread.start()

    def end(self) -> dict[str, Any]:
        """Return milliseconds by part."""
        self._stop.set()
        self._thread.join()
        each = 1000 * (time.perf_counter() - self._begun) / max(1, self.looks)
        parts = {f"{part} ({who})": round(count * each, 1) for (part, who), count in self.counts.most_common()}
        return {"ms": parts, "ours_ms": {name: round(count * each, 1) for name, count in self.ours.most_common(12)}}

    def _look(self) -> None:
        own = threading.get_ident()
        while not self._stop.wait(EVERY):
            self.looks += 1
            for thread, frame in sys._current_frames().items():
                if thread != own and (found := _place(frame)) is not None:
                    part, who, function = found
                    self.counts[part, who] += 1
                    if who == "the pack":
                        self.ours[function] += 1


def _place(frame: FrameType | None) -> tuple[str, str, str] | None:
    """Return part, owner and innermost function of a stack; None if the server's work is not in it."""
    owner = function = part = ""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "-packages" not in file and "/lib/python" not in file:
            if not owner:
                owner = "the pack" if PACK in file else "ComfyUI"
                function = f"{Path(file).name}:{name}"
            base = Path(file).name
            part = part or next((p for p, f, n in PARTS if f == base and n in ("", name)), "")
            if name == "prompt_worker":
                return part, owner, function
            if part == "validation":
                return part, owner, function
        frame = frame.f_back
    return None


_looker: list[Looker] = []


def prompt_parts(action: str, turn: int) -> io.NodeOutput:
    """Begin to look, or end it and tell what was seen."""
    if action == "begin":
        _looker.append(Looker())
        return io.NodeOutput(ui={"parts": []})
    return io.NodeOutput(ui={"parts": [_looker.pop().end()]})


_waits: Counter[str] = Counter()


def host_waits(action: str, turn: int) -> io.NodeOutput:
    """Begin to count where torch waits for the GPU, or end it and tell the lines; torch's events are not seen."""
    if not torch.cuda.is_available():
        return io.NodeOutput(ui={"waits": []})
    if action == "begin":
        _waits.clear()
        warnings.simplefilter("always")
        warnings.showwarning = _count_wait
        torch.cuda.set_sync_debug_mode("warn")
        return io.NodeOutput(ui={"waits": []})
    torch.cuda.set_sync_debug_mode("default")
    return io.NodeOutput(ui={"waits": [[line, count] for line, count in _waits.most_common(40)]})


def _count_wait(message: Warning | str, _category: type, file: str, line: int, *_: Any) -> None:
    if "synchroniz" in str(message):
        frame, names = sys._getframe(1), []
        while frame is not None and len(names) < 6:
            names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        _waits[f"{Path(file).name}:{line} < {' < '.join(names)}"] += 1
