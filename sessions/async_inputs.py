"""Inputs of a call that another stream still computes, and where a recorded network waits for them.

Residuals are needed in a UNet's second half alone. A network that was compiled to say where it needs such inputs is
recorded with a *gate* in that place: the graph's first half then runs beside the ControlNets that compute them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch


def wait_for(ready: torch.cuda.Event, stream: torch.cuda.Stream, tensors: Iterable[torch.Tensor]) -> None:
    """Let the current stream go on once an event of another one has come, and read these tensors of that one."""
    here = torch.cuda.current_stream(stream.device)
    here.wait_event(ready)
    for tensor in tensors:
        tensor.record_stream(here)


class WaitPoint:
    """Point at which a graph waits for late inputs: each replay waits for the event as it was recorded last.

    Attributes:
        passed: whether what was recorded has such a place.
    """

    def __init__(self, event: torch.cuda.Event):
        self.event = event
        self.passed = False

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
        self.passed = True


_gate: ContextVar[WaitPoint | None] = ContextVar("hybrid_trt_gate", default=None)


@contextmanager
def at_gate(gate: WaitPoint | None) -> Iterator[None]:
    """Inside, this thread's networks wait at a gate where they need late inputs."""
    token = _gate.set(gate)
    try:
        yield
    finally:
        _gate.reset(token)


def wait_at_gate() -> None:
    """Late inputs are needed from here on; without a gate they are there already."""
    gate = _gate.get()
    if gate is not None:
        gate.wait()
