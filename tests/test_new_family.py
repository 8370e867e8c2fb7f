"""A family of networks is one file: one that the pack has never heard of is served end to end by its file alone."""

from __future__ import annotations

import re
from pathlib import Path

import pack
import pytest
from comfy_process import ComfyProcess
from scenarios import SETTINGS, Prompt, latent_of, node, relative_difference

ROOT: Path = pack.ROOT
LIMIT = 1e-5
NETS = {1: (0.8, 0.0, 1.0), 2: (0.5, 0.0, 0.6)}
"""Seed of the control image -> strength, start and end; both on one ControlNet."""


def graph(engines: bool, nets: dict[int, tuple[float, float, float]], backend: str = "onnxruntime") -> Prompt:
    """Sampling with the toy model, its ControlNet once for each image."""
    settings = SETTINGS | {"when_missing": "build now", "min_size": 64, "max_size": 256, "max_tokens": 0,
                           "max_images": 1, "backend": backend}
    built: Prompt = {
        "toy": node("TestToyModel", seed=3),
        "positive": node("TestConditioning", tokens=77, width=16, pooled=0, seed=1),
        "negative": node("TestConditioning", tokens=154, width=16, pooled=0, seed=2),
        "latent": node("EmptyLatentImage", width=136, height=120, batch_size=1),
        "save": node("TestSaveLatent", latent=["sampler", 0], name="toy"),
    }
    model, net = ["toy", 0], ["toy", 1]
    if engines:
        built |= {
            "engine": node("TRTUNetEngine", model=model, **settings),
            "patch": node("TRTSamplerPatch", model=model, engine=["engine", 0]),
            "net_engine": node("TRTControlNetEngine", control_net=net, **settings),
            "report": node("TRTReport", after=["sampler", 0]),
        }
        model, net = ["patch", 0], ["net_engine", 0]
    positive, negative = ["positive", 0], ["negative", 0]
    for seed, (strength, start, end) in nets.items():
        built[f"image_{seed}"] = node("TestImage", seed=seed, width=136, height=120, batch=1, channels=3)
        built[f"apply_{seed}"] = node(
            "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=net,
            image=[f"image_{seed}", 0], strength=strength, start_percent=start, end_percent=end,
        )
        positive, negative = [f"apply_{seed}", 0], [f"apply_{seed}", 1]
    built["sampler"] = node(
        "KSampler", model=model, positive=positive, negative=negative, latent_image=["latent", 0], seed=5, steps=4,
        cfg=4.0, sampler_name="euler", scheduler="normal", denoise=1.0,
    )
    return built


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_a_family_of_one_file_is_built_checked_and_served(comfy: ComfyProcess, backend: str) -> None:
    native = latent_of(comfy.queue(graph(False, NETS)))
    one, none = (latent_of(comfy.queue(graph(False, nets))) for nets in ({1: NETS[1]}, {}))
    assert min(relative_difference(native, one), relative_difference(one, none)) > 0.01, "each ControlNet acts"
    settings = {"when_missing": "use native"} if backend == "torch" else {}
    prompt = graph(True, NETS, backend)
    for name in ("engine", "net_engine"):
        prompt[name]["inputs"] |= settings
    history = comfy.queue(prompt, timeout=300)
    assert relative_difference(latent_of(history), native) <= LIMIT
    report = history.output("report", "report")[0]
    assert all(row["engine"] > 0 and row["native"] == 0 for row in report["rows"]), report
    assert {row["kind"] for row in report["rows"]} == {"unet", "controlnet"}
    if backend == "onnxruntime":
        assert "rows 64-256 px" in history.output("engine", "text")[0], "told in the family's own words"


def test_no_room_but_the_families_own_knows_a_family_by_name() -> None:
    """So that adding one changes nothing else: neither names of architectures nor ComfyUI's network classes."""
    names = re.compile(r"sd15|sdxl|UNetModel|cldm\.cldm|input_blocks|\"control_(output|input|middle)", re.IGNORECASE)
    rooms = ("backends", "engine_builder", "engine_library", "sampling", "sessions", "comfy_model",
             "nodes", "page_api")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for room in rooms
        for path in sorted((ROOT / room).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if names.search(line)
    ]
    assert found == []
