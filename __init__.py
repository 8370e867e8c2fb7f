"""Hybrid TRT: ControlNets and the UNet as compiled engines in ComfyUI, with native as the fallback.

ComfyUI imports this file. Nothing heavy is imported here: a backend loads when it is first needed, and says what to
install when it is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

WEB_DIRECTORY = "./js"


async def comfy_entrypoint() -> ComfyExtension:
    """Called once by ComfyUI at start-up to get the nodes."""
    from .comfy_model import comfyui_internals
    from .nodes import HybridTRT

    comfyui_internals.check()
    return HybridTRT()
