"""ComfyUI's own sampling in this process, without a server."""

from __future__ import annotations

from collections.abc import Callable

import comfy.sample
import torch
from comfy.controlnet import ControlBase
from comfy.model_patcher import ModelPatcher

STEPS = 4


def sample(
    model: ModelPatcher,
    seed: int = 1,
    steps: int = STEPS,
    step: Callable[[int], None] = lambda _i: None,
    control: ControlBase | None = None,
    sampler: str = "euler",
    size: tuple[int, int] = (8, 8),
    **conditioning: object,
) -> torch.Tensor:
    """A latent (``size``: height, width) sampled as KSampler does; ``step`` is called after each step.

    ``conditioning`` are further entries of both conditionings.
    """
    generator = torch.Generator().manual_seed(seed)
    controls = {} if control is None else {"control": control, "control_apply_to_uncond": False}
    options = {**conditioning, **controls}
    positive, negative = ([[torch.randn(1, 77, 768, generator=generator), dict(options)]] for _ in range(2))
    noise = torch.randn(1, 4, *size, generator=generator)
    with torch.inference_mode():
        return comfy.sample.sample(
            model, noise, steps, 5.0, sampler, "normal", positive, negative, torch.zeros_like(noise), seed=seed,
            disable_pbar=True, callback=lambda i, *_: step(i))  # fmt: skip


def error(latent: torch.Tensor, reference: torch.Tensor) -> float:
    return float((latent - reference).norm() / reference.norm())
