"""UNets of the SD1.5 family: no vector conditioning (SD2 has the same layout)."""

from .ldm import SD15_SIZES
from .ldm_unet import UNetArchitecture

ARCHITECTURE = UNetArchitecture("sd15_unet", takes_y=False, sizes=SD15_SIZES)
