"""Prompts of Flux.1 in a real ComfyUI: guidance, references, custom sampling and LoRAs give native's latent."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from builds import until
from comfy_process import ComfyProcess, History
from safetensors.torch import save_file
from scenarios import CONDITIONING, SETTINGS, Link, Prompt, latent_of, node, relative_difference

LIMIT = 1e-5
BACKENDS = {"torch": {"backend": "torch"}, "onnxruntime": {"backend": "onnxruntime", "when_missing": "build now"}}


class Graph:
    """A prompt in the making, native or on an engine; ``model`` and the conditionings are what the next node takes."""

    def __init__(self, engine: dict[str, Any] | None, unet: str = "tiny_flux1_unet", tokens: int = 77):
        self.prompt: Prompt = {"unet": node("UNETLoader", unet_name=f"{unet}.safetensors", weight_dtype="default")}
        self._engine = engine
        self.model: Link = ["unet", 0]
        for seed, name in enumerate(("positive", "negative"), start=1):
            self.add(name, "TestConditioning", tokens=tokens, seed=seed, **CONDITIONING["flux1"])
        self.positive, self.negative = ["positive", 0], ["negative", 0]

    def add(self, node_id: str, kind: str, /, **inputs: Any) -> Link:
        """Put a node into the prompt; return its first output."""
        self.prompt[node_id] = node(kind, **inputs)
        return [node_id, 0]

    def on_engine(self) -> None:
        """From here on the model's transformer has an engine."""
        if self._engine is not None:
            engine = self.add("engine", "TRTUNetEngine", model=self.model, **SETTINGS | self._engine)
            self.model = self.add("patch", "TRTSamplerPatch", model=self.model, engine=engine)

    def referring(self, *sides: int, method: str = "") -> None:
        """Refer to pictures, squares of so many pixels."""
        vae = self.add("vae", "VAELoader", vae_name="tiny_flux_kl.safetensors")
        for number, side in enumerate(sides):
            pixels = self.add(f"pixels_{number}", "TestImage", seed=number, width=side, height=side, batch=1,
                              channels=3)  # fmt: skip
            latent = self.add(f"encoded_{number}", "VAEEncode", pixels=pixels, vae=vae)
            self.positive = self.add(f"ref_{number}", "ReferenceLatent", conditioning=self.positive, latent=latent)
        if method:
            self.positive = self.add("method", "FluxKontextMultiReferenceLatentMethod", conditioning=self.positive,
                                     reference_latents_method=method)  # fmt: skip

    def sampled(self, cfg: float = 1.0, **latent: int) -> Prompt:
        """The prompt with KSampler at its end."""
        size = {"width": 64, "height": 64, "batch_size": 1} | latent
        empty = self.add("latent", "EmptySD3LatentImage", **size)
        self.add("sampler", "KSampler", model=self.model, positive=self.positive, negative=self.negative,
                 latent_image=empty, seed=5, steps=2, cfg=cfg, sampler_name="euler", scheduler="simple",
                 denoise=1.0)  # fmt: skip
        return self._saved()

    def custom(self) -> Prompt:
        """The prompt with custom sampling at its end, without CFG."""
        given = {
            "noise": self.add("noise", "RandomNoise", noise_seed=5),
            "guider": self.add("guider", "BasicGuider", model=self.model, conditioning=self.positive),
            "sampler": self.add("euler", "KSamplerSelect", sampler_name="euler"),
            "sigmas": self.add("sigmas", "BasicScheduler", model=self.model, scheduler="simple", steps=2, denoise=1.0),
            "latent_image": self.add("latent", "EmptySD3LatentImage", width=96, height=64, batch_size=1),
        }
        self.add("sampler", "SamplerCustomAdvanced", **given)
        return self._saved()

    def _saved(self) -> Prompt:
        self.add("save", "TestSaveLatent", latent=["sampler", 0], name="flux")
        if self._engine is not None:
            self.add("report", "TRTReport", after=["sampler", 0])
        return self.prompt


def counts(history: History) -> dict[str, Any]:
    """The transformer's calls in the report."""
    return history.output("report", "report")[0]["unet"]


