"""Microseconds of the pack's own Python per call, the network taken out. Needs no GPU.

A ControlNet is called as in a run of a model with *TRT Sampler Patch*. Without it the results of each call are looked
at, which the last line has too: most of it is sums, which the device computes.

    python tools/environment.py run -- python benchmarks/own_cost.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "support")]

from pack import import_comfy

import_comfy()

import small_networks
import torch
from comfy_execution.utils import CurrentNodeContext
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling import nan_guard
from hybrid_trt.sampling.controlnet import EngineControlModel
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.model_wrapper import BackboneRouter
from hybrid_trt.sampling.run_context import SamplingRun, inside
from profiles import profile_of

CALLS, TURNS = 3000, 15
SIZES = {"B": 2, "H": 9, "W": 12, "T": 77, "HB": 1}


def microseconds(call: Callable[[], Any]) -> float:
    """Median over turns of the time of one call."""
    times = []
    for _ in range(TURNS):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - started) / CALLS)
    return 1e6 * statistics.median(times)


def run_of(work: Callable[[], Any]) -> Any:
    """A run of a patched model that does this, as ComfyUI's executor gives it to a wrapper."""
    patcher = SimpleNamespace(load_device=torch.device("cpu"))
    run = lambda: work()  # noqa: E731
    run.class_obj = SimpleNamespace(conds={}, model_patcher=patcher)
    return run


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    with torch.inference_mode(), CurrentNodeContext("prompt", "sampler"):
        unet, control = unet_call(folder), controlnet_call(folder)
        found = {}
        for alone, words in ((True, ""), (False, " beside other packs' code")):
            with inside(SamplingRun(comfyuis_alone=alone)):
                found[f"unet{words}"] = microseconds(unet)
                found[f"controlnet{words}"] = nan_guard.redo_unless_finite(run_of(lambda: microseconds(control)))
        found["controlnet without a sampler patch"] = microseconds(control)
    sys.stdout.write("".join(f"{kind} {value:.1f} us\n" for kind, value in found.items()))


def unet_call(folder: Path) -> Callable[[], Any]:
    """A call of a UNet with residuals, routed to an engine that does nothing."""
    net, handle, given = backed("unet", folder)
    net.patcher.model.current_patcher = net.patcher
    route = BackboneRouter(net.patcher, handle, None)._route
    x, timesteps, context = (given[name] for name in ("x", "timesteps", "context"))
    control = small_networks.control_of(net, given) | {"input": []}
    options: dict[str, Any] = {"patches": {}, "patches_replace": {}}
    return lambda: route(None, x, timesteps, context, None, control, options)


def controlnet_call(folder: Path) -> Callable[[], Any]:
    """A call of a ControlNet on an engine that does nothing."""
    net, handle, given = backed("controlnet", folder)
    model = EngineControlModel(handle, SimpleNamespace(control_model=net.module, control_model_wrapped=net.patcher))
    return lambda: model(**given)


def backed(kind: str, folder: Path) -> tuple[NativeNetwork, EngineHandle, dict[str, torch.Tensor]]:
    """A network, a handle whose session gives results that are there already, and the inputs of a call."""
    net = small_networks.network(kind, "sd15_as_published")
    architecture = net.architecture()
    handle = EngineHandle.look_up(net, EngineChoice(profile_of(64, 96, 320), "auto", "torch"), Library([folder]), kind)
    results = sample_inputs(architecture.outputs(net.module, "float32"), SIZES, 2)
    handle.session.run = lambda *_: results
    return net, handle, sample_inputs(architecture.inputs(net.module, "float32"), SIZES, 1)


if __name__ == "__main__":
    main()
