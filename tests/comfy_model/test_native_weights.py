"""Native weights while engines serve: they wait off the device, and come back when a call needs them.

All of it is ComfyUI's own sampling, patching and memory management, in this process and on the CPU. Where the CPU has
to play a device with memory of its own, the fixture `device` says so; what the GPU's allocator does is not shown here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.hooks
import pytest
import torch
from comfy import model_management
from comfy.controlnet import ControlLora
from comfy.model_patcher import ModelPatcher
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.engine_library import Fallback, Library, Reason, trust
from hybrid_trt.engine_library.gpu import gpu_of
from hybrid_trt.sampling import model_wrapper
from hybrid_trt.sampling.engine_patcher import EnginePatcher
from hybrid_trt.sampling.native_weights import OffloadedPatcher
from hybrid_trt.sessions.file_session import FileSession
from memory_fixtures import device, file, library, nothing_loaded, patched
from patched import CPU, LIMIT, Failing, Patched, all_of, gone, load, on_device, with_lora

from sampling import STEPS, error, sample

__all__ = ["device", "file", "library", "nothing_loaded", "patched"]  # fixtures: pytest finds them by name


def test_a_run_that_falls_back_from_its_first_call_is_natives_to_the_bit(
    patched: Patched, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = sample(load_again(patched))
    monkeypatch.setattr(patched.handle, "refresh", lambda: gone(patched.handle))  # deleted since the node ran
    held = []
    latent = patched.sample(step=lambda _i: held.append(on_device(patched.model)))
    assert patched.counts == (0, STEPS)
    assert torch.equal(latent, native)
    assert held == [all_of(patched.native)] * STEPS


def load_again(patched: Patched) -> ModelPatcher:
    """The same model as a stranger, which shares no weights."""
    return load(patched.native.cached_patcher_init[1][0])


def fail_from(session: FileSession, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend's runner fail from a call on."""
    failing = Failing(session._runner.run, call, error=RuntimeError("the backend failed"))
    monkeypatch.setattr(session._runner, "run", failing)


@pytest.mark.fault("an engine fails in the middle of a run",
                   see="normal speed: *engine failed* for the rest of the run")