def compared(comfy: ComfyProcess, native: Prompt, engine: Prompt) -> tuple[numpy.ndarray, float, dict[str, Any]]:
    """Native's latent, the error of the one on engines, and the transformer's calls."""
    reference = latent_of(comfy.queue(native))
    history = comfy.queue(engine, timeout=300)
    return reference, relative_difference(latent_of(history), reference), counts(history)


@pytest.mark.parametrize("backend", BACKENDS)
def test_guidance_and_references_give_natives_latent(comfy: ComfyProcess, backend: str) -> None:
    def graph(engine: bool, guidance: float, sides: tuple[int, ...], method: str, cfg: float) -> Prompt:
        made = Graph(BACKENDS[backend] if engine else None)
        made.on_engine()
        made.positive = made.add("guidance", "FluxGuidance", conditioning=made.positive, guidance=guidance)
        if sides:
            made.referring(*sides, method=method)
        return made.sampled(cfg)

    latents = []
    for case in ((3.5, (), "", 1.0), (2.0, (), "", 3.0), (2.5, (96,), "", 1.0), (2.5, (96, 64), "uxo/uno", 3.0),
                 (2.5, (96, 64), "index", 1.0)):  # fmt: skip
        native, error, calls = compared(comfy, graph(False, *case), graph(True, *case))
        assert error <= LIMIT, case
        assert calls["engine"] > 0, (case, calls)
        assert calls["native"] == 0, (case, calls)
        assert all(relative_difference(native, other) > 0.01 for other in latents), case
        latents.append(native)


LORA = {"lora_name": "tiny_flux1_lora.safetensors", "strength_model": 0.8}


@pytest.mark.parametrize("unet", ["tiny_flux1_unet", "tiny_flux1_fp8_unet"])
def test_loras_before_and_behind_the_engine_and_fp8_weights_give_natives_latent(comfy: ComfyProcess, unet: str) -> None:
    def graph(engine: bool, before: bool, behind: bool) -> Prompt:
        made = Graph(BACKENDS["torch"] if engine else None, unet)
        for there, name in ((before, "before"), (behind, "behind")):
            if there:
                made.model = made.add(name, "LoraLoaderModelOnly", model=made.model, **LORA)
            if name == "before":
                made.on_engine()
        return made.sampled(cfg=2.0)

    plain = latent_of(comfy.queue(graph(False, False, False)))
    for places in ((True, False), (False, True), (False, False)):
        native, error, calls = compared(comfy, graph(False, *places), graph(True, *places))
        assert error <= LIMIT, places
        assert calls["native"] == 0, (places, calls)
        assert (relative_difference(native, plain) > 0.01) is any(places)


def test_custom_sampling_with_one_prompt_gives_natives_latent(comfy: ComfyProcess) -> None:
    def graph(engine: bool) -> Prompt:
        made = Graph(BACKENDS["torch"] if engine else None)
        made.on_engine()
        return made.custom()

    _, error, calls = compared(comfy, graph(False), graph(True))
    assert error <= LIMIT
    assert calls == {"engine": 2, "native": 0, "reasons": {}}


def test_disabled_guidance_runs_native_with_a_reason(comfy: ComfyProcess) -> None:
    def graph(engine: bool) -> Prompt:
        made = Graph(BACKENDS["torch"] if engine else None)
        made.on_engine()
        made.positive = made.add("guidance", "FluxDisableGuidance", conditioning=made.positive)
        return made.sampled()

    _, error, calls = compared(comfy, graph(False), graph(True))
    assert error == 0
    assert calls == {"engine": 0, "native": 2, "reasons": {"unsupported input": 2}}


@pytest.mark.fault("a LoRA gives a layer more inputs (Flux.1 Canny, Depth)",
                   see="normal speed: *weights patched*, with the layer's name")
