"""Live sessions of small SD1.5 networks, and calls for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_recorder import Recorder
from hybrid_trt.architectures import architecture_of
from hybrid_trt.architectures.shapes import Profile, Range, sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import trust
from hybrid_trt.engine_library.engine import relative_error
from small_networks import native_call

TORCH = backends()["torch"]
SIZES = {"B": 2, "H": 9, "W": 12, "T": 77, "HB": 1}
PROFILE = Profile({"B": Range(1, 2, 4), "H": Range(4, 16, 40), "W": Range(4, 16, 40), "T": Range(77, 77, 231),
                   "HB": Range(1, 1, 4)})


def given_for(net: NativeNetwork, seed: int = 1, **sizes: int) -> dict[str, torch.Tensor]:
    return sample_inputs(architecture_of(net.module).inputs(net.module, "float32"), SIZES | sizes, seed)


def opened(net: NativeNetwork) -> LiveSession:
    return LiveSession(net, TORCH, "float32", Recorder())


def error(session: LiveSession, net: NativeNetwork, given: dict[str, torch.Tensor]) -> float:
    with torch.inference_mode():
        results = session.run(given).values()
        return max(relative_error(r, n) for r, n in zip(results, native_call(net, given), strict=True))


@pytest.fixture
def key_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    return tmp_path / "keys"
