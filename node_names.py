"""Names of our nodes, and of their inputs and values that several rooms read. Nothing is imported here."""

from __future__ import annotations

ACCELERATE = "TRTAccelerate"
UNET_ENGINE = "TRTUNetEngine"
CONTROLNET_ENGINE = "TRTControlNetEngine"
VAE_ENGINE = "TRTVAEEngine"
SAMPLER_PATCH = "TRTSamplerPatch"
APPLY_CONTROLNET = "TRTApplyControlNet"
STREAM = "TRTStream"
FRAME = "TRTFrame"
COMPARE = "TRTCompare"
REPORT = "TRTReport"

ENGINE_NODES = (UNET_ENGINE, CONTROLNET_ENGINE, VAE_ENGINE, ACCELERATE)
CONTROL_INPUTS = ("control_net_1", "control_net_2", "control_net_3", "control_net_4")
"""The ControlNets of TRT Accelerate."""

WHEN_MISSING = "when_missing"
"""The input of engine nodes that says what happens while there is no engine."""
USE_NATIVE, BUILD_NOW, IN_BACKGROUND = "use native", "build now", "build in background"
"""Its values beside ``auto``."""
