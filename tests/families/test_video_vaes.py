"""Decoders of MiniMax H3's and LTX-2's VAEs on engines: one build decodes every still and video as native does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_h3_vae
import torch
from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE
from comfy.ldm.minimax import vae as minimax
from comfy.quant_ops import QuantizedTensor
from comfy.sd import VAE
from compiling import COMPILES
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import Picture, RequestedSizes
from hybrid_trt.comfy_model.attention import remark
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.vae import vae_with_engines
from tiny_h3_vae import drawn
from tiny_transformers import LTX_VAE as LTX
from vaes import as_vae, engine_of, interrupt

LIMIT = 1e-5
CPU = torch.device("cpu")
SIZES = RequestedSizes(64, 64, 64)
OTHER_LAYERS = [["res_x", 1], ["compress_all", 1], ["res_x_y", 1], ["compress_space", 1], ["compress_time", 1],
                ["compress_all", 1]]  # fmt: skip
CALLS = {"h3": ((1, 4, 6), (2, 3, 5), (7, 4, 4), (12, 20, 17), (1, 1, 1), (1, 33, 2), (3, 16, 16)),
         "ltx": ((1, 4, 6), (2, 3, 5), (5, 2, 3), (1, 12, 14), (40, 2, 3), (42, 2, 4))}  # fmt: skip
"""Latent frames, height and width. On a CPU torch takes other code for larger pictures: of LTX's the last two have the
sizes and the chunks of the example."""
KINDS = {"h3": 1, "ltx": 17}


def tiny(kind: str) -> VAE:
    """ComfyUI's VAE with a tiny network and random weights."""
    return ltx(LTX) if kind == "ltx" else tiny_h3_vae.load()


def ltx(config: Mapping[str, Any]) -> VAE:
    metadata = {"config": json.dumps({"vae": config})}
    module = VideoVAE(config=config)
    if config["decoder_blocks"] is OTHER_LAYERS:  # ComfyUI knows files by names that it lacks
        module.load_state_dict(drawn(module))
        return as_vae(module.requires_grad_(False))
    return VAE(sd=drawn(module), device=CPU, dtype=torch.float32, metadata=metadata)


def latent(sizes: tuple[int, ...], channels: int, seed: int) -> torch.Tensor:
    return torch.randn(1, channels, *sizes, generator=torch.Generator().manual_seed(seed))


