"""Qwen-Image and its Edit models: each call and whole prompts equal native's, what no engine takes is a reason."""

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
from tiny_transformers import QWEN_IMAGE
from token_calls import (
    Call,
    Patched,
    engine_of,
    error_of,
    natively,
    network_of,
    profile_of,
    replace_attention,
    sample,
)

from sampling import error

CPU = torch.device("cpu")
LIMIT = 1e-5
FILE, WIDTH, FEATURES = "tiny_qwen_image", QWEN_IMAGE["joint_attention_dim"], 64
CALLS = {
    "plain": Call(),
    "odd sides, a batch": Call(2, (13, 11), 30),
    "a prompt of one token": Call(words=1),
    "one reference": Call(references=((8, 6),), method="index"),
    "two references, odd sides, a batch": Call(2, (13, 11), 77, ((8, 8), (5, 9)), "index"),
    "references of time zero": Call(2, (8, 8), 7, ((8, 8), (5, 9), (7, 3)), "index_timestep_zero"),
    "references beside each other": Call(1, (8, 9), 7, ((8, 8), (9, 9), (7, 13)), "uxo"),
    "references of negative index": Call(1, (8, 8), 7, ((8, 8), (9, 9)), "negative_index"),
    "the model's own way to place them": Call(1, (8, 8), 7, ((8, 8), (9, 9))),
}


@pytest.fixture
def network(models: dict[str, Path]) -> NativeNetwork:
    return network_of(models, FILE)


def residuals(call: dict[str, Any], full: bool = True) -> dict[str, list]:
    """Two blocks' residuals, or one of the two; made once for the whole batch."""
    rows, columns = (-(-side // 2) for side in call["x"].shape[-2:])
    own = [3 * torch.randn(1, rows * columns, FEATURES) for _ in range(2)]
    return {"input": own if full else [None, own[1]], "output": [], "middle": []}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_on_live_weights_is_natives(network: NativeNetwork, name: str) -> None:
    session, call = LiveSession(network, backends()["torch"], "float32"), CALLS[name].drawn(WIDTH)
    plain = natively(network, call)
    for control in (None, residuals(call), residuals(call, full=False)):
        assert error_of(network, session.run, call, control) <= LIMIT
        if control is not None:
            assert relative_error(natively(network, call, control), plain) > 0.01, "residuals act"


def test_one_engine_of_onnx_runtime_serves_all_calls(network: NativeNetwork, tmp_path: Path) -> None:
    session = FileSession(engine_of(network, tmp_path), backends()["onnxruntime"].load, CPU)
    for name, one in CALLS.items():
        call = one.drawn(WIDTH)
        for control in (None, residuals(call)):
            assert error_of(network, session.run, call, control) <= LIMIT, name


def test_references_act_and_their_method_too(network: NativeNetwork) -> None:
    """So that the calls above prove something."""
    call = CALLS["references of time zero"].drawn(WIDTH)
    methods = ("index", "index_timestep_zero", "uxo", "negative_index")
    results = [natively(network, {**call, "ref_latents_method": method}) for method in methods]
    results.append(natively(network, {name: call[name] for name in ("x", "timesteps", "context")}))
    for i, one in enumerate(results):
        assert all(relative_error(one, other) > 1e-3 for other in results[:i]), i


def test_half_precision_has_positions_of_half_precision_as_native_has(network: NativeNetwork) -> None:
    specs = {spec.name: spec.dtype for spec in network.architecture().inputs(network.module, "bfloat16")}
    assert {name: dtype for name, dtype in specs.items() if dtype != "bfloat16"} == {
        "timestep": "float32", "reference_timestep": "float32"}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), [
    ({"attention_mask": torch.ones(1, 9)}, "attention_mask"),
    ({"additional_t_cond": torch.zeros(1)}, "additional_t_cond"),
    ({"x": torch.zeros(1, 16, 3, 8, 6)}, "several pictures in a row"),
    ({"ref_latents": [torch.zeros(1, 16, 2, 8, 6)]}, "several pictures in a row"),
    ({"ref_latents": [torch.zeros(2, 16, 1, 8, 6)]}, "another batch"),
    ({"context": None}, "no prompt"),
    ({"of_another_pack": 1}, "of_another_pack"),
])  # fmt: skip
def test_what_no_engine_takes_is_a_reason(network: NativeNetwork, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        network.architecture().binding(network.module)({**Call().drawn(WIDTH), **change})


def test_the_same_positions_are_the_same_tensors(network: NativeNetwork) -> None:
    """So that a captured graph copies them once."""
    bind, call = network.architecture().binding(network.module), CALLS["one reference"].drawn(WIDTH)
    first, second = (bind({**call, "x": call["x"] + i}).inputs for i in range(2))
    other = bind({**call, "context": call["context"][:, :5]}).inputs
    for name in ("pe_image", "pe_context", "pe_reference"):
        assert first[name] is second[name]
    assert other["pe_context"].shape != first["pe_context"].shape


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_whole_prompts_are_natives(models: dict[str, Path], tmp_path: Path, backend: str) -> None:
    network = network_of(models, FILE)
    if backend == "onnxruntime":
        engine_of(network, tmp_path)
    patched = Patched(network, tmp_path, backend)
    for options, calls in (({}, 6), ({"size": (13, 11), "words": (9, 9)}, 3), ({"cfg": 1.0, "words": (77, 1)}, 3),
                           ({"references": [(8, 6), (5, 9)]}, 6),
                           ({"references": [(8, 6)], "method": "index_timestep_zero"}, 6)):  # fmt: skip
        expected = sample(network_of(models, FILE).patcher, WIDTH, **options)
        assert error(patched.sample(WIDTH, **options), expected) <= LIMIT
        assert patched.counts == (calls, 0), patched.handle.stats.reasons


def test_a_mask_of_the_prompt_gives_natives_picture_for_a_reason(models: dict[str, Path], tmp_path: Path) -> None:
    patched, mask = Patched(network_of(models, FILE), tmp_path, "torch"), torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0, 0]])
    native, plain = (sample(network_of(models, FILE).patcher, WIDTH, words=(9, 9), **entries)
                     for entries in ({"attention_mask": mask}, {}))  # fmt: skip
    assert error(native, plain) > 1e-3, "the mask acts"
    assert error(patched.sample(WIDTH, words=(9, 9), attention_mask=mask), native) == 0
    assert patched.counts[0] == 0
    assert patched.handle.stats.reasons.keys() == {"unsupported input"}


