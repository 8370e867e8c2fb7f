"""Models with an engine behind the sampler patch, in this process and on the CPU, for the tests of memory."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy_execution.utils import CurrentNodeContext
from hybrid_trt.architectures.shapes import Profile
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, Reason, Unavailable
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.engine_patcher import EnginePatcher
from hybrid_trt.sampling.model_wrapper import patch_model
from profiles import profile_of

from sampling import sample

CPU = torch.device("cpu")
NAME = "tiny_sd15_flat_unet"
PROFILE = profile_of(64, 64, 256, 2, 77)
LIMIT = 1e-5
prompt_numbers = itertools.count()
_libraries: dict[Path, Library] = {}
_latents: dict[Path, torch.Tensor] = {}


def load(file: Path) -> ModelPatcher:
    """The MODEL as ComfyUI's loader node gives it."""
    return comfy.sd.load_diffusion_model(str(file))


def library_of(file: Path, folder: Path) -> Library:
    """A library with the engine of the file, built once per process."""
    if file not in _libraries:
        library = Library([folder])
        built_here(NativeNetwork.of_model(load(file), NAME), library)
        _libraries[file] = library
    return _libraries[file]


def built_here(
    network: NativeNetwork, library: Library, backend: str = "onnxruntime", profile: Profile = PROFILE,
    precision: str = "float32", **options: Any,
) -> Engine:  # fmt: skip
    """An engine that is built in this process."""
    order = BuildOrder(network, precision, profile, backends()[backend], **options)
    return build_engine(order, library, lambda _phase, _fraction: None, run=run_here)


def with_lora(model: ModelPatcher, strength: float = 0.8, seed: int = 5, ends: Any = "to_k.weight") -> ModelPatcher:
    """The model with differences on the weights whose names end so, as nodes for LoRAs give it."""
    changed, generator = model.clone(), torch.Generator().manual_seed(seed)
    shapes = {name: weight.shape for name, weight in model.model.named_parameters() if name.endswith(ends)}
    patches = {name: ("diff", (torch.randn(shape, generator=generator) / shape[-1] ** 0.5,))
               for name, shape in shapes.items()}  # fmt: skip
    assert set(changed.add_patches(patches, strength)) == set(patches) != set()
    return changed


def spoil(session: Any, patch: pytest.MonkeyPatch, call: int = 1, value: float = float("nan"), place: int = 0) -> None:
    """From this call on one of an engine's results has one value of this kind."""
    calls, run = itertools.count(1), session.run

    def broken(*given: Any) -> dict[str, torch.Tensor]:
        results = run(*given)
        if next(calls) >= call:
            list(results.values())[place].view(-1)[3] = value
        return results

    patch.setattr(session, "run", broken)


def natively(file: Path) -> torch.Tensor:
    """Native's latent of the file's model, sampled once per process."""
    if file not in _latents:
        _latents[file] = sample(load(file))
    return _latents[file]


class Patched:
    """A model with its engine behind the sampler patch."""

    def __init__(self, native: ModelPatcher, library: Library, backend: str = "onnxruntime"):
        self.native = native
        network = NativeNetwork.of_model(native, NAME)
        self.handle = EngineHandle.look_up(network, EngineChoice(PROFILE, backend=backend), library, "engine")
        self.model = patch_model(native, self.handle)

    def sample(self, seed: int = 1, **options: Any) -> torch.Tensor:
        """One run, which the pack takes for an execution of a sampling node."""
        with sampling_node():
            return sample(self.model, seed, **options)

    @property
    def counts(self) -> tuple[int, int]:
        """Calls of the last run on the engine, and native."""
        return self.handle.stats.engine, self.handle.stats.native


class Failing:
    """Stands in front of a function: fails after so many calls, in some or in all further ones."""

    def __init__(self, real: Any, served: int = 0, fails: float = math.inf, error: Exception | None = None):
        self._real, self._served, self._fails = real, served, fails
        self._error = error or torch.OutOfMemoryError("CUDA out of memory")
        self.failed = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._served -= 1
        if self._served < 0 and self.failed < self._fails:
            self.failed += 1
            raise self._error
        return self._real(*arguments, **options)


def sampling_node() -> CurrentNodeContext:
    """One execution of a sampling node, as the pack tells them apart."""
    return CurrentNodeContext(f"prompt {next(prompt_numbers)}", "sampler")


def on_device(model: ModelPatcher) -> int:
    """Bytes of native weights that ComfyUI has loaded; it counts the noise schedule too when it loads all at once."""
    return max(0, model.model.model_loaded_weight_memory - schedule(model))


def schedule(model: ModelPatcher) -> int:
    return sum(b.numel() * b.element_size() for b in model.model.buffers())


def all_of(model: ModelPatcher) -> int:
    return model.model_size() - schedule(model)


def engines_loaded() -> list[EnginePatcher]:
    return [m for m in model_management.loaded_models() if isinstance(m, EnginePatcher)]


def gone(handle: EngineHandle) -> None:
    """As ``handle.refresh`` leaves it when the library has no engine."""
    handle.patcher.model.session, handle.fallback = None, Unavailable(Reason.NO_ENGINE, "deleted").fallback
