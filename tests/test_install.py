"""What install.py decides, on machines that are made up."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
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
    from hybrid_trt.backends import tensorrt_rtx

    assert install.SUPPORTED == tensorrt_rtx.SUPPORTED
    oldest, beyond = tensorrt_rtx.BACKEND.flavour.versions
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
        assert command[-1] == "tensorrt-rtx-cu13>=1.7,<1.8"
        assert check
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(install, "this_machine", machine)
    monkeypatch.setattr(install.subprocess, "run", run)
    assert install.main() == 0


def test_it_runs_as_a_script_and_says_one_sentence() -> None:
    done = subprocess.run([sys.executable, "install.py"], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0
    assert done.stdout.startswith("[hybrid-trt] ")
    assert done.stdout.count("\n") == 1
