"""Run by ComfyUI-Manager after requirements.txt: adds ONNX Runtime where there is none, and TensorRT-RTX where the GPU
and torch fit it.

It uninstalls nothing, puts nothing over what is there, and never makes the installation fail.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from importlib.util import find_spec

log = logging.getLogger("hybrid-trt")

ONNXRUNTIME = "onnxruntime>=1.20.0"
"""The first release that binds tensors by ONNX type, which float16 and bfloat16 without numpy need."""

VERSIONS = ">=1.7,<1.8"
PACKAGES = {"12": "tensorrt-rtx-cu12", "13": "tensorrt-rtx-cu13"}
"""CUDA major version that torch was built for -> package."""

SUPPORTED = frozenset({(7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)})
"""Compute capabilities that TensorRT-RTX runs on."""


@dataclass(frozen=True)
class Machine:
    """Facts about a machine that decide what is installed.

    Attributes:
        cuda: CUDA version of torch, for example ``13.0``; None when torch is not built for NVIDIA GPUs.
        gpus: name and compute capability of each GPU.
        installed: which of ``tensorrt`` and ``tensorrt_rtx`` can be imported.
    """

    cuda: str | None
    gpus: tuple[tuple[str, tuple[int, int]], ...] = ()
    installed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    """Package to install, None for nothing, and the reason in one sentence."""

    requirement: str | None
    sentence: str


def decide(machine: Machine) -> Decision:
    """Tell whether a machine gets TensorRT-RTX, and which build of it."""
    for module, title in (("tensorrt", "TensorRT"), ("tensorrt_rtx", "TensorRT-RTX")):
        if module in machine.installed:
            return Decision(None, f"{title} is installed already and stays as it is.")
    if machine.cuda is None or not machine.gpus:
        return Decision(None, "No NVIDIA GPU is usable by torch, so TensorRT-RTX was not installed.")
    fitting = [name for name, capability in machine.gpus if capability in SUPPORTED]
    if not fitting:
        name, (major, minor) = machine.gpus[0]
        return Decision(
            None, f"TensorRT-RTX does not run on {name} (compute capability {major}.{minor}), so it was not installed."
        )
    package = PACKAGES.get(machine.cuda.split(".")[0])
    if package is None:
        return Decision(None, f"There is no TensorRT-RTX for CUDA {machine.cuda}, so it was not installed.")
    return Decision(package + VERSIONS, f"TensorRT-RTX for {fitting[0]} and CUDA {machine.cuda} was installed.")


def this_machine() -> Machine:
    """The machine that this runs on, as torch sees it."""
    import torch

    count = torch.cuda.device_count() if torch.version.cuda is not None and torch.cuda.is_available() else 0
    gpus = tuple((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count))
    installed = frozenset(name for name in ("tensorrt", "tensorrt_rtx") if find_spec(name) is not None)
    return Machine(torch.version.cuda, gpus, installed)


def decide_onnxruntime(providers: Sequence[str], importable: bool) -> Decision:
    """Decide on ONNX Runtime: it is installed where nothing brings its module, since its packages (for the CPU, CUDA,
    DirectML, OpenVINO ...) write over one another's files, and each of them will do.

    Args:
        providers: the distributions that bring the module ``onnxruntime``.
        importable: whether the module is there, for example without a distribution.
    """
    if providers or importable:
        name = providers[0] if providers else "from another source"
        return Decision(None, f"ONNX Runtime ({name}) is installed already and stays as it is.")
    return Decision(ONNXRUNTIME, "ONNX Runtime was installed.")


def this_onnxruntime() -> tuple[list[str], bool]:
    """Return which distributions bring ONNX Runtime here, and whether its module is there."""
    spec = find_spec("onnxruntime")
    # an uninstalled one may leave an empty folder, which counts as a package without a file
    return sorted(packages_distributions().get("onnxruntime", [])), spec is not None and spec.origin is not None


def carry_out(title: str, decide_it: Callable[[], Decision], otherwise: str) -> None:
    """Decide on one package, install it, and say so in one sentence, whatever happens."""
    try:
        decision = decide_it()
        if decision.requirement is not None:
            subprocess.run([sys.executable, "-m", "pip", "install", decision.requirement], check=True)
        log.info(decision.sentence)
    except Exception as error:
        log.info("%s was not installed (%s); %s", title, error, otherwise)


def main() -> int:
    """Always 0: ComfyUI-Manager takes anything else for a failed pack."""
    logging.basicConfig(level=logging.INFO, format="[%(name)s] %(message)s", stream=sys.stdout)
    carry_out("ONNX Runtime", lambda: decide_onnxruntime(*this_onnxruntime()),
              "pip install onnxruntime, or onnxruntime-gpu, installs it later; until then the pack loads and says so.")
    carry_out("TensorRT-RTX", lambda: decide(this_machine()),
              "the pack works without it, and requirements-tensorrt-rtx.txt installs it later.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
