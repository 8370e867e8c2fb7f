"""The nodes as they are where engines can serve."""

from __future__ import annotations

from .apply_controlnet import TRTApplyControlNet
from .controlnet_engine import TRTControlNetEngine
from .report import TRTReport
from .sampler_patch import TRTSamplerPatch
from .unet_engine import TRTUNetEngine

NODES = [TRTUNetEngine, TRTControlNetEngine, TRTApplyControlNet, TRTSamplerPatch, TRTReport]
