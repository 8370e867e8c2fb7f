"""The decoder of MiniMax H3's VAE on engines: one build decodes stills and videos of every size as native does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comfy.ldm.minimax import vae as minimax
from comfy.sd import VAE
from compiling import COMPILES
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import Picture, RequestedSizes
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.vae import vae_with_engines
from vaes import engine_of

LIMIT = 1e-5
CALLS = ((1, 4, 6), (2, 3, 5), (7, 4, 4), (12, 20, 17), (1, 1, 1), (1, 33, 2), (3, 16, 16))
"""Latent frames, height and width."""


@pytest.fixture
def vae(monkeypatch: pytest.MonkeyPatch) -> VAE:
    """ComfyUI's VAE with a tiny network and random weights."""
    real, decoder = minimax.MiniMaxH3VideoVAE, minimax.ViT3DDecoder
    monkeypatch.setattr(minimax, "ViT3DDecoder", lambda **sizes: decoder(**sizes, num_layers=2, heads=2, dim_head=32))
    monkeypatch.setattr(minimax, "MiniMaxH3VideoVAE", lambda: real(ch=32))
    module, generator = minimax.MiniMaxH3VideoVAE(), torch.Generator().manual_seed(3)
    for name, weight in module.named_parameters():
        draw = torch.randn(weight.shape, generator=generator)
        plain = "scale" in name or "norm" in name
        weight.data = 0.1 * draw + 1 if plain else draw * weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.05 * draw
    found = VAE(sd=module.state_dict(), device=torch.device("cpu"), dtype=torch.float32)
    monkeypatch.undo()
    return found


@COMPILES
def test_one_build_decodes_every_still_and_video(vae: VAE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = engine_of(vae, Role.VAE_DECODER, tmp_path, "torch", RequestedSizes(64, 64, 64))
    backed = vae_with_engines(vae, {Role.VAE_DECODER: handle})
    with torch.inference_mode():  # as in ComfyUI's server
        for number, (frames, height, width) in enumerate(CALLS):
            latent = torch.randn(1, 24, frames, height, width, generator=torch.Generator().manual_seed(number))
            found, expected = backed.decode(latent), vae.decode(latent)
            assert found.dtype == expected.dtype
            assert relative_error(found, expected) <= LIMIT, (frames, height, width)
        assert relative_error(backed.decode_tiled(latent), vae.decode_tiled(latent)) <= LIMIT
        (blocks,) = handle.session.active.live._compiled.values()
        assert (len(blocks.kinds), blocks.plain) == (1, 0)
        assert (handle.stats.engine, handle.stats.native) == (len(CALLS) + 1, 0), handle.stats.details
        lack_memory_once(monkeypatch, backed.first_stage_model)
        assert relative_error(backed.decode(latent), vae.decode(latent)) <= LIMIT
    assert handle.stats.native == 0, handle.stats.details
    assert backed.memory_used_decode(latent.shape, torch.float32) == vae.memory_used_decode(latent.shape, torch.float32)


def lack_memory_once(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Have the next call find no memory: ComfyUI then decodes in the VAE's own tiles."""
    own, failed = model.decode, []

    def decode(latent: torch.Tensor) -> torch.Tensor:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("no room for the whole video")
        return own(latent)

    monkeypatch.setattr(model, "decode", decode)


def test_it_says_what_it_decodes_and_encodes_at_normal_speed(vae: VAE) -> None:
    network = NativeNetwork.of_vae(vae, Role.VAE_DECODER, "a VAE")
    architecture = network.architecture()
    profile = architecture.profile(RequestedSizes(64, 64, 64))
    for frames, words in ((1, "96x80"), (5, "96x80, 2 latent frames"), (124, "96x80, 37 latent frames")):
        (call,) = architecture.calls(profile, Picture(96, 80, (1,), length=frames))
        assert architecture.call_words(call) == words
    assert "tiles" in network.only_live
    with pytest.raises(Unavailable, match="MiniMaxH3VideoVAE"):
        NativeNetwork.of_vae(vae, Role.VAE_ENCODER, "a VAE").architecture()
