"""Compares patched fp8 and quantised layers with native's under dynamic VRAM: prints the formats that hold."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import comfy_aimdo.control

comfy_aimdo.control.init()  # before ComfyUI's modules, as its main.py does it

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]
sys.path.append(os.environ["HYBRID_TRT_COMFYUI"])

import comfy.memory_management
import comfy.model_management
from comfy.model_patcher import ModelPatcherDynamic
from pack import import_comfy

import_comfy()

import torch
from any_weights import error, lora
from hybrid_trt.architectures.quantised_linear import multiplies_in_fp8
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.comfy_model.network import NativeNetwork
from quantised import plain_fp8, quantised
from small_networks import native_call

GPU, CPU, HALF = torch.device("cuda", 0), torch.device("cpu"), torch.bfloat16
assert comfy_aimdo.control.init_devices([(0, 0)]), "dynamic VRAM does not start here"

KERNELS_ON_HOPPER = frozenset({"nvfp4", "mxfp8"})
FAST = "fp8_e4m3fn_fast"
declined: list[str] = []
"""Lines of ComfyUI's log that tell that its fp8 kernel did not run."""


class Declined(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if any(words in record.getMessage() for words in ("during fp8 op", "falling back")):
            declined.append(record.getMessage())


logging.getLogger().addHandler(Declined())
logging.getLogger().setLevel(logging.INFO)


def made(name: str) -> NativeNetwork:
    """A network, made as where there is no dynamic VRAM."""
    comfy.memory_management.aimdo_enabled = False
    try:
        if name in (FAST, "plain fp8"):
            return plain_fp8("unlike_levels", HALF, fast=name == FAST)
        return quantised("unet", "unlike_levels", name, HALF, KERNELS_ON_HOPPER)
    finally:
        comfy.memory_management.aimdo_enabled = True


def dynamic(net: NativeNetwork, ends: str) -> NativeNetwork:
    """The same network, loaded dynamically with a LoRA."""
    patcher = ModelPatcherDynamic(net.patcher.model, GPU, CPU, net.patcher.model_size())
    assert patcher.is_dynamic()
    assert patcher.add_patches(lora(net, 5, ends), 0.8)
    net = NativeNetwork(patcher, net.module, net.prefix, HALF, net.label, net.role)
    net.architecture()  # it is served
    comfy.model_management.load_models_gpu([patcher])
    return net


def followed(net: NativeNetwork) -> NativeNetwork:
    """The network that an engine computes."""
    weights = LiveWeights(net, HALF, share=False)
    weights.sync_from(net.patcher)
    return replace(net, module=weights.module)


def results(net: NativeNetwork, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return native_call(net, given)


def compare_layers(name: str) -> None:
    net = dynamic(made(name), "to_k.weight")
    own, compared, patched = followed(net).module, 0, 0
    for path, layer in net.module.named_modules():  # small ones and large ones
        if not (hasattr(layer, "quant_format") or multiplies_in_fp8(layer)):
            continue
        given = torch.randn(2, 32, layer.in_features, dtype=HALF, device=GPU)
        for _ in range(3):  # the first call patches, later ones find it done
            with torch.inference_mode():
                assert torch.equal(own.get_submodule(path)(given.clone()), layer(given.clone())), path
        compared, patched = compared + 1, patched + path.endswith("to_k")
    assert compared > 20, compared
    assert patched > 2, "a LoRA acts on these"
    assert not declined, declined
    print(name)


def compare_with_both_values() -> None:
    """Native's results of its first call and of later ones, and of the model loaded whole, beside an engine's."""
    name = "plain fp8"
    net, whole = dynamic(made(name), ".weight"), made(name)
    specs = net.architecture().inputs(net.module, "bfloat16")
    given = {k: v.to(GPU) for k, v in sample_inputs(specs, {"B": 2, "H": 16, "W": 16, "T": 77}, seed=3).items()}
    first, _, later = (results(net, given) for _ in range(3))
    ours = results(followed(net), given)
    whole.patcher.load_device = GPU
    assert whole.patcher.add_patches(lora(whole, 5, ".weight"), 0.8)
    comfy.model_management.load_models_gpu([whole.patcher], force_full_load=True)
    expected = results(whole, given)
    between = error(first, later)
    found = {"engine and whole": error(ours, expected), "first and later": between,
             "engine and first": error(ours, first), "engine and later": error(ours, later)}  # fmt: skip
    told = ", ".join(f"{what} {value:.2e}" for what, value in found.items())
    assert between > 1e-2, told
    assert error(ours, expected) <= 0.25 * between, told
    assert error(ours, first) <= 1.25 * between, told
    assert error(ours, later) <= 1.75 * between, told
    print(f"{name}: {told}")


for one in ("fp8", "int8 rows", FAST):
    compare_layers(one)
compare_with_both_values()
