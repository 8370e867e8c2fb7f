"""Other packs' changes to ControlNets within a step act on engines as they do on native ControlNets.

ComfyUI samples. The packs are doubles, see ``support/other_packs_controls.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.samplers
import other_packs_controls as others
import pytest
import slow
import torch
from comfy.controlnet import ControlNet
from comfy.patcher_extension import WrappersMP
from controlled import STEPS, Graphs, graphs, joined
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.sampling import call_stats
from hybrid_trt.sampling.controlnet import EngineControlModel
from hybrid_trt.sampling.model_wrapper import patch_model
from hybrid_trt.sessions.cuda_graphs import GraphCache
from hybrid_trt.sessions.file_session import FileSession
from memory_fixtures import files, nothing_loaded
from patched import LIMIT, Patched, library_of, load, sampling_node

from sampling import error, sample

__all__ = ["files", "graphs", "joined", "nothing_loaded"]  # fixtures: pytest finds them by name

ENGINES = {"both on engines": (True, True), "the first on an engine": (True, False), "plain": (False, False)}


def native(graphs: Graphs, way: str) -> torch.Tensor:
    return graphs.native(way, lambda model: others.in_tiles(model, way))


CASES = [
    *((way, "both on engines", False) for way in others.ALL_WAYS),
    *(("held back", engines, False) for engines in ("the first on an engine", "plain")),
    ("held back", "both on engines", True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("hint", "the first on an engine", False), ("hint", "plain", False), ("method", "both on engines", True),
        ("copies", "both on engines", True))),
]


@pytest.mark.parametrize(("way", "engines", "before"), CASES)
def test_what_a_pack_does_to_controlnets_acts_as_without_engines(
    graphs: Graphs, way: str, engines: str, before: bool
) -> None:
    """``before``: whether its node stands before the sampler patch."""
    reference = native(graphs, way)
    assert error(graphs.native(), reference) > 100 * LIMIT, "the pack's way acts"
    made, control = graphs.patched(), graphs.controls(*ENGINES[engines])
    model = patch_model(others.in_tiles(made.native, way), made.handle) if before else others.in_tiles(made.model, way)
    assert error(graphs.sampled(model, control), reference) <= LIMIT
    assert [handle.stats.native for handle in graphs.handles] == [0] * len(graphs.handles)
    assert all(handle.stats.engine > 0 for handle in graphs.handles)


class Spy:
    """Sees the ControlNets of each step wherever another pack can, and changes nothing."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def see(self, conds: list) -> None:
        self.seen += [cond["control"] for group in conds for cond in group or () if "control" in cond]

    def wrap(self, executor: Any, model: Any, conds: list, *rest: Any) -> Any:
        self.see(conds)
        return executor(model, conds, *rest)

    def pre_cfg(self, args: dict) -> list:
        self.see(args["conds"])
        return args["conds_out"]

    def batch_function(self, args: dict) -> list:
        self.see(args["conds"])
        given = (args[name] for name in ("model", "conds", "input", "sigma", "model_options"))
        return comfy.samplers.calc_cond_batch(*given)


def wrapped(model: Any, spy: Spy) -> None:
    model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "spy", spy.wrap)


def pre_cfg(model: Any, spy: Spy) -> None:
    model.set_model_sampler_pre_cfg_function(spy.pre_cfg)


def batch_function(model: Any, spy: Spy) -> None:
    model.set_model_sampler_calc_cond_batch_function(spy.batch_function)


PLACES = {"behind the patch": (wrapped, False), "before the patch": (wrapped, True), "before CFG": (pre_cfg, False),
          "in the place of the batch": (batch_function, False)}  # fmt: skip


@pytest.mark.parametrize(("place", "before"), PLACES.values(), ids=PLACES)
def test_who_sees_the_controls_of_a_step_sees_those_of_the_graph_and_they_still_run_as_one(
    graphs: Graphs, joined: list[int], place: Callable, before: bool
) -> None:
    spy, made, control = Spy(), graphs.patched(), graphs.controls(True, True)
    model = (made.native if before else made.model).clone()
    place(model, spy)
    model = patch_model(model, made.handle) if before else model
    latent = graphs.sampled(model, control)
    assert error(latent, graphs.native()) <= LIMIT
    assert len(spy.seen) == 2 * STEPS, "both conditionings have it"
    assert all(one is control and type(one) is ControlNet for one in spy.seen)
    assert joined == [2] * (STEPS - 1)


