"""Krea 2: each call and whole prompts equal native's, what no engine takes is a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.shapes import Picture, RequestedSizes, outside
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions.file_session import FileSession
from tiny_transformers import KREA2
from token_calls import Call, Patched, engine_of, error_of, natively, network_of, replace_attention, sample

from sampling import error

CPU = torch.device("cpu")
LIMIT = 1e-5
FILE, WIDTH = "tiny_krea2", KREA2["txtlayers"] * KREA2["txtdim"]
CALLS = {
    "plain": Call(),
    "odd sides, a batch": Call(2, (13, 11), 30),
    "a prompt of one token": Call(words=1),
    "one reference": Call(references=((8, 6),), method="index"),
    "two references, odd sides, a batch": Call(2, (13, 11), 77, ((8, 8), (5, 9)), "index"),
    "references of time zero": Call(2, (8, 8), 7, ((8, 8), (5, 9), (7, 3)), "index_timestep_zero"),
    "references that native passes over": Call(1, (8, 8), 7, ((8, 8), (9, 9))),
}


@pytest.fixture
def network(models: dict[str, Path]) -> NativeNetwork:
    return network_of(models, FILE)


@pytest.mark.parametrize("name", CALLS)
def test_each_call_on_live_weights_is_natives(network: NativeNetwork, name: str) -> None:
    session = LiveSession(network, backends()["torch"], "float32")
    assert error_of(network, session.run, CALLS[name].drawn(WIDTH)) <= LIMIT


def test_a_latent_without_a_row_of_pictures_keeps_its_dimensions(network: NativeNetwork) -> None:
    session, call = LiveSession(network, backends()["torch"], "float32"), Call(2, (13, 11)).drawn(WIDTH)
    assert error_of(network, session.run, {**call, "x": call["x"][:, :, 0]}) <= LIMIT


def test_one_reference_for_a_whole_batch_is_repeated(network: NativeNetwork) -> None:
    session, call = LiveSession(network, backends()["torch"], "float32"), Call(2, method="index").drawn(WIDTH)
    assert error_of(network, session.run, {**call, "ref_latents": [torch.randn(1, 16, 1, 8, 6)]}) <= LIMIT


def test_one_engine_of_onnx_runtime_serves_all_calls(network: NativeNetwork, tmp_path: Path) -> None:
    session = FileSession(engine_of(network, tmp_path), backends()["onnxruntime"].load, CPU)
    worst = {name: error_of(network, session.run, call.drawn(WIDTH)) for name, call in CALLS.items()}
    assert max(worst.values()) <= LIMIT, worst


def test_references_act_and_their_method_too(network: NativeNetwork) -> None:
    """So that the calls above prove something."""
    call = CALLS["references of time zero"].drawn(WIDTH)
    results = [natively(network, {**call, "ref_latents_method": method}) for method in ("index", "index_timestep_zero")]
    results.append(natively(network, {name: call[name] for name in ("x", "timesteps", "context")}))
    for i, one in enumerate(results):
        assert all(relative_error(one, other) > 1e-3 for other in results[:i]), i


def test_half_precision_has_positions_in_float32_as_native_has(network: NativeNetwork) -> None:
    specs = {spec.name: spec.dtype for spec in network.architecture().inputs(network.module, "bfloat16")}
    assert {name for name, dtype in specs.items() if dtype == "float32"} == {
        "timestep", "reference_timestep", "pe_image", "pe_reference"}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), [
    ({"x": torch.zeros(1, 16, 3, 8, 6)}, "several pictures in a row"),
    ({"ref_latents": [torch.zeros(1, 16, 2, 8, 6)], "ref_latents_method": "index"}, "several pictures in a row"),
    ({"context": None}, "no prompt"),
    ({"control": {"input": [torch.zeros(1)]}}, "control"),
    ({"of_another_pack": 1}, "of_another_pack"),
])  # fmt: skip
def test_what_no_engine_takes_is_a_reason(network: NativeNetwork, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        network.architecture().binding(network.module)({**Call().drawn(WIDTH), **change})


def test_the_same_positions_are_the_same_tensors(network: NativeNetwork) -> None:
    """So that a captured graph copies them once."""
    bind, call = network.architecture().binding(network.module), CALLS["one reference"].drawn(WIDTH)
    first, second = (bind({**call, "x": call["x"] + i}).inputs for i in range(2))
    for name in ("pe_image", "pe_reference"):
        assert first[name] is second[name]


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_whole_prompts_are_natives(models: dict[str, Path], tmp_path: Path, backend: str) -> None:
    network = network_of(models, FILE)
    if backend == "onnxruntime":
        engine_of(network, tmp_path)
    patched = Patched(network, tmp_path, backend)
    for options, calls in (({}, 6), ({"size": (13, 11), "words": (9, 9)}, 3), ({"cfg": 1.0, "words": (77, 1)}, 3),
                           ({"references": [(8, 6), (5, 9)], "method": "index"}, 6),
                           ({"references": [(8, 6)], "method": "index_timestep_zero"}, 6)):  # fmt: skip
        expected = sample(network_of(models, FILE).patcher, WIDTH, **options)
        assert error(patched.sample(WIDTH, **options), expected) <= LIMIT
        assert patched.counts == (calls, 0), patched.handle.stats.reasons


PATCHES: dict[str, Callable[..., Any]] = {
    "post_input": lambda given: {**given, "img": given["img"] * 1.5},
    "attn1_patch": lambda q, k, v, **_: {"q": q * 1.5},
    "attn1_output_patch": lambda out, _options: out * 1.5,
}
CHANGES: dict[str, Callable[[ModelPatcher], None]] = {
    "attention": replace_attention,
    **{name: lambda model, name=name: model.set_model_patch(PATCHES[name], name) for name in PATCHES},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_patch_inside_the_network_gives_natives_picture_for_a_reason(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    patched, native = Patched(network_of(models, FILE), tmp_path, "torch"), network_of(models, FILE).patcher
    plain = sample(native, WIDTH)
    CHANGES[name](native)
    CHANGES[name](patched.model)
    expected = sample(native, WIDTH)
    assert error(expected, plain) > 1e-3, "the patch acts"
    assert error(patched.sample(WIDTH), expected) == 0
    assert patched.counts == (0, 6)
    (reason,) = patched.handle.stats.reasons
    assert "patch" in reason


def test_without_numbers_the_profile_is_what_the_family_is_used_for(network: NativeNetwork) -> None:
    architecture = network.architecture()
    profile = architecture.profile(RequestedSizes())
    for picture in (Picture(1024, 1024, (1,)), Picture(1536, 768, (1,)), Picture(832, 1216, (1,))):
        (call,) = architecture.calls(profile, picture)
        assert outside(profile, call, architecture.symbols) is None
    assert architecture.words(profile) == "up to 2 in a batch, 256 to 1536 px, 1024 tokens"
