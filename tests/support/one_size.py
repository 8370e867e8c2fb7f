"""Nodes whose backend builds an engine for one size each, with ONNX Runtime said to be such a backend; real builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from built_once import built_once
from hybrid_trt.architectures.calls import EngineCall
from hybrid_trt.architectures.shapes import Picture, Profile, Range, sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.tensorrt.version8.backend import OneSizeBackend
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Engine, Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.nodes import building
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from small_networks import native_call

ORT = backends()["onnxruntime"]
PROFILE = Profile({"B": Range(1, 2, 4), "H": Range(4, 8, 20), "W": Range(4, 8, 20), "T": Range(77, 77, 231),
                   "HB": Range(1, 1, 4)})
BEST = {"B": 2, "H": 8, "W": 8, "T": 77, "HB": 1}
PORTRAIT = Picture(96, 128, (2, 1))
OF_PORTRAIT = {**BEST, "H": 16, "W": 12}


def only(sizes: dict[str, int]) -> Profile:
    return Profile({s: Range(n, n, n) for s, n in sizes.items()})


@pytest.fixture(autouse=True)
def of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, method in vars(OneSizeBackend).items():
        if not name.startswith("_"):
            monkeypatch.setattr(type(ORT), name, method, raising=False)


def handle_of(net: NativeNetwork, folder: Path, *pictures: Picture, backend: str = "onnxruntime") -> EngineHandle:
    choice = EngineChoice(PROFILE, backend=backend, pictures=pictures)
    return EngineHandle.look_up(net, choice, Library([folder]), f"{net.module!r:.9}{folder}", f"key {folder}")


def build(handle: EngineHandle) -> Engine:
    ((order, _anew),) = building._orders(handle)
    return built_once(order, handle.library)


def built_for(net: NativeNetwork, folder: Path, *sets: tuple[Picture, ...]) -> tuple[EngineHandle, list[Engine]]:
    """Build an engine for each set of pictures; return the last set's handle, which has found them, and them."""
    handles = [handle_of(net, folder, *pictures) for pictures in sets]
    engines = [build(handle) for handle in handles]
    handles[-1].refresh()
    return handles[-1], engines


def serve(handle: EngineHandle, sizes: dict[str, int]) -> tuple[bool, float]:
    """Return whether a call was served, and how far its result is from native's."""
    net = handle.network
    given = sample_inputs(net.architecture().inputs(net.module, "float32"), sizes, seed=3)
    with torch.inference_mode():
        done, result = handle.serve(None, lambda: EngineCall(dict(given), dict), net.patcher)
        if not done:
            return False, 0.0
        expected = native_call(net, given)
    return True, max(relative_error(a, b) for a, b in zip(result.values(), expected, strict=True))
