"""Backends whose engines hold weights refuse ComfyUI's quantised layers with a reason, and native serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from comfy.model_patcher import ModelPatcher
from comfy.ops import mixed_precision_ops
from comfy.quant_ops import QuantizedTensor
from hybrid_trt.backends import AUTO
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.snapshot import _known_class
from hybrid_trt.engine_builder.command_line import main as command_line
from hybrid_trt.engine_builder.jobs import BuildQueue
from hybrid_trt.engine_library import BuildError, Library, Reason, Unavailable
from hybrid_trt.nodes import building
from hybrid_trt.page_api.node_states import NodeStates
from hybrid_trt.page_api.outlook import NodeRequest
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.engine_status import status
from patched import NAME, PROFILE, Patched, library_of, load
from small_networks import network

from sampling import error, sample

QUANTISED = "tiny_sd15_quantised_unet"


@pytest.fixture(scope="module")
def files(environment: Any) -> dict[str, Path]:
    return tiny_models.make(environment.base / "models", [NAME, QUANTISED])


@pytest.fixture(scope="module")
def library(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Library:
    """With an engine of a plain checkpoint of the same family, so that the look-up wants to see the weights."""
    return library_of(files[NAME], tmp_path_factory.mktemp("library"))


@pytest.fixture
def quantised(files: dict[str, Path]) -> ModelPatcher:
    with torch.inference_mode():  # as ComfyUI runs loaders
        return load(files[QUANTISED])


@pytest.mark.parametrize("backend", [AUTO, "onnxruntime"])
def test_native_serves_beside_an_engine_of_another_checkpoint(
    files: dict[str, Path], quantised: ModelPatcher, library: Library, backend: str
) -> None:
    reference = sample(quantised)
    assert error(sample(load(files[NAME])), reference) > 0.01, "the quantised layers act"
    with torch.inference_mode():
        patched = Patched(quantised, library, backend)
    assert error(patched.sample(), reference) == 0
    assert patched.counts == (0, 4)
    assert list(patched.handle.stats.reasons) == [Reason.UNSUPPORTED_MODEL.value]
    assert "quantised layers" in status(patched.handle)


@pytest.mark.parametrize("backend", [AUTO, "onnxruntime"])
def test_the_page_says_so_and_the_build_button_changes_nothing(
    quantised: ModelPatcher, library: Library, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, submitted = NodeStates(library, BuildQueue()), []
    monkeypatch.setattr(building.builds, "submit", lambda *given: submitted.append(given))
    network, choice = NativeNetwork.of_model(quantised, "a.safetensors"), EngineChoice(PROFILE, backend=backend)
    handle = EngineHandle.look_up(network, choice, library, "node", "key")
    building.build(handle, None, again=True)
    building.build(handle, building.BUILD_NOW)
    states.learn("key", handle)
    state = states.state("key", NodeRequest("unet", "a.safetensors", False, backend))
    assert "quantised layers" in state["text"]
    assert handle.fallback.reason is Reason.UNSUPPORTED_MODEL
    assert submitted == []


def test_the_command_line_says_so_in_a_sentence(
    files: dict[str, Path], environment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--library", str(tmp_path), "--comfyui", str(environment.comfyui)]
    assert command_line.main(["build", "--unet", str(files[QUANTISED]), *folders]) == 1
    assert f"unsupported model: {QUANTISED}.safetensors has" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_one_quantised_layer_is_enough_and_fp8_weights_alone_are_none(kind: str) -> None:
    net, plain = network(kind, "unlike_levels"), network(kind, "unlike_levels")
    plain.module.to(torch.float8_e4m3fn)
    assert plain.architecture() is not None
    layer = net.module.time_embed[0]
    layer.weight = torch.nn.Parameter(QuantizedTensor.from_float(layer.weight, "TensorCoreFP8E4M3Layout"), False)
    with pytest.raises(Unavailable, match="quantised layers"):
        net.architecture()


def test_a_layer_whose_plain_class_is_not_known_is_no_part_of_an_engine() -> None:
    with pytest.raises(BuildError):
        _known_class(mixed_precision_ops().Linear)


def test_no_prompt_ends_because_an_engine_cannot_be_looked_up(
    files: dict[str, Path], library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def strange(_self: NativeNetwork) -> str:
        raise AttributeError("'Linear' object has no attribute 'of_another_pack'")

    reference = sample(load(files[NAME]))
    with monkeypatch.context() as patch:
        patch.setattr(NativeNetwork, "fingerprint", strange)
        patched = Patched(load(files[NAME]), library)
        assert error(patched.sample(), reference) == 0
        assert list(patched.handle.stats.reasons) == [Reason.ENGINE_FAILED.value]
        assert "of_another_pack" in status(patched.handle)
    assert "Traceback" in caplog.text
    assert error(patched.sample(), reference) <= 1e-5, "the next run looks again"
    assert patched.counts == (4, 0)
