"""InstantX's ControlNets for Qwen-Image: whole prompts equal native's, also beside references."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import token_networks
import torch
from comfy.controlnet import ControlNet
from family_contract import LIMIT
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling.controlnet import back_with_engine
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from model_families.qwen_image import FILE as MODEL
from model_families.qwen_image import WIDTH
from model_families.qwen_image_controlnet import FILE
from token_calls import Patched, engine_of, network_of, profile_of, sample

from sampling import error


def loaded(models: dict[str, Path]) -> ControlNet:
    return token_networks.load_control(str(models[FILE]))


def encode(pixels: torch.Tensor) -> torch.Tensor:
    """A latent of 16 channels and one picture in a row, as the VAE of this family gives it; no such VAE is tiny."""
    latent = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8).repeat(1, 6, 1, 1)[:, :16]
    return latent.unsqueeze(2) * 4 - 2


def applied(control: ControlNet, strength: float, end: float, before: ControlNet | None = None) -> ControlNet:
    vae = SimpleNamespace(spacial_compression_encode=lambda: 8, encode=encode)
    image = torch.rand(1, 3, 64, 48, generator=torch.Generator().manual_seed(int(10 * strength)))
    control = control.copy().set_cond_hint(image, strength, (0.0, end), vae=vae)
    control.set_previous_controlnet(before)
    return control


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_whole_prompts_are_natives(models: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """One ControlNet, two of which the second ends earlier, beside references; then without it."""
    network = network_of(models, MODEL)
    control_network = NativeNetwork.of_controlnet(control := loaded(models), FILE)
    if backend == "onnxruntime":
        for one in (network, control_network):
            engine_of(one, tmp_path)
    patched = Patched(network, tmp_path, backend)
    choice = EngineChoice(profile_of(control_network), backend=backend)
    handle = EngineHandle.look_up(control_network, choice, Library([tmp_path]), f"control of {tmp_path}")
    backed, native = back_with_engine(control, handle), loaded(models)
    plain = sample(network_of(models, MODEL).patcher, WIDTH)
    for count, options, calls in ((1, {}, 6), (2, {"words": (9, 9)}, 5), (1, {"references": [(8, 6)]}, 6)):
        results = []
        for net in (native, backed):
            stack = applied(net, 0.7, 1.0)
            if count == 2:
                stack = applied(net, 1.5, 0.5, stack)
            given = options | {"control": stack, "control_apply_to_uncond": False}
            model = network_of(models, MODEL).patcher
            results.append(patched.sample(WIDTH, **given) if net is backed else sample(model, WIDTH, **given))
        expected, found = results
        assert error(expected, plain) > 0.01, "the ControlNet acts"
        assert error(found, expected) <= LIMIT
        assert patched.counts[1] == 0, patched.handle.stats.reasons
        assert (handle.stats.engine, handle.stats.native) == (calls, 0), handle.stats.reasons
    assert error(patched.sample(WIDTH), plain) <= LIMIT, "nothing of it is left"
