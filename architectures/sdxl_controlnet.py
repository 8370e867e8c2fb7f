"""ControlNets of the SDXL family: vector conditioning ``y``."""

from .ldm_controlnet import ControlNetArchitecture

ARCHITECTURE = ControlNetArchitecture("sdxl_controlnet", takes_y=True)