@COMPILES
@pytest.mark.parametrize("kind", ["h3", pytest.param("ltx", marks=pytest.mark.slow)])
def test_one_build_decodes_every_still_and_video(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vae = tiny(kind)
    handle = engine_of(vae, Role.VAE_DECODER, tmp_path, "torch", SIZES)
    backed, plain = vae_with_engines(vae, {Role.VAE_DECODER: handle}), []
    with torch.inference_mode():  # as in ComfyUI's server
        for number, sizes in enumerate(CALLS[kind]):
            given = latent(sizes, vae.latent_channels, number)
            found, expected = backed.decode(given), vae.decode(given)
            assert found.dtype == expected.dtype
            assert relative_error(found, expected) <= LIMIT, sizes
            blocks = handle.session.active.live.compiled
            plain.append(blocks.plain)
        assert (len(blocks.kinds), plain[-1] - plain[-3]) == (KINDS[kind], 0)
        assert (handle.stats.engine, handle.stats.native) == (len(CALLS[kind]), 0), handle.stats.details
        interrupt(lambda: backed.decode(given))
        assert relative_error(backed.decode(given), expected) <= LIMIT
        several = torch.cat([given, 2 * given])
        assert relative_error(backed.decode(several), vae.decode(several)) <= LIMIT
        tiles = {"tile_x": 6, "tile_y": 6, "overlap": 2, "tile_t": 2, "overlap_t": 1}
        assert relative_error(backed.decode_tiled(given, **tiles), vae.decode_tiled(given, **tiles)) <= LIMIT
        lack_memory_once(monkeypatch, backed.first_stage_model)
        assert relative_error(backed.decode(given), vae.decode_tiled(given, **own_tiles(vae))) <= LIMIT
    assert handle.stats.native == 0, handle.stats.details
    assert backed.memory_used_decode(given.shape, torch.float32) == vae.memory_used_decode(given.shape, torch.float32)


def test_tiles_that_newer_versions_decode_in_groups_are_natives(monkeypatch: pytest.MonkeyPatch) -> None:
    own = minimax.MiniMaxH3VideoVAE.tiled_decode

    def in_groups(self: torch.nn.Module, z: torch.Tensor) -> torch.Tensor:
        decode, (rows, height, _), (columns, width, _) = self._decode_pixels, *(
            self.split_tiles(side * self.vae_ratio) for side in z.shape[3:])
        tiles = [z[..., y // 16 : (y + height[0]) // 16, x // 16 : (x + width[0]) // 16] for y in rows for x in columns]
        found = iter([tile for group in (tiles[:2], tiles[2:5], tiles[5:]) if group
                      for tile in decode(torch.cat(group)).chunk(len(group))])  # fmt: skip
        monkeypatch.setattr(self, "_decode_pixels", lambda _: next(found))
        try:
            return own(self, z)
        finally:
            self._decode_pixels = decode

    given, vae = latent((7, 20, 17), 24, 4), tiny("h3")
    function = NativeNetwork.of_vae(vae, Role.VAE_DECODER, "a VAE").architecture().function
    with torch.inference_mode():
        expected = vae.first_stage_model.decode(given)
        monkeypatch.setattr(minimax.MiniMaxH3VideoVAE, "tiled_decode", in_groups)
        for model in (lambda given: (vae.first_stage_model.decode(given),), function(tiny("h3").first_stage_model)):
            assert relative_error(model(given)[0], expected) <= LIMIT


def test_the_report_says_where_newer_versions_attend_in_int8_and_the_engine_exactly(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = tiny("h3")
    module, layer = vae.first_stage_model, vae.first_stage_model.decoder.transformer_blocks[0].attn.to_qkv
    weights = QuantizedTensor.from_float(layer.weight.detach(), "TensorWiseINT8Layout")
    said = []
    for newer, weight in ((True, layer.weight), (False, weights), (True, weights)):
        monkeypatch.setattr(minimax, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", newer, raising=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        said.append(remark(module, vae.patcher, ""))
    assert said == ["", "", "Native computes some attention in INT8; the engine is exact"]


def own_tiles(vae: VAE) -> dict[str, Any]:
    """The tiles that ComfyUI takes where memory is short, as its code has them."""
    tile = 256 // vae.spacial_compression_decode()
    return {"tile_x": tile, "tile_y": tile, "overlap": tile // 4, "overlap_t": 1}


def lack_memory_once(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Have the next call find no memory."""
    own, failed = model.decode, []

    def decode(given: torch.Tensor, **more: Any) -> torch.Tensor:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("no room for the whole video")
        return own(given, **more)

    monkeypatch.setattr(model, "decode", decode)


@pytest.mark.parametrize("changes", [
    {}, {"causal_decoder": True}, {"spatial_padding_mode": "zeros"}, {"decoder_blocks": OTHER_LAYERS}], ids=str)
def test_each_decoder_of_ltx_gives_what_native_does_for_every_number_of_chunks(changes: dict[str, Any]) -> None:
    vae = ltx({**LTX, **changes})
    network = NativeNetwork.of_vae(vae, Role.VAE_DECODER, "a VAE")
    function = network.architecture().function(ltx({**LTX, **changes}).first_stage_model)
    for frames in (1, 2, 3, 4, 5, 8, 13):
        given = latent((frames, 3, 4), 128, 5)
        with torch.inference_mode():
            expected = vae.first_stage_model.decode(given)
            (found,) = function(given)
        assert relative_error(found, expected) <= LIMIT, frames


@pytest.mark.parametrize("changes", [
    {"timestep_conditioning": True},
    {"decoder_blocks": [["res_x", {"num_layers": 1, "inject_noise": True}], *3 * [LTX["decoder_blocks"][1]]]},
    {"norm_layer": "group_norm", "decoder_base_channels": 32, "encoder_base_channels": 32}],
    ids=["noise of a timestep", "noise", "norms over all frames"])  # fmt: skip
def test_decoders_that_draw_noise_or_look_at_all_frames_run_at_normal_speed(changes: dict[str, Any]) -> None:
    module = VideoVAE(config={**LTX, **changes})
    with pytest.raises(Unavailable, match="VideoVAE"):
        NativeNetwork.of_vae(as_vae(module), Role.VAE_DECODER, "a VAE").architecture()


@pytest.mark.parametrize(("kind", "pixels", "latents"), [
    ("h3", 16, {1: 1, 5: 2, 124: 37}), ("ltx", 32, {1: 1, 121: 16})])
def test_it_says_what_it_decodes_and_encodes_at_normal_speed(
    kind: str, pixels: int, latents: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = tiny(kind)
    network = NativeNetwork.of_vae(vae, Role.VAE_DECODER, "a VAE")
    architecture = network.architecture()
    for frames, count in latents.items():
        picture = Picture(6 * pixels, 5 * pixels, (1,), length=frames)
        (call,) = architecture.calls(architecture.profile(SIZES), picture)
        size = f"{6 * pixels}x{5 * pixels}"
        assert call["L"] + 1 == count
        assert architecture.call_words(call) == size + (f", {frames} frames" if count > 1 else "")
    assert network.only_live
    with pytest.raises(Unavailable, match="family that has no engines yet"):
        NativeNetwork.of_vae(vae, Role.VAE_ENCODER, "a VAE").architecture()
