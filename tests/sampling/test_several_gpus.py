"""Several GPUs, or several models in one node: each call runs on an engine of its own, or natively with a reason.

The second GPU is a double, the CPU under another name. What only GPUs show is in ``test_two_gpus_gpu.py``.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.multigpu
import pytest
import slow
import torch
from comfy import model_management
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.nodes.engine_nodes import _for_model
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.model_wrapper import KEY, BackboneRouter, patch_model
from hybrid_trt.sessions.file_session import FileSession
from memory_fixtures import Controlled, controlnet, file, files, library, nothing_loaded
from patched import LIMIT, NAME, PROFILE, Patched, gone, load, sampling_node, spoil, with_lora
from second_device import SECOND, split, two_devices

from sampling import STEPS, error, sample

__all__ = ["controlnet", "file", "files", "library", "nothing_loaded", "two_devices"]  # fixtures

CALLS = 2 * STEPS
"""Of a run: each step calls the UNet once on each GPU."""


class Split:
    """A model with an engine, and its copy on a second GPU: made before, between or after our nodes."""

    def __init__(self, file: Path, library: Library, backend: str = "onnxruntime", place: str = "after"):
        self.file, native = file, load(file)
        self.patched = Patched(split(native) if place == "before" else native, library, backend)
        if place == "between":
            self.patched.model = patch_model(split(native), self.patched.handle)
        self.model = split(self.patched.model) if place == "after" else self.patched.model

    def sample(self, model: ModelPatcher | None = None, **options: Any) -> torch.Tensor:
        with sampling_node():
            return sample(model or self.model, **options)

    def natively(self, **options: Any) -> torch.Tensor:
        return sample(split(load(self.file)), **options)

    @property
    def router(self) -> BackboneRouter:
        (router,) = self.model.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY)
        return router

    @property
    def second(self) -> EngineHandle:
        return self.router._copies[SECOND]._handle


@pytest.fixture
def both(file: Path, library: Library) -> Iterator[Split]:
    made = Split(file, library)
    yield made
    made.model.set_additional_models("multigpu", [])


@pytest.mark.parametrize(("backend", "kind", "place"), [
    ("onnxruntime", FileSession, "after"), ("torch", LiveSession, "after"),
    ("onnxruntime", FileSession, "between")])  # fmt: skip
def test_each_gpu_has_an_engine_of_its_own_which_stays_open_and_the_picture_is_natives(
    file: Path, library: Library, backend: str, kind: type, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, calls = Split(file, library, backend, place), []
    run, open_ones = kind.run, []

    def counted(self: Any, *rest: Any) -> dict[str, torch.Tensor]:
        calls.append((self, threading.get_ident()))
        return run(self, *rest)

    monkeypatch.setattr(kind, "run", counted)
    for seed in (1, 2):
        calls.clear()
        assert error(both.sample(seed=seed), both.natively(seed=seed)) <= LIMIT
        assert both.patched.counts == (CALLS, 0)
        assert len(calls) == CALLS
        sessions, threads = ({call[i] for call in calls} for i in (0, 1))
        assert sessions == {both.patched.handle.session, both.second.session}
        assert {session.device for session in sessions} == {torch.device("cpu"), SECOND}
        assert len(threads) == 2
        assert threading.get_ident() not in threads
        assert both.patched.handle.stats.reopened == 0
        assert all(session.loaded for session in sessions)
        open_ones.append(sessions)
    assert open_ones[0] == open_ones[1]
    both.model.set_additional_models("multigpu", [])


@pytest.mark.fault("an engine gives values that are no numbers (NaN) on one of several GPUs",
                   see="normal speed on all: *engine failed*; the whole run is done again")
@pytest.mark.parametrize("which", [pytest.param("first", marks=pytest.mark.slow), "second"])
def test_native_does_the_run_again_on_all_gpus_when_an_engine_of_one_gives_no_numbers(
    both: Split, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.sample(seed=5)
    spoil((both.patched.handle if which == "first" else both.second).session, monkeypatch)
    latent = both.sample()
    assert latent.isfinite().all()
    assert error(latent, both.natively()) <= LIMIT
    stats = both.patched.handle.stats
    assert (stats.engine, stats.native) == (CALLS, CALLS)
    assert stats.reasons == {Reason.ENGINE_FAILED.value: CALLS}


@pytest.mark.fault("one of several GPUs has no engine of its kind",
                   see="normal speed there, with the reason; the others run on theirs")
def test_a_gpu_without_an_engine_runs_native_with_a_reason_and_the_others_run_on_theirs(
    both: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh = EngineHandle.refresh
    monkeypatch.setattr(EngineHandle, "refresh",
                        lambda self: gone(self) if self.network.device == SECOND else refresh(self))  # fmt: skip
    assert error(both.sample(), both.natively()) <= LIMIT
    assert both.patched.counts == (STEPS, STEPS)
    assert both.patched.handle.stats.reasons == {Reason.NO_ENGINE.value: STEPS}


@pytest.mark.fault("a LoRA stands behind the engine of several GPUs", see="normal speed on all: *weights changed*")
@slow.when("torch")
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_a_lora_behind_the_engine_acts_as_in_native_on_each_gpu(file: Path, library: Library, backend: str) -> None:
    """Live weights follow it."""
    both = Split(file, library, backend)
    both.sample()
    latent = both.sample(with_lora(both.model))
    assert error(latent, sample(with_lora(split(load(file))))) <= LIMIT
    assert error(latent, both.natively()) > 100 * LIMIT
    live = backend == "torch"
    assert both.patched.counts == ((CALLS, 0) if live else (0, CALLS))
    assert both.patched.handle.stats.reasons == ({} if live else {Reason.WEIGHTS_PATCHED.value: CALLS})
    assert error(both.sample(), both.natively()) <= LIMIT
    assert both.patched.counts == (CALLS, 0)


def test_without_the_split_the_model_runs_as_before_and_its_copies_may_go(both: Split) -> None:
    both.sample()
    copy = weakref.ref(both.router._copies[SECOND]._base)
    assert error(both.patched.sample(), sample(load(both.file))) <= LIMIT
    assert both.patched.counts == (STEPS, 0)
    assert both.router.shared.context is None
    both.model = both.patched.model
    model_management.unload_all_models()
    gc.collect()
    assert copy() is None


def test_controlnets_run_on_engines_of_each_gpu_which_stay_open(
    files: dict[str, Path], controlnet: ControlNet, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Split(files[NAME], library, "torch")
    controlled = Controlled(both.patched.native, controlnet, library)
    control, sessions = controlled.net.control_model, []
    for seed in (1, 2):
        latent = both.sample(seed=seed, control=controlled.net)
        assert error(latent, both.natively(seed=seed, control=controlled.plain.copy())) <= LIMIT
        second = controlled.net.multigpu_clones[SECOND].control_model
        assert second is control.on_gpus[SECOND]
        sessions.append([control.handle.session, second.handle.session])
        assert [session.device for session in sessions[-1]] == [torch.device("cpu"), SECOND]
        assert (control.handle.stats.engine, control.handle.stats.native) == (CALLS, 0)
        assert both.patched.counts == (CALLS, 0)
        assert control.run is second.run is None, "it ended"
        monkeypatch.setattr(LiveSession, "unload", lambda self: pytest.fail(f"{self.status(PROFILE)} is closed"))
    monkeypatch.undo()
    assert sessions[0] == sessions[1]
    assert all(session.loaded for session in sessions[0])
    assert controlled.handle.stats.reopened == 0
    assert error(latent, both.natively(seed=2)) > 100 * LIMIT


@pytest.mark.fault("dynamic VRAM keeps memory of its own on a ControlNet that a second GPU needs", see="served on both")
def test_a_controlnet_gets_an_engine_on_each_gpu_wherever_comfyui_keeps_its_weights(
    files: dict[str, Path], controlnet: ControlNet, library: Library
) -> None:
    """ComfyUI's own copy of such a ControlNet fails: it copies that memory."""
    both = Split(files[NAME], library, "torch")
    controlled = Controlled(both.patched.native, controlnet, library)
    model = controlled.net.control_model
    kept = ctypes.pointer(ctypes.c_int(5))
    layer = next(layer for layer in model.native.modules() if isinstance(layer, torch.nn.Conv2d))
    layer._v_weight = [kept]
    latent = both.sample(control=controlled.net)
    assert layer.__dict__.pop("_v_weight") == [kept]
    assert error(latent, both.natively(control=controlled.plain)) <= LIMIT
    copy = controlled.net.multigpu_clones[SECOND].control_model
    assert not any(hasattr(layer, "_v_weight") for layer in copy.native.modules())
    assert model.handle.stats.native == 0


