"""UNets and ControlNets in blocks: one build serves every size, and each kind of block is compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comfy import model_management
from compiling import COMPILES
from fake_recorder import Recorder
from hybrid_trt.architectures.blocks import in_blocks
from hybrid_trt.architectures.shapes import RequestedSizes
from hybrid_trt.backends.torch_inductor.compile_kinds import kinds_of
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model import torch_kernels
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from live_sessions import TORCH, error, given_for
from small_networks import CPU, ONE_LEVEL, network

KINDS = {("unet", ONE_LEVEL): 6, ("controlnet", ONE_LEVEL): 5, ("unet", "sdxl_as_published"): 26}
"""Networks -> the kinds of their blocks."""
CALLS = ({}, {"B": 1, "H": 8, "W": 16}, {"B": 3, "H": 13, "W": 7, "T": 154}, {"H": 8, "W": 9, "T": 1, "HB": 2},
         {"B": 1, "H": 9, "W": 33, "T": 231})  # fmt: skip


@COMPILES
@pytest.mark.parametrize(("kind", "layout"), [
    pytest.param(*name, marks=[] if name[1] == ONE_LEVEL else [pytest.mark.slow]) for name in KINDS])  # fmt: skip
def test_one_build_serves_every_size_and_compiles_each_kind_of_block_once(
    tmp_path: Path, kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "unet":  # in the memory layout that is a GPU's
        monkeypatch.setattr(torch_kernels, "_layout", lambda _device, dimensions: (
            torch.channels_last if dimensions == 4 else torch.contiguous_format))  # fmt: skip
    net = network(kind, layout)
    profile = net.architecture().profile(RequestedSizes(32, 64, 256))
    order = BuildOrder(net, "float32", profile, TORCH)
    engine = build_engine(order, Library([tmp_path / "library"]), lambda *_: None, run=run_here)
    session = LiveSession(net, TORCH, "float32", Recorder())
    session.use([engine])
    for seed, call in enumerate(CALLS):
        given = given_for(net, seed, **call)
        for _ in range(3):  # plainly, recorded, replayed
            assert error(session, net, given) <= 1e-5, call
        assert session.serving == [engine]
    blocks = session.live.compiled
    assert (len(blocks.kinds), blocks.plain) == (KINDS[kind, layout], 0)

    monkeypatch.setattr(model_management, "MAX_PINNED_MEMORY", 1 << 34)  # in tests ComfyUI itself is on the CPU
    for loaded in (False, True):  # ComfyUI's own weights lie otherwise
        if loaded:
            net.patcher.patch_model(CPU)
        streamed = LiveSession(net, TORCH, "float32", Recorder())
        streamed.use([engine])
        weights, given = streamed.live.weights, given_for(net, 5)
        streamed.live.move_out({name for block in streamed.live.blocks for name in weights.large(block, 0)})
        assert weights.size_of(weights.outside) > 0.5 * weights.most_bytes
        for _ in range(3):
            assert error(streamed, net, given) <= 1e-5
        assert (streamed.serving, streamed.refusal) == ([engine], None)


@pytest.mark.parametrize(("kind", "layout", "count"), [
    ("unet", "sd15_as_published", 23), ("controlnet", "sd15_as_published", 16), ("unet", "sdxl_as_published", 26)])
def test_layers_of_the_same_shape_are_of_one_kind(kind: str, layout: str, count: int) -> None:
    net = network(kind, layout)
    architecture = net.architecture()
    function = architecture.function(net.module)
    calls = [list(given_for(net, **sizes).values()) for sizes in ({}, {"H": 1, "W": 1}, {"H": 10, "W": 14, "B": 3})]
    kinds, of = kinds_of(function, calls)
    assert all(len(own) == 1 for own in of)
    assert len(kinds) == count


def _once(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight


def _twice(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return 2 * (x @ layer.weight)


def test_layers_alike_that_other_code_computes_are_of_another_kind() -> None:
    network = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4)).requires_grad_(False)
    network.blocks = (*in_blocks(network[:2], _once), *in_blocks(network[2:3], _twice), *in_blocks(network[3:]))
    network.forward = lambda x: tuple(block(x) for block in network.blocks)
    kinds, of = kinds_of(network, [[torch.randn(size, 4)] for size in (4, 8, 12)])
    assert of == [(0,), (0,), (1,), (2,)]
    assert len({kind.key for kind in kinds}) == 3, "nor does a library share their code"
