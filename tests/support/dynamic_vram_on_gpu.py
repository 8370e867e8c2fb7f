"""Compares patched quantised layers with native's under dynamic VRAM: prints the formats in which all are equal."""

from __future__ import annotations

import os
import sys
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
from any_weights import lora
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.comfy_model.network import NativeNetwork
from quantised import quantised

GPU, CPU, HALF = torch.device("cuda", 0), torch.device("cpu"), torch.bfloat16
assert comfy_aimdo.control.init_devices([(0, 0)]), "dynamic VRAM does not start here"

for name in ("fp8", "int8 rows"):
    comfy.memory_management.aimdo_enabled = False  # models are made as usual
    net = quantised("unet", "unlike_levels", name, HALF, frozenset({"nvfp4", "mxfp8"}))
    comfy.memory_management.aimdo_enabled = True
    patcher = ModelPatcherDynamic(net.patcher.model, GPU, CPU, net.patcher.model_size())
    assert patcher.is_dynamic()
    assert patcher.add_patches(lora(net, 5), 0.8)
    net = NativeNetwork(patcher, net.module, net.prefix, HALF, name, net.role)
    net.architecture()  # it is served
    comfy.model_management.load_models_gpu([patcher])
    weights = LiveWeights(net, HALF, share=False)
    weights.sync_from(patcher)
    compared, patched = 0, 0
    with torch.inference_mode():
        for path, layer in net.module.named_modules():  # small ones and large ones
            if not hasattr(layer, "quant_format"):
                continue
            own = weights.module.get_submodule(path)
            given = torch.randn(2, 32, layer.in_features, dtype=HALF, device=GPU)
            for _ in range(3):  # the first call patches, later ones find it done
                assert torch.equal(own(given), layer(given)), path
            compared, patched = compared + 1, patched + path.endswith("to_k")
    assert compared > 20, compared
    assert patched > 2, "a LoRA acts on these"
    print(name)
