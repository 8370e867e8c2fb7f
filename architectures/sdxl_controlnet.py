"""ControlNets of the SDXL family: vector conditioning ``y``."""

from .ldm import SDXL_SIZES
from .ldm_controlnet import ControlNetArchitecture

ARCHITECTURE = ControlNetArchitecture("sdxl_controlnet", takes_y=True, sizes=SDXL_SIZES)
