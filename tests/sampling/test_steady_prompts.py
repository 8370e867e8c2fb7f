"""A prompt is encoded once per run however ComfyUI joins prompts, and none is ever served for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import slow
import tiny_models
import torch
import zimage
from comfy.conds import CONDCrossAttn, CONDRegular
from comfy.patcher_extension import WrappersMP
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.run_inputs import KEPT_RESULTS, SteadyTensors, steady
from patched import built_here

LIMIT = 1e-5
STEPS = 4


@pytest.fixture(scope="module")
def file(environment: Any) -> Path:
    return tiny_models.make(environment.base / "models", ["tiny_zimage"])["tiny_zimage"]


@pytest.fixture
def patched(file: Path, tmp_path: Path) -> zimage.Patched:
    return zimage.Patched(zimage.load(file), Library([tmp_path]))


def conds(*prompts: torch.Tensor) -> list:
    return [[prompt, {}] for prompt in prompts]


def in_area(prompt: torch.Tensor, x: int, width: int = 4) -> list:
    return [prompt, {"area": (8, width, 0, x), "set_area_to_bounds": False, "strength": 1.0}]


def in_steps(prompt: torch.Tensor, start: float, end: float) -> list:
    return [prompt, {"start_percent": start, "end_percent": end}]


A, B, C = zimage.prompts(20, 20, 40)
RUNS = {
    "without CFG": (conds(A), conds(B), 1.0, 1),
    "both prompts in one call": (conds(A), conds(B), 3.0, 1),
    "prompts of unlike lengths": (conds(A), conds(C), 3.0, 2),
    "another in each half of the run": ([in_steps(A, 0, 0.5), in_steps(C, 0.5, 1)], conds(B), 3.0, 3),
    "parts of the picture": ([*conds(A), in_area(C, 0), in_area(B, 2)], conds(B), 3.0, 3),
    "in half precision": (conds(A.half()), conds(B.half()), 3.0, 1),
}
"""Positive and negative prompts, CFG, and the calls of unlike prompts in a run."""


@slow.when("1", but=["parts of the picture"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("batch", [1, 2])
def test_prompts_are_encoded_once_per_run_and_the_latent_is_natives(
    patched: zimage.Patched, run: tuple, batch: int
) -> None:
    *given, unlike = run
    native = zimage.sample(patched.native, *given, batch=batch, steps=STEPS)
    for number in (1, 2):
        assert relative_error(patched.sample(*given, batch=batch, steps=STEPS), native) <= LIMIT
        assert patched.counts[1] == 0
        assert patched.encoded == unlike * number
    others = zimage.sample(patched.native, given[1], given[0], given[2], batch=batch, steps=STEPS)
    assert relative_error(others, native) > 100 * LIMIT, "prompts that are mistaken for another would show"


def test_an_engine_of_files_encodes_them_once_per_run_too(patched: zimage.Patched, tmp_path: Path) -> None:
    library = Library([tmp_path])
    network, choice = patched.handle.network, patched.handle.choice
    built_here(network, library, profile=choice.profile)
    served = zimage.Patched(patched.native, library, "onnxruntime")
    for number, given in enumerate([(conds(A), conds(B)), (conds(B), conds(A))], start=1):
        assert relative_error(served.sample(*given), zimage.sample(patched.native, *given)) <= LIMIT
        assert served.counts == (STEPS, 0)
        assert served.encoded == number


def test_prompts_change_places_from_run_to_run(patched: zimage.Patched) -> None:
    for positive, negative in ((A, B), (B, A), (A, A), (B, C), (A, B)):
        given = conds(positive), conds(negative)
        assert relative_error(patched.sample(*given), zimage.sample(patched.native, *given)) <= LIMIT


def _another_in_each_step(
    executor: Any, x: Any, t: torch.Tensor, concat: Any, prompts: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return executor(x, t, concat, prompts + t[:, None, None] * torch.arange(prompts.shape[2]), *args, **kwargs)


def _another_for_all(executor: Any, model: Any, given: list, *args: Any) -> Any:
    held = {"c_crossattn": CONDRegular(C)}
    changed = [[{**cond, "model_conds": cond["model_conds"] | held} for cond in group] for group in given]
    return executor(model, changed, *args)


@pytest.mark.parametrize(("place", "wrapper"), [
    (WrappersMP.APPLY_MODEL, _another_in_each_step), (WrappersMP.CALC_COND_BATCH, _another_for_all),
], ids=["after they were cast", "before they are joined"])  # fmt: skip
def test_prompts_of_another_node_are_never_taken_for_those_before(
    patched: zimage.Patched, place: str, wrapper: Any
) -> None:
    given, native = (conds(A), conds(B)), patched.native.clone()
    patched.sample(*given)
    native.add_wrapper_with_key(place, "another pack", wrapper)
    patched.model.add_wrapper_with_key(place, "another pack", wrapper)
    reference = zimage.sample(native, *given)
    assert relative_error(zimage.sample(patched.native, *given), reference) > 100 * LIMIT
    assert relative_error(patched.sample(*given), reference) <= LIMIT
    assert patched.counts == (STEPS, 0)
    assert patched.encoded == 1 + STEPS, "nothing is known of its tensors"


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_a_prompt_that_is_written_to_is_another(alone: bool, inference: bool) -> None:
    with torch.inference_mode(inference):
        sources = [torch.ones(1, 3, 2), torch.zeros(1, 3, 2)]
    tensors, made = SteadyTensors(alone), []

    def joined() -> torch.Tensor:
        with torch.inference_mode():
            (group,) = steady([[{"model_conds": {"c": CONDRegular(one)}} for one in sources]], tensors)
            first, second = (cond["model_conds"]["c"].process_cond(1, area=None) for cond in group)
            made.append(first.concat([second]))
        return made[-1]

    first = joined()
    assert joined() is first
    assert not first.is_inference(), "who writes to it shows in its version"
    with torch.inference_mode():
        sources[1].add_(5)
    if inference and alone:
        return  # nobody is there who would
    assert joined() is not first
    assert joined().sum() == 6 + 30
    with torch.inference_mode():
        joined().mul_(2)
    assert joined().sum() == 6 + 30


def test_order_number_and_batch_of_prompts_make_others_and_the_latest_are_known() -> None:
    tensors = SteadyTensors(alone=True)

    def joined(*prompts: torch.Tensor, batch: int = 1, kind: type = CONDRegular) -> torch.Tensor:
        (group,) = steady([[{"model_conds": {"c": kind(one)}} for one in prompts]], tensors)
        first, *others = (cond["model_conds"]["c"].process_cond(batch, area=None) for cond in group)
        assert isinstance(first, kind)
        return first.concat(others)

    cases = [(A, B), (B, A), (A,), (A, B, A)]
    found = [joined(*prompts) for prompts in cases]
    for prompts, one in zip(cases, found, strict=True):
        assert torch.equal(one, torch.cat(prompts))
        assert joined(*prompts) is one
    assert torch.equal(joined(A, B, batch=2), torch.cat([A, A, B, B]))
    assert torch.equal(joined(A, C, kind=CONDCrossAttn), torch.cat([A.repeat(1, 2, 1), C]))
    for _ in range(KEPT_RESULTS + 1):
        joined(A.clone())
    assert joined(*cases[0]) is not found[0]
    tensors.release()
    assert tensors._known == []
