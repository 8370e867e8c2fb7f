"""VAEs of HunyuanVideo 1.5 and HunyuanImage 2.1 on engines: one build serves every still and video as native does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import torch
from comfy.ldm.models.autoencoder import AutoencodingEngine
from comfy.sd import VAE
from compiling import COMPILES
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import Picture, RequestedSizes
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.vae import vae_with_engines
from tiny_h3_vae import drawn
from vaes import as_vae, engine_of, interrupt

LIMIT = 1e-5
SIZES = RequestedSizes(64, 64, 64)
ROLES = (Role.VAE_DECODER, Role.VAE_ENCODER)
PLACE = {"video": "comfy.ldm.hunyuan_video.vae_refiner", "image": "comfy.ldm.hunyuan_video.vae"}
REGULARIZER = {"video": "EmptyRegularizer", "image": "DiagonalGaussianRegularizer"}
PIXELS = {"video": 16, "image": 32}
MATCHED = {"in_channels": 3, "out_channels": 3, "num_res_blocks": 1, "downsample_match_channel": True,
           "upsample_match_channel": True}  # fmt: skip
SHAPE = {"video": {**MATCHED, "block_out_channels": [16, 32, 64, 64, 64], "z_channels": 32, "ffactor_spatial": 16,
                   "ffactor_temporal": 4},
         "image": {**MATCHED, "block_out_channels": [32, 32, 32, 32, 64, 128], "z_channels": 64,
                   "ffactor_spatial": 32}}  # fmt: skip
UNMATCHED = {"upsample_match_channel": False, "downsample_match_channel": False, "num_res_blocks": 2}
CALLS = {"video": ((1, 4, 6), (2, 3, 5), (3, 4, 4), (1, 1, 1), (6, 2, 3), (9, 1, 2), (1, 16, 7), (3, 21, 5),
                   (2, 14, 8)),
         "image": ((2, 3), (1, 1), (5, 2), (19, 18), (13, 27), (24, 15))}  # fmt: skip
"""Latent frames of a video, height and width."""
COMPILED = 3
"""The last of these, of sizes for which torch takes the same code for a single image on a CPU as for the example."""
KINDS = {("video", Role.VAE_DECODER): 20, ("video", Role.VAE_ENCODER): 20, ("image", Role.VAE_DECODER): 9,
         ("image", Role.VAE_ENCODER): 9}  # fmt: skip


def module_of(kind: str, regularizer: str | None = None, **changes: Any) -> AutoencodingEngine:
    """A tiny VAE with random weights."""
    sizes = {**SHAPE[kind], **changes}
    halves = {f"{half.lower()}_config": {"target": f"{PLACE[kind]}.{half}", "params": sizes}
              for half in ("Encoder", "Decoder")}  # fmt: skip
    target = f"comfy.ldm.models.autoencoder.{regularizer or REGULARIZER[kind]}"
    module = AutoencodingEngine(regularizer_config={"target": target}, **halves)
    module.load_state_dict(drawn(module))
    return module.eval().requires_grad_(False)


def tiny(kind: str, monkeypatch: pytest.MonkeyPatch) -> VAE:
    """ComfyUI's VAE with a tiny network."""

    def small(**given: Mapping[str, Any]) -> AutoencodingEngine:
        return module_of(kind, given["regularizer_config"]["target"].rpartition(".")[2])

    with monkeypatch.context() as patch:
        patch.setattr(comfy.sd, "AutoencodingEngine", small)
        return VAE(sd=module_of(kind).state_dict(), device=torch.device("cpu"), dtype=torch.float32)


