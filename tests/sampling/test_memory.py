"""Engines in ComfyUI's memory management: it plans for those of a run, may take them back, and frees dropped models.

In this process and on the CPU, with ComfyUI's own ``load_models_gpu``; doubles of what a GPU alone has are named so.
"""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy import model_management
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher
from dynamic_vram import on_cpu
from hybrid_trt.backends import backends
from hybrid_trt.engine_library import Library, Reason, Unavailable
from hybrid_trt.sampling.controlnet import EngineControlModel
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.engine_patcher import EnginePatcher
from hybrid_trt.sampling.model_wrapper import patch_model
from memory_fixtures import Controlled, controlled, controlnet, device, file, files, library, nothing_loaded, patched
from patched import (
    CPU,
    LIMIT,
    NAME,
    PROFILE,
    Failing,
    Patched,
    engines_loaded,
    gone,
    load,
    on_device,
    sampling_node,
    with_lora,
)

from sampling import STEPS, error, sample

# fixtures: pytest finds them by name
__all__ = ["controlled", "controlnet", "device", "file", "files", "library", "nothing_loaded", "patched"]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that ComfyUI made room for, plan by plan."""
    bytes_, load_models = [], model_management.load_models_gpu

    def load_models_gpu(models: list[ModelPatcher], *arguments: Any, **options: Any) -> None:
        every = {id(m): m for model in models for m in [model, *model.model_patches_models()]}.values()
        bytes_.append(sum(model_management.LoadedModel(m).model_memory_required(m.load_device) for m in every))
        load_models(models, *arguments, **options)

    monkeypatch.setattr(model_management, "load_models_gpu", load_models_gpu)
    return bytes_


def test_an_engine_is_registered_with_its_size(patched: Patched) -> None:
    sizes = []
    patched.sample(step=lambda _i: sizes.extend(m.loaded_size() for m in engines_loaded()))
    assert patched.counts == (STEPS, 0)
    assert set(sizes) == {patched.handle.session.bytes}
    assert len(sizes) == STEPS
    assert patched.handle.session.bytes >= patched.handle.session.engine.manifest.bytes


def test_under_memory_pressure_an_engine_closes_and_the_next_run_opens_it_with_the_same_result(
    patched: Patched
) -> None:
    first = patched.sample()
    session = patched.handle.session
    assert session.loaded
    runner = session._runner
    model_management.free_memory(1e30, CPU)  # more than there is
    assert not session.loaded
    assert engines_loaded() == []
    again = patched.sample()
    assert patched.handle.session is session
    assert session.loaded
    assert session._runner is not runner
    assert torch.equal(again, first)
    assert patched.counts == (STEPS, 0)


def test_an_engine_that_is_evicted_in_the_middle_of_a_run_opens_again_at_the_next_call(patched: Patched) -> None:
    undisturbed = patched.sample()

    def evict(step: int) -> None:
        if step == 1:
            model_management.free_memory(1e30, CPU)
            assert not patched.handle.session.loaded

    assert torch.equal(patched.sample(step=evict), undisturbed)
    assert patched.counts == (STEPS, 0)


def test_when_there_is_room_engines_stay_open(patched: Patched) -> None:
    patched.sample()
    model_management.free_memory(1, CPU)
    assert patched.handle.session.loaded


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_a_dropped_model_is_freed_at_once(file: Path, library: Library, device: None, backend: str) -> None:
    patched = Patched(load(file), library, backend)
    patched.sample()
    model, weights = weakref.ref(patched.model), weakref.ref(patched.native.model.diffusion_model)
    gc.disable()
    try:
        del patched
        assert model() is None, "a reference cycle keeps it until Python looks for cycles"
        assert weights() is None, "an engine that is kept open keeps the model in main memory"
    finally:
        gc.enable()


def test_a_live_network_stays_loaded_while_only_its_node_runs_again(file: Path, library: Library) -> None:
    native = load(file)
    first = Patched(native, library, "torch")
    latent = first.sample()
    session = first.handle.session
    del first
    gc.collect()
    assert session.loaded
    assert len(engines_loaded()) == 1, "ComfyUI sees it and may take it"
    again = Patched(native, library, "torch")
    assert again.handle.session is session
    assert torch.equal(again.sample(), latent)


def test_a_lora_between_the_engine_node_and_the_patch_is_not_lost_when_an_engine_with_weights_takes_over(
    file: Path, library: Library
) -> None:
    native = load(file)
    handle = Patched(native, library, backend="torch").handle
    assert handle.follows_patches
    changed = with_lora(native)
    reference = sample(changed)
    assert error(reference, sample(native)) > 1e-3
    model = patch_model(changed, handle)
    for backend, counts in (("torch", (STEPS, 0)), ("onnxruntime", (0, STEPS))):
        handle.choice = EngineChoice(PROFILE, backend=backend)
        with sampling_node():
            assert error(sample(model), reference) <= LIMIT
        assert (handle.stats.engine, handle.stats.native) == counts
    assert handle.stats.reasons == {"weights changed": STEPS}


# Engines that come and go between the node and the run


def test_an_engine_whose_clones_are_gone_is_still_one_that_comfyui_knows(
    patched: Patched, nothing_loaded: None, caplog: pytest.LogCaptureFixture
) -> None:
    """ComfyUI clones the engines of a model with the model. Clones of clones often go together, in a cycle."""
    (engine,) = (model for models in patched.model.additional_models.values() for model in models)
    first = engine.clone()
    clones = [first, first.clone()]
    clones[1].attachments["a cycle"] = clones
    model_management.load_models_gpu([clones[1]])
    assert [entry.model for entry in model_management.current_loaded_models] == [clones[1]]
    del first, clones
    gc.collect()
    (entry,) = model_management.current_loaded_models
    assert entry.model is not None
    assert entry.model.model is engine.model
    with caplog.at_level(logging.INFO):
        model_management.load_models_gpu([patched.native])
    assert "memory leak" not in caplog.text


def test_an_engine_that_arrived_after_the_node_ran_is_planned_for_and_native_weights_wait(
    patched: Patched, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(EngineHandle, "refresh", gone)
        late = Patched(patched.native, patched.handle.library)
    assert late.handle.session is None
    held, engines = [], []
    late.sample(step=lambda _i: (held.append(on_device(late.model)), engines.append(len(engines_loaded()))))
    assert late.counts == (STEPS, 0)
    assert held == [0] * STEPS
    assert engines == [1] * STEPS, "what is in no list is not freed by 'Unload models'"


def test_a_controlnet_engine_that_arrived_after_the_node_ran_is_planned_for_without_native_weights(
    files: dict[str, Path], controlnet: ControlNet, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(EngineHandle, "refresh", gone)
        controlled = Controlled(load(files[NAME]), controlnet, library)
    seen = []
    latent = controlled.sample(step=lambda _i: seen.append((controlled.native_loaded, len(engines_loaded()))))
    assert (controlled.handle.stats.engine, controlled.handle.stats.native) == (STEPS, 0)
    assert seen == [(False, 1)] * STEPS
    assert error(latent, sample(controlled.model, control=controlled.plain)) <= LIMIT


def test_a_controlnet_whose_engine_was_deleted_has_its_native_weights_planned_for(
    controlled: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controlled.handle, "refresh", lambda: gone(controlled.handle))
    monkeypatch.setattr(EngineControlModel, "_make_native_resident", lambda *_: None)  # too late for a plan
    loaded = []
    latent = controlled.sample(step=lambda _i: loaded.append(controlled.native_loaded))
    assert controlled.handle.stats.native == STEPS
    assert loaded == [True] * STEPS
    assert torch.equal(latent, sample(controlled.model, control=controlled.plain))


def test_a_run_looks_the_engine_up_once_however_often_it_samples(
    controlled: Controlled, patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    for handle in (controlled.handle, patched.handle):
        refresh = handle.refresh
        monkeypatch.setattr(handle, "refresh", lambda handle=handle, refresh=refresh: (asked.append(handle), refresh()))
    with sampling_node():
        for seed in range(2):
            sample(patched.model, seed, control=controlled.net)
    assert asked.count(controlled.handle) == 1
    assert asked.count(patched.handle) == 1
    with sampling_node():
        sample(patched.model, control=controlled.net)
    assert len(asked) == 4


def test_native_controlnet_weights_that_were_evicted_come_again_in_a_later_run_of_the_same_node(
    controlled: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tiled samplers do it: several runs in one execution, and other models between them."""
    session = controlled.handle.session
    failed = Failing(None, error=Unavailable(Reason.SHAPE_OUTSIDE_PROFILE, "a tile"))
    monkeypatch.setattr(type(session), "run", failed)
    loaded, loads, load_models = [], [], model_management.load_models_gpu
    monkeypatch.setattr(
        model_management, "load_models_gpu", lambda *given, **b: (loads.append(given), load_models(*given, **b)))
    with sampling_node():
        for _ in range(2):
            sample(controlled.model, control=controlled.net, step=lambda _i: loaded.append(controlled.native_loaded))
            model_management.free_memory(1e30, CPU)
    assert loaded == [True] * 2 * STEPS
    assert len(loads) == 4, "by ComfyUI before each run, and by its first call"


