"""Clocks: CUDA events for the GPU, the host's clock for our own cost, the highest memory use while something runs."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import psutil
import torch


def gpu_ms(call: Callable[[], Any], repeats: int = 30, warm: int = 4) -> dict[str, float]:
    """Median and spread of a call's time by the pack's clock; the pack has been imported."""
    from hybrid_trt.comfy_model import torch_kernels

    return summary(torch_kernels.each_call(call, warm, repeats))


def host_us(call: Callable[[], Any], repeats: int = 50) -> float:
    """Median time that the host spends in a call which only launches work."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(times), 1)


def summary(times: list[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return {"median": round(statistics.median(ordered), 4), "p10": round(ordered[round(last * 0.1)], 4),
            "p90": round(ordered[round(last * 0.9)], 4), "n": len(ordered)}


def matmul_tflops(size: int = 8192) -> float:
    """The rate that this GPU reaches in a large fp16 product of random matrices."""
    a = torch.randn(size, size, device="cuda", dtype=torch.float16)
    b = torch.randn_like(a)
    return 2 * size**3 / gpu_ms(lambda: a @ b, 20)["median"] / 1e9


def kernels(call: Callable[[], Any], most: int = 15) -> list[tuple[str, float, int]]:
    """The kernels that take the most GPU time in a call: name, milliseconds, launches; the sum of all comes first."""
    from torch.profiler import ProfilerActivity, profile

    place = "device" if torch.cuda.is_available() else "cpu"
    with profile(activities=[ProfilerActivity.CUDA if place == "device" else ProfilerActivity.CPU]) as seen:
        call()
    rows = [(one.key[:120], round(getattr(one, f"self_{place}_time_total") / 1000, 3), one.count)
            for one in seen.key_averages() if getattr(one, f"self_{place}_time_total")]  # fmt: skip
    rows.sort(key=lambda row: -row[1])
    return [("all", round(sum(ms for _, ms, _ in rows), 3), sum(n for *_, n in rows)), *rows[:most]]


class PeakMemory:
    """The GPU's memory in use by everyone, in MB: the highest value inside the block, less what was there before."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]  # NVML does not heed it
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)
        self.before = self._used()
        self.peak = 0.0
        self._stop = threading.Event()

    def _used(self) -> float:
        return self._nvml.nvmlDeviceGetMemoryInfo(self._gpu).used / 1e6

    @property
    def used_now(self) -> float:
        """Memory that is in use now, less what was there before, in MB."""
        return round(self._used() - self.before, 1)

    def __enter__(self) -> PeakMemory:
        self.peak = 0.0
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, self._used() - self.before)
            time.sleep(0.005)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = round(max(self.peak, self._used() - self.before), 1)


class MainMemory:
    """The most main memory of this process and its children inside the block, in MB, less what it had before."""

    def __enter__(self) -> MainMemory:
        self.peak, self._before, self._ended = 0.0, self._used(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self.peak = max(self.peak, self._used() - self._before)

    @staticmethod
    def _used() -> float:
        this, total = psutil.Process(), 0
        for process in (this, *this.children(recursive=True)):
            try:
                total += process.memory_info().rss - process.memory_info().shared
            except psutil.Error:
                continue
        return total / 1e6