@pytest.mark.parametrize("name", ["get_area_and_mult", "can_concat_cond", "_calc_cond_batch"])
def test_a_function_in_the_place_of_comfyuis_sees_the_controls_of_the_graph_too(
    graphs: Graphs, joined: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = getattr(comfy.samplers, name), []

    def theirs(*args: Any) -> Any:
        held = [args[1] for _ in "1" if name == "_calc_cond_batch"] or args
        seen.extend(_controls(held))
        return own(*args)

    monkeypatch.setattr(comfy.samplers, name, theirs)
    made, control = graphs.patched(), graphs.controls(True, True)
    latent = graphs.sampled(made.model, control)
    assert error(latent, graphs.native()) <= LIMIT
    assert seen
    assert all(one is control for one in seen)
    assert joined == []
    assert call_stats.slow_sentences([handle.stats for handle in graphs.handles]) == [], "another pack is the reason"


def _controls(held: Any) -> list[Any]:
    """All ControlNets, and what would stand for one, in lists, dicts and tuples."""
    if isinstance(held, dict):
        return [held["control"]] if "control" in held else []
    if isinstance(held, list | tuple):
        return [one for part in held for one in _controls(part)]
    return [held] if hasattr(held, "get_control") else []


def test_hints_of_nodes_and_packs_are_encoded_once_and_anew_when_somebody_wrote_to_them(graphs: Graphs) -> None:
    control = graphs.controls(True)
    network, session = control.control_model.network, control.control_model.handle.session
    encoded = []
    with torch.inference_mode(), sampling_node():
        hint, x = torch.rand(1, 3, 64, 64), torch.rand(2, 4, 8, 8)
        given = {"x": x, "timesteps": torch.ones(2), "context": torch.rand(2, 77, 768)}
        for write in (None, None, lambda: hint.mul_(0.5), None, lambda: hint[..., :32].zero_(), None):
            if write is not None:
                write()
            residuals = control.control_model(**given, hint=hint)
            native = network.module(**given, hint=hint)
            assert all(map(torch.allclose, residuals["output"], native["output"], [1e-4] * 99, [1e-5] * 99))
            encoded.append(session.live.passes.computed)
    assert encoded == [1, 1, 2, 2, 3, 3]


# Copies that other packs make of conditionings and models


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (LiveSession, FileSession, GraphCache, torch.nn.Module):
        fail = lambda *_, name=kind.__name__: pytest.fail(f"a {name} is copied")  # noqa: E731
        monkeypatch.setattr(kind, "__deepcopy__", fail, raising=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "copy": copy.copy,
    "by hand": lambda control: _of(vars(control)),
    "its attributes": lambda control: _of(copy.deepcopy(vars(control))),
    "ComfyUI's": lambda control: control.copy().set_previous_controlnet(control.previous_controlnet),
    "in a conditioning": lambda control: copy.deepcopy([[None, {"control": control}]])[0][1]["control"],
    "a copy of a copy": lambda control: copy.deepcopy(copy.deepcopy(control)),
}


def _of(attributes: dict) -> ControlNet:
    made = ControlNet.__new__(ControlNet)
    made.__dict__.update(attributes)
    return made


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("copied", slow.cases(
    COPIES, ["copy", "by hand", "its attributes", "in a conditioning", "a copy of a copy"]))
def test_a_copied_control_runs_on_the_engine_of_the_one_that_it_is_a_copy_of(graphs: Graphs, copied: Callable) -> None:
    model, control = graphs.patched().model, graphs.controls(True, True)
    for _ in range(2):  # the first opens the engines
        other = copied(control)
        assert type(other) is ControlNet
        assert other is not control
        assert error(graphs.sampled(model, other), graphs.native()) <= LIMIT
        assert [(handle.stats.engine, handle.stats.native) for handle in graphs.handles] == [(STEPS, 0)] * 3
        assert other.control_model.handle is control.control_model.handle
        loads = zip(other.get_models(), control.get_models(), strict=True)
        assert all(one.is_clone(own) for one, own in loads), "ComfyUI makes room for the engines once"
    assert error(graphs.sampled(model, control), graphs.native()) <= LIMIT


@pytest.mark.usefixtures("no_copies")
def test_a_copy_that_is_made_while_a_step_is_computed_shares_the_engine_too(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.nn.Module, "__deepcopy__")  # the noise schedule is copied, of native ControlNets as well

    def with_copies(executor: Any, model: Any, conds: list, *rest: Any) -> Any:
        own = {"control": copy.deepcopy(conds[0][0]["control"])}
        given = [[{**cond, **own} for cond in group] for group in conds]
        return executor(model, given, *rest)

    made, control = graphs.patched(), graphs.controls(True, True)
    made.model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "copies", with_copies)
    assert error(graphs.sampled(made.model, control), graphs.native()) <= LIMIT
    assert [(handle.stats.engine, handle.stats.native) for handle in graphs.handles] == [(STEPS, 0)] * 3


