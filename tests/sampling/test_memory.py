"""Engines in ComfyUI's memory management: it knows their size and may take it back, and a dropped model is freed.

All of it is ComfyUI's own sampling, patching and memory management, in this process and on the CPU.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy import model_management
from hybrid_trt.backends import backends
from hybrid_trt.engine_library import Library, Reason, Unavailable
from hybrid_trt.sampling.engine_handle import EngineChoice
from hybrid_trt.sampling.model_wrapper import patch_model
from memory_fixtures import device, file, library, nothing_loaded, patched
from patched import CPU, LIMIT, PROFILE, Patched, engines_loaded, load, sampling_node

from sampling import STEPS, error, sample

__all__ = ["device", "file", "library", "nothing_loaded", "patched"]  # fixtures: pytest finds them by name


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


def test_an_engine_that_its_library_refuses_for_this_gpu_is_not_opened_at_every_call(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def refuse(_self: Any, engine: Any, _device: torch.device) -> None:
        opened.append(engine)
        raise Unavailable(Reason.WRONG_GPU, "it cannot run on compute capability 9.0")

    monkeypatch.setattr(type(backends()["onnxruntime"]), "load", refuse)
    patched.handle.session.unload()  # earlier prompts keep it open
    native = sample(patched.native)
    assert torch.equal(patched.sample(), native)
    assert patched.counts == (0, STEPS)
    assert patched.handle.stats.reasons == {"wrong GPU": STEPS}
    assert len(opened) == 1


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


# An engine that has come since the sampler patch ran


def test_a_lora_between_the_engine_node_and_the_patch_is_not_lost_when_an_engine_with_weights_takes_over(
    file: Path, library: Library
) -> None:
    native = load(file)
    handle = Patched(native, library, backend="torch").handle
    assert handle.follows_patches
    with_lora, key = native.clone(), next(k for k in native.model_state_dict() if k.endswith("attn2.to_k.weight"))
    with_lora.add_patches({key: ("diff", (native.model_state_dict()[key].flip(0),))}, 1.0)
    reference = sample(with_lora)
    assert error(reference, sample(native)) > 1e-3
    model = patch_model(with_lora, handle)
    for backend, counts in (("torch", (STEPS, 0)), ("onnxruntime", (0, STEPS))):
        handle.choice = EngineChoice(PROFILE, backend=backend)
        with sampling_node():
            assert error(sample(model), reference) <= LIMIT
        assert (handle.stats.engine, handle.stats.native) == counts
    assert handle.stats.reasons == {"weights patched": STEPS}
