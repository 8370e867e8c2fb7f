"""Run by ComfyUI-Manager after requirements.txt: adds ONNX Runtime where there is none.

It uninstalls nothing, puts nothing over what is there, and never makes the installation fail. TensorRT and TensorRT-RTX
are installed by whoever wants them, from requirements-tensorrt.txt and requirements-tensorrt-rtx.txt.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import packages_distributions
from importlib.util import find_spec

log = logging.getLogger("hybrid-trt")

ONNXRUNTIME = "onnxruntime>=1.20.0"
"""The first release that binds tensors by ONNX type, which float16 and bfloat16 without numpy need."""


def provider() -> str | None:
    """Return what brings ONNX Runtime here: a distribution's name, ``"another source"``, or None where nothing does.

    Its packages (for the CPU, CUDA, DirectML, OpenVINO ...) write over one another's files, and each of them will do.
    """
    if found := sorted(packages_distributions().get("onnxruntime", [])):
        return found[0]
    spec = find_spec("onnxruntime")
    # an uninstalled one may leave an empty folder, which counts as a package without a file
    return "another source" if spec is not None and spec.origin is not None else None


def main() -> int:
    """Always 0: ComfyUI-Manager takes anything else for a failed pack."""
    logging.basicConfig(level=logging.INFO, format="[%(name)s] %(message)s", stream=sys.stdout)
    try:
        if (found := provider()) is not None:
            log.info("ONNX Runtime (%s) is installed already and stays as it is.", found)
            return 0
        subprocess.run([sys.executable, "-m", "pip", "install", ONNXRUNTIME], check=True)
        log.info("ONNX Runtime was installed.")
    except Exception as error:
        log.info("ONNX Runtime was not installed (%s); pip install onnxruntime, or onnxruntime-gpu, installs it later. "
                 "Until then the pack loads and says so.", error)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
