"""A full card: ComfyUI frees what it can, then it is tried once more, and then the run is native's.

In this process and on the CPU, with ComfyUI's own ``load_models_gpu``; doubles of what a GPU alone has are named so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy import model_management
from hybrid_trt.backends import backends
from hybrid_trt.engine_library import Library, Reason, Unavailable
from hybrid_trt.sampling.engine_patcher import EnginePatcher
from hybrid_trt.sessions import gpu_memory
from memory_fixtures import Controlled, controlled, controlnet, file, files, library, nothing_loaded, patched
from patched import CPU, LIMIT, NAME, Failing, Patched, engines_loaded, gone, load, sampling_node

from sampling import STEPS, error, sample

# fixtures: pytest finds them by name
__all__ = ["controlled", "controlnet", "file", "files", "library", "nothing_loaded", "patched"]


RUNTIME = type(backends()["onnxruntime"])


def watch_room(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sizes that ComfyUI is asked to make room for; the CPU itself needs none."""
    sizes: list[float] = []
    make_room: Callable[..., None] = gpu_memory.make_room
    monkeypatch.setattr(gpu_memory, "make_room", lambda size, device: (sizes.append(size), make_room(size, device)))
    return sizes


@pytest.mark.fault("the card is full when an engine opens, and ComfyUI can free some",
                   see="nothing: it opens at the second attempt")
