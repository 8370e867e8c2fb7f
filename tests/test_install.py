"""Decisions of install.py on machines that are made up."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pack import ROOT

ADA = ("NVIDIA GeForce RTX 4090", (8, 9))
BLACKWELL = ("NVIDIA GeForce RTX 5090", (12, 0))
HOPPER = ("NVIDIA H200", (9, 0))
PASCAL = ("NVIDIA GeForce GTX 1080", (6, 1))


@pytest.fixture(scope="module")
def install() -> ModuleType:
    """install.py as a module; it is a script at the root, which is not on sys.path."""
    spec = importlib.util.spec_from_file_location("hybrid_trt_install", ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("cuda", "gpus", "installed", "requirement", "told"), [
    ("13.0", (ADA,), (), "tensorrt-rtx-cu13>=1.7,<1.8", "RTX 4090 and CUDA 13.0 was installed"),
    ("12.8", (BLACKWELL,), (), "tensorrt-rtx-cu12>=1.7,<1.8", "RTX 5090 and CUDA 12.8 was installed"),
    ("13.0", (HOPPER, ADA), (), "tensorrt-rtx-cu13>=1.7,<1.8", "RTX 4090"),
    ("13.0", (HOPPER,), (), None, "does not run on NVIDIA H200 (compute capability 9.0)"),
    ("12.8", (PASCAL,), (), None, "does not run on NVIDIA GeForce GTX 1080"),
    ("11.8", (ADA,), (), None, "no TensorRT-RTX for CUDA 11.8"),
    ("14.1", (ADA,), (), None, "no TensorRT-RTX for CUDA 14.1"),
    ("13.0", (), (), None, "No NVIDIA GPU"),
    (None, (), (), None, "No NVIDIA GPU"),
    ("13.0", (ADA,), ("tensorrt_rtx",), None, "TensorRT-RTX is installed already"),
    ("13.0", (ADA,), ("tensorrt", "tensorrt_rtx"), None, "TensorRT is installed already"),
])
def test_decision(install: ModuleType, cuda: str | None, gpus: tuple, installed: tuple, requirement: str | None,
                  told: str) -> None:
    decision = install.decide(install.Machine(cuda, gpus, frozenset(installed)))
    assert decision.requirement == requirement
    assert told in decision.sentence
    assert decision.sentence.endswith(".")
    assert "\n" not in decision.sentence


def test_it_knows_the_gpus_that_the_backend_knows(install: ModuleType) -> None:
    from hybrid_trt.backends.tensorrt import rtx as tensorrt_rtx

    assert install.SUPPORTED == tensorrt_rtx.SUPPORTED
    ((oldest, beyond),) = tensorrt_rtx.BACKEND.flavour.versions
    assert install.VERSIONS == ">={}.{},<{}.{}".format(*oldest, *beyond)


@pytest.mark.parametrize("failure", ["torch is broken", "pip failed"])
def test_the_installation_of_the_pack_never_fails(
    install: ModuleType, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def machine() -> object:
        if failure == "torch is broken":
            raise ImportError(failure)
        return install.Machine("13.0", (ADA,))

    def run(command: list[str], check: bool) -> None:
        assert command[-1] in ("tensorrt-rtx-cu13>=1.7,<1.8", "onnxruntime>=1.20.0")
        assert check
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(install, "this_machine", machine)
    monkeypatch.setattr(install, "this_onnxruntime", lambda: ([], False))
    monkeypatch.setattr(install.subprocess, "run", run)
    assert install.main() == 0


def test_it_runs_as_a_script_and_says_a_sentence_for_each_package() -> None:
    done = subprocess.run([sys.executable, "install.py"], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0
    onnx, tensorrt = done.stdout.splitlines()
    assert onnx == "[hybrid-trt] ONNX Runtime (onnxruntime) is installed already and stays as it is."
    assert tensorrt.startswith("[hybrid-trt] ")


def _bare(folder: Path) -> subprocess.CompletedProcess[str]:
    """install.py with no packages but those in a folder, and a pip there that writes down what it is asked for."""
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    asked = f"open({str(folder / 'asked')!r}, 'a')"
    (folder / "pip" / "__main__.py").write_text(f"import sys; {asked}.write(' '.join(sys.argv[1:]))")
    return subprocess.run(
        [sys.executable, "-S", "install.py"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, env={"PATH": "", "PYTHONPATH": str(folder)},
    )


@pytest.mark.parametrize("distribution", ["onnxruntime_gpu", "onnxruntime_directml", "onnxruntime_openvino", None])
def test_whatever_brings_onnx_runtime_stays(distribution: str | None, tmp_path: Path) -> None:
    package = tmp_path / "onnxruntime"
    package.mkdir()
    (package / "__init__.py").touch()
    if distribution is not None:
        info = tmp_path / f"{distribution}-1.22.0.dist-info"
        info.mkdir()
        name = distribution.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.22.0\n")
        (info / "top_level.txt").write_text("onnxruntime\n")
    done = _bare(tmp_path)
    assert done.returncode == 0
    name = distribution.replace("_", "-") if distribution else "from another source"
    assert f"ONNX Runtime ({name}) is installed already and stays as it is." in done.stdout
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("leftover", [False, True])
def test_onnx_runtime_is_installed_where_there_is_none(leftover: bool, tmp_path: Path) -> None:
    if leftover:
        (tmp_path / "onnxruntime").mkdir()  # uninstalling may leave an empty folder
    done = _bare(tmp_path)
    assert done.returncode == 0
    assert "ONNX Runtime was installed." in done.stdout
    assert (tmp_path / "asked").read_text() == "install onnxruntime>=1.20.0"


def test_without_onnx_runtime_the_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from hybrid_trt.backends import backends, onnxruntime
    from hybrid_trt.engine_library import Unavailable

    cpu = torch.device("cpu")
    backend = backends()["onnxruntime"]
    assert backend.unavailable(cpu) is None
    monkeypatch.setattr(onnxruntime, "OLDEST", (99, 0))
    assert "is too old, 99.0 or newer serves" in backend.unavailable(cpu).detail
    monkeypatch.setattr(onnxruntime, "find_spec", lambda name: None)
    assert "python install.py in the pack's folder, or pip install onnxruntime" in backend.unavailable(cpu).sentence()
    with pytest.raises(Unavailable, match="onnxruntime is not installed"):  # the check of a graph against native, too
        onnxruntime.OnnxRuntimeRunner(Path("model.onnx"), cpu, 0)


def test_the_install_and_the_backend_want_the_same_onnx_runtime(install: ModuleType) -> None:
    from hybrid_trt.backends.onnxruntime import OLDEST

    assert install.ONNXRUNTIME == f"onnxruntime>={OLDEST[0]}.{OLDEST[1]}.0"
    assert f'"{install.ONNXRUNTIME}"' in (ROOT / "pyproject.toml").read_text()