def test_a_lora_that_widens_a_layer_runs_native_with_the_reason(comfy: ComfyProcess) -> None:
    generator = torch.Generator().manual_seed(3)
    layer, shapes = "diffusion_model.img_in", {"lora_A": (4, 128), "lora_B": (256, 4)}
    lora = {f"{layer}.{part}.weight": torch.randn(shape, generator=generator) for part, shape in shapes.items()}
    lora[f"{layer}.reshape_weight"] = torch.tensor([256, 128])  # the control image comes as further channels
    save_file(lora, comfy.base / "models" / "loras" / "widens.safetensors")

    def graph(engine: bool, place: str, control: bool = True) -> Prompt:
        made = Graph(BACKENDS["torch"] if engine else None)
        for here in ("before", "behind"):
            if place == here:
                made.model = made.add(here, "LoraLoaderModelOnly", model=made.model, lora_name="widens.safetensors",
                                      strength_model=0.8)  # fmt: skip
            if here == "before":
                made.on_engine()
        if control:
            made.add("vae", "VAELoader", vae_name="tiny_flux_kl.safetensors")
            made.add("pixels", "TestImage", seed=4, width=64, height=64, batch=1, channels=3)
            made.add("control", "InstructPixToPixConditioning", positive=made.positive, negative=made.negative,
                     vae=["vae", 0], pixels=["pixels", 0])  # fmt: skip
            made.positive, made.negative = ["control", 0], ["control", 1]
        return made.sampled(cfg=2.0)

    for place in ("before", "behind"):
        native = latent_of(comfy.queue(graph(False, place)))
        history = comfy.queue(graph(True, place))
        assert relative_difference(latent_of(history), native) == 0
        assert relative_difference(native, latent_of(comfy.queue(graph(False, place, control=False)))) > 0.01
        assert counts(history) == {"engine": 0, "native": 2, "reasons": {"weights patched": 2}}
        assert "img_in" in history.output("engine" if place == "before" else "report", "text")[0]
    _, error, calls = compared(comfy, graph(False, "", False), graph(True, "", False))
    assert error <= LIMIT
    assert calls["native"] == 0, "the model without the LoRA has its engine again"


AUTO = {"backend": "torch", "when_missing": "auto"}
SIDES = ((64, 64), (96, 64), (64, 112), (128, 128), (48, 80), (160, 64), (80, 80), (32, 144), (112, 96))
TOKENS, BATCHES, REFERENCES = (77, 9, 154, 30, 256), (1, 2, 3), ((), (64,), (96, 48))


def calls_of_any_size() -> list[tuple[tuple[int, int], int, int, tuple[int, ...]]]:
    """24 calls in which each size comes, in ever other company."""
    turning = [itertools.cycle(sizes) for sizes in (SIDES, TOKENS, BATCHES, REFERENCES[::-1])]
    found = [tuple(next(sizes) for sizes in turning) for _ in range(24)]
    return [(*case[:3], REFERENCES[(i + i // 3) % 3]) for i, case in enumerate(found)]


def any_size(
    engine: dict[str, Any] | None, side: tuple[int, int], tokens: int, batch: int, refs: tuple[int, ...]
) -> Prompt:
    made = Graph(engine, tokens=tokens)
    made.on_engine()
    if refs:
        made.referring(*refs)
    return made.sampled(width=side[0], height=side[1], batch_size=batch)


def compiled_files(comfy: ComfyProcess) -> dict[Path, int]:
    found = (comfy.base / "models" / "trt_engines").glob("flux1-*-torch-*/*.bin")
    return {file: file.stat().st_mtime_ns for file in found}


def test_the_first_prompt_starts_a_build_that_serves_all_later_ones(comfy: ComfyProcess) -> None:
    there = compiled_files(comfy)
    first = calls_of_any_size()[0]
    _, error, calls = compared(comfy, any_size(None, *first), any_size(AUTO, *first))
    assert error <= LIMIT
    assert calls["native"] == 0
    assert until(lambda: not any(job["state"] in ("queued", "running") for job in comfy.get("/hybrid_trt/builds")), 240)
    built = compiled_files(comfy)
    assert len(built.keys() - there.keys()) <= 1, "one file, of this test or of one before"
    for case in calls_of_any_size():
        reference = latent_of(comfy.queue(any_size(None, *case)))
        history = comfy.queue(any_size(AUTO, *case))
        assert relative_difference(latent_of(history), reference) <= LIMIT, case
        (row,) = history.output("report", "report")[0]["rows"]
        assert (row["engine"] > 0, row["native"], row["uncompiled"]) == (True, 0, {}), case
    assert compiled_files(comfy) == built, "nothing was built again"
