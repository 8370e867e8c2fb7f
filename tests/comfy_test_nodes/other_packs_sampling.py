"""Stands for packs that compute a model's steps in their own way, or sample in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from comfy.model_patcher import ModelPatcher

import nodes  # ComfyUI's


class OwnForward:
    """A ``model_function_wrapper`` that calls the UNet's parts by itself, as DeepCache does."""

    def __init__(self, model: ModelPatcher, every: int):
        self.model, self.every, self.calls = model.model, every, 0

    def __call__(self, apply_model: Callable, given: dict) -> torch.Tensor:
        self.calls += 1
        x, sigma, cond = given["input"], given["timestep"], given["c"]
        if self.every and self.calls % self.every == 0:
            return apply_model(x, sigma, **cond)
        sampling, unet = self.model.model_sampling, self.model.diffusion_model
        scaled = sampling.calculate_input(sigma, x).to(self.model.get_dtype())
        context = cond["c_crossattn"].to(scaled.dtype)
        options = cond.get("transformer_options", {}).copy()
        out = unet._forward(scaled, sampling.timestep(sigma).float(), context=context, y=cond.get("y"),
                            control=cond.get("control"), transformer_options=options)  # fmt: skip
        return sampling.calculate_denoised(sigma, out.float(), x)


def with_own_forward(model: ModelPatcher, every: int = 0, replaced: bool = False) -> ModelPatcher:
    """Return a model whose UNet another pack calls: by its parts, or through a forward that was replaced."""
    other = model.clone()
    if replaced:
        unet = model.model.diffusion_model
        other.add_object_patch("diffusion_model.forward", lambda *args, **kwargs: unet._forward(*args, **kwargs))
    else:
        other.set_model_unet_function_wrapper(OwnForward(other, every))
    return other


def sample_in_thread(model: ModelPatcher, positive: list, negative: list, latent_image: dict, seed: int, steps: int,
                     way: str) -> dict:
    """Call ComfyUI's sampler in a thread that a node starts."""

    def sample() -> dict:
        with torch.inference_mode():
            given = (seed, steps, 5.0, "euler", "normal", positive, negative, latent_image)
            return nodes.common_ksampler(model, *given)[0]

    if way == "executor":
        return _executor.submit(sample).result()
    found: list[dict] = []
    thread = threading.Thread(target=lambda: found.append(sample()))
    thread.start()
    thread.join()
    return found[0]


_executor = ThreadPoolExecutor(1)
"""As packs keep one: its thread outlives the node that it was started for."""
