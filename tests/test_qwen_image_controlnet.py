"""InstantX's ControlNets for Qwen-Image: each call and whole prompts equal native's, also beside references."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import token_networks
import torch
from comfy.controlnet import ControlNet
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.controlnet import back_with_engine
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sessions.file_session import FileSession
from tiny_transformers import QWEN_IMAGE
from token_calls import Call, Patched, engine_of, network_of, profile_of, sample

from sampling import error

CPU = torch.device("cpu")
LIMIT = 1e-5
MODEL, FILE, WIDTH = "tiny_qwen_image", "tiny_qwen_image_control", QWEN_IMAGE["joint_attention_dim"]
CALLS = {"plain": Call(), "odd sides, a batch": Call(2, (13, 11), 30), "a prompt of one token": Call(words=1)}


def loaded(models: dict[str, Path]) -> ControlNet:
    return token_networks.load_control(str(models[FILE]))


@pytest.fixture
def network(models: dict[str, Path]) -> NativeNetwork:
    return NativeNetwork.of_controlnet(loaded(models), FILE)


def drawn(call: Call, hints: int = 1, seed: int = 1) -> dict[str, Any]:
    given = call.drawn(WIDTH, seed)
    return given | {"hint": torch.randn(hints, *given["x"].shape[1:], generator=torch.Generator().manual_seed(seed))}


def worst_of(network: NativeNetwork, session: Any, call: dict[str, Any]) -> float:
    """Return the largest error of a residual; which places they have is native's too."""
    bound = network.architecture().binding(network.module)(call)
    with torch.inference_mode():
        native = network.module(**call)
        result = bound.finish(session.run(bound.inputs))
    assert result.keys() == native.keys() == {"input"}
    assert len(result["input"]) == len(native["input"]) == 60
    return max(relative_error(one, other) for one, other in zip(result["input"], native["input"], strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_each_call_on_live_weights_is_natives(network: NativeNetwork, name: str) -> None:
    session = LiveSession(network, backends()["torch"], "float32")
    for hints in {1, CALLS[name].batch}:
        assert worst_of(network, session, drawn(CALLS[name], hints)) <= LIMIT
    first, second = (network.module(**drawn(CALLS[name], seed=seed) | drawn_without_hint(name)) for seed in (1, 2))
    assert relative_error(first["input"][0], second["input"][0]) > 0.01, "the hint acts"


def drawn_without_hint(name: str) -> dict[str, Any]:
    return CALLS[name].drawn(WIDTH)


def test_one_engine_of_onnx_runtime_serves_all_calls(network: NativeNetwork, tmp_path: Path) -> None:
    session = FileSession(engine_of(network, tmp_path), backends()["onnxruntime"].load, CPU)
    assert max(worst_of(network, session, drawn(call)) for call in CALLS.values()) <= LIMIT


@pytest.mark.parametrize(("change", "reason"), [
    ({"attention_mask": torch.ones(1, 9)}, "attention_mask"),
    ({"guidance": torch.ones(1)}, "guidance"),
    ({"x": torch.zeros(1, 16, 3, 8, 6)}, "several pictures in a row"),
    ({"hint": torch.zeros(1, 16, 3, 8, 6)}, "several pictures in a row"),
])  # fmt: skip
def test_what_no_engine_takes_is_a_reason(network: NativeNetwork, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        network.architecture().binding(network.module)(drawn(Call()) | change)


def encode(pixels: torch.Tensor) -> torch.Tensor:
    """A latent of 16 channels and one picture in a row, as the VAE of this family gives it; no such VAE is tiny."""
    latent = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8).repeat(1, 6, 1, 1)[:, :16]
    return latent.unsqueeze(2) * 4 - 2


def applied(control: ControlNet, strength: float, end: float, before: ControlNet | None = None) -> ControlNet:
    vae = SimpleNamespace(spacial_compression_encode=lambda: 8, encode=encode)
    image = torch.rand(1, 3, 64, 48, generator=torch.Generator().manual_seed(int(10 * strength)))
    control = control.copy().set_cond_hint(image, strength, (0.0, end), vae=vae)
    control.set_previous_controlnet(before)
    return control


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_whole_prompts_are_natives(models: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """One ControlNet, two of which the second ends earlier, beside references; then without it."""
    network = network_of(models, MODEL)
    control_network = NativeNetwork.of_controlnet(control := loaded(models), FILE)
    if backend == "onnxruntime":
        for one in (network, control_network):
            engine_of(one, tmp_path)
    patched = Patched(network, tmp_path, backend)
    choice = EngineChoice(profile_of(control_network), backend=backend)
    handle = EngineHandle.look_up(control_network, choice, Library([tmp_path]), f"control of {tmp_path}")
    backed, native = back_with_engine(control, handle), loaded(models)
    plain = sample(network_of(models, MODEL).patcher, WIDTH)
    for count, options, calls in ((1, {}, 6), (2, {"words": (9, 9)}, 5), (1, {"references": [(8, 6)]}, 6)):
        results = []
        for net in (native, backed):
            stack = applied(net, 0.7, 1.0)
            if count == 2:
                stack = applied(net, 1.5, 0.5, stack)
            given = options | {"control": stack, "control_apply_to_uncond": False}
            model = network_of(models, MODEL).patcher
            results.append(patched.sample(WIDTH, **given) if net is backed else sample(model, WIDTH, **given))
        expected, found = results
        assert error(expected, plain) > 0.01, "the ControlNet acts"
        assert error(found, expected) <= LIMIT
        assert patched.counts[1] == 0, patched.handle.stats.reasons
        assert (handle.stats.engine, handle.stats.native) == (calls, 0), handle.stats.reasons
    assert error(patched.sample(WIDTH), plain) <= LIMIT, "nothing of it is left"
