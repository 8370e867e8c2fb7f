"""Flux.1's ControlNets: each call of a small one on an engine gives the residuals that ComfyUI's own forward gives."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from built_once import built_once
from comfy import latent_formats
from comfy.controlnet import ControlNet
from compiling import COMPILES
from control_stacks import SAMPLING
from flux_networks import CONTROLS, PIXELS, call, control_call, control_network
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.float32 import results_in_float32
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling import control_stack
from hybrid_trt.sampling.controlnet import back_with_engine
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sessions.file_session import FileSession
from hybrid_trt.sessions.session import Session
from small_networks import CPU

LIMIT = 1e-5
PROFILE = Profile({"B": Range(1, 1, 2), "N": Range(4, 24, 300), "T": Range(1, 9, 64)})
CASES = {
    "a picture": {},
    "a hint for the batch, an odd size": {"batch": 2, "size": (13, 11), "prompt": 30},
    "a hint for each": {"batch": 2, "hints": 2},
}
EVEN = {name: {**case, "size": (14, 12)} if "size" in case else case for name, case in CASES.items()}
"""The same for ControlNets of pixels: native cuts their hint into tokens without padding, and fails at odd sizes."""


def cases(layout: str) -> dict[str, dict[str, Any]]:
    return EVEN if layout in PIXELS else CASES


def live(net: NativeNetwork) -> LiveSession:
    return LiveSession(net, backends()["torch"], net.precision)


def native(net: NativeNetwork, given: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    with torch.inference_mode():
        return {kind: list(found) for kind, found in net.module(**given).items()}


def error(net: NativeNetwork, session: Session, given: dict[str, Any]) -> float:
    bound = net.architecture().binding(net.module)(given)
    with torch.inference_mode():
        result = bound.finish(session.run(bound.inputs, bound.extras))
    expected = native(net, given)
    assert {kind: len(found) for kind, found in result.items()} == {k: len(found) for k, found in expected.items()}
    pairs = [pair for kind in expected for pair in zip(result[kind], expected[kind], strict=True)]
    return max(relative_error(own, theirs) for own, theirs in pairs)


@pytest.mark.parametrize("layout", CONTROLS)
def test_each_residual_is_natives(layout: str) -> None:
    net = control_network(layout)
    session = live(net)
    for name, changes in cases(layout).items():
        assert error(net, session, control_call(net, **changes)) <= LIMIT, name


@pytest.mark.parametrize("layout", PIXELS)
def test_pixels_are_encoded_once_for_all_steps_and_again_for_another_image(layout: str) -> None:
    net = control_network(layout)
    session, given = live(net), control_call(net, batch=2)
    for seed in (1, 2, 3):
        step = {**control_call(net, batch=2, seed=seed), "hint": given["hint"]}
        assert error(net, session, step) <= LIMIT
    assert session.live.passes.computed == 1
    other = {**given, "hint": 1 - given["hint"]}
    assert relative_error(native(net, other)["input"][0], native(net, given)["input"][0]) > 1e-3, "the image matters"
    assert error(net, session, other) <= LIMIT
    assert session.live.passes.computed == 2


@pytest.mark.parametrize("layout", PIXELS)
def test_pixels_at_an_odd_size_are_left_to_native_which_says_why_it_fails(layout: str) -> None:
    net = control_network(layout)
    given = control_call(net, size=(13, 11))
    with pytest.raises(Unavailable, match="hint_pixels"):
        error(net, live(net), given)
    with pytest.raises(Exception, match="shape"):
        native(net, given)


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


def test_each_type_of_a_union_controlnet_is_natives() -> None:
    net = control_network("union")
    session, seen = live(net), []
    for types in ([], [0], [4], [6], [0]):
        given = control_call(net, control_type=types)
        assert error(net, session, given) <= LIMIT, types
        seen.append(native(net, given)["input"][0])
    assert relative_error(seen[4], seen[1]) == 0
    assert min(relative_error(seen[i], seen[j]) for i in range(4) for j in range(i)) > 1e-3


@pytest.mark.parametrize(("layout", "changes", "why"), [
    ("union", {"control_type": [9]}, "a control type"),
    ("union", {"control_type": [1, 2]}, "a control type"),
    ("instantx", {"guidance": None}, "no guidance"),
    ("instantx", {"something_new": 1}, "something_new"),
])  # fmt: skip
def test_what_no_engine_takes_is_refused_with_a_reason(layout: str, changes: dict[str, Any], why: str) -> None:
    net = control_network(layout)
    with pytest.raises(Unsupported, match=why):
        net.architecture().binding(net.module)(control_call(net, **changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_rounds_as_native_does(dtype: torch.dtype) -> None:
    """Timesteps too: a ControlNet's are in half precision when native multiplies them by 1000."""
    limit = 2e-2 if dtype is torch.bfloat16 else 2e-3
    net = control_network("union", dtype)
    for types in ([], [3]):
        assert error(net, live(net), control_call(net, batch=2, control_type=types)) <= limit
    for layout in PIXELS:
        net = control_network(layout, dtype)
        assert error(net, live(net), control_call(net, batch=2)) <= limit, layout


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


@pytest.mark.parametrize("layout", ["instantx", "union", *PIXELS])
def test_a_graph_for_all_sizes_computes_what_native_does(layout: str, tmp_path: Path) -> None:
    net = control_network(layout)
    engine = built_once(BuildOrder(net, "float32", PROFILE, backends()["onnxruntime"]), Library([tmp_path]))
    assert engine.manifest.parity["rel_err"] <= LIMIT
    session = FileSession(engine, backends()["onnxruntime"].load, CPU)
    session.sync_from(net, net.patcher)
    types = ({"control_type": [2]},) if layout == "union" else ()
    for changes in (*cases(layout).values(), *types):
        assert error(net, session, control_call(net, **changes)) <= LIMIT, changes


@pytest.mark.slow
@COMPILES
def test_a_compiled_file_computes_what_native_does(tmp_path: Path) -> None:
    net, torch_backend = control_network("union"), backends()["torch"]
    order = BuildOrder(net, "float32", PROFILE, torch_backend, calls=({"B": 1, "N": 24, "T": 10},))
    session = live(net)
    session.use([build_engine(order, Library([tmp_path]), lambda *_: None)])
    for kind in (1, 5):
        assert error(net, session, control_call(net, control_type=[kind])) <= LIMIT
        assert session.uncovered is None
    assert session.refusal is None


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
        assert {kind: len(found) for kind, found in result.items()} == {k: len(v) for k, v in expected.items()}
        for kind, residuals in expected.items():
            assert max([relative_error(o, n) for o, n in zip(result[kind], residuals, strict=True)] or [0]) <= LIMIT
    assert len(runs) == (3 if len(layouts) == 1 else 2), "a hint is encoded in the first call that it acts in"
