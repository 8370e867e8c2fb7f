"""Chains of small ControlNets, native and backed by the torch backend, and what a call of them gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.samplers
import pytest
import torch
from comfy.controlnet import ControlNet
from comfy.patcher_extension import WrapperExecutor
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling import control_stack
from hybrid_trt.sampling.controlnet import back_with_engine
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from small_networks import CPU, network

CHOICE = EngineChoice(Profile({s: Range(1, 16, 64) for s in ("B", "H", "W", "T", "HB")}), "auto", "torch")
SAMPLING = SimpleNamespace(calculate_input=lambda t, x: x / (t[0] ** 2 + 1) ** 0.5, timestep=lambda t: t * 10)


class Stacks:
    """The same chains twice: native, and backed by the torch backend."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.library = Library([folder])
        self.runs = 0
        run = control_stack._run

        def counted(*args: object) -> object:
            self.runs += 1
            return run(*args)

        monkeypatch.setattr(control_stack, "_run", counted)
        self.nets = [self._native("unlike_levels") for _ in range(2)]

    def _native(self, layout: str) -> ControlNet:
        module = network("controlnet", layout).module
        return ControlNet(module, load_device=CPU)

    def chain(self, backed: bool, count: int = 2, layouts: list[ControlNet] | None = None) -> ControlNet:
        previous = None
        for i in range(count):
            net = (layouts or self.nets)[i % 2]
            if backed:
                handle = EngineHandle.look_up(NativeNetwork.of_controlnet(net, "n"), CHOICE, self.library, str(i + 1))
                net = back_with_engine(net, handle)
            control = net.copy()
            image = torch.rand(1, 3, 72, 96, generator=torch.Generator().manual_seed(i))
            control.set_cond_hint(image, strength=(0.7, 0.4, 1.0, 1.3)[i])
            control.set_previous_controlnet(previous)
            control.timestep_range, control.model_sampling_current = (999999999.9, 0.0), SAMPLING
            previous = control
        return previous


def call(
    control: object, step: int = 0, batch: int = 2, sigma: float = 3.0, size: tuple[int, int] = (9, 12),
    prompts: int = 0,
) -> dict | None:  # fmt: skip
    """A call for latents of a size (height, width): for so many prompts, or for one with each latent."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch, 4, *size, generator=generator)
    cond = {"c_crossattn": torch.randn(batch, 77, 64, generator=generator)}
    with torch.inference_mode():
        return control.get_control(x, torch.full((batch,), sigma), cond, prompts or batch, {})


def step_of_comfyui(function: Callable[..., Any], backbone: Any = None) -> Callable[..., Any]:
    """A step whose conditionings ComfyUI computes by this function, with stacks of ControlNets."""
    function.__code__ = function.__code__.replace(co_filename=comfy.samplers.__file__)
    wrapper = partial(control_stack.run_stacks_at_once, backbone=backbone)
    return WrapperExecutor.new_executor(function, [wrapper]).execute


def hint_in(control: ControlNet) -> torch.Tensor | None:
    """The latest hint that a control holds, in either of ComfyUI's forms."""
    by_size = getattr(control, "cond_hints", None)
    return control.cond_hint if by_size is None else next(reversed(by_size.values()), None)


def same(value: dict, reference: dict) -> bool:
    assert {k: len(v) for k, v in value.items()} == {k: len(v) for k, v in reference.items()}
    pairs = [(a, b) for k in reference for a, b in zip(value[k], reference[k], strict=True)]
    return all(relative_error(a, b) <= 1e-5 for a, b in pairs)