def test_an_engine_that_finds_no_memory_is_opened_again_when_comfyui_has_freed_some(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, own = watch_room(monkeypatch), RUNTIME.load
    words = RuntimeError("Error Code 2: OutOfMemory (Requested size was 1723 bytes.)")
    monkeypatch.setattr(RUNTIME, "load", Failing(partial(own, backends()["onnxruntime"]), fails=1, error=words))
    patched.handle.session.unload()
    patched.sample()
    assert patched.counts == (STEPS, 0)
    assert freed == [patched.handle.session.engine.manifest.bytes, gpu_memory.EVERYTHING]


@pytest.mark.fault("the card is full during a call, and ComfyUI can free some", see="nothing: the call is made again")
def test_a_call_that_finds_no_memory_is_made_again_when_comfyui_has_freed_some(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, runner = patched.sample(), patched.handle.session._runner
    freed = watch_room(monkeypatch)
    monkeypatch.setattr(runner, "run", Failing(runner.run, fails=1))
    assert torch.equal(patched.sample(), reference)
    assert patched.counts == (STEPS, 0)
    assert freed == [gpu_memory.EVERYTHING]


@pytest.mark.fault("the card is full and stays so when an engine opens, or in the middle of a run",
                   see="normal speed: *engine failed*; the next run tries again")
@pytest.mark.parametrize(("when", "served"), [("load", 0), ("call", 0), ("call", 2), ("call", STEPS - 1)])
def test_a_card_that_is_full_at_load_or_in_mid_sampling_gives_natives_picture_and_a_reason(
    patched: Patched, monkeypatch: pytest.MonkeyPatch, when: str, served: int
) -> None:
    native = sample(load(patched.native.cached_patcher_init[1][0]))
    if when == "load":
        full = Failing(None)
        monkeypatch.setattr(RUNTIME, "load", full)
        patched.handle.session.unload()
    else:
        patched.sample()
        full = Failing(patched.handle.session._runner.run, served)
        monkeypatch.setattr(patched.handle.session._runner, "run", full)
    latent = patched.sample()
    assert error(latent, native) <= LIMIT
    assert patched.counts == (served, STEPS - served)
    assert full.failed == 2, "once more after freeing, and not again in this run"
    assert patched.handle.stats.reasons == {"engine failed": STEPS - served}
    assert gpu_memory.MAKE_ROOM in patched.handle.stats.details["engine failed"]
    assert not patched.handle.session.loaded, "its memory is given back"
    monkeypatch.undo()
    assert error(patched.sample(), native) <= LIMIT
    assert patched.counts == (STEPS, 0), "the next run tries again"


@pytest.mark.parametrize(("raised", "reason", "words"), [
    (RuntimeError("Unsupported model IR version: 99"), "engine failed",
     "it could not be opened (RuntimeError: Unsupported model IR version: 99); build it again"),
    (Unavailable(Reason.WRONG_GPU, "it cannot run on compute capability 9.0"), "wrong GPU", "compute capability 9.0"),
], ids=["unreadable", "refused"])  # fmt: skip
def test_an_engine_that_cannot_be_opened_is_tried_once_a_run_and_told_from_one_that_finds_no_memory(
    patched: Patched, monkeypatch: pytest.MonkeyPatch, raised: Exception, reason: str, words: str
) -> None:
    """Another build does not help where memory is short."""
    broken = Failing(None, error=raised)
    monkeypatch.setattr(RUNTIME, "load", broken)
    patched.handle.session.unload()
    assert torch.equal(patched.sample(), sample(patched.native))
    assert patched.counts == (0, STEPS)
    assert patched.handle.stats.reasons == {reason: STEPS}
    assert words in patched.handle.stats.details[reason]
    assert "memory" not in patched.handle.stats.details[reason]
    assert broken.failed == 1


@pytest.mark.fault("an engine is larger than what is free", see="normal speed: *engine failed*; it is not opened")
def test_an_engine_that_does_not_fit_is_not_opened(patched: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    patched.handle.session.unload()
    freed = watch_room(monkeypatch)
    monkeypatch.setattr(gpu_memory, "lacks_room", lambda _size, _device: True)
    patched.sample()
    assert patched.counts == (0, STEPS)
    told = patched.handle.stats.details["engine failed"]
    assert "not enough GPU memory (it needs " in told
    assert gpu_memory.MAKE_ROOM in told
    assert freed == [patched.handle.session.engine.manifest.bytes, gpu_memory.EVERYTHING]
    assert not patched.handle.session.loaded


@pytest.mark.fault("the normal model finds no memory beside the engines",
                   see="engines give theirs back; normal speed: *engine failed*")
def test_native_that_finds_no_memory_gets_that_of_all_engines_and_computes_the_same(
    controlled: Controlled, files: dict[str, Path], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The UNet's call fails once, when it has taken the residuals out of their lists."""
    patched = Patched(load(files[NAME]), library)
    reference = sample(load(files[NAME]), control=controlled.plain)
    monkeypatch.setattr(patched.handle, "refresh", lambda: gone(patched.handle))
    unet = type(patched.native.model.diffusion_model)
    forward, full = unet._forward, Failing(lambda result: result, fails=1)
    monkeypatch.setattr(unet, "_forward", lambda *arguments, **options: full(forward(*arguments, **options)))
    with sampling_node():
        latent = sample(patched.model, control=controlled.net)
    assert error(latent, reference) <= LIMIT
    assert (patched.handle.stats.engine, patched.handle.stats.native) == (0, STEPS)
    assert (controlled.handle.stats.engine, controlled.handle.stats.native) == (1, STEPS - 1)
    assert gpu_memory.MAKE_ROOM in controlled.handle.stats.details["engine failed"]


def test_a_live_network_whose_weights_have_no_room_is_refused_before_it_takes_any(
    files: dict[str, Path], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dynamic VRAM a model that ComfyUI loaded in part leaves no room for the rest."""
    patched = Patched(load(files[NAME]), library, "torch")
    asked = []
    monkeypatch.setattr(gpu_memory, "lacks_room", lambda size, _device: asked.append(size) or True)
    monkeypatch.setattr(type(patched.handle.session.live.weights), "_can_share", lambda *_: False)
    latent = patched.sample()
    assert patched.counts == (0, STEPS)
    assert len(asked) == 2, "once more when all that is not in use was freed, and not again in this run"
    assert asked[0] == sum(p.numel() * p.element_size() for p in patched.native.model.diffusion_model.parameters())
    assert not patched.handle.session.loaded
    assert torch.equal(latent, sample(patched.native))


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
        gpu_memory.make_room(gpu_memory.EVERYTHING, CPU)
        seen.append((any(m.is_clone(other) for m in model_management.loaded_models()),
                     patched.handle.session.loaded, any(isinstance(m, EnginePatcher) for m in engines_loaded())))

    patched.sample(step=evict, steps=1)
    assert seen == [(False, True, True)]


@pytest.mark.fault("a model dies with another that is unloaded to make room", see="nothing: ComfyUI goes on freeing")
def test_room_is_made_though_a_model_dies_with_another_that_is_unloaded(
    nothing_loaded: None, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, kept = load(files[NAME]), [load(files[NAME])] * 9  # ComfyUI begins with the one that has fewer references
    model_management.load_models_gpu([kept[0]])
    model_management.load_models_gpu([first])
    for entry in model_management.current_loaded_models:
        entry.currently_used = False
    detach = first.detach

    def drop(*arguments: Any) -> Any:
        kept.clear()  # as when an engine closes that had the last reference
        return detach(*arguments)

    monkeypatch.setattr(first, "detach", drop)
    monkeypatch.setattr(model_management, "is_device_cpu", lambda _device: False)
    gpu_memory.make_room(gpu_memory.EVERYTHING, CPU)
    gc.collect()
    assert not kept
    assert not model_management.current_loaded_models
