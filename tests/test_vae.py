"""VAEs on engines: what they decode and encode is what ComfyUI's own VAE gives."""

from __future__ import annotations

from typing import Any

import pytest
from comfy_process import ComfyProcess, History
from scenarios import Prompt, latent_of, node, relative_difference

LIMIT = 1e-5
SETTINGS = {"when_missing": "build now", "min_size": 64, "opt_size": 128, "max_size": 256}
KINDS = {"kl": "tiny_kl.safetensors", "taesd": "tiny_sdxl_taesd.safetensors"}
CALLS = {"decode": "vae_decoder", "encode": "vae_encoder"}


def graph(kind: str, call: str, backend: str = "", width: int = 136, height: int = 120, batch: int = 1, **tiles: int
          ) -> Prompt:
    """A picture that a VAE encodes; to decode, what native encodes is decoded. Without a backend all is native."""
    vae = ["node", 0] if backend else ["loader", 0]
    tiled, last = ("Tiled", tiles) if tiles else ("", {})
    built = {
        "loader": node("VAELoader", vae_name=KINDS[kind]),
        "image": node("TestImage", seed=1, width=width, height=height, batch=batch, channels=3),
        "encode": node(f"VAEEncode{tiled}", pixels=["image", 0], vae=vae if call == "encode" else ["loader", 0], **last),
        "save": node("TestSaveLatent", latent=["encode", 0], name="vae"),
    }
    if call == "decode":
        built["decode"] = node(f"VAEDecode{tiled}", samples=["encode", 0], vae=vae, **last)
        built["pixels"] = node("TestPixels", image=["decode", 0])
        built["save"]["inputs"]["latent"] = ["pixels", 0]
    if backend:
        built["node"] = node("TRTVAEEngine", vae=["loader", 0], backend=backend, **SETTINGS)
        built["report"] = node("TRTReport", after=[call, 0])
    return built


def rows(history: History) -> list[dict[str, Any]]:
    return history.output("report", "report")[0]["rows"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_vae_on_an_engine_gives_natives_picture(comfy: ComfyProcess, kind: str, call: str) -> None:
    for sizes in ({}, {"width": 64, "height": 200}, {"batch": 3}):
        native = latent_of(comfy.queue(graph(kind, call, **sizes)))
        history = comfy.queue(graph(kind, call, "onnxruntime", **sizes), timeout=300)
        assert relative_difference(latent_of(history), native) <= LIMIT
        row, = rows(history)
        assert (row["kind"], row["engine"], row["native"]) == (CALLS[call], sizes.get("batch", 1), 0), str(row["details"])


def test_torch_serves_what_it_compiled_and_the_next_size_runs_normally(comfy: ComfyProcess) -> None:
    """Live weights alone do not serve a VAE: a picture of another size than the compiled ones runs on native."""
    kind = "taesd"
    native = latent_of(comfy.queue(graph(kind, "decode")))
    history = comfy.queue(graph(kind, "decode", "torch"), timeout=300)
    assert relative_difference(latent_of(history), native) <= LIMIT
    row, = rows(history)
    assert (row["engine"], row["native"]) == (0, 1), "nothing tells the size of a picture from a file before it ran"
    history = comfy.queue(graph(kind, "decode", "torch"), timeout=300)
    row, = rows(history)
    assert relative_difference(latent_of(history), native) <= LIMIT
    assert (row["engine"], row["native"]) == (1, 0), row["details"]
    other = latent_of(comfy.queue(graph(kind, "decode", width=64, height=200)))
    history = comfy.queue(graph(kind, "decode", "torch", width=64, height=200) | {
        "node": node("TRTVAEEngine", vae=["loader", 0], backend="torch", **SETTINGS | {"when_missing": "use native"})})
    assert relative_difference(latent_of(history), other) <= LIMIT
    row, = rows(history)
    assert row["reasons"] == {"size the engine was not built for": 1}, row["details"]


def test_tiled_decoding_runs_on_the_engine(comfy: ComfyProcess) -> None:
    tiles = {"tile_size": 128, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8}
    size = {"width": 200, "height": 168}
    native = latent_of(comfy.queue(graph("taesd", "decode", **size, **tiles)))
    history = comfy.queue(graph("taesd", "decode", "onnxruntime", **size, **tiles), timeout=300)
    assert relative_difference(latent_of(history), native) <= LIMIT
    row, = rows(history)
    assert row["engine"] > 3 and row["native"] == 0, row["details"]
