"""Anima: each call and whole prompts equal native's, what no engine takes is a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import slow
import token_networks
import torch
from comfy.ldm.anima.model import Anima
from comfy.model_patcher import ModelPatcher
from compiling import COMPILES
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.shapes import Picture, Profile, RequestedSizes, outside
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.structure_hash import structure_hash
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, trust
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions.file_session import FileSession
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
FILE, WIDTH = "tiny_anima", 1024
CALLS = {
    "plain": Call(),
    "odd sides, a batch": Call(2, (13, 11), 30),
    "a prompt of one token": Call(words=1),
    "the longest prompt": Call(1, (5, 9), 128),
}


@pytest.fixture
def network(models: dict[str, Path]) -> NativeNetwork:
    return network_of(models, FILE)


@pytest.mark.parametrize("name", CALLS)
def test_each_call_on_live_weights_is_natives(network: NativeNetwork, name: str) -> None:
    session = LiveSession(network, backends()["torch"], "float32")
    assert error_of(network, session.run, CALLS[name].drawn(WIDTH)) <= LIMIT


def test_one_engine_of_onnx_runtime_serves_all_calls(network: NativeNetwork, tmp_path: Path) -> None:
    session = FileSession(engine_of(network, tmp_path), backends()["onnxruntime"].load, CPU)
    worst = {name: error_of(network, session.run, call.drawn(WIDTH)) for name, call in CALLS.items()}
    assert max(worst.values()) <= LIMIT, worst


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_to_float32_as_native_is(models: dict[str, Path], dtype: torch.dtype) -> None:
    """In float16 what goes from block to block is float32: it is large here, so that its rounding would show."""
    exact, half = network_of(models, FILE), NativeNetwork.of_model(token_networks.load(str(models[FILE]), dtype), FILE)
    for network in (exact, half):
        network.module.x_embedder.proj[1].weight.data.mul_(30)
    call = CALLS["odd sides, a batch"].drawn(WIDTH)
    narrow = {name: value if name == "timesteps" else value.to(dtype) for name, value in call.items()}
    session = LiveSession(half, backends()["torch"], str(dtype).removeprefix("torch."))
    with torch.inference_mode():
        wanted, native = natively(exact, call), natively(half, narrow)
        bound = half.architecture().binding(half.module)(narrow)
        found = bound.finish(session.run(bound.inputs))
    assert found.dtype == dtype
    rounding = relative_error(native.float(), wanted)
    assert relative_error(found.float(), wanted) <= 1.1 * rounding
    if dtype == torch.float16:
        assert relative_error(found.float(), native.float()) <= 0.5 * rounding


@pytest.mark.parametrize(("change", "reason"), [
    ({"x": torch.zeros(1, 16, 3, 8, 6)}, "several pictures in a row"),
    ({"timesteps": torch.zeros(1, 1)}, "timesteps of parts"),
    ({"padding_mask": torch.zeros(1, 1, 8, 6)}, "padding_mask"),
    ({"fps": torch.ones(1)}, "fps"),
    ({"t5xxl_ids": torch.zeros(1, 9)}, "t5xxl_ids"),
    ({"context": None}, "no prompt"),
    ({"control": {"input": [torch.zeros(1)]}}, "control"),
    ({"of_another_pack": 1}, "of_another_pack"),
])  # fmt: skip
def test_what_no_engine_takes_is_a_reason(network: NativeNetwork, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        network.architecture().binding(network.module)({**Call().drawn(WIDTH), **change})


def test_the_same_places_are_the_same_tensor(network: NativeNetwork) -> None:
    """So that a captured graph copies them once."""
    bind, call = network.architecture().binding(network.module), Call().drawn(WIDTH)
    first, second = (bind({**call, "x": call["x"] + i}).inputs for i in range(2))
    assert first["pe"] is second["pe"]


@pytest.mark.fault("a model keeps tensors of its last call as if they were its settings",
                   see="nothing: engines are found, the tensors are not kept")
def test_what_a_call_leaves_on_the_network_is_no_part_of_it(models: dict[str, Path]) -> None:
    """Else engines would not be found again, and a copy would keep the tensors."""
    used, fresh = network_of(models, FILE), network_of(models, FILE)
    natively(used, Call().drawn(WIDTH))
    assert used.module.crossattn_emb is not None
    assert structure_hash(used.module) == structure_hash(fresh.module)
    session = LiveSession(used, backends()["torch"], "float32")
    assert not hasattr(session.live.weights.module, "crossattn_emb")
    assert isinstance(session.live.weights.module, Anima)


def test_what_makes_the_prompt_ready_is_not_held_a_second_time(network: NativeNetwork) -> None:
    session = LiveSession(network, backends()["torch"], "float32")
    assert error_of(network, session.run, Call().drawn(WIDTH)) <= LIMIT
    held = {name: p.numel() * p.element_size() for name, p in network.module.named_parameters()}
    adapters = sum(size for name, size in held.items() if name.startswith("llm_adapter."))
    assert 0 < adapters == sum(held.values()) - session.live.weights.most_bytes


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_whole_prompts_are_natives(models: dict[str, Path], tmp_path: Path, backend: str) -> None:
    network = network_of(models, FILE)
    if backend == "onnxruntime":
        engine_of(network, tmp_path)
    patched = Patched(network, tmp_path, backend)
    for options, calls in (({}, 6), ({"size": (13, 11), "words": (12, 12)}, 3), ({"cfg": 1.0, "words": (77, 1)}, 3)):
        expected = sample(network_of(models, FILE).patcher, WIDTH, **options)
        assert error(patched.sample(WIDTH, **options), expected) <= LIMIT
        assert patched.counts == (calls, 0), patched.handle.stats.reasons


def test_loras_before_and_behind_the_engine_give_natives_latent(models: dict[str, Path], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    lora = {f"diffusion_model.blocks.{i}.{layer}.lora_{part}.weight": 0.1 * torch.randn(shape, generator=generator)
            for i in range(2) for layer in ("self_attn.q_proj", "cross_attn.output_proj")
            for part, shape in (("A", (4, 256)), ("B", (256, 4)))}  # fmt: skip

    def with_lora(model: ModelPatcher, strength: float) -> ModelPatcher:
        return comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]

    before = NativeNetwork.of_model(with_lora(network_of(models, FILE).patcher, 0.7), FILE)
    patched, native = Patched(before, tmp_path, "torch"), with_lora(network_of(models, FILE).patcher, 0.7)
    plain = sample(network_of(models, FILE).patcher, WIDTH)
    expected = sample(native, WIDTH)
    assert error(expected, plain) > 1e-3, "it acts"
    assert error(patched.sample(WIDTH), expected) <= LIMIT
    patched.model = with_lora(patched.model, -0.4)
    assert error(patched.sample(WIDTH), sample(with_lora(native, -0.4), WIDTH)) <= LIMIT
    assert patched.counts == (6, 0), patched.handle.stats.reasons


PATCHES: dict[str, Callable[..., Any]] = {
    "post_input": lambda given: {**given, "img": given["img"] * 1.5},
    "attn1_patch": lambda q, k, v, **_: {"v": v * 1.5},
    "attn2_patch": lambda q, k, v, **_: {"v": v * 1.5},
    "mlp_patch": lambda given: {**given, "x": given["x"] * 1.5},
}
CHANGES: dict[str, Callable[[ModelPatcher], None]] = {
    "attention": replace_attention,
    **{name: lambda model, name=name: model.set_model_patch(PATCHES[name], name) for name in PATCHES},
}


@slow.when("attn2_patch")
@pytest.mark.parametrize("name", CHANGES)
def test_a_patch_inside_the_network_gives_natives_picture_for_a_reason(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """LLLite is such patches."""
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


def test_a_picture_is_one_call_with_both_prompts(network: NativeNetwork) -> None:
    (call,) = network.architecture().calls(profile_of(network), Picture.sampled(120, 136, 1, cfg=4.0))
    assert (call["B"], call["R"], call["C"]) == (2, 9, 8)


def test_without_numbers_the_profile_is_what_the_family_is_used_for(network: NativeNetwork) -> None:
    architecture = network.architecture()
    profile = architecture.profile(RequestedSizes())
    for picture in (Picture(1024, 1024, (1,)), Picture(1536, 768, (1,)), Picture(832, 1216, (1,))):
        (call,) = architecture.calls(profile, picture)
        assert outside(profile, call, architecture.symbols) is None
    assert architecture.words(profile) == "up to 2 in a batch, 512 to 1536 px, 512 tokens"
    assert architecture.call_words(call) == "832x1216, 512 tokens"


@pytest.mark.slow
@COMPILES
def test_one_compiled_file_serves_prompts_of_any_length(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    network, call = network_of(models, FILE), {"B": 2, "R": 4, "C": 3, "T": 97}
    order = BuildOrder(network, "float32", Profile.around([call]), backends()["torch"], calls=(call,))
    build_engine(order, Library([tmp_path]), lambda *_: None)
    patched = Patched(network, tmp_path, "torch")
    for words in (12, 130):
        expected = sample(network_of(models, FILE).patcher, WIDTH, words=(words, words))
        assert error(patched.sample(WIDTH, words=(words, words)), expected) <= LIMIT
        assert patched.counts == (3, 0), patched.handle.stats.reasons
        assert patched.handle.session.uncovered is None, "the file served"
