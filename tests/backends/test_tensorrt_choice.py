"""TensorRT backends that can build and run something, on GPUs and with packages that are not here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networks
import pytest
import tensorrt_rtx as trt
import torch
from hybrid_trt.backends import BuildRequest, backends
from hybrid_trt.backends.tensorrt import build as trt_build
from hybrid_trt.backends.tensorrt import flavour as trt_flavour
from hybrid_trt.backends.tensorrt import rtx as rtx_backend
from hybrid_trt.backends.tensorrt.flavour import Flavour
from hybrid_trt.backends.tensorrt.version8.backend import BACKEND as VERSION8
from hybrid_trt.engine_library import BuildError, Reason, Unavailable
from hybrid_trt.engine_library.gpu import Gpu
from trt_backends import ADA, BLACKWELL, CUDA, FULL, HOPPER, PASCAL, RTX, TURING, gpu, ignore, manifest

pytestmark = pytest.mark.tensorrt


def test_the_most_preferred_backend_comes_first() -> None:
    names = [name for name in backends() if name in ("tensorrt", "tensorrt_rtx", "onnxruntime")]
    assert names == ["tensorrt", "tensorrt_rtx", "onnxruntime"]


def test_without_a_gpu_rtx_builds_and_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, None)
    assert RTX.cannot_build(networks.CPU) is None
    assert RTX.target(networks.CPU) == "portable"
    refusal = RTX.cannot_run(networks.CPU)
    assert refusal.reason is Reason.WRONG_GPU
    assert refusal.detail == "TensorRT-RTX needs an NVIDIA GPU, the model runs on cpu"
    assert FULL.cannot_build(networks.CPU).reason is Reason.WRONG_GPU


@pytest.mark.parametrize(("faked", "target"), [(ADA, "sm_89"), (TURING, "sm_75"), (HOPPER, "portable")])
def test_rtx_builds_for_the_gpu_at_hand_where_it_runs_there(
    faked: Gpu, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, faked)
    assert RTX.target(CUDA) == target
    assert FULL.target(CUDA) == f"{faked.sm} {faked.name}"


def test_rtx_refuses_gpus_that_are_not_rtx_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, HOPPER)
    for refusal in (RTX.cannot_run(CUDA), RTX.cannot_use(manifest(RTX, trt.__version__, "portable"), CUDA)):
        assert refusal.reason is Reason.WRONG_GPU
        assert refusal.detail == (
            "TensorRT-RTX runs on GeForce and RTX cards only, this GPU is NVIDIA H200 (compute capability 9.0)"
        )
    gpu(monkeypatch, ADA)
    assert RTX.cannot_run(CUDA) is None


@pytest.mark.parametrize(("version", "faked", "told"), [
    ("11.4.0.106", PASCAL, "tensorrt==8.6.0"), ("10.1.0", PASCAL, "tensorrt==8.6.0"), ("8.6.0", PASCAL, None),
    ("8.6.0", HOPPER, None), ("8.6.0", BLACKWELL, "tensorrt>=10.1"), ("11.4.0.106", BLACKWELL, None)])
def test_each_version_of_full_tensorrt_takes_the_gpus_that_it_knows(
    version: str, faked: Gpu, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, faked)
    monkeypatch.setattr(trt_flavour, "_import", lambda _flavour: SimpleNamespace(__version__=version))
    refusal = (VERSION8 if version.startswith("8.") else FULL).cannot_run(CUDA)
    assert (refusal and refusal.reason) == (told and Reason.WRONG_GPU)
    assert told is None or told in refusal.detail


@pytest.mark.parametrize(("faked", "built_for", "reason"), [
    (ADA, "portable", None), (ADA, "sm_89", None), (ADA, "sm_86", Reason.WRONG_GPU),
    (TURING, "sm_75", None), (TURING, "portable", Reason.WRONG_GPU), (ADA, "sm_8", Reason.WRONG_GPU)])
def test_which_rtx_engines_run_on_which_gpu(
    faked: Gpu, built_for: str, reason: Reason | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, faked)
    refusal = RTX.cannot_use(manifest(RTX, trt.__version__, built_for), CUDA)
    assert (refusal and refusal.reason) == reason
    if refusal:
        assert built_for in refusal.detail
        assert str(faked) in refusal.detail


def test_full_tensorrt_engines_belong_to_one_model_of_gpu_and_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, HOPPER)
    monkeypatch.setattr(trt_flavour, "_import", lambda _flavour: SimpleNamespace(__version__="11.4.0.106"))
    assert FULL.cannot_use(manifest(FULL, "11.4.0.106", "sm_90 NVIDIA H200"), CUDA) is None
    assert FULL.cannot_use(manifest(FULL, "11.4.0.106", "sm_90 NVIDIA H100"), CUDA).reason is Reason.WRONG_GPU
    refusal = FULL.cannot_use(manifest(FULL, "11.4.0.105", "sm_90 NVIDIA H200"), CUDA)
    assert refusal.reason is Reason.STALE_ENGINE
    assert "11.4.0.105 and 11.4.0.106 is installed" in refusal.detail


def test_the_gpus_are_those_that_the_package_names() -> None:
    named = {name for name in trt.ComputeCapability.__members__ if name.startswith("SM")}
    assert named == {"SM{}{}".format(*capability) for capability in rtx_backend.SUPPORTED}


@pytest.mark.parametrize(("backend", "command"), [
    (RTX, 'pip install "tensorrt-rtx'), (FULL, 'pip install "tensorrt')])
def test_a_missing_package_is_told_with_the_command_that_installs_it(
    backend: Any, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, backend.flavour.module, None)  # blocks the import
    gpu(monkeypatch, ADA)
    for refusal in (backend.cannot_run(CUDA), backend.cannot_build(CUDA)):
        assert refusal.reason is Reason.BACKEND_MISSING
        assert command in refusal.detail
    nothing = BuildRequest(tmp_path / "model.onnx", (), (), networks.PROFILE, tmp_path, "portable")
    with pytest.raises(BuildError, match="is not installed"):
        trt_build.build_engine_file(backend.flavour, nothing, ignore)
    with pytest.raises(Unavailable):
        backend.version()


def test_torch_for_cuda_12_wants_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert RTX.flavour.install == 'pip install "tensorrt-rtx-cu12>=1.7,<1.8"'
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert RTX.flavour.install == 'pip install "tensorrt-rtx>=1.7,<1.8"'


def test_a_missing_polygraphy_stops_builds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polygraphy", None)
    gpu(monkeypatch, ADA)
    assert RTX.cannot_run(CUDA) is None
    assert "pip install polygraphy" in RTX.cannot_build(CUDA).detail


@pytest.mark.parametrize(("text", "told"), [
    ("raise OSError('libcudart.so.13: cannot open')", "cannot be loaded (OSError: libcudart.so.13"),
    ("__version__ = '1.4.0.76'", "1.4.0.76 is installed and cannot be used"),
    ("", "cannot be loaded (AttributeError")])
def test_a_package_that_does_not_load_or_serve_is_no_crash(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    refusal = trt_flavour.cannot_import(Flavour(name, "TensorRT-RTX", ((1, 7), (1, 8)), "tensorrt-rtx"))
    assert refusal.reason is Reason.BACKEND_MISSING
    assert told in refusal.detail
    assert "pip install" in refusal.detail


def test_amds_gpus_are_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Gpu.of(CUDA) is None
