"""For tests of the two TensorRT backends: GPUs that are not here, and a small graph to build from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from hybrid_trt.backends import BuildRequest
from hybrid_trt.backends.tensorrt import full as tensorrt_backend
from hybrid_trt.backends.tensorrt import rtx as rtx_backend
from hybrid_trt.engine_builder.worker.onnx_export import export_onnx
from hybrid_trt.engine_library import EngineIdentity, Manifest
from hybrid_trt.engine_library.gpu import Gpu
from networks import PROFILE

CUDA = torch.device("cuda", 0)
RTX, FULL = rtx_backend.BACKEND, tensorrt_backend.BACKEND
ADA = Gpu("NVIDIA GeForce RTX 4090", (8, 9))
TURING = Gpu("NVIDIA GeForce RTX 2080", (7, 5))
HOPPER = Gpu("NVIDIA H200", (9, 0))
BLACKWELL = Gpu("NVIDIA GeForce RTX 5090", (12, 0))
PASCAL = Gpu("NVIDIA GeForce GTX 1080", (6, 1))
SMALL = networks.TINY["sd15"] | {"model_channels": 64, "context_dim": 64}


def ignore(_phase: str, _fraction: float) -> None:
    pass


def small_request(precision: str, folder: Path) -> BuildRequest:
    """A request for a small SD1.5 UNet, its graph in the folder."""
    network = networks.random_network("unet", SMALL, getattr(torch, precision))
    architecture = network.architecture()
    inputs = tuple(architecture.inputs(network.module, precision))
    outputs = tuple(architecture.outputs(network.module, precision))
    traced = architecture.examples(PROFILE).traced
    graph = export_onnx(architecture.function(network.module), inputs, outputs, traced, folder)
    return BuildRequest(graph, inputs, outputs, PROFILE, folder, "portable")


def gpu(monkeypatch: pytest.MonkeyPatch, faked: Gpu | None) -> None:
    """Let both backends see this GPU on every device."""
    monkeypatch.setattr(Gpu, "of", classmethod(lambda _cls, _device: faked))


def manifest(backend: Any, version: str, device: str) -> Manifest:
    identity = EngineIdentity("sd15_unet", "0" * 64, "float16", PROFILE, backend.name, version, device)
    return Manifest(identity, "unet", "x", (), (), {})
