"""Engines that stop giving numbers in the middle of a run: the picture is native's, and the node says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import slow
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from controlled import STEPS as CONTROL_STEPS
from controlled import Graphs, graphs
from gpu_doubles import gpu_recorder, play_gpu
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.sampling import control_stack, nan_guard
from memory_fixtures import file, files, library, nothing_loaded
from patched import LIMIT, Patched, library_of, load, spoil, with_lora

from sampling import STEPS, error, sample

__all__ = ["file", "files", "graphs", "library", "nothing_loaded"]  # fixtures: pytest finds them by name

NAN, INF = float("nan"), float("inf")


@pytest.mark.fault("an engine gives values that are no numbers (NaN)",
                   see="normal speed: *engine failed*; the whole run is done again")
@pytest.mark.parametrize(("sampler", "value"), [("euler", NAN), ("euler_ancestral", INF)])
def test_native_does_a_run_again_in_which_an_engine_gave_no_numbers(
    file: Path, library: Library, value: float, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = sample(load(file), sampler=sampler)
    patched = Patched(load(file), library)
    spoil(patched.handle.session, monkeypatch, 2, value)
    latent = patched.sample(sampler=sampler)
    assert latent.isfinite().all()
    assert error(latent, reference) <= LIMIT
    assert patched.counts == (STEPS, STEPS)
    stats = patched.handle.stats
    assert stats.reasons == {Reason.ENGINE_FAILED.value: STEPS}
    assert "no numbers (NaN), so the whole run was done again" in stats.details[Reason.ENGINE_FAILED.value]
    monkeypatch.undo()
    assert error(patched.sample(), sample(load(file))) <= LIMIT
    assert patched.counts == (STEPS, 0), "the next run tries the engine again"


@pytest.mark.fault("the normal model gives values that are no numbers (NaN)",
                   see="normal speed: *engine failed*; the whole run is done again, and the report blames no engine")
def test_no_engine_is_blamed_where_the_normal_model_gives_no_numbers_either(file: Path, library: Library) -> None:
    patched = Patched(load(file), library)
    patched.model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * NAN)
    assert patched.sample().isnan().all()
    why = patched.handle.stats.details[Reason.ENGINE_FAILED.value]
    assert why == nan_guard.NATIVE_TOO
    assert "engine" not in why
    assert "engine" not in patched.handle.stats.advice(Reason.ENGINE_FAILED)


def test_a_run_of_numbers_is_done_once_and_nothing_is_asked_of_the_gpu_before_its_end(
    file: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched, asked, seen = Patched(load(file), library), [], []
    original, see = nan_guard.Watch.finite, nan_guard.Watch.see
    monkeypatch.setattr(nan_guard.Watch, "finite", lambda self: asked.append(len(seen)) or original(self))
    monkeypatch.setattr(nan_guard.Watch, "see", lambda self, result: seen.append(1) or see(self, result))
    patched.sample()
    assert patched.counts == (STEPS, 0)
    assert asked == [STEPS], "once, after the last call"


def test_large_half_precision_numbers_are_numbers() -> None:
    run = nan_guard.Watch()
    for _ in range(100):
        run.see(torch.full((4, 4, 128, 128), 65504.0, dtype=torch.float16))
    assert run.finite()
    run.see(torch.tensor([NAN]))
    run.see(torch.ones(3))
    assert not run.finite(), "a later number does not hide it"


# ControlNets


def with_patch_inside(model: ModelPatcher) -> ModelPatcher:
    model = model.clone()
    model.set_model_attn1_patch(lambda q, k, v, _options: (q, k, 0.9 * v))
    return model


def past_wrappers(model: ModelPatcher) -> ModelPatcher:
    """As packs that have a forward of their own: nobody's wrappers run around the UNet."""

    def call(apply_model: Callable, args: dict) -> torch.Tensor:
        options = {**args["c"]["transformer_options"], "wrappers": {}}
        return apply_model(args["input"], args["timestep"], **{**args["c"], "transformer_options": options})

    model = model.clone()
    model.set_model_unet_function_wrapper(call)
    return model


CHANGES = {"on its engine": lambda model: model, "native by a LoRA": with_lora, "native by a patch": with_patch_inside,
           "called past all wrappers": past_wrappers}  # fmt: skip


@pytest.fixture(scope="module")
def own_weights(graphs: Graphs, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return library_of(graphs.file, tmp_path_factory.mktemp("engines"))


@pytest.fixture
def no_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_stack, "_can_join", lambda *_: False)


def check(graphs: Graphs, latent: torch.Tensor, reference: torch.Tensor, spoiled: int) -> None:
    assert latent.isfinite().all()
    assert error(latent, reference) <= LIMIT
    stats = graphs.handles[spoiled].stats
    assert set(stats.reasons) == {Reason.ENGINE_FAILED.value}
    assert "no numbers (NaN)" in stats.details[Reason.ENGINE_FAILED.value]


