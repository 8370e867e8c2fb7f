"""Parts of the benchmarks that need no GPU: times of prompts and steps, and the parts of TensorRT 8.6."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
from pack import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import prompts
import tensorrt86


def test_tensorrts_package_is_freed_of_parsers_that_were_not_compiled() -> None:
    kept = "    Builder.__enter__ = common_enter\n"
    code = f"{kept}    UffParser.__enter__ = common_enter\n    CaffeParser.__exit__ = common_exit\n"
    assert tensorrt86.without_old_parsers(code) == kept


def test_a_missing_library_gets_what_is_wanted_of_it_and_nothing_of_the_others() -> None:
    symbols = ["  U cublasCreate_v2@libcublas.so.12", "  U cublasLtCreate@libcublasLt.so.12",
               "  U cudnnCreate@libcudnn.so.8", "  w __cxa_finalize", ""]  # fmt: skip
    found = {library: tensorrt86.wanted_of(symbols, library) for library in tensorrt86.STUBS}
    assert found == {"libcudnn.so.8": ["cudnnCreate"], "libcublasLt.so.12": ["cublasLtCreate"],
                     "libcublas.so.12": ["cublasCreate_v2"]}  # fmt: skip


class FixedClock:
    """A server that takes 70 ms a prompt, 10 ms a step, and 100 ms to decode and save a picture."""

    def __init__(self, latent: Path):
        self.latent = latent

    def queue(self, prompt: prompts.Prompt, timeout: float = 60.0) -> SimpleNamespace:
        taken = 0.07 + 0.01 * prompt["sampler"]["inputs"]["steps"] + 0.1 * ("image" in prompt)
        return SimpleNamespace(ok=True, error=None, seconds=taken, output=lambda *_: (self.latent, None))


def test_a_prompts_time_is_told_apart_from_that_of_its_steps(tmp_path: Path) -> None:
    numpy.save(tmp_path / "latent.npy", numpy.zeros(1))
    memory = contextlib.nullcontext()
    memory.peak = 5.0
    run = prompts.measure(FixedClock(tmp_path / "latent.npy"), memory, 2, None, "native", runs=3)
    assert (run.median_ms, run.sampling_ms, run.step_ms) == (370.0, 270.0, 10.0)
    assert run.to_json()["step_ms"] == 10.0