def test_an_engine_that_fails_in_the_middle_of_a_run_leaves_the_rest_to_native_with_all_its_weights(
    patched: Patched, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = sample(load_again(patched))
    patched.sample()
    fail_from(patched.handle.session, 2, monkeypatch)
    held, loads = [], []
    load_models = model_management.load_models_gpu
    monkeypatch.setattr(model_management, "load_models_gpu", lambda models, **options: (
        loads.append((models, options)), load_models(models, **options)))
    latent = patched.sample(step=lambda _i: held.append(on_device(patched.model)))
    size = all_of(patched.native)
    assert held == [0, 0, size, size]
    assert patched.counts == (2, 2)
    assert patched.handle.stats.reasons == {"engine failed": 2}
    assert error(latent, native) <= LIMIT
    (_prepare, prepare_options), (models, options) = loads
    assert models[0] is patched.model
    assert any(isinstance(m, EnginePatcher) for m in models), "what is in use and not named may be evicted"
    assert not any(isinstance(m, OffloadedPatcher) for m in models)
    assert {name: prepare_options[name] for name in options} == options, "room for activations as at the start"
    in_use = model_management.loaded_models()
    assert len([m for m in in_use if m.is_clone(patched.model)]) == 1
    assert len([m for m in in_use if isinstance(m, EnginePatcher)]) == 1


def test_a_run_after_one_that_needed_native_has_its_weights_from_the_start_and_one_more_waits_again(
    patched: Patched, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched.sample()
    with monkeypatch.context() as failing:
        fail_from(patched.handle.session, 3, failing)
        patched.sample()
    held: list[list[int]] = []
    for _ in range(2):
        held.append([])
        patched.sample(step=lambda _i: held[-1].append(on_device(patched.model)))
        assert patched.counts == (STEPS, 0)
    assert held == [[all_of(patched.native)] * STEPS, [0] * STEPS]


def test_weights_wait_again_after_a_run_that_was_natives_because_it_was_to_be_timed(
    patched: Patched, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched.sample()
    with monkeypatch.context() as timed:
        timed.setattr(model_wrapper, "why_native", lambda *_: Fallback(Reason.LARGER_THAN_GPU, "it is timed"))
        patched.sample()
        assert patched.counts == (0, STEPS)
    held = []
    patched.sample(step=lambda _i: held.append(on_device(patched.model)))
    assert patched.counts == (STEPS, 0)
    assert held == [0] * STEPS, "the engine has the GPU's memory from the start"


def test_a_workflow_that_runs_both_ways_in_turn_does_not_move_the_weights_each_time(
    patched: Patched, device: None
) -> None:
    def held() -> set[int]:
        seen = set()
        patched.sample(step=lambda _i: seen.add(on_device(patched.model)))
        assert patched.counts == (STEPS, 0)
        return seen

    sample(patched.native)
    assert held() == {0}
    for _ in range(2):
        sample(patched.native)
        assert held() == {all_of(patched.native)}
    model_management.free_memory(1e30, CPU)
    assert held() == {0}, "ComfyUI took them, so they wait again"


def test_native_weights_that_wait_still_compute_natives_result_for_whoever_calls_them(
    patched: Patched, device: None
) -> None:
    """Another node that calls the UNet in the middle of a run: slow, and right."""
    generator = torch.Generator().manual_seed(3)
    x, context = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 77, 768, generator=generator)

    def forward(model: ModelPatcher) -> torch.Tensor:
        unet = model.model.diffusion_model
        dtype = model.model.get_dtype_inference()
        return unet(x.to(dtype), torch.tensor([500.0, 3.0]), context.to(dtype), transformer_options={})

    stranger = load_again(patched)
    model_management.load_models_gpu([stranger])
    reference, seen = forward(stranger), []

    def call(_step: int) -> None:
        assert on_device(patched.model) == 0
        layers = [m for m in patched.model.model.diffusion_model.modules() if hasattr(m, "comfy_cast_weights")]
        assert all(layer.comfy_cast_weights for layer in layers), "these would not fetch their weights on a GPU"
        assert len(layers) > 40
        seen.append(forward(patched.model))

    patched.sample(step=call, steps=1)
    assert torch.equal(seen[0], reference)


@pytest.mark.parametrize("was_loaded", [False, True])
def test_loras_are_in_the_weights_that_come_back(file: Path, was_loaded: bool) -> None:
    at_once, waited = with_lora(load(file)), with_lora(load(file))
    model_management.load_models_gpu([at_once])
    if was_loaded:
        model_management.load_models_gpu([waited])
    stand_in = OffloadedPatcher(waited)
    for _ in range(2):
        model_management.load_models_gpu([stand_in])
        assert on_device(waited) == 0
    model_management.load_models_gpu([waited])
    assert on_device(waited) == all_of(waited)
    plain = load(file).model_state_dict()
    for key, weight in at_once.model.state_dict().items():
        assert torch.equal(waited.model.state_dict()[key], weight), key
    changed = [key for key, weight in at_once.model.state_dict().items() if not torch.equal(weight, plain[key])]
    assert changed
    assert all(key.endswith("to_k.weight") for key in changed)


def test_another_schedule_is_in_place_although_the_weights_wait(patched: Patched, device: None) -> None:
    """Object patches such as ModelSamplingDiscrete's are part of what ComfyUI does when it loads."""
    before = patched.model.model.model_sampling
    for _ in range(3):
        other, seen = type(before)(patched.model.model.model_config), []
        patched.model.add_object_patch("model_sampling", other)
        patched.sample(step=lambda _i, seen=seen: seen.append(patched.model.model.model_sampling))
        assert patched.counts == (STEPS, 0)
        assert len(seen) == STEPS
        assert all(sampling is other for sampling in seen)
        assert on_device(patched.model) == 0
    model_management.unload_all_models()
    assert patched.model.model.model_sampling is before


def test_comfyui_goes_on_with_the_patcher_itself_after_a_run(patched: Patched, device: None) -> None:
    patched.sample()
    (entry,) = [m for m in model_management.loaded_models() if m.is_clone(patched.model)]
    assert entry is patched.model, "nothing else may keep the model alive, or be kept alive"
    model_management.free_memory(1e30, CPU)
    native = sample(load_again(patched))
    assert torch.equal(sample(patched.native), native)


def prepared_with(patched: Patched, conds: dict | None = None, **model_options: Any) -> object:
    """Return the model that ComfyUI is given to load when it prepares a sampling."""
    given = []
    weights = patched.model.get_wrappers("prepare_sampling", "hybrid_trt")[0].__self__
    conds = {"positive": [{"cross_attn": torch.zeros(1, 77, 768), "model_conds": {}}]} if conds is None else conds
    weights.prepare(lambda model, *_args, **_kwargs: given.append(model), patched.model, [1, 4, 8, 8], conds,
                    model_options=patched.model.model_options | model_options)
    weights.end_run(patched.model)
    return given[0]


@pytest.mark.usefixtures("device")
def test_native_weights_wait_only_where_engines_are_expected_to_serve_all_calls(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(**changes: Any) -> bool:
        given = prepared_with(patched, **changes)
        assert given is patched.model or isinstance(given, OffloadedPatcher)
        return given is not patched.model

    def cond(**entries: Any) -> dict:
        return {"positive": [{"cross_attn": torch.zeros(1, 77, 768), "model_conds": {}} | entries], "negative": None}

    assert waits()
    assert not waits(conds=cond(hooks=comfy.hooks.HookGroup()))
    assert not waits(registered_hooks=object())
    lora = ControlLora.__new__(ControlLora)
    lora.previous_controlnet = None
    assert not waits(conds=cond(control=lora)), "a Control-LoRA computes with the UNet's weights"
    assert not waits(transformer_options={"patches": {"attn1_patch": [print]}})
    monkeypatch.setattr(patched.model.model, "current_patcher", patched.model)
    assert not waits(), "another guider samples with the same weights"


def test_on_the_cpu_native_weights_stay_where_they_are(patched: Patched) -> None:
    assert prepared_with(patched) is patched.model


@pytest.mark.usefixtures("device")
def test_the_torch_backend_computes_with_native_weights_so_they_are_loaded(file: Path, library: Library) -> None:
    patched = Patched(load(file), library, backend="torch")
    assert isinstance(patched.handle.session, LiveSession)
    held = []
    latent = patched.sample(step=lambda _i: held.append(on_device(patched.model)))
    assert patched.counts == (STEPS, 0)
    assert held == [all_of(patched.native)] * STEPS
    assert error(latent, sample(load_again(patched))) <= LIMIT


# On a GPU


class CarriedRunner:
    """A double of a GPU engine: ONNX Runtime on the CPU, with its tensors carried there and back."""

    capturable = False

    def __init__(self, runner: Any, device: torch.device):
        self.device, self.bytes, self._runner = device, runner.bytes, runner

    def run(self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
        results = {name: torch.empty_like(tensor, device=CPU) for name, tensor in outputs.items()}
        self._runner.run({name: tensor.cpu() for name, tensor in inputs.items()}, results)
        for name, tensor in outputs.items():
            tensor.copy_(results[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
def test_native_weights_take_no_gpu_memory_until_a_call_needs_them(
    file: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dynamic VRAM, which a ComfyUI that was imported for the CPU has not."""
    gpu = torch.device("cuda", 0)
    runtime = type(backends()["onnxruntime"])
    load_here = runtime.load
    monkeypatch.setattr(runtime, "cannot_run", lambda _self, _device: None)
    monkeypatch.setattr(runtime, "load", lambda self, engine, device: CarriedRunner(
        load_here(self, engine, CPU), device))
    for engine in library.engines():  # as if it had been compared there
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT, gpu=gpu_of(gpu)))
    native, alone = load(file), load(file)
    native.load_device = alone.load_device = gpu
    size = all_of(native)
    sample(alone)  # a process's first run on a GPU may differ in the last bits
    reference = sample(alone)
    model_management.unload_all_models()
    patched = Patched(native, library)
    torch.cuda.empty_cache()
    before, held = torch.cuda.memory_allocated(gpu), []

    def measure(_step: int) -> None:
        held.append(torch.cuda.memory_allocated(gpu) - before)
        assert patched.model.model.model_sampling.sigmas.device == gpu, "each step would wait for a copy"

    latent = patched.sample(step=measure)
    assert patched.counts == (STEPS, 0)
    assert max(held) < 0.2 * size
    assert error(latent, reference) <= 2e-2  # native computes in TF32 there
    held.clear()
    fail_from(patched.handle.session, 2, monkeypatch)
    latent = patched.sample(step=measure)
    assert patched.counts == (2, 2)
    assert max(held[:2]) < 0.2 * size
    assert min(held[2:]) >= size
    assert error(latent, reference) <= 2e-2  # native computes in TF32 there
    held.clear()
    monkeypatch.setattr(patched.handle, "refresh", lambda: gone(patched.handle))
    assert torch.equal(patched.sample(step=measure), reference)