@pytest.mark.fault("a ControlNet's engine gives values that are no numbers",
                   see="normal speed: *engine failed*; the whole run is done again")
@slow.when("one by one", but=["native by a LoRA"])
@slow.when("native by a patch")
@pytest.mark.parametrize("joins", [True, False], ids=["run as one", "one by one"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_patched_model_is_sampled_again_natively(
    graphs: Graphs, own_weights: Library, change: Callable, joins: bool, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if not joins:
        request.getfixturevalue("no_joins")
    made = graphs.patched()
    if change is with_lora:  # which an engine with weights of its own lacks
        made = Patched(load(graphs.file), own_weights, "onnxruntime")
        graphs.handles = [made.handle]
    reference = graphs.native(change.__name__, change)
    control, model = graphs.controls(True, True), change(made.model)
    with monkeypatch.context() as patch:
        spoil(graphs.handles[1].session, patch, 2, place=-1)
        check(graphs, graphs.sampled(model, control), reference, 1)
    assert graphs.handles[2].stats.native == CONTROL_STEPS, "no engine of any network in the second time"
    assert error(graphs.sampled(model, control), reference) <= LIMIT
    assert [handle.stats.native for handle in graphs.handles[1:]] == [0, 0], "the next run tries the engines again"


@pytest.mark.parametrize(("place", "value"), slow.cases(
    {f"{place}, {value}": (place, value) for place in (0, 1, -1) for value in (NAN, INF)},
    ["0, inf", "1, nan", "-1, inf"]))
def test_any_value_of_any_residual_is_seen(
    graphs: Graphs, value: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = graphs.patched() and graphs.controls(False, True)
    spoil(graphs.handles[1].session, monkeypatch, CONTROL_STEPS, value, place)
    model = load(graphs.file)
    check(graphs, graphs.sampled(model, control), graphs.native(), 1)
    assert (graphs.handles[1].stats.engine, graphs.handles[1].stats.native) == (CONTROL_STEPS - 1, 1)


def test_without_a_sampler_patch_native_does_that_call_and_the_rest_of_the_run(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs.handles = []
    control, model = graphs.controls(True, True), load(graphs.file)
    with monkeypatch.context() as patch:
        spoil(graphs.handles[0].session, patch, 2, place=-1)
        check(graphs, graphs.sampled(model, control), graphs.native(), 0)
    assert [(h.stats.engine, h.stats.native) for h in graphs.handles] == [(1, CONTROL_STEPS - 1), (CONTROL_STEPS, 0)]
    assert error(graphs.sampled(model, control), graphs.native()) <= LIMIT
    assert [(h.stats.engine, h.stats.native) for h in graphs.handles] == [(CONTROL_STEPS, 0)] * 2


def test_residuals_that_come_late_are_looked_at_with_the_run(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch)
    made, control = graphs.patched(), graphs.controls(True, True)
    for number, handle in enumerate(graphs.handles):
        handle.session.graphs._capture = gpu_recorder(wait_point=not number)
    assert error(graphs.sampled(made.model, control), graphs.native()) <= LIMIT
    assert error(graphs.sampled(made.model, control), graphs.native()) <= LIMIT
    assert graphs.handles[0].stats.beside == CONTROL_STEPS, "they come late"
    spoil(graphs.handles[2].session, monkeypatch, 2, place=-1)
    check(graphs, graphs.sampled(made.model, control), graphs.native(), 2)


@pytest.mark.parametrize("patched", [True, False])
def test_the_gpu_is_waited_for_in_the_end_alone_where_there_is_a_sampler_patch(
    graphs: Graphs, patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, looks, own = graphs.patched(), [], nan_guard._all_finite
    monkeypatch.setattr(nan_guard, "_all_finite", lambda tensors: looks.append(done[-1]) or own(tensors))
    done = [0]
    model = (made.model if patched else load(graphs.file)).clone()
    model.add_wrapper_with_key(
        WrappersMP.CALC_COND_BATCH, "steps", lambda executor, *given: (executor(*given), done.append(len(done)))[0])
    assert error(graphs.sampled(model, graphs.controls(True, True)), graphs.native()) <= LIMIT
    assert looks == ([CONTROL_STEPS] if patched else [0, 0, 1, 1, 2, 2])


def test_what_native_gives_alone_is_not_sampled_again(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    made, steps = graphs.patched(), []
    model = with_patch_inside(made.model)
    unet = type(model.model.diffusion_model)
    own = unet._forward
    monkeypatch.setattr(unet, "_forward", lambda *a, **b: steps.append(1) or NAN * own(*a, **b))
    latent = graphs.sampled(model, None)
    assert latent.isnan().any(), "a picture of native's own"
    assert len(steps) == CONTROL_STEPS
    assert made.handle.stats.engine == 0
