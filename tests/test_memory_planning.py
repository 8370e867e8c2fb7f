"""What ComfyUI plans memory for: the engines and native weights that a run is going to use, looked up before it plans.

In this process and on the CPU, with ComfyUI's own ``load_models_gpu``; doubles of what a GPU alone has are named so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from pack import import_comfy

import_comfy()

import comfy.controlnet
from comfy import model_management
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_live import session as live_session
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_runtime import native_weights
from hybrid_trt.engine_runtime.controlnet import EngineControlModel, back_with_engine
from hybrid_trt.engine_runtime.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.engine_runtime.memory import EnginePatcher
from hybrid_trt.engine_sessions import file_session as session
from hybrid_trt.engine_sessions import room
from hybrid_trt.native_model.network import NativeNetwork
from patched import (
    CPU,
    LIMIT,
    NAME,
    PROFILE,
    Patched,
    engines_loaded,
    gone,
    library_of,
    load,
    on_device,
    sampling_node,
)
from sampling import STEPS, error, sample

CONTROLNET = "tiny_sd15_flat_a"


@pytest.fixture(scope="module")
def files(environment: Any) -> dict[str, Path]:
    return tiny_models.make(environment.base / "models", [NAME, CONTROLNET])


@pytest.fixture(scope="module")
def library(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Library:
    return library_of(files[NAME], tmp_path_factory.mktemp("library"))


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    yield
    gc.collect()
    model_management.unload_all_models()


@pytest.fixture
def patched(files: dict[str, Path], library: Library) -> Patched:
    return Patched(load(files[NAME]), library)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double: the pack takes the CPU for a device whose memory is not the main memory."""
    monkeypatch.setattr(native_weights, "has_memory_of_its_own", lambda _device: True)


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


@pytest.fixture
def controlnet(files: dict[str, Path]) -> ControlNet:
    return comfy.controlnet.load_controlnet(str(files[CONTROLNET]))


class Controlled:
    """A native UNet with a ControlNet that the torch backend runs, so that no wrapper of the pack is on the model."""

    def __init__(self, model: ModelPatcher, native: ControlNet, library: Library):
        self.model = model
        network = NativeNetwork.of_controlnet(native, CONTROLNET)
        self.handle = EngineHandle(network, EngineChoice(PROFILE, backend="torch"), library, "engine")
        self.native = native.control_model_wrapped
        image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
        self.net = back_with_engine(native, self.handle).copy().set_cond_hint(image, 0.7, (0.0, 1.0))
        self.plain = native.copy().set_cond_hint(image, 0.7, (0.0, 1.0))

    def sample(self, **options: Any) -> torch.Tensor:
        with sampling_node():
            return sample(self.model, control=self.net, **options)

    @property
    def native_loaded(self) -> bool:
        return any(m.is_clone(self.native) for m in model_management.loaded_models())


@pytest.fixture
def controlled(files: dict[str, Path], controlnet: ControlNet, library: Library) -> Controlled:
    return Controlled(load(files[NAME]), controlnet, library)


