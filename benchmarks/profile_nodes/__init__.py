"""For ``profile_prompt.py`` only: a KSampler that writes down what the GPU and the host did meanwhile."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

with suppress(ImportError):  # its arithmetic is tested without ComfyUI
    from comfy_api.latest import ComfyExtension, io

    from nodes import common_ksampler

Span = tuple[float, float, str]
"""Begin and end in microseconds, and a kernel's name."""

SHORTEST = 20.0
"""Microseconds of a pause that is worth a line."""


def busy(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one span runs."""
    total, end = 0.0, float("-inf")
    for begin, until, _ in sorted(spans):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total


def pauses(spans: Iterable[Span], shortest: float = SHORTEST) -> list[tuple[float, str, str]]:
    """Where nothing runs for so long: microseconds, and the kernels before and after; the longest first."""
    found, end, last = [], None, ""
    for begin, until, name in sorted(spans):
        if end is not None and begin - end >= shortest:
            found.append((begin - end, last, name))
        if end is None or until > end:
            end, last = until, name
    return sorted(found, reverse=True)


def host_calls(events: Iterable[Any], most: int = 25) -> list[dict[str, Any]]:
    """The CUDA calls and operators that took most of the host's time by themselves."""
    count, spent = defaultdict(int), defaultdict(float)
    for event in events:
        count[event.name] += 1
        spent[event.name] += event.self_cpu_time_total / 1000
    names = sorted(spent, key=spent.__getitem__, reverse=True)[:most]
    return [{"call": name[:100], "count": count[name], "ms": round(spent[name], 3)} for name in names]


def figures(events: list[Any], wall_ms: float, steps: int) -> dict[str, Any]:
    """What a profile of one sampling says."""
    on_gpu, on_host = [], []
    for event in events:
        (on_gpu if str(event.device_type).endswith("CUDA") else on_host).append(event)
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in on_gpu]
    idle = pauses(spans)
    return {
        "steps": steps, "wall_ms": round(wall_ms, 3), "kernels": len(spans), "busy_ms": round(busy(spans) / 1000, 3),
        "pauses": len(idle), "pauses_ms": round(sum(length for length, *_ in idle) / 1000, 3),
        "longest_pauses": [{"us": round(length, 1), "after": after[:80], "before": before[:80]}
                           for length, after, before in idle[:40]],
        "host": host_calls(on_host),
    }  # fmt: skip


@contextmanager
def waits(on_gpu: bool) -> Iterator[Counter[str]]:
    """Counts, inside, which lines of Python made the host wait for the GPU, as torch tells them."""
    found: Counter[str] = Counter()
    if not on_gpu:
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found.update(f"{Path(one.filename).parent.name}/{Path(one.filename).name}:{one.lineno}" for one in told
                 if "synchroniz" in str(one.message))


def sampled(name: str, *arguments: Any, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """The latent, and the figures of its sampling."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    synchronise = torch.cuda.synchronize if on_gpu else lambda: None
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        synchronise()
        started = time.perf_counter()
        (latent,) = common_ksampler(*arguments, **settings)
        synchronise()
        wall = (time.perf_counter() - started) * 1000
    with waits(on_gpu) as lines:  # a second sampling: warnings cost time
        common_ksampler(*arguments, **settings)
    told = {"waits": [{"line": line, "count": count} for line, count in lines.most_common()]}
    return latent, {"name": name, **figures(list(found.events()), wall, arguments[2]), **told}


def _node() -> type:
    class ProfiledKSampler(io.ComfyNode):
        """ComfyUI's KSampler (euler, normal), whose figures go to a file."""

        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id="ProfiledKSampler", category="benchmarks", is_output_node=True,
                inputs=[io.Model.Input("model"), io.Conditioning.Input("positive"), io.Conditioning.Input("negative"),
                        io.Latent.Input("latent_image"), io.Int.Input("seed"), io.Int.Input("steps"),
                        io.Float.Input("cfg"), io.String.Input("file")],
                outputs=[io.Latent.Output()])  # fmt: skip

        @classmethod
        def execute(cls, model: Any, positive: Any, negative: Any, latent_image: Any, seed: int, steps: int,
                    cfg: float, file: str) -> io.NodeOutput:  # fmt: skip
            latent, told = sampled(Path(file).stem, model, seed, steps, cfg, "euler", "normal", positive, negative,
                                   latent_image, denoise=1.0)
            Path(file).write_text(json.dumps(told))
            return io.NodeOutput(latent)

    return ProfiledKSampler


async def comfy_entrypoint() -> Any:
    """What ComfyUI asks a pack for."""

    class Extension(ComfyExtension):
        async def get_node_list(self) -> list[type]:
            return [_node()]

    return Extension()
