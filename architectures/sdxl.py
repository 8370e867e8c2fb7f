"""The SDXL family, its refiner and its union ControlNets included: vector conditioning ``y``."""

from .ldm_controlnet import ControlNetArchitecture
from .ldm_unet import UNetArchitecture
from .sizes import Sizes

SIZES = Sizes("SDXL", 512, 1024, 1536)

ARCHITECTURES = (
    UNetArchitecture(SIZES, "sdxl_unet", takes_y=True, adapter_blocks=(3, 5, 8)),
    ControlNetArchitecture(SIZES, "sdxl_controlnet", takes_y=True),
)
