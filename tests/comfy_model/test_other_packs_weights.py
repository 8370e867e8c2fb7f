"""Models whose weights another pack keeps in its own way: native serves, and the reason says what they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import other_packs_weights
import pytest
import torch
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher
from comfy_process import ComfyProcess
from gpu_doubles import gpu_recorder, play_gpu
from hybrid_trt.backends import AUTO
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.sampling.engine_status import status
from memory_fixtures import Controlled, controlnet, file, files, library
from patched import LIMIT, Patched, natively
from scenarios import A, B, Prompt, Scenario, latent_of, node, prompt, relative_difference

from sampling import STEPS, error, sample

__all__ = ["controlnet", "file", "files", "library"]  # fixtures: pytest finds them by name

GGUF = {"GGUF": "GGUF weights", "GGUF, a layout": "quantised layers", "GGUF, in ComfyUI's layers": "quantised layers"}
KINDS = {**GGUF, "NF4": "bitsandbytes weights",
         "whole numbers": "Nunchaku weights", "another patcher": "GGUF weights"}  # fmt: skip


@pytest.mark.fault("another pack's loader brings weights of its own (GGUF)", see="normal speed: *unsupported model*")
@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, AUTO) for kind in KINDS), ("GGUF", "torch"), ("GGUF", "onnxruntime"),
     *(pytest.param(kind, "torch", marks=pytest.mark.slow) for kind in GGUF if kind != "GGUF")],
)
def test_native_serves_it_and_the_reason_says_what_its_weights_are(
    file: Path, library: Library, kind: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.inference_mode():
        model = other_packs_weights.load(str(file), kind)
        reference = sample(model)
        if kind != "another patcher":
            assert error(natively(file), reference) > 1e-4, "its weights are rounded"
        with caplog.at_level(logging.WARNING):
            patched = Patched(model, library, backend)
    assert error(patched.sample(), reference) == 0
    assert patched.counts == (0, STEPS)
    assert list(patched.handle.stats.reasons) == [Reason.UNSUPPORTED_MODEL.value]
    assert KINDS[kind] in status(patched.handle)
    assert "Traceback" not in caplog.text


def with_lora(model: ModelPatcher) -> ModelPatcher:
    """The model with differences on layers whose weights are packed."""
    changed, draw = model.clone(), torch.Generator().manual_seed(5)
    named = model.model.named_parameters()
    shapes = {name: weight.shape for name, weight in named if name.endswith(("to_k.weight", "to_q.weight"))}
    patches = {n: ("diff", (torch.randn(s, generator=draw) / s[-1] ** 0.5,)) for n, s in shapes.items()}
    assert set(changed.add_patches(patches, 0.8)) == set(patches) != set()
    return changed


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_a_lora_on_it_acts_as_it_does_natively(file: Path, library: Library, backend: str) -> None:
    with torch.inference_mode():
        model = other_packs_weights.load(str(file), "GGUF")
        plain, lora = sample(model), with_lora(model)
        reference = sample(lora)
        assert error(reference, plain) > 1e-2, "the LoRA acts"
        patched = Patched(lora, library, backend)
    assert error(patched.sample(), reference) == 0
    assert patched.counts == (0, STEPS)
    assert list(patched.handle.stats.reasons) == [Reason.UNSUPPORTED_MODEL.value]
    assert error(sample(model), plain) == 0, "and leaves the model as it was"


def test_a_controlnet_beside_it_is_recorded_and_it_never_is(
    file: Path, library: Library, controlnet: ControlNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading its blocks takes Python and new memory in each call, which no recording could hold."""
    play_gpu(monkeypatch)
    reads, read = [], other_packs_weights.out_of_blocks
    monkeypatch.setattr(other_packs_weights, "out_of_blocks", lambda *given: reads.append(recording) or read(*given))
    recording = 0
    recorder = gpu_recorder(wait_point=False)

    def record(body: Callable[[], None]) -> Any:
        nonlocal recording
        recording += 1
        try:
            return recorder(body)
        finally:
            recording -= 1

    record.stream = recorder.stream
    with torch.inference_mode():
        model = other_packs_weights.load(str(file), "GGUF")
        patched = Patched(model, library, "torch")
        both = Controlled(patched.model, controlnet, library)
        reference = sample(model, control=both.plain)
    both.handle.session.graphs._capture = record
    for _ in range(2):
        assert error(both.sample(), reference) <= LIMIT
    assert error(sample(model), reference) > 1e-3, "the ControlNet acts"
    assert (both.handle.stats.engine, both.handle.stats.native) == (STEPS, 0)
    assert patched.counts == (0, STEPS)
    assert recorder.captured > 0
    assert reads
    assert set(reads) == {0}, "its layers ran while something was recorded"


def test_in_a_real_comfyui_with_a_lora_and_two_controlnets_it_gives_natives_picture(sd15: ComfyProcess) -> None:
    lora = ("LoraLoaderModelOnly", {"lora_name": "tiny_sd15_lora.safetensors", "strength_model": 0.8})
    scenario = Scenario(controls=(A, B), loras_before=(lora,), steps=2, width=64, height=64)

    def graph(scenario: Scenario, engines: bool, name: str) -> Prompt:
        built = prompt(scenario, engines, name)
        loader = node("TestOtherPacksWeights", unet_name=built["unet"]["inputs"]["unet_name"], kind="GGUF")
        return built | {"unet": loader}

    native = latent_of(sd15.queue(graph(scenario, False, "gguf_native")))
    for changed in (scenario.but(loras_before=()), scenario.but(controls=())):
        assert relative_difference(latent_of(sd15.queue(graph(changed, False, "gguf_other"))), native) > 1e-2
    history = sd15.queue(graph(scenario, True, "gguf"))
    assert relative_difference(latent_of(history), native) <= LIMIT
    report = history.output("report", "report")[0]
    assert report["unet"] == {"engine": 0, "native": 2, "reasons": {"unsupported model": 2}}
    assert all(row["engine"] == 2 and row["native"] == 0 for row in report["controlnets"]), report
    (text,) = history.output("unet_engine", "text")
    assert "GGUF weights, and engines need plain ones" in text
