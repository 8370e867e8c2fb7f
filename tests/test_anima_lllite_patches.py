"""Anima with LLLite: native computes what an engine does not, and a reason names it; the view of the page."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lllite
import pytest
import torch
from comfy.ldm.anima.lllite import (
    AnimaLLLite,
    AnimaLLLiteAttentionPatch,
    AnimaLLLiteConditioning,
    AnimaLLLiteMLPPatch,
    AnimaLLLiteModule,
    AnimaLLLitePatch,
)
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.engine_library import Reason
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.page_api.workflow_graph import node_key
from lllite_sampling import TOGETHER, WIDTH, mask, model, other, own_sampling, patch, patched
from token_calls import Call

__all__ = ["model", "other", "patch"]  # fixtures: pytest finds them by name

LIMIT = 1e-5


def with_another_patch(model: ModelPatcher, _other: ModelPatcher) -> ModelPatcher:
    model = model.clone()
    model.set_model_attn1_patch(lambda q, k, v, **_: {"v": v * 1.5})
    return model


def without_patches(model: ModelPatcher, _other: ModelPatcher) -> ModelPatcher:
    model = model.clone()
    model.model_options["transformer_options"].pop("patches")
    return model


def with_other_file(model: ModelPatcher, other: ModelPatcher) -> ModelPatcher:
    return lllite.behind(without_patches(model, other), other)


def with_two(model: ModelPatcher, other: ModelPatcher) -> ModelPatcher:
    return lllite.behind(model, other, lllite.image(7), 0.4)


def for_other_layers(model: ModelPatcher, _other: ModelPatcher) -> ModelPatcher:
    """Another pack's node has the patch act on fewer layers."""
    model = model.clone()
    places = model.model_options["transformer_options"]["patches"]
    (whole,) = places["attn1_patch"]
    places["attn1_patch"] = [AnimaLLLiteAttentionPatch(whole.patch, {"q": "self_attn_q_proj"})]
    return model


BEHIND = {
    "another patch beside it": (with_another_patch, Reason.MODEL_PATCHED, "by AnimaLLLitePatch"),
    "two at once": (with_two, Reason.MODEL_PATCHED, "by AnimaLLLitePatch"),
    "other layers": (for_other_layers, Reason.MODEL_PATCHED, "by AnimaLLLitePatch"),
    "none": (without_patches, Reason.OTHER_MODEL, "the model that is sampled has none"),
    "another file": (with_other_file, Reason.OTHER_MODEL, "the model that is sampled has that of another file"),
}


@pytest.mark.parametrize(("change", "reason", "words"), BEHIND.values(), ids=BEHIND)
def test_a_model_with_other_patches_than_at_the_engine_gives_natives_picture_and_a_reason(
    model: ModelPatcher, patch: ModelPatcher, other: ModelPatcher, tmp_path: Path, caplog: Any,
    change: Callable[[ModelPatcher, ModelPatcher], ModelPatcher], reason: Reason, words: str,
) -> None:  # fmt: skip
    native = lllite.behind(model, patch)
    ours = patched(native, tmp_path)
    whole, ours.model = ours.model, change(ours.model, other)
    changed = own_sampling(change(native, other))
    assert relative_error(own_sampling(native), changed) > 100 * LIMIT
    assert relative_error(ours.sample(WIDTH, **TOGETHER), changed) <= LIMIT
    assert ours.counts == (0, 3)
    assert f"{reason.value}: " in caplog.text
    assert words in caplog.text
    ours.model = whole
    assert relative_error(ours.sample(WIDTH, **TOGETHER), own_sampling(native)) <= LIMIT
    assert ours.counts == (3, 0), "with its own patch the engine serves again"


def test_a_patch_behind_the_engine_node_is_named_with_what_to_do(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, caplog: Any
) -> None:
    ours = patched(model, tmp_path)
    ours.model = lllite.behind(ours.model, patch)
    assert relative_error(ours.sample(WIDTH, **TOGETHER), own_sampling(lllite.behind(model, patch))) <= LIMIT
    assert ours.counts == (0, 3)
    assert "put the engine node behind AnimaLLLiteApply" in caplog.text


def test_several_control_images_at_once_give_natives_picture_and_a_reason(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, caplog: Any
) -> None:
    native = lllite.behind(model, patch, lllite.image(images=2))
    ours = patched(native, tmp_path)
    assert relative_error(ours.sample(WIDTH, **TOGETHER), own_sampling(native)) <= LIMIT
    assert ours.counts == (0, 3)
    assert f"{Reason.UNSUPPORTED_INPUT.value}: LLLite with 2 images at once" in caplog.text


