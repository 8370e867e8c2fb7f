"""UNets of the SDXL family: vector conditioning ``y``."""

from .ldm import SDXL_SIZES
from .ldm_unet import UNetArchitecture

ARCHITECTURE = UNetArchitecture("sdxl_unet", takes_y=True, sizes=SDXL_SIZES)
