"""The pack and ComfyUI's modules inside the test process, on the CPU, without a server.

The pack becomes the package ``hybrid_trt`` by path: the repository's root must not be on sys.path, where its ``nodes``
would hide ComfyUI's.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import tiny_models

ROOT = Path(__file__).resolve().parents[2]

if "hybrid_trt" not in sys.modules:
    package = types.ModuleType("hybrid_trt")
    package.__path__ = [str(ROOT)]
    sys.modules["hybrid_trt"] = package


def import_comfy() -> None:
    """Make ``import comfy...`` work in this process, on the CPU."""
    comfyui = os.environ["HYBRID_TRT_COMFYUI"]
    if comfyui not in sys.path:
        sys.path.append(comfyui)
    tiny_models.import_comfy_on_cpu()