PATCHES: dict[str, Callable[..., dict]] = {
    "post_input": lambda given: {**given, "img": given["img"] * 1.5},
    "double_block": lambda given: {**given, "img": given["img"] * 1.5},
    "attn1_patch": lambda q, k, v, **_: {"q": q * 1.5},
}


def replace_block(model: ModelPatcher) -> None:
    model.set_model_patch_replace(lambda given, more: {
        **(out := more["original_block"](given)), "img": out["img"] * 1.5}, "dit", "double_block", 0)  # fmt: skip


CHANGES: dict[str, Callable[[ModelPatcher], None]] = {
    "a block": replace_block,
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


def test_prompts_of_two_lengths_are_two_calls_of_the_latents_batch(network: NativeNetwork) -> None:
    calls = network.architecture().calls(profile_of(network), Picture.sampled(120, 136, 1, cfg=4.0))
    assert [(call["B"], call["R"], call["C"], call["L"]) for call in calls] == [(1, 9, 8, 0)]


def test_without_numbers_the_profile_is_what_the_family_is_used_for(network: NativeNetwork) -> None:
    architecture = network.architecture()
    profile = architecture.profile(RequestedSizes())
    for picture in (Picture(1328, 1328, (1,)), Picture(1664, 928, (1,)), Picture(928, 1664, (1,))):
        (call,) = architecture.calls(profile, picture)
        assert outside(profile, call, architecture.symbols) is None
    assert architecture.words(profile) == "up to 2 in a batch, 256 to 1664 px, 1024 tokens"
    assert architecture.call_words(call | {"T": 30, "L": 7}) == "928x1664, 30 tokens, 7 reference tokens"
