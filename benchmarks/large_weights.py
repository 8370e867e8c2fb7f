"""Random weights of large models, controls that act on them, and what stands for a VAE; for ``large_models.py``."""

from __future__ import annotations

import json
from typing import Any

import tiny_models
import torch

_LLLITE = {"channels": 3, "cond_dim": 64, "cond_emb_dim": 32, "mlp_dim": 64, "resblocks": 1, "aspp": True}
_FP8 = "float8_e4m3fn"
_TURNED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
_IN_FLOAT32 = ("patch_proj", "adaln_", "video_out.", "audio_out.", "inv_freq")
"""Parts of names of what MiniMax H3's files have in float32."""
_TARGETS = ("self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj", "cross_attn_q_proj", "mlp_layer1")


def drawn(network: str, config: dict[str, Any], eight_bit: str, device: str) -> dict[str, torch.Tensor]:
    """Random weights in main memory, in files' usual half precision but for layers in eight bits; drawn on the device.

    Args:
        eight_bit: what layers in blocks are: ``fp8``, or ``int8`` in rows that are turned, or nothing.
    """
    found = {}
    for name, shape in tiny_models._SHAPES[network](config).items():
        values = torch.randn(shape, device=device)
        if len(shape) > 1:
            values *= 1 / max(1, torch.Size(shape[1:]).numel()) ** 0.5
        else:
            values = 0.05 * values + (1.0 if name.endswith(("weight", "scale")) else 0.0)
        if eight_bit and len(shape) == 2 and _is_in_blocks(name):
            found |= _in_eight_bits(name.removesuffix(".weight"), values, eight_bit)
        else:
            exact = network == "minimax_h3" and any(part in name for part in _IN_FLOAT32)
            usual = torch.float16 if network == "unet" else torch.bfloat16
            found[name] = values.to(torch.float32 if exact else usual).cpu()
    return found


def _in_eight_bits(layer: str, values: torch.Tensor, eight_bit: str) -> dict[str, torch.Tensor]:
    """A layer's weights as ComfyUI saves them. Random ones are as random before they are turned, so none is."""
    if eight_bit == "int8":
        scale, words = values.abs().amax(1, keepdim=True) / 127, json.dumps(_TURNED).encode()
        values = (values / scale).round().clamp(-127, 127).to(torch.int8)
    else:
        scale, words = torch.tensor(tiny_models._QUANTISED[_FP8][1]), tiny_models._quantised_as(_FP8)
        values = (values / scale.to(values)).clamp(-448, 448).to(torch.float8_e4m3fn)
    marker = torch.tensor(list(words), dtype=torch.uint8)
    return {f"{layer}.weight": values.cpu(), f"{layer}.weight_scale": scale.cpu(), f"{layer}.comfy_quant": marker}


def _is_in_blocks(name: str) -> bool:
    return name.endswith(".weight") and any(part in name for part in (
        "double_blocks.", "single_blocks.", "transformer_blocks.", "layers.", "blocks.")) and not any(
        part in name for part in ("norm", "modulation", "adaLN", "adaln", "mod.", "token_refiner", "connector",
                                  "gate_logits"))  # fmt: skip


def with_fun(model: Any, config: dict[str, Any], fun: dict[str, Any], side: int, device: str) -> Any:
    """Return a Z-Image behind ComfyUI's node for Fun control; random weights in bfloat16, drawn on the device."""
    import comfy.ops
    from comfy.ldm.lumina.controlnet import ZImage_Control
    from comfy.model_management import get_torch_device, unet_offload_device
    from comfy.model_patcher import CoreModelPatcher
    from comfy_extras.nodes_model_patch import ZImageFunControlnet

    sizes = {name: config[name] for name in ("dim", "n_heads", "n_kv_heads")}
    net = ZImage_Control(**sizes, **fun, device="cpu", dtype=torch.bfloat16, operations=comfy.ops.manual_cast)
    for name, parameter in net.named_parameters():
        scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.05
        values = torch.randn(parameter.shape, device=device) * scale + float("norm" in name)
        parameter.data = values.to(torch.bfloat16).cpu()
    patch = CoreModelPatcher(net.eval().requires_grad_(False), get_torch_device(), unet_offload_device())
    image = torch.rand(1, side, side, 3, generator=torch.Generator().manual_seed(2))
    return ZImageFunControlnet().diffsynth_controlnet(model, patch, HintEncoder(16), image, 0.7)[0]


def with_lllite(model: Any, config: dict[str, Any], side: int, device: str) -> Any:
    """Return an Anima behind ComfyUI's node for LLLite; random weights in bfloat16, drawn on the device."""
    import comfy.ops
    from comfy.ldm.anima.lllite import AnimaLLLite
    from comfy.model_management import get_torch_device, unet_offload_device
    from comfy.model_patcher import CoreModelPatcher
    from comfy_extras.nodes_model_patch import AnimaLLLiteApply

    targets = [f"{i}_{target}" for i in range(config["num_blocks"]) for target in _TARGETS]
    sizes = {"model_channels": config["model_channels"], "targets": targets}
    weights = drawn("anima_lllite", _LLLITE | sizes, "", device)
    net = AnimaLLLite(weights, {}, device="cpu", dtype=torch.bfloat16, operations=comfy.ops.manual_cast)
    patch = CoreModelPatcher(net, get_torch_device(), unet_offload_device())
    net.load_state_dict(weights, assign=patch.is_dynamic())
    image = torch.rand(1, side, side, 3, generator=torch.Generator().manual_seed(2))
    return AnimaLLLiteApply().apply_patch(model, patch, image, 0.7, 0.0, 1.0)[0]


class HintEncoder:
    """Stands for a VAE: a ControlNet of Flux takes a latent as its hint, and which one does not matter here."""

    downscale_ratio = 8

    def __init__(self, channels: int):
        self.channels = channels

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(image.movedim(-1, 1), scale_factor=1 / 8).mean(1, True).repeat(
            1, self.channels, 1, 1)

    def spacial_compression_encode(self) -> int:
        return 8