@pytest.mark.fault("a model of an earlier prompt is garbage when MultiGPU CFG Split looks at what is loaded",
                   see="it is dropped first; served on both")
def test_what_is_left_of_earlier_models_does_not_stop_the_split(file: Path, library: Library) -> None:
    gone = load(file)
    model_management.load_models_gpu([gone])
    held: list[Any] = [gone.model]
    held.append(held)  # until Python looks for cycles
    del held, gone
    assert None in model_management.loaded_models()
    patched = Patched(load(file), library, "torch")
    model = comfy.multigpu.create_multigpu_deepclones(patched.model, 2, reuse_loaded=True)
    assert [copy.load_device for copy in model.get_additional_models_with_key("multigpu")] == [SECOND]
    model.set_additional_models("multigpu", [])


@pytest.mark.slow
@pytest.mark.fault("a ControlNet's engine gives values that are no numbers (NaN) on one of several GPUs",
                   see="normal speed on all: *engine failed*; the whole run is done again")
def test_native_does_the_run_again_when_a_controlnets_engine_on_one_gpu_gives_no_numbers(
    files: dict[str, Path], controlnet: ControlNet, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Split(files[NAME], library, "torch")
    controlled = Controlled(both.patched.native, controlnet, library)
    both.sample(seed=5, control=controlled.net)
    spoil(controlled.net.control_model.on_gpus[SECOND].handle.session, monkeypatch)
    latent = both.sample(control=controlled.net)
    assert error(latent, both.natively(control=controlled.plain)) <= LIMIT
    assert both.patched.counts == (CALLS, CALLS)
    assert (controlled.handle.stats.engine, controlled.handle.stats.native) == (CALLS, CALLS)


# Several models in one execution of a node


@pytest.mark.parametrize("engine_of", ["this model", "the file loaded again"])
def test_two_runs_in_one_execution_have_each_their_own_lora(file: Path, library: Library, engine_of: str) -> None:
    engine, model = Patched(load(file), library, "torch"), load(file)
    handle, refusal = (engine.handle, None) if engine_of == "this model" else _for_model(model, engine.handle)
    model = patch_model(engine.native if engine_of == "this model" else model, handle, refusal)
    natives = [sample(with_lora(load(file), strength)) for strength in (0.4, 1.0, 0.0)]
    assert min(error(natives[0], other) for other in natives[1:]) > 0.05
    with sampling_node():
        for strength, native in zip((0.4, 1.0, 0.0, 0.4), [*natives, natives[0]], strict=True):
            assert error(sample(with_lora(model, strength)), native) <= LIMIT
    assert (handle.stats.engine, handle.stats.native) == (4 * STEPS, 0)


def other_weights(model: ModelPatcher) -> ModelPatcher:
    """The model as another checkpoint of its kind has it."""
    for parameter in model.model.diffusion_model.parameters():
        parameter.data.mul_(0.9)
    return model


def test_two_runs_in_one_execution_have_each_their_own_model(file: Path, library: Library) -> None:
    both = [Patched(model, library, "torch") for model in (load(file), other_weights(load(file)))]
    natives = [sample(load(file)), sample(other_weights(load(file)))]
    assert error(*natives) > 0.05
    with sampling_node():
        for number in (0, 1, 0):
            assert error(sample(both[number].model), natives[number]) <= LIMIT


@pytest.mark.parametrize("place", ["before the engine node", "after the sampler patch"])
def test_a_lora_for_clip_alone_leaves_the_model_its_engine(file: Path, library: Library, place: str) -> None:
    """ComfyUI adds its patches to the model all the same, at strength 0."""
    patched = Patched(with_lora(load(file), 0.0) if place.startswith("before") else load(file), library)
    assert patched.native.patches or place.startswith("after")
    if place.startswith("after"):
        patched.model = with_lora(patched.model, 0.0)
    assert error(patched.sample(), sample(load(file))) <= LIMIT
    assert patched.counts == (STEPS, 0)
