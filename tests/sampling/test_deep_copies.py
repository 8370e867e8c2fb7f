"""Copies that other packs make of conditionings and models share their engines; no session or graph is ever copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import slow
import torch
from comfy.controlnet import ControlNet
from comfy.patcher_extension import WrappersMP
from controlled import STEPS, Graphs, graphs
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.sampling.controlnet import EngineControlModel
from hybrid_trt.sampling.model_wrapper import patch_model
from hybrid_trt.sessions.cuda_graphs import GraphCache
from hybrid_trt.sessions.file_session import FileSession
from memory_fixtures import files, nothing_loaded
from patched import LIMIT, Patched, library_of, load, sampling_node

from sampling import error, sample

__all__ = ["files", "graphs", "nothing_loaded"]  # fixtures: pytest finds them by name


@pytest.fixture(autouse=True)
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
