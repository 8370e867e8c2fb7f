"""Small random networks inside real ComfyUI patchers, on the CPU, without files or a server."""

from __future__ import annotations

from typing import Any

import comfy.model_patcher
import comfy.ops
import torch
from comfy.cldm.cldm import ControlNet
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from hybrid_trt.architectures import Role
from hybrid_trt.comfy_model.network import UNET_PREFIX, NativeNetwork
from hybrid_trt.sessions.made_inputs import LivePerImagePasses

CPU = torch.device("cpu")
SMALL = {"model_channels": 64, "legacy": False, "image_size": 32, "in_channels": 4, "use_spatial_transformer": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sd15_as_published": {"context_dim": 96, "num_heads": 8, "channel_mult": [1, 2, 4, 4], "num_res_blocks": [2] * 4,
                          "transformer_depth": [1] * 6 + [0] * 2, "transformer_depth_output": [1] * 9 + [0] * 3,
                          "transformer_depth_middle": 1},
    "sdxl_as_published": {"context_dim": 128, "num_head_channels": 32, "channel_mult": [1, 2, 4],
                          "num_res_blocks": [2] * 3, "transformer_depth": [0, 0, 2, 2, 3, 3],
                          "transformer_depth_output": [0, 0, 0, 2, 2, 2, 3, 3, 3], "transformer_depth_middle": 3,
                          "use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 160},
    "sdxl_refiner": {"context_dim": 80, "num_head_channels": 32, "channel_mult": [1, 2, 2, 2],
                     "num_res_blocks": [1] * 4, "transformer_depth": [0, 1, 1, 0],
                     "transformer_depth_output": [0, 0, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1,
                     "use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 160},
    "unlike_levels": {"context_dim": 64, "num_heads": 4, "channel_mult": [1, 3, 2], "num_res_blocks": [1, 2, 1],
                      "transformer_depth": [1, 0, 2, 0], "transformer_depth_output": [1, 0, 0, 2, 1, 0, 1],
                      "transformer_depth_middle": -1},
    "inpainting_channels": {"context_dim": 64, "num_heads": 4, "channel_mult": [1, 2], "num_res_blocks": [1, 1],
                            "transformer_depth": [1, 1], "transformer_depth_output": [1] * 4,
                            "transformer_depth_middle": 1, "in_channels": 9},
}
ONE_LEVEL = "one_level"
"""The smallest layout, for tests that compile one: Inductor takes as long for each layer, however small it is."""
SMALLEST = {ONE_LEVEL: {"context_dim": 64, "num_heads": 4, "channel_mult": [1], "num_res_blocks": [1],
                        "transformer_depth": [1], "transformer_depth_output": [1, 1], "transformer_depth_middle": 1}}


def random_weights(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in module.parameters():
        fan_in = p[0].numel() if p.ndim > 1 else 100
        p.data = (torch.randn(p.shape, generator=generator) / fan_in**0.5).to(dtype)
    for layer in module.modules():
        if isinstance(layer, torch.nn.GroupNorm | torch.nn.LayerNorm) and layer.weight is not None:
            layer.weight.data += 1


def network(
    kind: str, layout: str, dtype: torch.dtype = torch.float32, operations: type = comfy.ops.disable_weight_init
) -> NativeNetwork:
    """A random network of a layout inside a real ComfyUI patcher; computes in float32."""
    config = SMALL | (LAYOUTS | SMALLEST)[layout] | {"operations": operations, "dtype": dtype, "device": CPU}
    depths = [list(config.pop(name)) for name in ("transformer_depth", "transformer_depth_output")]
    if kind == "unet":
        config |= {"transformer_depth": depths[0], "transformer_depth_output": depths[1]}
        module = UNetModel(out_channels=4, **config)
        model = torch.nn.Module()
        model.diffusion_model = module
    else:
        model = module = ControlNet(hint_channels=3, **config, transformer_depth=depths[0])
    random_weights(module, dtype)
    module.eval().requires_grad_(False)
    patcher = comfy.model_patcher.ModelPatcher(model, CPU, CPU)
    prefix = UNET_PREFIX if kind == "unet" else ""
    return NativeNetwork(patcher, module, prefix, torch.float32, f"{layout}.safetensors", Role(kind))


class HintEncoder:
    """The per-image passes of a ControlNet as a function of the hint."""

    def __init__(self, net: NativeNetwork, precision: str = "float32"):
        self.net = net
        self.live = LivePerImagePasses(net, precision)

    def __call__(self, hint: torch.Tensor) -> torch.Tensor:
        self.live.sync_from(self.net.patcher)
        return self.live.run({"hint": hint}, {})["hint"]


def lora_for(net: NativeNetwork) -> dict[str, tuple]:
    """A dense difference for every cross-attention projection, strong enough to see."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: ("diff", (0.3 * torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5,))
        for name, p in net.patcher.model.named_parameters()
        if name.endswith("to_k.weight")
    }


def with_lora(net: NativeNetwork) -> NativeNetwork:
    patcher = net.patcher.clone()
    assert patcher.add_patches(lora_for(net), 0.8)
    return NativeNetwork(patcher, net.module, net.prefix, net.dtype, net.label, net.role)


def native_call(net: NativeNetwork, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The native module's own forward, with the attention that this ComfyUI uses."""
    given = {name: tensor.clone() for name, tensor in given.items()}
    if net.role is Role.CONTROLNET:
        result = net.module(**given)
        return [*result["output"], *result["middle"]]
    control = control_of(net, given)
    return [net.module(**given, control=control, transformer_options={})]


def control_of(net: NativeNetwork, given: dict[str, torch.Tensor]) -> dict[str, list]:
    """The residuals among a UNet's inputs, taken out of them, as the lists that native wants."""
    outputs = [given.pop(name) for name in list(given) if name.startswith("control_output")]
    blocks = [f"control_input_{i}" for i in range(len(net.module.input_blocks))]
    inputs = [given.pop(name, None) for name in reversed(blocks)]
    return {"input": inputs, "output": outputs, "middle": [given.pop("control_middle_0")]}
