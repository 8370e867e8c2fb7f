"""Captures what cannot be captured, in a process of its own: prints the allocator, what a later capture came to, and
whether the failed one's memory was given back (or how much was not). With the argument ``interrupt`` a capture is
interrupted instead."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

package = types.ModuleType("hybrid_trt")
package.__path__ = [str(Path(__file__).resolve().parents[2])]
sys.modules["hybrid_trt"] = package

from hybrid_trt.sessions.cuda_graphs import GraphCache

GPU = torch.device("cuda", 0)
ROWS, COLUMNS = 64, 1 << 20
"""256 MiB of weights, and as much for each activation."""


class Network:
    """Waits for the GPU in the middle, which nothing may while it is captured."""

    def __init__(self) -> None:
        self.weight = torch.ones(ROWS, COLUMNS, device=GPU)

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        activations = [self.weight * inputs["x"]]
        activations.append(activations[0] + 1)
        activations.append(activations[1].sum().reshape(1))
        # nothing but names holds a tensor here: torch ends the process when an error frees one in a broken capture
        factor = float(inputs["x"])
        return {"out": activations[2] * factor}


class Interrupted(BaseException):
    """Stands for ComfyUI's interrupt, which layers raise in the middle of a pass."""


class Unfinished:
    """Keeps a result until its next call, as layers do that an interrupt stops in the middle of a pass."""

    def __init__(self) -> None:
        self.interrupts = False
        self.result = None

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        self.result = None
        self.result = list((inputs["x"] * 2).split(2))
        if self.interrupts and torch.cuda.is_current_stream_capturing():
            raise Interrupted
        self.result[0] = None
        return {"out": self.result[1] + 1}


def run_on_after_an_interrupt(graphs: GraphCache) -> None:
    """Interrupt a capture, then have the network replace what it kept of it."""
    network = Unfinished()
    for network.interrupts in (False, True, False, False):
        try:
            out = graphs.run(network, {"x": torch.ones(4, device=GPU)})["out"]
            assert out.tolist() == [3.0, 3.0]
        except Interrupted:
            assert network.interrupts
    print(torch.cuda.get_allocator_backend(), "captured" if len(graphs) == 1 else graphs.failure)


def held_by_a_failed_capture(graphs: GraphCache) -> int:
    """Bytes of the device that are not free again when the network and the failed capture are gone."""
    network = Network()
    alive = weakref.ref(network)
    for _ in range(3):
        out = graphs.run(network, {"x": torch.full((1,), 2.0, device=GPU)})["out"]
        assert float(out) == 2.0 * 3.0 * ROWS * COLUMNS, out
    assert graphs.failure is not None
    del network, out
    gc.collect()
    assert alive() is None, "the frames hold the network"
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return free - torch.cuda.mem_get_info()[0]


small = torch.ones(8, 8, device=GPU)
small @ small  # makes the library's work space
if sys.argv[1:] == ["interrupt"]:
    run_on_after_an_interrupt(GraphCache(GPU))
    raise SystemExit
free = torch.cuda.mem_get_info()[0]
graphs = GraphCache(GPU)
held = held_by_a_failed_capture(graphs)
for _ in range(3):
    assert graphs.run(lambda t: {"out": t["x"] + 1}, {"x": torch.zeros(4, device=GPU)})["out"].tolist() == [1.0] * 4
torch.randn(8, device=GPU)
print(torch.cuda.get_allocator_backend(), "captured" if len(graphs) == 1 else graphs.failure, held < 200 << 20 or held)
