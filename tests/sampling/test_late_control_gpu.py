"""A UNet's engine beside its ControlNets on a GPU, where streams and gates are real. On a machine with an NVIDIA GPU:

    pytest -m gpu tests/sampling/test_late_control_gpu.py

What holds on a CPU too is in ``test_late_control.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networks
import pytest
import torch
from comfy.controlnet import ControlNet
from control_stacks import step_of_comfyui
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, trust
from hybrid_trt.sampling import control_stack
from hybrid_trt.sampling.control_stack import LateControl, bound_unread
from hybrid_trt.sampling.controlnet import back_with_engine
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")]

GPU = torch.device("cuda", 0)
HALF = torch.float16
TORCH = backends()["torch"]
CYCLES = 20_000_000
"""About 10 ms of a GPU: a tiny UNet would be done long before."""
SAMPLING = SimpleNamespace(calculate_input=lambda t, x: x / (t[0] ** 2 + 1) ** 0.5, timestep=lambda t: t * 10)


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NativeNetwork, LiveSession]]:
    net = networks.random_network("unet", networks.TINY["sd15"], HALF, 1, GPU)
    session, library = LiveSession(net, TORCH, "float16"), Library([tmp_path_factory.mktemp("library")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(trust.FOLDER_VARIABLE, str(tmp_path_factory.mktemp("keys")))
        session.use([build_engine(BuildOrder(net, "float16", networks.PROFILE, TORCH), library, lambda *_: None)])
        yield net, session


@pytest.fixture
def stack(tmp_path: Path) -> Callable[[int], ControlNet]:
    """Makes a chain of ControlNets on live weights."""

    def make(count: int) -> ControlNet:
        previous = None
        for i in range(count):
            net = networks.random_network("controlnet", networks.TINY["sd15"], HALF, 10 + i, GPU)
            control = ControlNet(net.module, load_device=GPU)
            choice = EngineChoice(networks.PROFILE, "auto", "torch")
            network = NativeNetwork.of_controlnet(control, f"net {i}")
            handle = EngineHandle.look_up(network, choice, Library([tmp_path]), str(i))
            control = back_with_engine(control, handle).copy()
            control.set_cond_hint(torch.rand(1, 3, 512, 512, generator=torch.Generator().manual_seed(i)), 0.7 / (i + 1))
            control.set_previous_controlnet(previous)
            control.timestep_range, control.model_sampling_current = (999999999.9, 0.0), SAMPLING
            previous = control
        return previous

    return make


def steps(
    unet: tuple[NativeNetwork, LiveSession], chain: ControlNet, late: bool, look: bool = False
) -> tuple[list[torch.Tensor], int]:
    """Return a UNet's results of some steps, and the number of steps whose residuals came late."""
    net, session = unet
    bind, unread = net.architecture().binding(net.module), bound_unread
    came_late = 0

    def step(_model: Any, conds: list, x: torch.Tensor, t: torch.Tensor, _options: dict) -> torch.Tensor:
        nonlocal came_late
        cond = {"c_crossattn": conds[0][0]["prompt"]}
        control = conds[0][0]["control"].get_control(x, t, cond, 2, {})
        junk = [torch.full_like(x, float("nan")) for _ in range(64)]  # where what ControlNets still read would lie
        given = {"x": x.half(), "timesteps": t, "context": cond["c_crossattn"], "control": control}
        if isinstance(control, LateControl):
            came_late += 1
            if look:
                given["control"] = dict(control)
        call = unread(bind, given) if isinstance(given["control"], LateControl) else bind(given)
        result = call.finish(session.run(call.inputs, call.extras, *([call.late] if call.late else [])))
        del junk
        return result

    found = []
    with torch.inference_mode():
        for number in range(12):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(2, 4, 64, 64, generator=generator).to(GPU)
            prompt = torch.randn(2, 77, 768, generator=generator).to(GPU, HALF)
            conds = [[{"control": chain, "prompt": prompt}]]
            backbone = SimpleNamespace(session=SimpleNamespace(takes_late=late and session.takes_late))
            t = torch.full((2,), 3.0 + number, device=GPU)
            found.append(step_of_comfyui(step, backbone)(None, conds, x, t, {}).clone())
    torch.cuda.synchronize()
    return found, came_late


@pytest.mark.parametrize("look", [False, True], ids=["the engine waits", "somebody looks at them"])
@pytest.mark.parametrize("slow", [False, True], ids=["as they are", "slow ControlNets"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_unet_beside_its_controlnets_computes_the_same_bits(
    count: int, slow: bool, look: bool, unet: Any, stack: Callable[[int], ControlNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = stack(count)
    steps(unet, chain, late=False)  # opens and captures
    expected, _ = steps(unet, chain, late=False)
    if slow:
        merged = control_stack._merged
        monkeypatch.setattr(control_stack, "_merged", lambda *a: (torch.cuda._sleep(CYCLES), merged(*a))[1])
    found, came_late = steps(unet, chain, late=True, look=look)
    assert (unet[1].graphs.failure, unet[1].refusal, unet[1].uncovered) == (None, None, None)
    assert came_late == 12
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], found[1])


def test_a_replay_ends_behind_its_wait_point(unet: Any, stack: Callable[[int], ControlNet]) -> None:
    _, session = unet
    steps(unet, stack(1), late=True)
    (graph,) = session.graphs._captured.values()
    opened, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side = torch.cuda.Stream(GPU)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        opened.record()
        graph.wait_point.event.record()
    graph.replay.replay()
    ended.record()
    torch.cuda.synchronize()
    assert opened.elapsed_time(ended) > 0
