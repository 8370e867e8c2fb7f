"""Packs that change ComfyUI's code, layers, settings or weights behind its back: the picture stays native's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.samplers
import other_packs_weights
import pytest
import torch
from comfy.cldm import cldm
from comfy.controlnet import ControlNet
from comfy.ldm.modules import attention
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.model_patcher import ModelPatcher
from comfy_process import ComfyProcess
from foreign_changes import with_function, with_hook, with_setting
from gpu_doubles import gpu_recorder, play_gpu
from hybrid_trt.architectures.calls import only_adds_residuals
from hybrid_trt.backends import AUTO
from hybrid_trt.comfy_model.changed_layers import LayerWatch
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library, Reason, Unavailable
from hybrid_trt.sampling.engine_status import status
from memory_fixtures import Controlled, controlled, controlnet, file, files, library
from patched import LIMIT, NAME, Patched, built_here, load, natively, sampling_node, with_lora
from scenarios import A, B, Prompt, Scenario, latent_of, node, prompt, relative_difference

from sampling import STEPS, error, sample

__all__ = ["controlled", "controlnet", "file", "files", "library"]  # fixtures: pytest finds them by name

BACKENDS = pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
CODE = {
    "forward_timestep_embed": openaimodel, "timestep_embedding": openaimodel, "ResBlock._forward": openaimodel,
    "UNetModel._forward": openaimodel, "UNetModel.forward": openaimodel, "BasicTransformerBlock.forward": attention,
    "CrossAttention.forward": attention, "GEGLU.forward": attention, "optimized_attention": attention,
    "GroupNorm.forward": torch.nn, "silu": torch.nn.functional,
}  # fmt: skip


def replaced(place: str, by: Callable[[Any], Any] | None = None) -> Any:
    """A function of a pack's own in one of ComfyUI's places."""
    return with_function(CODE[place].__name__, place, by)(torch.nn.Identity())


@pytest.mark.fault("another pack replaces ComfyUI's functions", see="normal speed: *changed by another node*")
@pytest.mark.parametrize("place", CODE)
def test_code_that_a_pack_replaces_is_natives_until_it_is_put_back(file: Path, library: Library, place: str) -> None:
    reference, patched = natively(file), Patched(load(file), library)
    assert error(patched.sample(), reference) <= LIMIT
    with replaced(place):
        native = sample(load(file))
        assert error(native, reference) > 1e-3, "it does nothing here"
        assert error(patched.sample(), native) == 0
        assert patched.counts == (0, STEPS)
        (told,) = patched.handle.stats.details.values()
        assert f"the pack foreign_changes has replaced {place} for all models" in told
    assert error(patched.sample(), reference) <= LIMIT
    assert patched.counts == (STEPS, 0)


@BACKENDS
def test_code_that_was_replaced_before_the_model_was_seen_is_natives(
    file: Path, library: Library, backend: str
) -> None:
    with replaced("ResBlock._forward"):
        native, patched = sample(load(file)), Patched(load(file), library, backend)
        assert error(patched.sample(), native) == 0
        assert patched.counts == (0, STEPS)


def test_nothing_is_built_while_a_pack_has_its_own_code_there(file: Path, tmp_path: Path) -> None:
    network, library = NativeNetwork.of_model(load(file), NAME), Library([tmp_path])
    with replaced("CrossAttention.forward"), pytest.raises(Unavailable, match="has replaced CrossAttention.forward"):
        built_here(network, library)
    assert not library.engines()


def test_a_wrapper_of_torchs_own_does_not_cost_the_engine(file: Path, library: Library) -> None:
    reference, patched = natively(file), Patched(load(file), library)
    with replaced("ResBlock._forward", torch.no_grad()):
        assert error(patched.sample(), reference) <= LIMIT
        assert patched.counts == (STEPS, 0)


def resizing(h: torch.Tensor, control: dict | None, name: str) -> torch.Tensor:
    parts = None if control is None else control.get(name)
    if not parts or (part := parts.pop()) is None:
        return h
    if part.shape != h.shape:
        part = torch.nn.functional.interpolate(part, size=h.shape[-2:])
    return h + part


def test_a_function_that_only_resizes_residuals_that_do_not_fit_is_no_reason_to_do_without_engines() -> None:
    assert only_adds_residuals(openaimodel.apply_control)
    assert only_adds_residuals(resizing)
    assert not only_adds_residuals(lambda h, control, name: resizing(h, control, name) * 0.9)
    assert not only_adds_residuals(lambda h, control, name: h)
    assert not only_adds_residuals(lambda h, control: h)


def test_runs_of_one_execution_are_looked_at_one_by_one(file: Path, library: Library) -> None:
    reference, patched, other = natively(file), Patched(load(file), library), load(file)
    setting = with_setting("middle_block.0.in_layers.0", "eps", lambda _: 0.5)
    with sampling_node():
        assert error(sample(patched.model), reference) <= LIMIT
        with setting(patched.native.model.diffusion_model), setting(other.model.diffusion_model):
            assert error(sample(patched.model), sample(other)) == 0
        assert error(sample(patched.model), reference) <= LIMIT
    assert patched.counts == (2 * STEPS, STEPS)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each call that looks at the layers."""
    looked, own = [], LayerWatch.look_again

    def look_again(self: LayerWatch) -> str | None:
        looked.append("again")
        return own(self)

    monkeypatch.setattr(LayerWatch, "look_again", look_again)
    return looked


