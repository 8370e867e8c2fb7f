"""ComfyUI's nodes that change how a model computes: ModelComputeDtype and TorchCompileModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.torch_helpers import set_torch_compile_wrapper
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.nodes.engine_nodes import TRTSamplerPatch, _for_model
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.model_wrapper import patch_model
from memory_fixtures import file, library
from patched import LIMIT, Patched, sampling_node
from profiles import profile_of

from sampling import STEPS, error, sample

__all__ = ["file", "library"]  # fixtures: pytest finds them by name

HALF, FULL = torch.bfloat16, torch.float32


def load(file: Path, dtype: torch.dtype | None) -> ModelPatcher:
    return comfy.sd.load_diffusion_model(str(file), model_options={"dtype": dtype} if dtype else {})


def computing_in(model: ModelPatcher, dtype: torch.dtype | None) -> ModelPatcher:
    """As the node gives it."""
    clone = model.clone()
    clone.set_model_compute_dtype(dtype)
    return clone


def sampled(model: ModelPatcher) -> torch.Tensor:
    with sampling_node():
        return sample(model)


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_the_prompt_before_leaves_none_to_the_next(file: Path, library: Library, backend: str) -> None:
    model = load(file, None)
    reference = sample(load(file, None))
    before = sample(computing_in(model, HALF))
    assert error(before, reference) > 100 * LIMIT
    patched = Patched(model, library, backend)
    assert error(patched.sample(), reference) <= LIMIT
    assert patched.counts == (4, 0)


@pytest.mark.parametrize(("own", "asked", "wanted"), [(None, HALF, "bfloat16"), (HALF, FULL, "float32")])
def test_in_front_of_the_engine_node_it_is_the_engines(
    file: Path, tmp_path: Path, own: torch.dtype | None, asked: torch.dtype, wanted: str
) -> None:
    model = load(file, own)
    assert NativeNetwork.of_model(computing_in(model, asked), "unet").precision == wanted
    patched = Patched(computing_in(model, asked), Library([tmp_path]), "torch")
    reference = sample(computing_in(load(file, own), asked))
    assert error(patched.sample(), reference) <= (LIMIT if wanted == "float32" else 0.05)  # each rounds its own way
    assert patched.counts == (4, 0)


@pytest.mark.parametrize("place", ["before the sampler patch", "after it", "taken away"])
# no engine computes here, whatever its backend
@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), "onnxruntime"])
def test_behind_the_engine_node_it_leaves_the_run_to_native(
    file: Path, library: Library, backend: str, place: str
) -> None:
    plain = load(file, None)
    half = computing_in(plain, HALF)
    engine_has, asked = (half, plain) if place == "taken away" else (plain, half)
    reference = sample(asked)
    patched = Patched(engine_has, library, backend)
    if place == "after it":
        sampled_with = computing_in(patched.model, HALF)
    else:
        sampled_with = patch_model(asked, patched.handle)
        said = TRTSamplerPatch.execute(asked, patched.handle).ui
        assert said["native"] == [True]
        assert f"{patched.handle.choice.precision_for(patched.handle.network)} at the engine node" in said["text"][0]
    assert error(sampled(sampled_with), reference) == 0
    assert patched.counts == (0, 4)
    assert list(patched.handle.stats.reasons) == [Reason.MODEL_PATCHED.value]


def test_asking_for_what_the_model_computes_in_anyway_changes_nothing(file: Path, tmp_path: Path) -> None:
    model = load(file, None)
    patched = Patched(model, Library([tmp_path]), "torch")
    reference = sample(model.clone())
    assert error(sampled(patch_model(computing_in(model, FULL), patched.handle)), reference) <= LIMIT
    assert patched.counts == (4, 0)


def test_a_file_that_was_loaded_twice_is_asked_what_it_computes_in_itself(file: Path, library: Library) -> None:
    node, again = Patched(load(file, None), library, "onnxruntime"), load(file, None)
    half = computing_in(again, HALF)
    for model, calls in ((again, (4, 0)), (half, (0, 4))):
        handle, refusal = _for_model(model, node.handle)
        assert error(sampled(patch_model(model, handle, refusal)), sample(model)) <= LIMIT
        assert (handle.stats.engine, handle.stats.native) == calls


# ComfyUI's TorchCompileModel


def test_without_an_engine_native_is_compiled_as_the_node_asks(file: Path, tmp_path: Path) -> None:
    native = load(file, None)
    convolutions = []

    def backend(graph: torch.fx.GraphModule, _inputs: list) -> Any:
        convolutions.extend(n for n in graph.graph.nodes if "conv2d" in str(n.target))
        return graph.forward

    network = NativeNetwork.of_model(native, "unet")
    handle = EngineHandle.look_up(network, EngineChoice(profile_of(64, 64, 256, 2, 77)), Library([tmp_path]), "engine")
    patched = patch_model(native, handle)
    reference = sample(native)
    assert torch.equal(sample(patched), reference)
    assert convolutions == []
    set_torch_compile_wrapper(patched, backend=backend)
    latent = sample(patched)
    assert error(latent, reference) < 1e-5
    assert handle.stats.native == 2 * STEPS
    traced = len(convolutions)
    assert traced > 5
    assert torch.equal(sample(patched), latent)
    assert len(convolutions) == traced, "it was compiled again for the next run"
