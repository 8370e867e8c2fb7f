"""Every kind of patch that a ModelPatcher takes, each made so that it changes the picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.samplers
import torch
from comfy.controlnet import ControlNet, QwenFunControlNet
from comfy.ldm.modules.attention import optimized_attention
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import PatcherInjection, WrappersMP

SHARE = 0.9
MIDDLE = "diffusion_model.middle_block.0.in_layers.2.weight"
TIME = "diffusion_model.time_embed.1"

Patch = Callable[[ModelPatcher], Any]
Block = dict[str, Any]


def scaled(value: Any) -> Any:
    """A share of a tensor, or of the first of several."""
    if isinstance(value, torch.Tensor):
        return value * SHARE
    first, *rest = value
    return type(value)([scaled(first), *rest])


def first_scaled(first: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """A patch that gives a share of the first thing it gets."""
    return first * SHARE


def query_scaled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _options: Block) -> tuple:
    """An attention's inputs."""
    return query * SHARE, key, value


def other_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Block) -> torch.Tensor:
    """An attention of its own."""
    return optimized_attention(query, key, value, options["n_heads"]) * SHARE


def override(function: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """An attention in the place of ComfyUI's, each channel with another factor: a norm takes a common one back."""
    found = function(*args, **kwargs)
    return found * torch.linspace(SHARE, 1.0, found.shape[-1], dtype=found.dtype, device=found.device)


def batch(args: Block) -> list[torch.Tensor]:
    """All conditionings of a step."""
    given = (args[name] for name in ("model", "conds", "input", "sigma", "model_options"))
    return [one * SHARE for one in comfy.samplers.calc_cond_batch(*given)]


def guided(args: Block) -> torch.Tensor:
    """A guidance of its own."""
    return args["uncond"] + (args["cond"] - args["uncond"]) * args["cond_scale"] * SHARE


def step(apply_model: Callable, args: Block) -> torch.Tensor:
    """One call of the model."""
    return apply_model(args["input"], args["timestep"], **args["c"]) * SHARE


def residual_block(layer: torch.nn.Module, x: torch.Tensor, emb: torch.Tensor, *_: Any) -> torch.Tensor:
    """A layer that the patch calls by itself."""
    return layer(x, emb) * SHARE


def whole_block(args: Block, given: Block) -> Block:
    """A block of a transformer."""
    found = given["original_block"](args)
    return found | {"img": found["img"] * SHARE}


def prompts_scaled(executor: Callable, model: Any, shape: Any, conds: dict, *rest: Any, **options: Any) -> Any:
    """A wrapper of what comes before sampling."""
    for one in (one for group in conds.values() for one in group or ()):
        if "cross_attn" in one:
            one["cross_attn"] = one["cross_attn"] * SHARE
    return executor(model, shape, conds, *rest, **options)


def result_scaled(executor: Callable, *args: Any, **options: Any) -> Any:
    """A wrapper of anything else."""
    return scaled(executor(*args, **options))


def wrap(kind: str, wrapper: Callable = result_scaled) -> Patch:
    return lambda model: model.add_wrapper_with_key(kind, "test", wrapper)


def inject(model: ModelPatcher) -> None:
    """A layer that lies in the network while it is sampled."""
    layers, theirs = model.model.diffusion_model.time_embed, torch.nn.GELU()
    own = layers[1]
    model.set_injections("test", [PatcherInjection(
        inject=lambda _: layers.__setitem__(1, theirs), eject=lambda _: layers.__setitem__(1, own))])


def weights(model: ModelPatcher) -> None:
    """A difference that is added to a weight."""
    shape = model.model.state_dict()[MIDDLE].shape
    model.add_patches({MIDDLE: (torch.randn(shape, generator=torch.Generator().manual_seed(5)) / 50,)})


UNET: dict[str, Patch] = {
    "sampler_cfg_function": lambda m: m.set_model_sampler_cfg_function(guided),
    "sampler_post_cfg_function": lambda m: m.set_model_sampler_post_cfg_function(lambda a: a["denoised"] * SHARE),
    "sampler_pre_cfg_function": lambda m: m.set_model_sampler_pre_cfg_function(
        lambda a: [one * SHARE for one in a["conds_out"]]),
    "sampler_calc_cond_batch_function": lambda m: m.set_model_sampler_calc_cond_batch_function(batch),
    "unet_function_wrapper": lambda m: m.set_model_unet_function_wrapper(step),
    "denoise_mask_function": lambda m: m.set_model_denoise_mask_function(first_mask),
    "attn1_patch": lambda m: m.set_model_attn1_patch(query_scaled),
    "attn2_patch": lambda m: m.set_model_attn2_patch(query_scaled),
    "attn1_replace": lambda m: m.set_model_attn1_replace(other_attention, "middle", 0),
    "attn2_replace": lambda m: m.set_model_attn2_replace(other_attention, "middle", 0),
    "attn1_output_patch": lambda m: m.set_model_attn1_output_patch(first_scaled),
    "attn2_output_patch": lambda m: m.set_model_attn2_output_patch(first_scaled),
    "middle_patch": lambda m: m.set_model_patch(first_scaled, "middle_patch"),
    "input_block_patch": lambda m: m.set_model_input_block_patch(first_scaled),
    "input_block_patch_after_skip": lambda m: m.set_model_input_block_patch_after_skip(first_scaled),
    "output_block_patch": lambda m: m.set_model_output_block_patch(lambda h, skip, _: (h * SHARE, skip)),
    "emb_patch": lambda m: m.set_model_emb_patch(first_scaled),
    "forward_timestep_embed_patch": lambda m: m.set_model_forward_timestep_embed_patch((ResBlock, residual_block)),
    "middle_block_after_patch": lambda m: m.set_model_middle_block_after_patch(lambda a: {"h": a["h"] * SHARE}),
    "optimized_attention_override": lambda m: m.model_options["transformer_options"].update(
        optimized_attention_override=override),
    "object_patch": lambda m: m.add_object_patch(TIME, torch.nn.GELU()),
    "compute_dtype": lambda m: m.set_model_compute_dtype(torch.bfloat16),
    "weight_wrapper": lambda m: m.add_weight_wrapper(MIDDLE, first_scaled),
    "patches": weights,
    "injections": inject,
    **{f"wrapper {kind}": wrap(kind) for kind in (
        WrappersMP.OUTER_SAMPLE, WrappersMP.SAMPLER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH,
        WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)},
    f"wrapper {WrappersMP.PREPARE_SAMPLING}": wrap(WrappersMP.PREPARE_SAMPLING, prompts_scaled),
}  # fmt: skip


def first_mask(_sigma: torch.Tensor, mask: torch.Tensor, extra_options: Block) -> torch.Tensor:
    """Another mask of where there is noise."""
    return mask * SHARE


def rope(model: ModelPatcher) -> None:
    """Other places of the tokens."""
    model.set_model_rope_options(scale_x=1.3, shift_x=2.0, scale_y=0.8, shift_y=1.0, scale_t=1.0, shift_t=0.0)


KINDS: dict[str, Patch] = {
    **{f"sd15/{name}": patch for name, patch in UNET.items()},
    "flux1/post_input_patch": lambda m: m.set_model_post_input_patch(lambda a: a | {"img": a["img"] * SHARE}),
    "flux1/patch_replace dit": lambda m: m.set_model_patch_replace(whole_block, "dit", "double_block", 0),
    "flux1/rope_options": rope,
    "flux1/wrapper diffusion_model": UNET["wrapper diffusion_model"],
    "zimage/double_block_patch": lambda m: m.set_model_double_block_patch(lambda a: {"img": a["img"] * SHARE}),
    "zimage/noise_refiner_patch": lambda m: m.set_model_noise_refiner_patch(lambda a: {"img": a["img"] * SHARE}),
    "zimage/rope_options": rope,
    "zimage/optimized_attention_override": UNET["optimized_attention_override"],
}
"""Family and kind -> what sets the patch."""


def patched(model: ModelPatcher, kind: str) -> ModelPatcher:
    """Return a model with one patch."""
    other = model.clone()
    KINDS[kind](other)
    return other


def qwen_fun(control_net: ControlNet) -> QwenFunControlNet:
    """Return a ControlNet of the kind of Qwen-Image's Fun ControlNets, with the network of the given one."""
    made = QwenFunControlNet(None, load_device=control_net.load_device, manual_cast_dtype=control_net.manual_cast_dtype)
    made.control_model, made.control_model_wrapped = control_net.control_model, control_net.control_model_wrapped
    control_net.copy_to(made)
    return made
