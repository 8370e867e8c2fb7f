"""Names in ComfyUI's own code that the families rely on. Imports nothing of ComfyUI."""

from __future__ import annotations

NEEDED_BY_FAMILIES = (
    "comfy.ldm.modules.attention:BasicTransformerBlock",
    "comfy.ldm.modules.attention:CrossAttention",
    "comfy.ldm.modules.attention:SpatialTransformer",
    "comfy.ldm.modules.diffusionmodules.openaimodel:Downsample",
    "comfy.ldm.modules.diffusionmodules.openaimodel:ResBlock",
    "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel._forward"
    "(self, x, timesteps, context, y, control, transformer_options, **)",
    "comfy.cldm.cldm:ControlNet.forward(self, x, hint, timesteps, context, y, **)",
)
