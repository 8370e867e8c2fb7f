"""Doubles of a GPU's streams and captured graphs, for whole runs on a CPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from fake_recorder import Recorder
from hybrid_trt.sampling import control_stack
from hybrid_trt.sessions import cuda_graphs


class Stream:
    """In the place of a CUDA stream: all is done when it is asked for."""

    device = torch.device("cpu")

    def wait_event(self, _event: object) -> None: ...

    def wait_stream(self, _stream: object) -> None: ...

    def record_event(self) -> str:
        return "ready"


def gpu_recorder(wait_point: bool) -> Recorder:
    """Return a capture as on a GPU: with a stream of its own and, if wanted, a network that waits in its midst."""
    recorder = Recorder()
    recorder.stream = Stream()
    if wait_point:
        recorder.new_wait_point = lambda: SimpleNamespace(
            passed=True, event=SimpleNamespace(record=lambda: None), wait=lambda: None)
    return recorder


def play_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "current_stream", lambda _device=None: Stream)
    patch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    for module in (control_stack, cuda_graphs):
        patch.setattr(module, "wait_for", lambda _ready, _stream, tensors: list(tensors))
    patch.setattr(control_stack, "_start", lambda sessions, *_, at_least: "now" if len(sessions) >= at_least else None)
