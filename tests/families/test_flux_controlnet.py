"""Flux.1's ControlNets: pixels are encoded once, residuals are shared, several run as a stack."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from comfy import latent_formats
from comfy.controlnet import ControlNet
from control_stacks import SAMPLING
from family_contract import ACTS, LIMIT, difference, error_of, live, natively
from flux_networks import PIXELS, call, control_call, control_network
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.torch_kernels import results_in_float32
from hybrid_trt.engine_library import Library, Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling import control_stack
from hybrid_trt.sampling.controlnet import back_with_engine
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from model_families.flux import PROFILE
from small_networks import CPU


@pytest.mark.parametrize("layout", PIXELS)
def test_pixels_are_encoded_once_for_all_steps_and_again_for_another_image(layout: str) -> None:
    net = control_network(layout)
    session, given = live(net), control_call(net, batch=2)
    for seed in (1, 2, 3):
        step = {**control_call(net, batch=2, seed=seed), "hint": given["hint"]}
        assert error_of(net, session, step) <= LIMIT
    assert session.live.passes.computed == 1
    other = {**given, "hint": 1 - given["hint"]}
    assert difference(natively(net, other), natively(net, given)) > ACTS, "the image matters"
    assert error_of(net, session, other) <= LIMIT
    assert session.live.passes.computed == 2


@pytest.mark.parametrize("layout", PIXELS)
def test_pixels_at_an_odd_size_are_left_to_native_which_says_why_it_fails(layout: str) -> None:
    net = control_network(layout)
    given = control_call(net, size=(13, 11))
    with pytest.raises(Unavailable, match="hint_pixels"):
        error_of(net, live(net, net.precision), given)
    with pytest.raises(Exception, match="shape"):
        natively(net, given)


def test_residuals_of_pixels_stand_for_every_so_many_blocks() -> None:
    net = control_network("mistoline")
    bound = net.architecture().binding(net.module)(control_call(net))
    found = {kind: [id(residual) for residual in residuals] for kind, residuals in
             bound.finish(live(net).run(bound.inputs, bound.extras)).items()}  # fmt: skip
    assert [len(set(places)) for places in found.values()] == [3, 2]
    assert all(places[i] == places[i + count] for places, count in zip(found.values(), (3, 2), strict=True)
               for i in range(len(places) - count))  # fmt: skip


def test_a_residual_that_stands_for_several_blocks_is_one_tensor() -> None:
    """Strengths and sums are then computed once for it."""
    net = control_network("instantx")
    bound = net.architecture().binding(net.module)(control_call(net))
    result = bound.finish(live(net).run(bound.inputs))
    assert [len(found) for found in result.values()] == [19, 38]
    assert [len({id(residual) for residual in found}) for found in result.values()] == [1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_rounds_as_native_does(dtype: torch.dtype) -> None:
    """Timesteps too: a ControlNet's are in half precision when native multiplies them by 1000."""
    limit = 2e-2 if dtype is torch.bfloat16 else 2e-3
    net = control_network("union", dtype)
    for types in ([], [3]):
        assert error_of(net, live(net, net.precision), control_call(net, batch=2, control_type=types)) <= limit
    for layout in PIXELS:
        net = control_network(layout, dtype)
        assert error_of(net, live(net, net.precision), control_call(net, batch=2)) <= limit, layout


def test_in_half_precision_it_can_be_computed_in_float32_to_compare_with() -> None:
    net = control_network("union", torch.bfloat16)
    architecture, module = net.architecture(), copy.deepcopy(net.module)
    inputs = architecture.binding(net.module)(control_call(net)).inputs
    assert inputs["timesteps"].dtype is torch.float32
    function = architecture.function(module)
    given = [inputs[spec.name] for spec in architecture.engine_inputs(net.module, "bfloat16")]
    exact = results_in_float32(function, given)
    assert exact is not None
    assert all(one.dtype is torch.float32 for one in exact)
    with torch.inference_mode():
        assert 1e-4 < relative_error(function(*given)[0], exact[0]) < 2e-2


class PictureEncoder:
    """Stands for a VAE: means of 8 by 8 pixels, mixed into 16 channels."""

    @staticmethod
    def spacial_compression_encode() -> int:
        return 8

    @staticmethod
    def encode(pixels: torch.Tensor) -> torch.Tensor:
        mixed = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
        return torch.einsum("oc,bchw->bohw", mixed, torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8))


def chain(layouts: Sequence[str], backed: bool, library: Library) -> ControlNet:
    """ControlNets that take latents, in a row; the second one acts late in sampling alone."""
    previous = None
    for number, layout in enumerate(layouts):
        module = control_network(layout).module
        kind = {} if layout in PIXELS else {"compression_ratio": 1, "latent_format": latent_formats.Flux()}
        net = ControlNet(module, load_device=CPU, extra_conds=["y", "guidance"], **kind)
        if backed:
            choice = EngineChoice(PROFILE, "auto", "torch")
            handle = EngineHandle.look_up(NativeNetwork.of_controlnet(net, "n"), choice, library, str(number))
            net = back_with_engine(net, handle)
        control = net.copy()
        image = torch.rand(1, 3, 80, 90, generator=torch.Generator().manual_seed(number))
        control.set_cond_hint(image, strength=0.8 - 0.3 * number, vae=None if layout in PIXELS else PictureEncoder())
        control.set_previous_controlnet(previous)
        control.timestep_range = (999999999.9, 0.0) if number == 0 else (0.6, 0.0)
        control.model_sampling_current = SAMPLING
        previous = control
    return previous


@pytest.mark.parametrize("layouts", [("instantx", "instantx"), ("instantx", "union"), ("without_singles",),
                                     ("xlabs", "mistoline"), ("mistoline", "instantx")])  # fmt: skip
def test_stacks_run_as_one_once_their_hints_are_encoded(
    layouts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, run = [], control_stack._run
    monkeypatch.setattr(control_stack, "_run", lambda *given: (runs.append(1), run(*given))[1])
    theirs, ours = (chain(layouts, backed, Library([tmp_path])) for backed in (False, True))
    stack = control_stack.ControlStack(ours)
    for step, sigma in enumerate((0.9, 0.5, 0.3, 0.2)):
        size = (10 if set(layouts) & set(PIXELS) else 9, 12)
        given = call(control_network("instantx"), batch=2, size=size, seed=step)
        cond = {"c_crossattn": given["context"], "y": given["y"], "guidance": given["guidance"]}
        with torch.inference_mode():
            expected, result = (one.get_control(given["x"], torch.full((2,), sigma), cond, 2, {})
                                for one in (theirs, stack))  # fmt: skip
        assert difference(result, expected) <= LIMIT
    assert len(runs) == (3 if len(layouts) == 1 else 2), "a hint is encoded in the first call that it acts in"
