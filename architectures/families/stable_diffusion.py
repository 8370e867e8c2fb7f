"""The families of Stable Diffusion.

* SD1.5: no vector conditioning. SD2 has the same layout.
* SDXL, its refiner and its union ControlNets included: vector conditioning ``y``.
"""

from ..shapes import RequestedSizes, Sizes
from .ldm_controlnet import ControlNetArchitecture
from .ldm_unet import UNetArchitecture

SD15 = Sizes("SD1.5", 256, 512, 1024)
SDXL = Sizes("SDXL", 512, 1024, 1536)

PRESETS = {
    "presetSdxl": ("SDXL", RequestedSizes(640, 1024, 1536, 1, 231)),
    "presetSd15": ("SD 1.5", RequestedSizes(256, 512, 1024, 1, 231)),
}
"""Choices of the page: all usual formats of a family. A user's settings keep these keys."""

FILE_MARKS = (
    "input_blocks.0.0.weight", "input_hint_block.0.weight", "down_blocks.0.resnets.0.", "controlnet_cond_embedding.",
)
"""Parts of tensors' names in the files of these families, in Stability's layout and in that of Diffusers."""

NEEDS = (
    "comfy.ldm.modules.attention:BasicTransformerBlock",
    "comfy.ldm.modules.attention:CrossAttention",
    "comfy.ldm.modules.attention:SpatialTransformer",
    "comfy.ldm.modules.diffusionmodules.openaimodel:Downsample",
    "comfy.ldm.modules.diffusionmodules.openaimodel:ResBlock",
    "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel._forward"
    "(self, x, timesteps, context, y, control, transformer_options, **)",
    "comfy.cldm.cldm:ControlNet.forward(self, x, hint, timesteps, context, y, **)",
)
"""Names in ComfyUI's own code that the family relies on, see ``needs``."""

ARCHITECTURES = (
    UNetArchitecture(SD15, "sd15_unet", takes_y=False, adapter_blocks=(2, 5, 8, 11)),
    ControlNetArchitecture(SD15, "sd15_controlnet", takes_y=False),
    UNetArchitecture(SDXL, "sdxl_unet", takes_y=True, adapter_blocks=(3, 5, 8)),
    ControlNetArchitecture(SDXL, "sdxl_controlnet", takes_y=True),
)
