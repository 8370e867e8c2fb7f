"""The nodes that users see. They know the run side and the build side; nothing knows them."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io

from ..comfy_model.comfyui_internals import Feature, switch_off, works

log = logging.getLogger(__name__)


class HybridTRT(ComfyExtension):
    """The pack as ComfyUI sees it. Node ids are a public promise: workflows store them."""

    def __init__(self) -> None:
        self._nodes = nodes()

    async def on_load(self) -> None:
        if works(Feature.ENGINES):
            from ..page_api import build_routes, live_routes, ready_routes

            build_routes.register()
            live_routes.register()
            ready_routes.register()
            log.info("Hybrid TRT %s", _in_short())

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return self._nodes


def _in_short() -> str:
    """Return this version, the device, its backend for ``auto``, and the backends that do not run here."""
    import torch
    from comfy import model_management

    from ..backends import AUTO, backends
    from ..backends.lookup import usable_backends
    from ..engine_library import Unavailable
    from ..engine_library.manifest import PACK_VERSION

    device = model_management.get_torch_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    try:
        chosen = f"backend {usable_backends(AUTO, device)[0].name}"
    except Unavailable as unavailable:
        chosen = f"no backend ({unavailable})"
    missing = [backend.name for backend in backends().values() if backend.cannot_run(device) is not None]
    return f"{PACK_VERSION}: {name}, {chosen}" + (f"; not usable here: {', '.join(missing)}" if missing else "")


def nodes() -> list[type[io.ComfyNode]]:
    """Return all nodes; where this ComfyUI lacks what every engine needs, nodes of the same names that run native."""
    if works(Feature.ENGINES):
        try:
            from .apply_controlnet import TRTApplyControlNet
            from .compare import TRTCompare
            from .engine_nodes import (
                TRTAccelerate,
                TRTControlNetEngine,
                TRTSamplerPatch,
                TRTUNetEngine,
                TRTVAEEngine,
            )
            from .report import TRTReport
            from .stream import TRTFrame, TRTStream

            return [
                TRTAccelerate, TRTUNetEngine, TRTControlNetEngine, TRTVAEEngine, TRTApplyControlNet, TRTSamplerPatch,
                TRTReport, TRTCompare, TRTStream, TRTFrame,
            ]
        except (ImportError, AttributeError) as error:  # of code that the table of internals does not name
            log.debug("Hybrid TRT: the nodes cannot be loaded", exc_info=True)
            switch_off(Feature.ENGINES, f"this ComfyUI is not as expected ({type(error).__name__}: {error})")
    from .native_only import NODES

    return NODES
