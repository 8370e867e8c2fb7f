"""Fixtures of the tests of memory: a tiny model with its engine, a ControlNet on the torch backend, a double of a GPU.

A module has those that it imports, and has to import what these ask for too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.controlnet
import pytest
import tiny_models
import torch
from comfy import model_management
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling import native_weights
from hybrid_trt.sampling.controlnet import back_with_engine, native_controlnet
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from patched import NAME, PROFILE, Patched, library_of, load, sampling_node

from sampling import sample

CONTROLNET = "tiny_sd15_flat_a"


@pytest.fixture(scope="module")
def file(environment: Any) -> Path:
    return tiny_models.make(environment.base / "models", [NAME])[NAME]


@pytest.fixture(scope="module")
def files(environment: Any) -> dict[str, Path]:
    return tiny_models.make(environment.base / "models", [NAME, CONTROLNET])


@pytest.fixture(scope="module")
def library(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return library_of(file, tmp_path_factory.mktemp("library"))


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    model_management.unload_all_models()  # what modules before have left
    yield
    gc.collect()
    model_management.unload_all_models()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double: the pack takes the CPU for a device whose memory is not the main memory."""
    monkeypatch.setattr(native_weights, "has_memory_of_its_own", lambda _device: True)


@pytest.fixture
def patched(file: Path, library: Library) -> Patched:
    return Patched(load(file), library)


@pytest.fixture
def controlnet(files: dict[str, Path]) -> ControlNet:
    return comfy.controlnet.load_controlnet(str(files[CONTROLNET]))


def on_engine(
    net: ControlNet, library: Library, backend: str = "torch", node: str = "engine"
) -> tuple[ControlNet, EngineHandle]:
    """A ControlNet as its engine node gives it, and the engine's handle."""
    network = NativeNetwork.of_controlnet(native_controlnet(net), CONTROLNET)
    handle = EngineHandle.look_up(network, EngineChoice(PROFILE, backend=backend), library, node)
    return back_with_engine(native_controlnet(net), handle), handle


class Controlled:
    """A native UNet with a ControlNet that the torch backend runs, so that no wrapper of the pack is on the model."""

    def __init__(self, model: ModelPatcher, native: ControlNet, library: Library):
        self.model, self.native = model, native.control_model_wrapped
        backed, self.handle = on_engine(native, library)
        image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
        self.net = backed.copy().set_cond_hint(image, 0.7, (0.0, 1.0))
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
