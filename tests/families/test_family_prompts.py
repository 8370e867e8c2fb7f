"""Prompts of all model families: with an engine behind the sampler patch their latents are native's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
from comfy.model_patcher import ModelPatcher
from compiling import COMPILES
from dynamic_vram import on_cpu
from family_contract import ACTS, LIMIT, Family, lora_of
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Reason, trust
from model_families import for_each
from token_calls import Patched

from sampling import error


def with_lora(model: ModelPatcher, lora: dict[str, Any], strength: float) -> ModelPatcher:
    return comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]


@for_each("file backend", lambda family: [
    (file, backend) for file in dict.fromkeys(prompt.file for prompt in family.prompts.values())
    for backend in ("torch", "onnxruntime")])  # fmt: skip
def test_whole_prompts_are_natives(
    models: dict[str, Path], tmp_path: Path, family: Family, file: str, backend: str
) -> None:
    network, native, seen = family.network(models, file), family.network(models, file).patcher, []
    if backend == "onnxruntime":
        family.engine(network, tmp_path)
    patched = Patched(network, tmp_path, backend)
    for name, prompt in family.prompts.items():
        if prompt.file == file:
            expected = prompt.sample(native)
            assert error(prompt.sample(patched.model), expected) <= LIMIT, name
            assert patched.counts == (prompt.calls, 0), (name, patched.handle.stats.reasons)
            seen.append(expected)
    assert all(a.shape != b.shape or error(a, b) > ACTS for a, b in zip(seen, seen[1:], strict=False)), "all act"


@for_each("name", lambda family: family.native)
def test_a_prompt_that_no_engine_takes_is_natives_for_a_reason(
    models: dict[str, Path], tmp_path: Path, family: Family, name: str
) -> None:
    prompt = family.native[name]
    patched, native = Patched(family.network(models, prompt.file), tmp_path, "torch"), family.network(
        models, prompt.file).patcher  # fmt: skip
    expected = prompt.sample(native)
    assert error(replace(prompt, entries=lambda random: {}).sample(native), expected) > ACTS, "it acts"
    assert error(prompt.sample(patched.model), expected) == 0
    assert patched.counts == (0, prompt.calls)
    assert patched.handle.stats.reasons.keys() == {Reason.UNSUPPORTED_INPUT.value}


@for_each("name", lambda family: family.loras)
def test_loras_before_and_behind_the_engine_give_natives_latent(
    models: dict[str, Path], tmp_path: Path, family: Family, name: str
) -> None:
    prompt, layers = family.prompts[name], family.loras[name]
    plain, before, native = (family.network(models, prompt.file).patcher for _ in range(3))
    lora = lora_of(family.network(models, prompt.file), layers)
    before, native = with_lora(before, lora, 0.7), with_lora(native, lora, 0.7)
    patched, last = Patched(NativeNetwork.of_model(before, prompt.file), tmp_path, "torch"), prompt.sample(plain)
    for model, reference in ((patched.model, native),
                             (with_lora(patched.model, lora, -0.4), with_lora(native, lora, -0.4))):  # fmt: skip
        expected = prompt.sample(reference)
        assert error(expected, last) > ACTS, "it acts"
        assert error(prompt.sample(model), expected) <= LIMIT
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
        last = expected


@for_each("name", lambda family: family.dynamic)
def test_under_dynamic_vram_prompts_and_loras_are_natives(
    models: dict[str, Path], tmp_path: Path, family: Family, name: str
) -> None:
    prompt, lora = family.prompts[name], lora_of(family.network(models, family.prompts[name].file), family.loras[name])
    dynamic, native = on_cpu(family.network(models, prompt.file).patcher), family.network(models, prompt.file).patcher
    patched = Patched(NativeNetwork.of_model(dynamic, prompt.file), tmp_path, "torch")
    for model, reference in ((patched.model, native), (with_lora(patched.model, lora, 0.7),
                                                       with_lora(native, lora, 0.7))):  # fmt: skip
        assert error(prompt.sample(model), prompt.sample(reference)) <= LIMIT
        assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons


@for_each("name words", lambda family: [(name, words) for name in family.patched for words in family.patches])
def test_a_patch_inside_the_network_gives_natives_picture_for_a_reason(
    models: dict[str, Path], tmp_path: Path, caplog: Any, family: Family, name: str, words: str
) -> None:
    prompt, change = family.prompts[name], family.patches[words]
    patched, native = Patched(family.network(models, prompt.file), tmp_path, "torch"), family.network(
        models, prompt.file).patcher  # fmt: skip
    plain, changed = prompt.sample(native), patched.model.clone()
    change(native)
    change(changed)
    expected = prompt.sample(native)
    assert error(expected, plain) > ACTS, "the patch acts"
    assert error(prompt.sample(changed), expected) == 0
    assert patched.counts == (0, prompt.calls)
    assert f"{Reason.MODEL_PATCHED.value}: {words.split(' (')[0]}" in caplog.text
    assert error(prompt.sample(patched.model), plain) <= LIMIT
    assert patched.counts == (prompt.calls, 0), "without it the engine serves again"


@pytest.mark.slow
@COMPILES
@for_each("name", lambda family: family.compiled)
def test_one_compiled_file_serves_prompts_of_any_length_and_any_lora(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, name: str
) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    prompt = family.prompts[name]
    network, native = family.network(models, prompt.file), family.network(models, prompt.file)
    order = BuildOrder(network, "float32", family.profile(network), backends()["torch"])
    build_engine(order, Library([tmp_path]), lambda *_: None)
    patched, lora = Patched(network, tmp_path, "torch"), lora_of(native, family.loras[name])
    models_and_natives = [(patched.model, native.patcher),
                          tuple(with_lora(one, lora, 0.7) for one in (patched.model, native.patcher))]  # fmt: skip
    for words in ((12, 12), (130, 130)):
        longer = replace(prompt, words=words)
        for model, reference in models_and_natives:
            assert error(longer.sample(model), longer.sample(reference)) <= LIMIT
            assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons
            assert patched.handle.session.uncovered is None, "the file served"