def plainly_sampled(model: ModelPatcher, guider: type = comfy.samplers.CFGGuider, **options: Any) -> None:
    """As ComfyUI samples with nobody else taking part."""
    prompts = {name: [[torch.randn(1, 77, 768), {}]] for name in ("positive", "negative")}
    guide, noise = guider(model), torch.randn(1, 4, 8, 8)
    guide.set_conds(**prompts)
    given = {"sampler": comfy.samplers.sampler_object("euler"), "sigmas": torch.tensor([10.0, 1.0, 0.0])} | options
    with torch.inference_mode():
        guide.sample(noise, torch.zeros_like(noise), disable_pbar=True, **given)


class OtherGuider(comfy.samplers.CFGGuider):
    pass


def other_sampler(model: Any, x: torch.Tensor, sigmas: torch.Tensor, **options: Any) -> torch.Tensor:
    return comfy.samplers.k_diffusion_sampling.sample_euler(model, x, sigmas, **options)


def patched_after(model: ModelPatcher) -> ModelPatcher:
    other = model.clone()
    other.set_model_sampler_post_cfg_function(lambda given: given["denoised"])
    return other


def test_layers_are_looked_at_in_each_call_where_other_packs_take_part_in_a_run_and_in_no_other(
    file: Path, library: Library, looks: list[str]
) -> None:
    model = Patched(load(file), library).model
    runs: list[tuple[bool, Callable[[], None]]] = [
        (False, lambda: plainly_sampled(model)),
        (True, lambda: plainly_sampled(model, OtherGuider)),
        (True, lambda: plainly_sampled(model, sampler=comfy.samplers.KSAMPLER(other_sampler))),
        (True, lambda: plainly_sampled(model, callback=lambda *_: None)),
        (True, lambda: plainly_sampled(patched_after(model))),
        (False, lambda: plainly_sampled(model)),
    ]
    for others, run in runs:
        looks.clear()
        run()
        assert len(looks) == (2 if others else 0)


def halved(result: dict) -> dict:
    return {name: [part * 0.5 for part in parts] for name, parts in result.items()}


@contextlib.contextmanager
def with_a_weight_doubled(net: torch.nn.Module) -> Iterator[None]:
    with torch.inference_mode():
        net.zero_convs[0][0].weight.data.mul_(2.0)
    yield
    with torch.inference_mode():
        net.zero_convs[0][0].weight.data.mul_(0.5)


CHANGES = {
    "code": with_function(cldm.__name__, "ControlNet.forward", lambda own: lambda *a, **b: halved(own(*a, **b))),
    "a hook": with_hook("middle_block.0"),
    "a weight": with_a_weight_doubled,
}


@pytest.mark.fault("another pack changes a ControlNet", see="normal speed with a reason")
@pytest.mark.parametrize("change", CHANGES)
def test_a_controlnet_that_a_pack_changes_acts_as_in_native(controlled: Controlled, change: str) -> None:
    def native() -> torch.Tensor:
        return sample(controlled.model, control=controlled.plain)

    reference = native()
    assert error(controlled.sample(), reference) <= LIMIT
    with CHANGES[change](controlled.native.model):
        changed = native()
        assert error(changed, reference) > 1e-3, "it does nothing here"
        assert error(controlled.sample(), changed) <= LIMIT
    assert error(controlled.sample(), reference) <= LIMIT
    assert controlled.handle.stats.engine == STEPS


# Weights that another pack keeps in its own way


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


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_a_lora_on_it_acts_as_it_does_natively(file: Path, library: Library, backend: str) -> None:
    with torch.inference_mode():
        model = other_packs_weights.load(str(file), "GGUF")
        plain, lora = sample(model), with_lora(model, ends=("to_k.weight", "to_q.weight"))
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
