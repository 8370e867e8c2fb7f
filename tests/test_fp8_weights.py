"""Weights kept in fp8 and patched before or behind the engine node: an engine computes with what ComfyUI rounds them to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from any_weights import PROFILE, another, built, error, handle_of, inputs_of, lora, native, patched, served
from comfy_process import ComfyProcess
from fake_recorder import Recorder
from scenarios import Scenario, compare, native_latent, relative_difference
from small_networks import CPU, network

import comfy.float
import comfy.ops
from comfy.model_patcher import ModelPatcher
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_live.session import LiveSession
from hybrid_trt.native_model.network import NativeNetwork
from hybrid_trt.native_model.weights import current_weights

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
STORED = (*FP8, torch.bfloat16)
LIMIT = 1e-5


def stored_as(dtype: torch.dtype, kind: str = "unet") -> NativeNetwork:
    """A network whose weights lie in a dtype, computing in float32, as UNETLoader's weight_dtype makes it."""
    net = network(kind, "unlike_levels", operations=comfy.ops.manual_cast)
    net.module.to(dtype)
    return net


def behind(net: NativeNetwork, patcher: ModelPatcher) -> NativeNetwork:
    return NativeNetwork(patcher, net.module, net.prefix, net.dtype, net.label)


def merged(net: NativeNetwork) -> ModelPatcher:
    """As ModelMergeSimple does it."""
    other = another(net)
    patcher = net.patcher.clone()
    for key, patches in other.patcher.get_key_patches(net.prefix or None).items():
        patcher.add_patches({key: patches}, 0.4, 0.6)
    return patcher


def with_lora(net: NativeNetwork, strength: float = 0.8) -> ModelPatcher:
    return patched(net, (lora(net, 5), strength))


PATCHES = {"a LoRA": with_lora, "a merge": merged}


def of_live(net: NativeNetwork, patcher: ModelPatcher) -> list[torch.Tensor]:
    """What the torch backend computes."""
    session = LiveSession(net, backends()["torch"], "float32", Recorder())
    session.begin_run(patcher)
    with torch.inference_mode():
        return list(session.run(inputs_of(net)).values())


def unrounded(net: NativeNetwork, patcher: ModelPatcher) -> list[torch.Tensor]:
    """What native would compute without its rounding."""
    wide = stored_as(torch.float32, "unet" if net.prefix else "controlnet")
    wide.module.load_state_dict({n: p.float() for n, p in net.module.state_dict().items()})
    plain = wide.patcher.clone()
    plain.patches, plain.patches_uuid = patcher.patches, patcher.patches_uuid
    return native(wide, plain)


@pytest.mark.parametrize("how", PATCHES)
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_patched_weights_are_to_the_bit_what_comfyui_puts_in_their_place(dtype: torch.dtype, kind: str, how: str) -> None:
    net = stored_as(dtype, kind)
    patcher = PATCHES[how](net)
    ours = {name: weight.clone() for name, weight in current_weights(patcher, net.prefix)}
    patcher.patch_model(CPU)
    its = {name: weight.clone() for name, weight in net.module.state_dict().items()}
    loaded = {name: weight.clone() for name, weight in current_weights(patcher, net.prefix)}
    patcher.unpatch_model(CPU)
    assert ours.keys() == its.keys()
    for name, weight in its.items():
        assert torch.equal(ours[name].float(), weight.float()), name
        assert torch.equal(loaded[name].float(), weight.float()), f"{name}, while it is loaded"


@pytest.mark.parametrize("how", PATCHES)
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_live_weights_are_what_native_samples_with(dtype: torch.dtype, how: str) -> None:
    net = stored_as(dtype)
    patcher = PATCHES[how](net)
    expected = native(net, patcher)
    assert error(unrounded(net, patcher), expected) > 10 * LIMIT, "the rounding is to be seen"
    assert error(of_live(net, patcher), expected) <= LIMIT


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_a_replaceable_engine_follows_loras_as_native_rounds_them(tmp_path: Path, dtype: torch.dtype) -> None:
    net = stored_as(dtype)
    built(net, tmp_path)
    handle = handle_of(net, tmp_path, replaceable=True)
    for patcher in (net.patcher, with_lora(net), with_lora(net, 0.3), merged(net), net.patcher):
        assert error(served(handle, patcher), native(net, patcher)) <= LIMIT


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_an_engine_with_a_lora_built_in_has_the_rounded_weights(tmp_path: Path, kind: str) -> None:
    plain = stored_as(torch.float8_e4m3fn, kind)
    net = behind(plain, with_lora(plain))
    built(net, tmp_path, replaceable=False)
    assert error(served(handle_of(net, tmp_path)), native(net, net.patcher)) <= LIMIT
    assert handle_of(behind(plain, with_lora(plain, 0.3)), tmp_path).session is None, "another strength is another hash"


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_rounding_leaves_what_is_exact_as_it_is(dtype: torch.dtype) -> None:
    """So that patches of strength 0 need not be looked at."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    every = every[every.float().isfinite()].float()
    for seed in range(20):
        assert torch.equal(comfy.float.stochastic_rounding(every, dtype, seed).float(), every)
