"""The VAE of Qwen-Image 2.1 on engines, by a stand-in: the pinned ComfyUI lacks its class's options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comfy.ldm.wan import vae2_2 as wan22
from comfy.ldm.wan.vae import CausalConv3d
from compiling import COMPILES
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import Picture, RequestedSizes
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.vae import EngineVAEModel
from tiny_h3_vae import drawn
from vaes import as_vae, engine_of

LIMIT = 1e-5
COLOURS = 4
SIZES = RequestedSizes(64, 64, 64)
ROLES = (Role.VAE_DECODER, Role.VAE_ENCODER)
CALLS = ((4, 6), (3, 5), (1, 1), (2, 7), (20, 18), (26, 15))
"""Rows and columns; of the last, torch takes the same code on a CPU as for the example."""
COMPILED, KINDS = 2, {Role.VAE_DECODER: 12, Role.VAE_ENCODER: 15}


def natives(role: Role, vae: wan22.WanVAE, images: torch.Tensor) -> torch.Tensor:
    """Decode or encode as newer servers do, by Wan 2.2's layers."""
    if role is Role.VAE_ENCODER:
        return vae.conv1(vae.encoder(images.unsqueeze(2))).chunk(2, 1)[0].squeeze(2)
    x = vae.decoder.middle(vae.decoder.conv1(vae.conv2(images.unsqueeze(2))))
    for layer in vae.decoder.upsamples:
        x = layer(x, first_chunk=True)
    return vae.decoder.head(x).squeeze(2)


def module_of(flat: bool = True, patch_size: int | None = 1, dim_mult: tuple[int, ...] = (1, 2, 4, 4, 4)
              ) -> torch.nn.Module:
    """A tiny VAE; its convolutions see one frame where it is ``flat``."""
    halves = [bool(number) for number in range(len(dim_mult) - 1)]
    module = wan22.WanVAE(dim=16, dec_dim=16, z_dim=16, dim_mult=list(dim_mult), num_res_blocks=1,
                          temperal_downsample=halves)  # fmt: skip
    module.encoder.conv1 = CausalConv3d(COLOURS, 16, 3, padding=1)
    module.decoder.head[-1] = CausalConv3d(16, COLOURS, 3, padding=1)
    for layer in module.modules():
        if flat and isinstance(layer, CausalConv3d):
            layer.weight = torch.nn.Parameter(layer.weight[:, :, -1:])
            layer.kernel_size, layer._padding = (1, *layer.kernel_size[1:]), 0
    if patch_size is not None:
        module.patch_size = patch_size
    module.load_state_dict(drawn(module))
    return module.eval().requires_grad_(False)


def given_to(role: Role, height: int, width: int, images: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height + width)
    if role is Role.VAE_DECODER:
        return torch.randn(images, 16, height, width, generator=generator)
    return torch.rand(images, COLOURS, 16 * height, 16 * width, generator=generator) * 2 - 1


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_one_build_serves_pictures_of_every_size(role: Role, tmp_path: Path) -> None:
    vae, plain = as_vae(module_of()), []
    handle = engine_of(vae, role, tmp_path, "torch", SIZES)
    served = EngineVAEModel(vae, {role: handle})
    ours = served.decode if role is Role.VAE_DECODER else served.encode
    with torch.inference_mode():  # as in ComfyUI's server
        for height, width in CALLS:
            given = given_to(role, height, width)
            assert relative_error(ours(given), natives(role, vae.first_stage_model, given)) <= LIMIT, (height, width)
            blocks = handle.session.active.live.compiled
            plain.append(blocks.plain)
        given = given_to(role, 3, 2, images=2)
        assert relative_error(ours(given), natives(role, vae.first_stage_model, given)) <= LIMIT
    assert (len(blocks.kinds), plain[-1] - plain[-1 - COMPILED]) == (KINDS[role], 0)
    assert handle.stats.native == 0, handle.stats.details


@pytest.mark.parametrize("role", ROLES)
def test_a_picture_is_the_first_frame_of_wans_way(role: Role) -> None:
    network = NativeNetwork.of_vae(as_vae(module_of()), role, "a VAE")
    architecture = network.architecture()
    assert architecture.name == f"qwen_image21_{role.value}"
    for sides in ((2, 3), (1, 1), (5, 2)):
        given = given_to(role, *sides)
        with torch.inference_mode():
            (found,) = architecture.function(module_of())(given)
            assert relative_error(found, natives(role, network.module, given)) <= LIMIT
    (call,) = architecture.calls(architecture.profile(SIZES), Picture(96, 80, (1,)))
    assert architecture.call_words(call) == "96x80"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("changes", [
    {"flat": False}, {"patch_size": 2}, {"patch_size": None}, {"dim_mult": (1, 2, 4, 4, 4, 4)}], ids=str)
def test_others_of_its_class_run_at_normal_speed(role: Role, changes: dict) -> None:
    """The report names the reason, and no family of Wan's videos takes them."""
    with pytest.raises(Unavailable, match=r"a VAE is of a family that has no engines yet \(WanVAE\)"):
        NativeNetwork.of_vae(as_vae(module_of(**changes)), role, "a VAE").architecture()
