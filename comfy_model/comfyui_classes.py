"""ComfyUI's network classes in a process that is not ComfyUI: a build's child."""

from __future__ import annotations

import contextlib
import sys


def import_comfyui(folder: str) -> None:
    """Make ComfyUI's network classes importable; on the CPU, so that no GPU memory is taken."""
    if "comfy.model_management" in sys.modules:
        return
    sys.path.append(folder)
    import comfy.cli_args  # parses no sys.argv unless main.py asked for it

    comfy.cli_args.args.cpu = True
    _have_no_int8_kernels()


def _have_no_int8_kernels() -> None:
    """ComfyUI's attention asks for them when it is imported, which starts CUDA; no build computes with them."""
    with contextlib.suppress(ImportError):
        import comfy_kitchen

        if hasattr(comfy_kitchen, "int8_attention_is_available"):
            comfy_kitchen.int8_attention_is_available = lambda *_: False
