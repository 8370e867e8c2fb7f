"""Anima with LLLite: the range of steps in which it acts."""

from __future__ import annotations

from pathlib import Path

import lllite
import pytest
import torch
from absorbed_patches import LLLITE, mask, places_of
from comfy.model_patcher import ModelPatcher
from family_contract import LIMIT
from hybrid_trt.engine_library.engine import relative_error


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> ModelPatcher:
    return lllite.anima(models)


@pytest.fixture(scope="module")
def patch(models: dict[str, Path]) -> ModelPatcher:
    return lllite.load(models)


@pytest.mark.parametrize(("start", "end", "acting"), [(0.0, 0.4, 1), (0.3, 0.8, 1), (0.5, 1.0, 1), (0.9, 1.0, 0)])
def test_it_acts_in_the_steps_of_its_range(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, start: float, end: float, acting: int
) -> None:
    expected = LLLITE.served(lllite.behind(model, patch, start=start, end=end), tmp_path)
    never, always = (LLLITE.prompt.sample(one) for one in (model, lllite.behind(model, patch)))
    assert relative_error(always, expected) > 1000 * LIMIT
    assert (relative_error(never, expected) > 100 * LIMIT) is bool(acting)


def test_the_ends_of_its_range_are_natives_to_the_last_bit(model: ModelPatcher, patch: ModelPatcher) -> None:
    """A step may lie at an end of the range itself."""
    one = lllite.behind(model, patch)
    net = LLLITE.network(one)
    bind, given = net.architecture().binding(net.module), LLLITE.calls[0].drawn(net)
    at = torch.tensor([0.3, 0.6], dtype=torch.float32)
    for end, start in ((0.5, 0.6), (0.5, at[1].item()), (at[1].item(), 1.0), (0.6, 1.0), (0.0, 0.5)):
        (acts,) = places_of(one)["post_input"]
        acts.sigma_start, acts.sigma_end, data = start, end, {}
        acts({"x": given["x"], "transformer_options": {"sigmas": at, "model_patch_data": data}})
        call = given | {"transformer_options": {"patches": places_of(one), "sigmas": at}}
        assert bool(bind(call).inputs["strength"]) is bool(data), (start, end)


def test_what_native_refuses_is_left_to_it(models: dict[str, Path], model: ModelPatcher, tmp_path: Path) -> None:
    native = lllite.behind(model, lllite.load(models, lllite.INPAINT), mask=mask(72, 48).repeat(2, 1, 1))
    engine = LLLITE.patched(native, tmp_path)
    with pytest.raises(ValueError, match="mask batch 2"):
        LLLITE.prompt.sample(engine.model)