# What ComfyUI makes room for


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_under_dynamic_vram_no_room_is_made_for_native_weights_beside_an_engine_with_its_own(
    files: dict[str, Path], library: Library, planned: list[int], backend: str
) -> None:
    native = on_cpu(load(files[NAME]))
    patched = Patched(native, library, backend)
    patched.handle.session.unload()  # earlier prompts keep it open
    expected = patched.handle.session.bytes
    assert 0 < expected < 2 * native.model_size()
    reference = sample(load(files[NAME]))
    planned.clear()
    for seed in (1, 1):
        latent = patched.sample(seed)
        assert patched.counts == (STEPS, 0)
        assert error(latent, reference) <= LIMIT
    assert planned == [expected, 0]


@pytest.mark.usefixtures("device")
def test_under_dynamic_vram_the_run_after_a_native_call_has_room_for_native_weights(
    files: dict[str, Path], library: Library, planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    native = on_cpu(load(files[NAME]))
    patched = Patched(native, library)
    with monkeypatch.context() as deleted:
        deleted.setattr(patched.handle, "refresh", lambda: gone(patched.handle))
        latent = patched.sample()
    assert torch.equal(latent, sample(load(files[NAME])))
    planned.clear()
    patched.sample()
    patched.sample()
    assert planned[0] >= native.model_size()
    assert planned[1] == 0


def test_no_room_is_made_for_an_engine_that_is_not_going_to_be_called(patched: Patched, planned: list[int]) -> None:
    patched.handle.session.unload()
    patched.model.set_model_attn1_patch(lambda q, k, v, _options: (q, k, v))
    patched.sample()
    assert patched.counts == (0, STEPS)
    assert not patched.handle.session.loaded
    assert planned == [patched.model.model_size()]


def test_no_room_is_made_again_for_an_engine_that_another_node_has_opened(patched: Patched) -> None:
    patched.sample()
    gpu, session = torch.device("cuda"), patched.handle.session
    again = EnginePatcher.on(gpu)  # that of a node which ran again, for example with other settings
    again.model.session = session
    required = model_management.LoadedModel(again).model_memory_required
    assert required(gpu) == 0
    session.unload()
    assert required(gpu) == session.bytes > 0


def test_engines_open_while_comfyui_loads_so_that_what_is_loaded_after_finds_less_room(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched.handle.session.unload()
    opened = []
    partially_load = ModelPatcher.partially_load
    monkeypatch.setattr(ModelPatcher, "partially_load", lambda self, *a, **k: (
        opened.append(patched.handle.session.loaded), partially_load(self, *a, **k))[1])
    patched.sample()
    assert opened == [True]


@pytest.mark.usefixtures("device")
def test_native_weights_are_off_the_device_before_an_engine_opens(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = sample(patched.native)
    assert on_device(patched.native) > 0
    patched.handle.session.unload()
    held, load_engine = [], type(backends()["onnxruntime"]).load
    monkeypatch.setattr(type(backends()["onnxruntime"]), "load", lambda *arguments: (
        held.append(on_device(patched.native)), load_engine(*arguments))[1])
    assert error(patched.sample(), native) <= LIMIT
    assert held == [0]
