"""The script that trains the demo's small models writes what ComfyUI's stock loaders take. Nothing is learnt here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest
import torch
from comfy.controlnet import load_controlnet
from comfy.sd import VAE, load_diffusion_model
from comfy.utils import load_torch_file
from comfy_process import ComfyProcess
from hybrid_trt.architectures import Role
from hybrid_trt.comfy_model.network import NativeNetwork
from pack import ROOT

sys.path.append(str(ROOT / "tools"))

import train_demo


@pytest.mark.slow
def test_what_it_trains_is_loaded_by_stock_nodes(comfy: ComfyProcess, tmp_path: Path) -> None:
    generator = numpy.random.default_rng(1)
    pictures = generator.integers(0, 255, (12, train_demo.SIDE, train_demo.SIDE, 3), dtype=numpy.uint8)
    numpy.savez(tmp_path / "data.npz", names=[*train_demo.SHOWN, "tea", "tin"], pictures=pictures)
    train_demo.train(comfy.comfyui, tmp_path / "data.npz", tmp_path, [0.01] * 3, batch=4)
    train_demo.unpack(tmp_path / "demo.safetensors", tmp_path / "models")
    files = {kind: str(tmp_path / "models" / file) for kind, file in train_demo.FILES.items()}

    unet = load_diffusion_model(files["unet"])
    control = load_controlnet(files["controlnet"])
    vae = VAE(sd=load_torch_file(files["vae"]), device=torch.device("cpu"), dtype=torch.float32)
    assert NativeNetwork.of_model(unet, "unet").architecture().name == "sd15_unet"
    assert NativeNetwork.of_controlnet(control, "net").architecture().name == "sd15_controlnet"
    assert NativeNetwork.of_vae(vae, Role.VAE_DECODER, "vae").architecture().name == "taesd_decoder"
    trained = torch.load(tmp_path / "unet.pt")["average"]
    for name, value in unet.model.diffusion_model.state_dict().items():
        most = 0.01 * float(trained[name].abs().max()) + 1e-6
        assert float((value.float() - trained[name]).abs().max()) <= most, name
    assert (tmp_path / "unet.png").stat().st_size > 1000
