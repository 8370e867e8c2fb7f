"""The families of Stable Diffusion.

* SD1.5: no vector conditioning. SD2 has the same layout.
* SDXL, its refiner and its union ControlNets included: vector conditioning ``y``.
"""

from .ldm_controlnet import ControlNetArchitecture
from .ldm_unet import UNetArchitecture
from .shapes import Sizes

SD15 = Sizes("SD1.5", 256, 512, 1024)
SDXL = Sizes("SDXL", 512, 1024, 1536)

ARCHITECTURES = (
    UNetArchitecture(SD15, "sd15_unet", takes_y=False, adapter_blocks=(2, 5, 8, 11)),
    ControlNetArchitecture(SD15, "sd15_controlnet", takes_y=False),
    UNetArchitecture(SDXL, "sdxl_unet", takes_y=True, adapter_blocks=(3, 5, 8)),
    ControlNetArchitecture(SDXL, "sdxl_controlnet", takes_y=True),
)
