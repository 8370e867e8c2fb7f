"""A worker of a fleet: a process with a secret of its own, which has an engine built where it must, and runs a call.

    fleet_worker.py LIBRARY BACKEND BUILDS [MACHINE SILENCE]

BUILDS is ``builds`` or ``runs``. With MACHINE, the system's locks do not reach other workers.
Prints the steps of its builds, whether an engine served, how far its result is from the normal model, and the seconds
that all of it took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

from pack import import_comfy

import_comfy()

import torch
from builds import small_network
from hybrid_trt.architectures.calls import EngineCall
from hybrid_trt.architectures.shapes import Profile, Range, sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from machine import become
from small_networks import native_call

CALL = {"B": 1, "H": 8, "W": 8, "T": 77}
PROFILE = Profile({symbol: Range(size, size, size) for symbol, size in CALL.items()})


def work(root: Path, backend: str, builds: bool) -> dict:
    """Return what this worker did."""
    net, steps, library, began, left = small_network(), [], Library([root]), time.monotonic(), ""
    given = sample_inputs(net.architecture().inputs(net.module, "float32"), CALL, seed=3)

    def run(task: dict, *rest: object) -> dict:
        steps.append(task["step"])
        return run_here(task, *rest)

    if builds:
        try:
            build_engine(BuildOrder(net, "float32", PROFILE, backends()[backend]), library, lambda *_: None, run=run)
        except Unavailable as unavailable:
            left = unavailable.fallback.reason.value
    handle = EngineHandle.look_up(net, EngineChoice(PROFILE, backend=backend), library, f"node of {root}")
    handle.plan()
    handle.open()
    with torch.inference_mode():
        done, result = handle.serve(None, lambda: EngineCall(given, dict))
        native = native_call(net, given)[0]
    serving = done and bool(handle.session.serving)
    return {
        "steps": steps,
        "left": left,
        "serving": serving,
        "error": relative_error(result["out"], native) if done else None,
        "why": handle.fallback.sentence() if handle.fallback else "",
        "seconds": time.monotonic() - began,
    }


if __name__ == "__main__":
    if len(sys.argv) > 4:
        become(sys.argv[4], float(sys.argv[5]))
    sys.stdout.write(json.dumps(work(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "builds")) + "\n")
