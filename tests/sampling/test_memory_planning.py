"""ComfyUI plans memory for the engines and native weights that a run is going to use, looked up before it plans.

In this process and on the CPU, with ComfyUI's own ``load_models_gpu``; doubles of what a GPU alone has are named so.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy import model_management
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor import session as live_session
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling.controlnet import EngineControlModel
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.engine_patcher import EnginePatcher
from memory_fixtures import Controlled, controlled, controlnet, device, file, files, library, nothing_loaded, patched
from patched import CPU, LIMIT, NAME, Patched, engines_loaded, gone, load, on_device, sampling_node

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
    monkeypatch.setattr(type(session), "run", lambda *_: (_ for _ in ()).throw(
        live_session.Unavailable(live_session.Reason.SHAPE_OUTSIDE_PROFILE, "a tile")))
    loaded = []
    with sampling_node():
        for _ in range(2):
            sample(controlled.model, control=controlled.net, step=lambda _i: loaded.append(controlled.native_loaded))
            model_management.free_memory(1e30, CPU)
    assert loaded == [True] * 2 * STEPS


# What ComfyUI makes room for


class DynamicDouble(ModelPatcher):
    """A double of ``ModelPatcherDynamic``, which needs a GPU: loading stages the weights and holds none."""

    def is_dynamic(self) -> bool:
        return True

    def loaded_ram_size(self) -> int:
        return 0

    def partially_load(self, device_to: torch.device, *_: Any, **__: Any) -> None:
        self.unpatch_model(self.offload_device, unpatch_weights=False)
        self.patch_model(load_weights=False)
        self.model.device = device_to
        self.model.current_weight_patches_uuid = self.patches_uuid


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_under_dynamic_vram_no_room_is_made_for_native_weights_beside_an_engine_with_its_own(
    files: dict[str, Path], library: Library, planned: list[int], backend: str
) -> None:
    native = load(files[NAME])
    native.__class__ = DynamicDouble
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
    native = load(files[NAME])
    native.__class__ = DynamicDouble
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
