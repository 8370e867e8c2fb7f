"""ControlNets of the SD1.5 family: no vector conditioning (SD2 has the same layout)."""

from .ldm import SD15_SIZES
from .ldm_controlnet import ControlNetArchitecture

ARCHITECTURE = ControlNetArchitecture("sd15_controlnet", takes_y=False, sizes=SD15_SIZES)
