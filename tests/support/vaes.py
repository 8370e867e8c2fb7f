"""VAEs with random weights, and engines for them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_patcher as comfy_patcher
import pytest
import torch
from comfy import model_management
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import RequestedSizes
from hybrid_trt.backends import backends
from hybrid_trt.backends.lookup import EngineChoice
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling.engine_handle import EngineHandle

SIZES = RequestedSizes(64, 128, 256)


def as_vae(module: torch.nn.Module) -> SimpleNamespace:
    """A VAE as far as the pack reads it."""
    patcher = comfy_patcher.ModelPatcher(module, torch.device("cpu"), torch.device("cpu"))
    return SimpleNamespace(patcher=patcher, first_stage_model=module, vae_dtype=torch.float32)


def engine_of(
    vae: Any, role: Role, folder: Path, backend: str = "onnxruntime", sizes: RequestedSizes = SIZES
) -> EngineHandle:
    """Build a VAE's engine and return its handle."""
    network, library = NativeNetwork.of_vae(vae, role, f"a VAE's {role.value}"), Library([folder])
    profile, chosen = network.architecture().profile(sizes), backends()[backend]
    order = BuildOrder(network, "float32", profile, chosen)
    build_engine(order, library, lambda *_: None, run=run_here)
    choice = EngineChoice(profile, backend=backend)
    return EngineHandle.look_up(network, choice, library, f"{role.value} by {backend} in {folder}")


def interrupt(run: Callable[[], object]) -> None:
    """Interrupt a call at half of the places where ComfyUI would notice a user's click."""
    looks = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_management, "throw_exception_if_processing_interrupted", lambda: next(looks))
        run()
    half = next(looks) // 2
    assert half > 2, "a click is noticed before the call ends"
    left = count(half, -1)

    def look() -> None:
        if next(left) == 0:
            raise model_management.InterruptProcessingException

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_management, "throw_exception_if_processing_interrupted", look)
        with pytest.raises(model_management.InterruptProcessingException):
            run()
