"""The SD1.5 family: no vector conditioning. SD2 has the same layout."""

from .ldm_controlnet import ControlNetArchitecture
from .ldm_unet import UNetArchitecture
from .sizes import Sizes

SIZES = Sizes("SD1.5", 256, 512, 1024)

ARCHITECTURES = (
    UNetArchitecture(SIZES, "sd15_unet", takes_y=False, adapter_blocks=(2, 5, 8, 11)),
    ControlNetArchitecture(SIZES, "sd15_controlnet", takes_y=False),
)
