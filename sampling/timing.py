"""How long calls take: measured while somebody wants to know, and read only when the report is made.

On the CPU a call is the time between two looks at the clock. On CUDA it lies between two events on the stream that the
call runs on, so nothing waits for the GPU while sampling.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ..comfy_model.network import NativeNetwork


def _nobody(prompt_id: str) -> bool:
    return False


wanted: Callable[[str], bool] = _nobody
"""Whether the calls of a prompt, by its id, are to be timed. Asked once per network and sampling run."""


def want_times(ask: Callable[[str], bool]) -> None:
    """Let ``ask`` decide whose calls are timed."""
    global wanted
    wanted = ask


class CallTimes:
    """The times of one network's calls on one device, in the order in which the calls ended well."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._spans: list[tuple] = []

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Times what is done inside; a call that raises is not counted."""
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def ms(self) -> list[float]:
        """Milliseconds of each call. On CUDA this waits for the last of them to end."""
        return [self._between(*span) for span in self._spans]

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
        if not self._cuda:
            return 1000 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)


class TimesTogether:
    """The times of several, one after another."""

    def __init__(self, parts: Sequence[CallTimes]):
        self._parts = parts

    def ms(self) -> list[float]:
        """Milliseconds of each call."""
        return [ms for part in self._parts for ms in part.ms()]


def timed(times: CallTimes | None) -> contextlib.AbstractContextManager[None]:
    """Times what is done inside, if there is something to put the time into."""
    return _NOTHING if times is None else times.call()


def range_of(network: NativeNetwork) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what opens the range of a network's calls in NVIDIA's profilers; it does nothing on other devices."""
    if network.device.type != "cuda":
        return contextlib.nullcontext
    return partial(named_range, f"Hybrid TRT {network.role.value} {network.label}")


@contextlib.contextmanager
def named_range(name: str) -> Iterator[None]:
    """Names what is done inside for NVIDIA's profilers; for CUDA devices only."""
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