def test_a_controlnet_engine_that_arrived_after_the_node_ran_is_planned_for_without_native_weights(
    files: dict[str, Path], controlnet: ControlNet, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(EngineHandle, "refresh", gone)
        controlled = Controlled(load(files[NAME]), controlnet, library)
    seen = []
    latent = controlled.sample(step=lambda _i: seen.append((controlled.native_loaded, len(engines_loaded()))))
    assert (controlled.handle.tally.engine, controlled.handle.tally.native) == (STEPS, 0)
    assert seen == [(False, 1)] * STEPS
    assert error(latent, sample(controlled.model, control=controlled.plain)) <= LIMIT


def test_a_controlnet_whose_engine_was_deleted_has_its_native_weights_planned_for(
    controlled: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controlled.handle, "refresh", lambda: gone(controlled.handle))
    monkeypatch.setattr(EngineControlModel, "_make_native_resident", lambda _self: None)  # too late for a plan
    loaded = []
    latent = controlled.sample(step=lambda _i: loaded.append(controlled.native_loaded))
    assert controlled.handle.tally.native == STEPS
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


# A full card


def test_an_engine_that_finds_no_memory_is_opened_again_when_comfyui_has_freed_some(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = watch_room(monkeypatch, room)
    once = iter([True])
    load_engine = type(backends()["onnxruntime"]).load

    def full(self: Any, *arguments: Any) -> Any:
        if next(once, False):
            raise RuntimeError("Error Code 2: OutOfMemory (Requested size was 1723 bytes.)")
        return load_engine(self, *arguments)

    monkeypatch.setattr(type(backends()["onnxruntime"]), "load", full)
    patched.handle.session.unload()
    patched.sample()
    assert patched.counts == (STEPS, 0)
    assert freed == [patched.handle.session.engine.manifest.bytes, room.EVERYTHING]


def test_an_engine_that_finds_no_memory_twice_leaves_the_run_to_native(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def full(_self: Any, *_arguments: Any) -> None:
        tried.append(True)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(type(backends()["onnxruntime"]), "load", full)
    patched.handle.session.unload()
    latent = patched.sample()
    assert patched.counts == (0, STEPS)
    assert patched.handle.tally.reasons == {"engine failed": STEPS}
    assert len(tried) == 2, "once more after freeing, and not again in this run"
    assert torch.equal(latent, sample(patched.native))


def test_a_call_that_finds_no_memory_is_made_again_when_comfyui_has_freed_some(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = patched.sample()
    freed = watch_room(monkeypatch, session)
    run, once = patched.handle.session._runner.run, iter([True])

    def full(*arguments: Any) -> None:
        if next(once, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        run(*arguments)

    monkeypatch.setattr(patched.handle.session._runner, "run", full)
    assert torch.equal(patched.sample(), reference)
    assert patched.counts == (STEPS, 0)
    assert freed == [room.EVERYTHING]


def test_an_engine_whose_call_finds_no_memory_twice_closes_and_leaves_the_run_to_native(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = sample(patched.native)
    patched.sample()
    called = []

    def full(*_arguments: Any) -> None:
        called.append(True)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(patched.handle.session._runner, "run", full)
    open_then = []
    latent = patched.sample(step=lambda _i: open_then.append(patched.handle.session.loaded))
    assert patched.counts == (0, STEPS)
    assert "not enough GPU memory" in patched.handle.tally.details["engine failed"]
    assert len(called) == 2
    assert open_then == [False] * STEPS
    assert error(latent, native) <= LIMIT


def test_an_engine_that_does_not_fit_is_not_opened(patched: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    patched.handle.session.unload()
    freed = watch_room(monkeypatch, room)
    monkeypatch.setattr(room, "lacks_room", lambda _size, _device: True)
    patched.sample()
    assert patched.counts == (0, STEPS)
    assert "not enough GPU memory: it needs" in patched.handle.tally.details["engine failed"]
    assert freed == [patched.handle.session.engine.manifest.bytes, room.EVERYTHING]
    assert not patched.handle.session.loaded


def test_native_that_finds_no_memory_gets_that_of_all_engines_and_computes_the_same(
    controlled: Controlled, files: dict[str, Path], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The UNet's call fails once, when it has taken the residuals out of their lists."""
    patched = Patched(load(files[NAME]), library)
    reference = sample(load(files[NAME]), control=controlled.plain)
    monkeypatch.setattr(patched.handle, "refresh", lambda: gone(patched.handle))
    unet = type(patched.native.model.diffusion_model)
    forward, once = unet._forward, iter([True])

    def full(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        result = forward(self, *arguments, **options)
        if next(once, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    monkeypatch.setattr(unet, "_forward", full)
    with sampling_node():
        latent = sample(patched.model, control=controlled.net)
    assert error(latent, reference) <= LIMIT
    assert (patched.handle.tally.engine, patched.handle.tally.native) == (0, STEPS)
    assert (controlled.handle.tally.engine, controlled.handle.tally.native) == (1, STEPS - 1)
    assert "not enough GPU memory" in controlled.handle.tally.details["engine failed"]


def test_a_live_network_whose_weights_have_no_room_is_refused_before_it_takes_any(
    files: dict[str, Path], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dynamic VRAM a model that ComfyUI loaded in part leaves no room for the rest."""
    patched = Patched(load(files[NAME]), library, "torch")
    asked = []
    monkeypatch.setattr(room, "lacks_room", lambda size, _device: asked.append(size) or True)
    monkeypatch.setattr(type(patched.handle.session.live.weights), "_can_share", lambda *_: False)
    latent = patched.sample()
    assert patched.counts == (0, STEPS)
    assert len(asked) == 2, "once more when all that is not in use was freed, and not again in this run"
    assert asked[0] == sum(p.numel() * p.element_size() for p in patched.native.model.diffusion_model.parameters())
    assert not patched.handle.session.loaded
    assert torch.equal(latent, sample(patched.native))


def watch_room(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[float]:
    """The sizes that ComfyUI is asked to make room for; the CPU itself needs none."""
    sizes: list[float] = []
    make_room: Callable[..., None] = room.make_room
    monkeypatch.setattr(module, "make_room", lambda size, device: (sizes.append(size), make_room(size, device)))
    return sizes


def test_room_is_made_at_the_expense_of_models_that_the_run_does_not_use(
    patched: Patched, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = load(files[NAME])
    model_management.load_models_gpu([other])
    for entry in model_management.current_loaded_models:
        entry.currently_used = False  # ComfyUI does so when it plans for a device that is not the CPU
    monkeypatch.setattr(model_management, "is_device_cpu", lambda _device: False)
    seen = []

    def evict(_step: int) -> None:
        room.make_room(room.EVERYTHING, CPU)
        seen.append((any(m.is_clone(other) for m in model_management.loaded_models()),
                     patched.handle.session.loaded, any(isinstance(m, EnginePatcher) for m in engines_loaded())))

    patched.sample(step=evict, steps=1)
    assert seen == [(False, True, True)]
