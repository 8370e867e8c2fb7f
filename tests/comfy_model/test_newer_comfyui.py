"""ComfyUI's changes since 0.30.0, one after another: pictures stay native's, and what is fast stays fast."""

from __future__ import annotations

import gc
import inspect
import pickle
import weakref
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import torch
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher
from hybrid_trt.comfy_model import comfyui_internals, comfyui_shims
from hybrid_trt.comfy_model.comfyui_internals import Feature
from hybrid_trt.comfy_model.module_copy import plain_copy
from hybrid_trt.comfy_model.snapshot import without_weights, write_structure
from hybrid_trt.engine_library import Library, Reason, Unavailable
from hybrid_trt.sampling.engine_patcher import EnginePatcher
from hybrid_trt.sessions import gpu_memory
from hybrid_trt.sessions.cuda_graphs import GraphCache
from memory_fixtures import controlled, controlnet, file, files, library, nothing_loaded
from newer_comfyui import (
    FAST_PINS,
    FOREIGN,
    Recording,
    fast_disk,
    free_memory_of_a_patcher,
    put_on_layers,
    recording,
)
from patched import LIMIT, Failing, Patched, load, natively
from small_networks import CPU, network

from sampling import STEPS, error, sample

# fixtures: pytest finds them by name
__all__ = ["controlled", "controlnet", "fast_disk", "file", "files", "free_memory_of_a_patcher", "library",
           "nothing_loaded", "recording"]  # fmt: skip


# -- attributes on layers


def test_no_copy_has_what_loading_put_on_layers() -> None:
    net = network("unet", "unlike_levels")
    watched = weakref.ref(put_on_layers(net.module))
    copy = plain_copy(net.module, torch.float32, lambda _, p: p, lambda _, b: b)
    pickle.dumps(copy.state_dict())
    assert not [name for layer in copy.modules() for name in FOREIGN if hasattr(layer, name)]
    restored = without_weights(write_structure(net, torch.float32))
    assert not [name for layer in restored.modules() for name in FOREIGN if hasattr(layer, name)]
    for layer in net.module.modules():
        for name in FOREIGN:
            layer.__dict__.pop(name, None)
    gc.collect()
    assert watched() is None, "the copies keep none of it"


def test_attributes_of_loading_are_told_by_name_or_by_what_they_hold() -> None:
    pages = put_on_layers(torch.nn.Module())
    for value in (pages, (pages, 0, 1), {"of": [pages]}, torch.cuda.Event()):
        assert comfyui_shims.is_of_loading("anything", value)
    for name in ("_v_block", "_comfy_tomorrow", "_pin_of_tomorrow", "_prefetch_2", "current_patcher"):
        assert comfyui_shims.is_of_loading(name, 1)
    for name, value in (("in_channels", 4), ("padding", (1, 1)), ("_reversed_padding_repeated_twice", [1, 1])):
        assert not comfyui_shims.is_of_loading(name, value)


# -- one keyword more


def test_clones_and_deep_clones_of_what_has_an_engine_take_one_keyword_more(fast_disk: None, controlled: Any) -> None:
    engine = controlled.handle.patcher
    clone = engine.clone()
    assert (type(clone), clone.fast_disk, clone.model) == (type(engine), False, engine.model)
    assert type(engine.deepclone_multigpu(CPU)) is EnginePatcher
    reference = controlled.net.deepclone_multigpu(CPU)
    assert reference.control_model is not controlled.net.control_model.native
    assert type(reference.control_model) is type(controlled.net.control_model.native)
    assert type(controlled.net.copy()) is ControlNet


# -- free memory


@pytest.mark.parametrize("form", ["as it is", "reads the patcher", "other arguments", "gone"])
def test_free_memory_is_found_however_patchers_are_asked(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *_: 1000)
    if form == "reads the patcher":
        own = lambda self, device: 1000 if self.load_device == device else 0  # noqa: E731
        monkeypatch.setattr(ModelPatcher, "get_free_memory", own)
    elif form == "other arguments":
        monkeypatch.setattr(ModelPatcher, "get_free_memory", lambda self: 0)
    elif form == "gone":
        monkeypatch.delattr(ModelPatcher, "get_free_memory")
    assert comfyui_shims.free_memory(CPU) == 1000


def test_an_engine_opens_where_free_memory_is_the_patchers_own(
    free_memory_of_a_patcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory.model_management, "is_device_cpu", lambda _device: False)
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *_: 1000)
    monkeypatch.setattr(gpu_memory.model_management, "extra_reserved_memory", lambda: 10)
    assert gpu_memory.lacks_room(991, CPU)
    assert not gpu_memory.lacks_room(990, CPU)


def test_the_pins_of_this_comfyui_are_known() -> None:
    source = inspect.getsource(comfy.model_management.models_for_pin_eviction)
    assert "dynamic_pins" in source
    source = inspect.getsource(comfy.model_patcher.ModelPatcherDynamic.register_load_device)
    unknown = {word for word in source.split('"')[1::2] if word.replace("-", "_").isidentifier()}
    assert unknown - comfyui_shims._KNOWN_PINS <= set(FAST_PINS)


# -- ComfyUI's recording of what a forward allocates


def test_a_native_call_inside_a_recording_allocates_nothing_of_ours(
    recording: Recording, file: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording.counting() as made:
        reference = sample(load(file))
    natively = list(made)
    assert natively, "the network itself"
    patched = Patched(load(file), library)
    failed = Failing(None, error=Unavailable(Reason.ENGINE_FAILED, "for this test"))
    monkeypatch.setattr(patched.handle.session, "run", failed)
    with recording.counting() as made:
        assert error(patched.sample(), reference) <= LIMIT
    assert patched.counts == (0, STEPS)
    assert made == natively


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_an_engine_inside_a_recording_pauses_it(
    recording: Recording, file: Path, library: Library, backend: str
) -> None:
    patched = Patched(load(file), library, backend)
    with recording.counting() as made:
        latent = patched.sample()
    assert (patched.counts, recording.calls) == ((STEPS, 0), STEPS)
    assert made == []
    assert recording.open == 0
    assert error(latent, natively(file)) <= LIMIT


def test_our_own_recordings_are_made_outside_of_comfyuis(recording: Recording) -> None:
    seen = []

    class Recorder:
        def __call__(self, body: Any) -> Any:
            seen.append(recording.open)
            body()
            return type("Replay", (), {"replay": staticmethod(body)})()

    cache = GraphCache(CPU, capture=Recorder())
    with recording.record():
        for _ in range(3):
            results = cache.run(lambda given: {"y": 2 * given["x"]}, {"x": torch.ones(3)})
            assert torch.equal(results["y"], torch.full((3,), 2.0))
        assert recording.open == 1
    assert seen == [0]


def test_nothing_is_paused_where_nothing_records() -> None:
    with comfyui_shims.outside_recording(), comfyui_shims.outside_recording():
        pass
    assert comfyui_internals.works(Feature.GRAPHS)
