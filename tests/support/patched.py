"""Models with an engine behind the sampler patch, in this process and on the CPU, for the tests of memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import comfy.sd
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy_execution.utils import CurrentNodeContext
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Reason, Unavailable
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
        network = NativeNetwork.of_model(load(file), NAME)
        order = BuildOrder(network, network.precision, PROFILE, backends()["onnxruntime"])
        build_engine(order, library, lambda _phase, _fraction: None, run=run_here)
        _libraries[file] = library
    return _libraries[file]


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