@pytest.mark.usefixtures("no_copies")
def test_two_copies_with_images_of_their_own_are_two_controls_of_one_engine(graphs: Graphs) -> None:
    made, control = graphs.patched(), graphs.controls(True)
    first, second = copy.deepcopy(control), copy.deepcopy(control)
    second.cond_hint_original.mul_(0.3)
    second.set_previous_controlnet(first)
    latent = graphs.sampled(made.model, second)
    unlike = graphs.controls(False)
    other = unlike.copy()
    other.set_cond_hint(unlike.cond_hint_original * 0.3, unlike.strength).set_previous_controlnet(unlike)
    assert error(latent, graphs.sampled(made.native, other)) <= LIMIT
    assert graphs.handles[1].stats.engine == 2 * STEPS


@pytest.mark.usefixtures("no_copies")
def test_a_network_that_is_copied_by_itself_is_native_for_another_gpu(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.nn.Module, "__deepcopy__")
    control = graphs.controls(True)
    clone = control.deepclone_multigpu(torch.device("cpu", 1), autoregister=True)
    native = control.control_model.native
    assert type(clone.control_model) is type(native)
    assert clone.control_model is not native
    assert isinstance(control.control_model, EngineControlModel)
    assert all(map(torch.equal, clone.control_model.parameters(), native.parameters()))
    assert clone.control_model_wrapped.model is clone.control_model


CHANGES: dict[str, Callable[[Any], None]] = {
    "options": lambda model: setattr(model, "model_options", copy.deepcopy(model.model_options)),
    "wrappers": lambda model: setattr(model, "wrappers", copy.deepcopy(model.wrappers)),
    "callbacks": lambda model: setattr(model, "callbacks", copy.deepcopy(model.callbacks)),
    "models beside it": lambda model: setattr(model, "additional_models", copy.deepcopy(model.additional_models)),
}


@pytest.mark.usefixtures("no_copies")
@slow.when("onnxruntime", but=["options"])
@pytest.mark.parametrize("change", [*CHANGES.values(), None], ids=[*CHANGES, "options of each call"])
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_copies_of_what_belongs_to_a_patched_model_share_its_engine(
    files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, backend: str, change: Callable | None
) -> None:
    file = next(iter(files.values()))
    library = library_of(file, tmp_path_factory.mktemp("engines"))
    native = load(file)
    reference = sample(native, steps=STEPS)
    patched = Patched(native, library, backend)
    patched.sample(steps=STEPS)  # opens the engine
    model = patched.model.clone()
    if change is None:
        model.set_model_unet_function_wrapper(_copying_options)
    else:
        change(model)
    with sampling_node():
        latent = sample(model, steps=STEPS)
    assert error(latent, reference) <= LIMIT
    assert patched.counts == (STEPS, 0)
    assert patch_model(model, copy.deepcopy(patched.handle)) is not None
    assert copy.deepcopy(patched.handle) is patched.handle


def _copying_options(apply_model: Callable, args: dict) -> torch.Tensor:
    given = {**args["c"], "transformer_options": copy.deepcopy(args["c"]["transformer_options"])}
    return apply_model(args["input"], args["timestep"], **given)
