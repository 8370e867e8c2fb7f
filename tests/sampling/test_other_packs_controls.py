"""Other packs' changes to ControlNets within a step act on engines as they do on native ControlNets.

ComfyUI samples. The packs are doubles, see ``support/other_packs_controls.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.samplers
import other_packs_controls as others
import pytest
import torch
from comfy.controlnet import ControlNet
from comfy.patcher_extension import WrappersMP
from controlled import STEPS, Graphs, graphs
from hybrid_trt.sampling import call_stats, control_stack
from hybrid_trt.sampling.model_wrapper import patch_model
from memory_fixtures import files, nothing_loaded
from patched import LIMIT, sampling_node

from sampling import error

__all__ = ["files", "graphs", "nothing_loaded"]  # fixtures: pytest finds them by name


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


def wrapped(model: Any, spy: Spy) -> Any:
    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "spy", spy.wrap)
    return model


def pre_cfg(model: Any, spy: Spy) -> Any:
    model = model.clone()
    model.set_model_sampler_pre_cfg_function(spy.pre_cfg)
    return model


def batch_function(model: Any, spy: Spy) -> Any:
    model = model.clone()
    model.set_model_sampler_calc_cond_batch_function(spy.batch_function)
    return model


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of ControlNets in each stack that ran as one."""
    found, run = [], control_stack._run
    monkeypatch.setattr(control_stack, "_run", lambda chain, *rest: found.append(len(chain)) or run(chain, *rest))
    return found


PLACES = {"behind the patch": (wrapped, False), "before the patch": (wrapped, True), "before CFG": (pre_cfg, False),
          "in the place of the batch": (batch_function, False)}  # fmt: skip


@pytest.mark.parametrize(("place", "before"), PLACES.values(), ids=PLACES)
def test_who_sees_the_controls_of_a_step_sees_those_of_the_graph_and_they_still_run_as_one(
    graphs: Graphs, joined: list[int], place: Callable, before: bool
) -> None:
    spy, made, control = Spy(), graphs.patched(), graphs.controls(True, True)
    model = patch_model(place(made.native, spy), made.handle) if before else place(made.model, spy)
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