def test_what_native_refuses_is_left_to_it(models: dict[str, Path], model: ModelPatcher, tmp_path: Path) -> None:
    own = lllite.load(models, "tiny_anima_lllite_inpaint")
    ours = patched(lllite.behind(model, own, mask=mask().repeat(2, 1, 1)), tmp_path)
    with pytest.raises(ValueError, match="mask batch 2"):
        ours.sample(WIDTH, **TOGETHER)


def test_a_call_without_the_patch_is_refused_by_name(model: ModelPatcher, patch: ModelPatcher) -> None:
    net = lllite.network(lllite.behind(model, patch))
    with pytest.raises(Unsupported, match="there is no LLLite"):
        net.architecture().binding(net.module)(Call().drawn(WIDTH))


def test_patches_that_no_engine_computes_leave_the_model_its_own_engine(
    models: dict[str, Path], model: ModelPatcher, patch: ModelPatcher
) -> None:
    class Other(AnimaLLLiteMLPPatch):
        """Another pack's patch that inherits from ComfyUI's."""

    inherited, elsewhere, wide = lllite.behind(model, patch), lllite.load(models), lllite.load(models)
    inherited.model_options["transformer_options"]["patches"]["mlp_patch"][0].__class__ = Other
    elsewhere.load_device = torch.device("cpu", 1)
    wide.model.model_dim = 512
    for native in (inherited, lllite.behind(model, elsewhere), lllite.behind(model, wide)):
        assert lllite.network(native).architecture().name == "anima"


def replacement_of(own: Callable) -> Callable:
    """Another pack's function in the place of a method of ComfyUI's, which looks like that."""

    @functools.wraps(own)
    def replacement(self: Any, *given: Any, **options: Any) -> Any:
        found = own(self, *given, **options)
        if not isinstance(found, dict):
            return found * 1.3
        name = next(name for name in ("img", "v", "x") if name in found)
        return {**found, name: found[name] * 1.3}

    return replacement


REPLACED = [(AnimaLLLite, "apply"), (AnimaLLLite, "encode_conditioning"), (AnimaLLLiteModule, "forward"),
            (AnimaLLLiteConditioning, "forward"), (AnimaLLLitePatch, "__call__"),
            (AnimaLLLiteAttentionPatch, "__call__"), (AnimaLLLiteMLPPatch, "__call__")]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), REPLACED, ids=[f"{kind.__name__}.{name}" for kind, name in REPLACED])
def test_code_of_another_pack_in_the_patch_is_natives(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    native = lllite.behind(model, patch)
    ours = patched(native, tmp_path)
    before = ours.sample(WIDTH, **TOGETHER)
    monkeypatch.setattr(kind, name, replacement_of(getattr(kind, name)))
    expected = own_sampling(native)
    assert relative_error(before, expected) > 100 * LIMIT
    assert relative_error(ours.sample(WIDTH, **TOGETHER), expected) <= LIMIT
    assert ours.counts[0] == 0
    assert list(ours.handle.stats.reasons) == [Reason.MODEL_PATCHED.value]


GRAPH: dict[str, Any] = {
    "unet": {"class_type": "UNETLoader", "inputs": {"unet_name": "model"}},
    "file": {"class_type": "ModelPatchLoader", "inputs": {"name": "lllite"}},
    "image": {"class_type": "LoadImage", "inputs": {"image": "one"}},
    "lllite": {"class_type": "AnimaLLLiteApply", "inputs": {
        "model": ["unet", 0], "model_patch": ["file", 0], "image": ["image", 0], "strength": 0.7, "end_percent": 1.0}},
    "engine": {"class_type": "TRTUNetEngine", "inputs": {"model": ["lllite", 0], "backend": "torch"}},
}


@pytest.mark.parametrize(("node", "value", "same"), [
    ("lllite", {"strength": 0.2}, True), ("lllite", {"end_percent": 0.2}, True), ("image", {"image": "two"}, True),
    ("file", {"name": "other"}, False),
], ids=["strength", "range", "image", "file of the patch"])  # fmt: skip
def test_a_node_on_the_page_is_the_same_for_all_images_strengths_and_ranges(
    node: str, value: dict, same: bool
) -> None:
    other = copy.deepcopy(GRAPH)
    other[node]["inputs"] |= value
    assert (node_key(other, "engine") == node_key(GRAPH, "engine")) is same
