"""ComfyUI's network classes in a process that is not ComfyUI: a build's child."""

from __future__ import annotations

import sys


def import_comfyui(folder: str) -> None:
    """Make ComfyUI's network classes importable; on the CPU, so that no GPU memory is taken."""
    if "comfy.model_management" in sys.modules:
        return
    sys.path.append(folder)
    import comfy.cli_args  # parses no sys.argv unless main.py asked for it

    comfy.cli_args.args.cpu = True
