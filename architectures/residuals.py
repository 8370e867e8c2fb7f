"""Functions of other packs that stand for ComfyUI's ``apply_control``, which adds residuals to a UNet's tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

APPLY_CONTROL = ("comfy.ldm.modules.diffusionmodules.openaimodel", "apply_control")
"""Its module and name."""


def only_adds_residuals(function: Callable) -> bool:
    """Tell whether a function in the place of ComfyUI's ``apply_control`` only adds residuals that fit.

    Packs put functions there that resize what does not fit, which no engine takes. Tried on small tensors.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        picture, first, last = (torch.randn(2, 4, 6, 5, generator=generator) for _ in range(3))
        try:
            for name in ("input", "middle", "output"):
                lists: dict[str, list] = {"input": [], "middle": [], "output": [], name: [first, None, last]}
                expected = [picture + last, picture, picture + first, picture]
                if not all(torch.equal(function(picture.clone(), lists, name), one) for one in expected):
                    return False
            return torch.equal(function(picture.clone(), None, "middle"), picture)
        except Exception as error:
            log.debug("Hybrid TRT: another pack's apply_control raised %s", error)
            return False
