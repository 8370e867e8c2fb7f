"""The nodes: what users see. They know the run side and the build side; nothing knows them."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from ..page_api import build_routes
from .apply_controlnet import TRTApplyControlNet
from .controlnet_engine import TRTControlNetEngine
from .report import TRTReport
from .sampler_patch import TRTSamplerPatch
from .unet_engine import TRTUNetEngine


class HybridTRT(ComfyExtension):
    """The pack as ComfyUI sees it. Node ids are a public promise: workflows store them."""

    async def on_load(self) -> None:
        build_routes.register()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TRTUNetEngine, TRTControlNetEngine, TRTApplyControlNet, TRTSamplerPatch, TRTReport]
