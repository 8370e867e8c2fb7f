"""Tiny Animas behind LLLites, as ComfyUI's own nodes load and set them; in this process."""

from __future__ import annotations

from pathlib import Path

import comfy.model_management
import comfy.ops
import comfy.utils
import token_networks
import torch
from comfy.ldm.anima.lllite import AnimaLLLite
from comfy.model_patcher import CoreModelPatcher, ModelPatcher
from comfy_extras.nodes_model_patch import AnimaLLLiteApply
from hybrid_trt.comfy_model.network import NativeNetwork

CPU = torch.device("cpu")
WIDTH = 1024
TOGETHER = {"words": (12, 12)}
"""Prompts of one length, as ComfyUI makes them for Anima: one call a step."""
BASE, FILE, OTHER = "tiny_anima", "tiny_anima_lllite", "tiny_anima_lllite_other"
INPAINT = "tiny_anima_lllite_inpaint"


def image(seed: int = 2, height: int = 72, width: int = 48, images: int = 1) -> torch.Tensor:
    """A control image."""
    return torch.rand(images, height, width, 3, generator=torch.Generator().manual_seed(seed))


def load(models: dict[str, Path], file: str = FILE, **metadata: str) -> ModelPatcher:
    """The MODEL_PATCH of a file, as ComfyUI's loader makes it; ``metadata`` is what the file may say of itself."""
    weights = comfy.utils.load_torch_file(str(models[file]), safe_load=True)
    dtype = comfy.utils.weight_dtype(weights)
    said = {f"lllite.{name}": value for name, value in metadata.items()}
    net = AnimaLLLite(weights, said, device=CPU, dtype=dtype, operations=comfy.ops.manual_cast)
    patcher = CoreModelPatcher(net, load_device=CPU, offload_device=CPU)
    net.load_state_dict(weights, assign=patcher.is_dynamic())
    return patcher


def behind(
    model: ModelPatcher, patch: ModelPatcher, control: torch.Tensor | None = None, strength: float = 0.7,
    start: float = 0.0, end: float = 1.0, mask: torch.Tensor | None = None,
) -> ModelPatcher:  # fmt: skip
    """The model behind ComfyUI's node for LLLite."""
    control = image() if control is None else control
    return AnimaLLLiteApply().apply_patch(model, patch, control, strength, start, end, mask)[0]


def anima(models: dict[str, Path], dtype: torch.dtype | None = None) -> ModelPatcher:
    """A MODEL of its own."""
    return token_networks.load(str(models[BASE]), dtype)


def network(model: ModelPatcher) -> NativeNetwork:
    """The network that an engine node behind a model sees."""
    return NativeNetwork.of_model(model, BASE)
