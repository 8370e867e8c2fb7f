"""ControlNets that were made for another kind of model: told so, and what native does with them happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.controlnet
import pytest
import tiny_models
import torch
from comfy_process import ComfyProcess
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.sampling.controlnet import back_with_engine
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from patched import NAME, Patched, library_of, load, sampling_node
from scenarios import Control, Scenario, compare

from sampling import STEPS, error, sample

OTHER_KIND = Reason.OTHER_KIND.value
FILES = [NAME, "tiny_sd15_a", "tiny_sdxl_a"]


@pytest.fixture(scope="module")
def files(environment: Any) -> dict[str, Path]:
    return tiny_models.make(environment.base / "models", FILES)


def controlnet(file: Path) -> comfy.controlnet.ControlNet:
    return comfy.controlnet.load_controlnet(str(file))


def hinted(net: comfy.controlnet.ControlNet) -> comfy.controlnet.ControlNet:
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    return net.copy().set_cond_hint(image, 1.0, (0.0, 1.0))


def failure(model: Path, net: comfy.controlnet.ControlNet, given: dict[str, Any]) -> Exception:
    """The end of a sampling with a ControlNet that does not fit."""
    try:
        sample(load(model), control=hinted(net), **given)
    except (RuntimeError, ValueError) as error:
        return error
    pytest.fail("it fits")


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_residuals_of_another_layout_are_left_to_native_and_no_larger_size_is_advised(
    files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, backend: str
) -> None:
    library = library_of(files[NAME], tmp_path_factory.mktemp("library"))
    net = controlnet(files["tiny_sd15_a"])
    reference = sample(load(files[NAME]), control=hinted(net))
    patched = Patched(load(files[NAME]), library, backend)
    assert error(patched.sample(control=hinted(net)), reference) <= 1e-5
    assert patched.counts == (0, STEPS)
    stats = patched.handle.stats
    assert list(stats.reasons) == [OTHER_KIND]
    assert "control_output" in stats.details[OTHER_KIND]
    assert "size" not in stats.advice(Reason.OTHER_KIND)


def test_a_controlnet_for_another_kind_of_model_fails_as_native_does(
    files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = controlnet(files["tiny_sdxl_a"])
    choice = EngineChoice(Profile({s: Range(1, 16, 64) for s in ("B", "H", "W", "T", "HB")}), "auto", "torch")
    handle = EngineHandle.look_up(NativeNetwork.of_controlnet(net, "net"), choice, Library([tmp_path]), "engine")
    vector = {"pooled_output": torch.zeros(1, 1280)}
    for given in ({}, vector):
        natively = failure(files[NAME], net, given)
        with sampling_node():
            ours = failure(files[NAME], back_with_engine(net, handle), given)
        assert (type(ours), str(ours)) == (type(natively), str(natively))
    assert OTHER_KIND in caplog.text
    assert "larger" not in caplog.text
    assert "wider" not in caplog.text
    assert "only slower" not in caplog.text


@pytest.mark.parametrize("engine", [False, True], ids=["plain", "on_an_engine"])
def test_a_prompt_with_such_a_controlnet_says_so(sd15: ComfyProcess, engine: bool) -> None:
    """Those of a smaller UNet: its residuals do not fit, and ComfyUI leaves them out."""
    scenario = Scenario(controls=(Control("tiny_sd15_flat_a", engine=engine),), steps=2, seed=931)
    result = compare(sd15, scenario)
    assert result.error <= 1e-5
    assert result.unet["reasons"] == {OTHER_KIND: 2}
    text = result.history.output("report", "text")[0]
    assert "made for another kind of model" in text
    assert "wider" not in text
