"""A VAE of full size on a GPU: compiled decoding in bfloat16, judged against float32 beside native's own error.

    pytest -m gpu tests/families/test_vae_gpu.py

Without an NVIDIA GPU each test is skipped. What holds on a CPU too is in ``test_vae.py``.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from comfy import model_management
from comfy.ldm.models.autoencoder import AutoencoderKL
from comfy.sd import VAE
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import RequestedSizes
from hybrid_trt.backends import backends
from hybrid_trt.backends.lookup import EngineChoice
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.vae import vae_with_engines

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")]

GPU = torch.device("cuda", 0)
SIDE = 512
LAYERS = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
          "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}  # fmt: skip

Decoder = tuple[VAE, VAE, EngineHandle]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """SD1.5's VAE with random weights natively and with an engine for one size, and the engine's handle."""
    torch.manual_seed(1)
    weights = AutoencoderKL(ddconfig=LAYERS, embed_dim=4).state_dict()
    for name, value in weights.items():
        if value.ndim > 1:
            weights[name] = torch.randn(value.shape) / value[0].numel() ** 0.5
        else:  # ComfyUI's layers leave them as the memory was
            weights[name] = torch.full(value.shape, float(name.endswith("weight")))
    vae = VAE(sd=weights, device=GPU, dtype=torch.bfloat16)  # the tests' ComfyUI is one for the CPU
    library = Library([tmp_path_factory.mktemp("library")])
    network = NativeNetwork.of_vae(vae, Role.VAE_DECODER, "vae")
    profile = network.architecture().profile(RequestedSizes())
    order = BuildOrder(network, network.precision, profile, backends()["torch"])
    build_engine(order, library, lambda *_: None)
    handle = EngineHandle.look_up(network, EngineChoice(profile, backend="torch"), library, "node")
    return vae, vae_with_engines(vae, {Role.VAE_DECODER: handle}), handle


@pytest.fixture(autouse=True)
def as_comfyui_runs_nodes() -> Iterator[None]:
    with torch.inference_mode():
        yield


def latent(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 4, SIDE // 8, SIDE // 8, generator=torch.Generator().manual_seed(batch))


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.float() - exact).norm() / exact.norm())


def test_it_is_no_further_from_float32_than_native(decoder: Decoder) -> None:
    vae, backed, handle = decoder
    given = latent()
    exact = copy.deepcopy(vae.first_stage_model).float().cuda().decode(given.cuda()).movedim(1, -1).cpu() / 2 + 0.5
    native, engine = vae.decode(given), backed.decode(given)
    assert (handle.stats.engine, handle.stats.native) == (1, 0), handle.stats.details
    errors = [error(one, exact.clamp(0, 1)) for one in (engine, native)]
    assert errors[0] <= 1.2 * errors[1]
    worst = [((255 * one).round() - (255 * exact.clamp(0, 1)).round()).abs().max() for one in (engine, native)]
    assert worst[0] <= worst[1] + 1


def test_batches_are_decoded_picture_by_picture(decoder: Decoder) -> None:
    vae, backed, _ = decoder
    assert error(backed.decode(latent(3)), vae.decode(latent(3)).float()) < 2e-2


def test_a_call_takes_no_more_memory_than_comfyui_is_told(decoder: Decoder) -> None:
    vae, backed, handle = decoder
    backed.decode(latent())  # ComfyUI has loaded all that a call needs
    given = latent().to(GPU, vae.vae_dtype)
    backed.first_stage_model.decode(given)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backed.first_stage_model.decode(given)
    taken = torch.cuda.max_memory_allocated() - before
    told = backed.memory_used_decode(given.shape, torch.bfloat16)
    assert told / 2 < taken <= told, (taken, told)
    assert handle.stats.native == 0


def test_it_opens_again_after_comfyui_has_unloaded_all(decoder: Decoder) -> None:
    _, backed, _ = decoder
    first = backed.decode(latent())
    model_management.unload_all_models()
    assert torch.equal(backed.decode(latent()), first)
