"""A photograph encoded and decoded by FLUX.2's tiny autoencoder with its real weights, natively and on engines.

HYBRID_TRT_TAEF2 names a folder with taef2_encoder and taef2_decoder, as ComfyUI's folder models/vae_approx has them;
without it nothing runs here. The photograph is one of ComfyUI's own templates.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch
from comfy_process import ComfyProcess, History
from compiling import COMPILES
from kornia.metrics import psnr, ssim
from PIL import Image
from scenarios import Prompt, node, relative_difference

WEIGHTS = "HYBRID_TRT_TAEF2"
LIMIT = 1e-5
LEAST_PSNR, LEAST_SSIM = 30.0, 0.9
"""Limits for the photograph that comes back. 33.9 dB and 0.944 were found, natively and on engines."""
SIZE = (512, 384)

pytestmark = pytest.mark.skipif(WEIGHTS not in os.environ, reason=f"{WEIGHTS} names no folder")


@pytest.fixture(scope="module")
def photograph(comfy: ComfyProcess) -> torch.Tensor:
    """Put weights and photograph where ComfyUI finds them; return it as values from 0 to 1, (1, 3, height, width)."""
    folder = comfy.base / "models" / "vae_approx"
    folder.mkdir(exist_ok=True)
    for part in ("encoder", "decoder"):
        (file,) = Path(os.environ[WEIGHTS]).glob(f"taef2_{part}.*")
        shutil.copy(file, folder / file.name)
    (templates,) = find_spec("comfyui_workflow_templates_media_image").submodule_search_locations
    with Image.open(Path(templates) / "templates" / "flux_canny_model_example-1.webp") as file:
        picture = file.convert("RGB").resize((SIZE[0], SIZE[0])).crop((0, 64, SIZE[0], 64 + SIZE[1]))
    picture.save(comfy.base / "input" / "photograph.png")
    return torch.tensor(numpy.asarray(picture)).permute(2, 0, 1)[None] / 255


def round_trip(backend: str = "") -> Prompt:
    """Encode and decode the photograph by stock nodes, or on engines of a backend."""
    vae = ["engine", 0] if backend else ["loader", 0]
    built = {
        "loader": node("VAELoader", vae_name="taef2"),
        "image": node("LoadImage", image="photograph.png"),
        "encode": node("VAEEncode", pixels=["image", 0], vae=vae),
        "latent": node("TestSaveLatent", latent=["encode", 0], name="photograph"),
        "decode": node("VAEDecode", samples=["encode", 0], vae=vae),
        "pixels": node("TestPixels", image=["decode", 0]),
        "picture": node("TestSaveLatent", latent=["pixels", 0], name="round_trip"),
    }
    if backend:
        built["engine"] = node("TRTVAEEngine", vae=["loader", 0], backend=backend, when_missing="build now",
                               min_size=256, opt_size=512, max_size=512)  # fmt: skip
        built["report"] = node("TRTReport", after=["decode", 0])
    return built


def values(history: History) -> dict[str, numpy.ndarray]:
    """Return the latent and the picture, which the next prompt writes over."""
    return {name: numpy.load(history.output(name, "latent")[0]) for name in ("latent", "picture")}


@pytest.mark.parametrize("backend", ["onnxruntime", pytest.param("torch", marks=COMPILES)])
def test_a_photograph_comes_back_as_by_native(comfy: ComfyProcess, photograph: torch.Tensor, backend: str) -> None:
    native = values(comfy.queue(round_trip()))
    engine = comfy.queue(round_trip(backend), timeout=300)
    found = values(engine)
    for name, value in native.items():
        assert 0 < relative_difference(found[name], value) <= LIMIT, name
    rows = engine.output("report", "report")[0]["rows"]
    assert [(row["engine"], row["native"]) for row in rows] == [(1, 0), (1, 0)], rows
    again = torch.tensor(found["picture"])
    assert psnr(again, photograph, 1.0) >= LEAST_PSNR
    assert ssim(again, photograph, 11).mean() >= LEAST_SSIM
