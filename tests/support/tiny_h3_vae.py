"""A tiny VAE of MiniMax H3, in this process or in a server's: ComfyUI makes it of one size only."""

from __future__ import annotations

from unittest import mock

import torch
from comfy.ldm.minimax import vae as minimax
from comfy.sd import VAE


def drawn(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Random weights for a VAE."""
    generator, found = torch.Generator().manual_seed(3), {}
    for name, weight in module.state_dict().items():
        draw = torch.randn(weight.shape, generator=generator)
        around_one = "gamma" in name or (weight.ndim == 1 and any(part in name for part in ("scale", "norm", "std")))
        kernel = weight.ndim > 1
        found[name] = 0.1 * draw + 1 if around_one else draw * weight[0].numel() ** -0.5 if kernel else 0.05 * draw
    return found


def load() -> VAE:
    """Return ComfyUI's VAE with a tiny network and random weights."""
    real, decoder = minimax.MiniMaxH3VideoVAE, minimax.ViT3DDecoder
    small = {"ViT3DDecoder": lambda **sizes: decoder(**sizes, num_layers=2, heads=2, dim_head=32),
             "MiniMaxH3VideoVAE": lambda: real(ch=32)}  # fmt: skip
    with mock.patch.multiple(minimax, **small):
        return VAE(sd=drawn(minimax.MiniMaxH3VideoVAE()), device=torch.device("cpu"), dtype=torch.float32)