def given_to(kind: str, role: Role, sizes: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    """Latents or pixels; sizes are a video's latent frames, rows and columns."""
    *frames, height, width = sizes
    generator = torch.Generator().manual_seed(seed)
    if role is Role.VAE_DECODER:
        return torch.randn(1, SHAPE[kind]["z_channels"], *sizes, generator=generator)
    sides = (PIXELS[kind] * height, PIXELS[kind] * width)
    return torch.rand(1, 3, *(4 * count - 3 for count in frames), *sides, generator=generator) * 2 - 1


@COMPILES
@pytest.mark.slow  # layers of such kinds are compiled in Wan's test too
@pytest.mark.parametrize(("kind", "role"), KINDS)
def test_one_build_serves_every_still_and_video(
    kind: str, role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = tiny(kind, monkeypatch)
    handle = engine_of(vae, role, tmp_path, "torch", SIZES)
    backed, plain = vae_with_engines(vae, {role: handle}), []
    call = "decode" if role is Role.VAE_DECODER else "encode"
    ours, native = (getattr(one.first_stage_model, call) for one in (backed, vae))
    with torch.inference_mode():  # as in ComfyUI's server
        for number, sizes in enumerate(CALLS[kind]):
            given = given_to(kind, role, sizes, seed=number)
            assert relative_error(ours(given), native(given)) <= LIMIT, sizes
            blocks = handle.session.active.live.compiled
            plain.append(blocks.plain)
        assert (len(blocks.kinds), plain[-1] - plain[-1 - COMPILED]) == (KINDS[kind, role], 0)
        assert (handle.stats.engine, handle.stats.native) == (len(CALLS[kind]), 0), handle.stats.details
        interrupt(lambda: ours(given))
        assert relative_error(ours(given), native(given)) <= LIMIT
        given = given_to(kind, role, CALLS[kind][0])
        several = torch.cat([given, 2 * given])
        assert relative_error(ours(several), native(several)) <= LIMIT
        if role is Role.VAE_DECODER:
            tiles = {"tile_x": 6, "tile_y": 6, "overlap": 2}
            tiles |= {"tile_t": 2, "overlap_t": 1} if kind == "video" else {}
            given = given_to(kind, role, (3, 9, 7)[-len(CALLS[kind][0]) :])
            assert relative_error(backed.decode(given), vae.decode(given)) <= LIMIT
            assert relative_error(backed.decode_tiled(given, **tiles), vae.decode_tiled(given, **tiles)) <= LIMIT
        else:
            images = torch.rand(7, 70, 52, 3)  # native leaves out what makes no whole latent
            assert relative_error(backed.encode(images), vae.encode(images)) <= LIMIT
    assert handle.stats.native == 0, handle.stats.details


@pytest.mark.parametrize("changes", [{}, UNMATCHED], ids=str)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("kind", "words", "calls"), [
    ("video", "96x80, 13 frames", [(frames, 1 + frames % 3, 2) for frames in range(1, 10)]),
    ("image", "96x64", [(1, 1), (3, 2), (2, 5)])])
def test_our_way_through_its_layers_is_natives(
    kind: str, words: str, calls: list, role: Role, changes: dict[str, Any]
) -> None:
    module = module_of(kind, **changes)
    architecture = NativeNetwork.of_vae(as_vae(module), role, "a VAE").architecture()
    function = architecture.function(module_of(kind, **changes))
    with torch.inference_mode():
        for sizes in calls:
            given = given_to(kind, role, sizes)
            expected = module.decode(given) if role is Role.VAE_DECODER else module.encode(given)
            (found,) = function(given)
            assert found.shape == expected.shape
            assert relative_error(found, expected) <= LIMIT, sizes
    (call,) = architecture.calls(architecture.profile(SIZES), Picture(96, 80, (1,), length=13))
    assert architecture.call_words(call) == words


@pytest.mark.parametrize(("kind", "regularizer", "changes"), [
    ("video", None, {"refiner_vae": False, "block_out_channels": [32, 64, 64, 64, 64]}),
    ("video", "DiagonalGaussianRegularizer", {}), ("video", None, {"ffactor_temporal": 2}),
    ("video", None, {"ffactor_spatial": 8}), ("image", "EmptyRegularizer", {}),
    ("image", None, {"ffactor_spatial": 16})], ids=str)  # fmt: skip
@pytest.mark.parametrize("role", ROLES)
def test_other_vaes_of_these_layers_run_at_normal_speed(
    kind: str, role: Role, regularizer: str | None, changes: dict[str, Any]
) -> None:
    module = module_of(kind, regularizer, **changes)
    with pytest.raises(Unavailable, match="family that has no engines yet"):
        NativeNetwork.of_vae(as_vae(module), role, "a VAE").architecture()
