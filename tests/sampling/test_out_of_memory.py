"""A card that stays full, at each moment of a run: the picture is native's, with a reason.

In this process, on the CPU. What raises in the place of a full GPU stands where the real error comes from: the backend
that opens a file, the capture of a CUDA graph, the runner's call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_doubles import gpu_recorder, play_gpu
from hybrid_trt.backends import backends
from hybrid_trt.engine_library import Library
from hybrid_trt.sessions import gpu_memory
from memory_fixtures import file, library, nothing_loaded
from patched import LIMIT, Patched, load

from sampling import STEPS, error, sample

# fixtures: pytest finds them by name
__all__ = ["file", "library", "nothing_loaded"]


class Full:
    """Raises what a full card does from the given call on; before it, does what it stands in front of."""

    def __init__(self, real: Any, served: int):
        self._real, self._served = real, served

    def __call__(self, *arguments: Any) -> Any:
        self._served -= 1
        if self._served < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._real(*arguments)


@pytest.mark.fault("the card is full and stays so when an engine opens, or in the middle of a run",
                   see="normal speed: *engine failed*; the next run tries again")
@pytest.mark.parametrize(("when", "served"), [("load", 0), ("call", 0), ("call", 2), ("call", STEPS - 1)])
def test_a_card_that_is_full_at_load_or_in_mid_sampling_gives_natives_picture_and_a_reason(
    file: Path, library: Library, monkeypatch: pytest.MonkeyPatch, when: str, served: int
) -> None:
    native, patched = sample(load(file)), Patched(load(file), library)
    if when == "load":
        monkeypatch.setattr(type(backends()["onnxruntime"]), "load", Full(None, 0))
        patched.handle.session.unload()
    else:
        patched.sample()
        runner = patched.handle.session._runner
        monkeypatch.setattr(runner, "run", Full(runner.run, served))
    latent = patched.sample()
    assert error(latent, native) <= LIMIT
    assert patched.counts == (served, STEPS - served)
    assert patched.handle.stats.reasons == {"engine failed": STEPS - served}
    assert gpu_memory.MAKE_ROOM in patched.handle.stats.details["engine failed"]
    assert not patched.handle.session.loaded, "its memory is given back"
    monkeypatch.undo()
    assert error(patched.sample(), native) <= LIMIT
    assert patched.counts == (STEPS, 0), "the next run tries again"


@pytest.mark.fault("the card is full while a CUDA graph is recorded",
                   see="the engine runs unrecorded; *TRT Report* says why")
def test_a_card_that_is_full_while_calls_are_recorded_runs_them_unrecorded_and_says_why(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, patched = sample(load(file)), Patched(load(file), Library([tmp_path]), "torch")
    play_gpu(monkeypatch)
    recorder = gpu_recorder(wait_point=False)
    recorder.error = torch.OutOfMemoryError("CUDA out of memory")
    patched.handle.session.graphs._capture = recorder
    assert error(patched.sample(), native) <= LIMIT
    assert patched.counts == (STEPS, 0)
    assert (recorder.captured, recorder.replayed) == (0, 0)
    assert "CUDA out of memory" in patched.handle.session.graphs.failure
