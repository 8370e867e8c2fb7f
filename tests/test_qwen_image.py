"""Qwen-Image and its Edit models: each call and whole prompts equal native's, what no engine takes is a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.sample
import pytest
import token_networks
import torch
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.shapes import Picture, Profile, RequestedSizes, outside
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.model_wrapper import patch_model
from hybrid_trt.sessions.file_session import FileSession
from patched import sampling_node
from tiny_models import QWEN_IMAGE

from sampling import error

CPU = torch.device("cpu")
LIMIT = 1e-5
WIDTH, FEATURES = QWEN_IMAGE["joint_attention_dim"], 64
ASKED = RequestedSizes(32, 64, 256, 2, 128)
Session = Callable[[dict], dict]

CALLS: dict[str, tuple[int, tuple[int, int], int, list[tuple[int, int]], str | None]] = {
    "plain": (1, (8, 6), 9, [], None),
    "odd sides, a batch": (2, (13, 11), 30, [], None),
    "a prompt of one token": (1, (8, 8), 1, [], None),
    "one reference": (1, (8, 6), 9, [(8, 6)], "index"),
    "two references, odd sides, a batch": (2, (13, 11), 77, [(8, 8), (5, 9)], "index"),
    "references of time zero": (2, (8, 8), 7, [(8, 8), (5, 9), (7, 3)], "index_timestep_zero"),
    "references beside each other": (1, (8, 9), 7, [(8, 8), (9, 9), (7, 13)], "uxo"),
    "references of negative index": (1, (8, 8), 7, [(8, 8), (9, 9)], "negative_index"),
    "the model's own way to place them": (1, (8, 8), 7, [(8, 8), (9, 9)], None),
}
"""Batch, sides of the latent, tokens, sides of the references, their method."""


@pytest.fixture
def model(models: dict[str, Path]) -> ModelPatcher:
    return token_networks.load(str(models["tiny_qwen_image"]))


@pytest.fixture
def network(model: ModelPatcher) -> NativeNetwork:
    return NativeNetwork.of_model(model, "tiny_qwen_image")


def profile_of(network: NativeNetwork) -> Profile:
    return network.architecture().profile(ASKED)


def engine_of(network: NativeNetwork, folder: Path) -> Engine:
    order = BuildOrder(network, "float32", profile_of(network), backends()["onnxruntime"])
    return build_engine(order, Library([folder]), lambda *_: None, run=run_here)


def a_call(name: str, seed: int = 1) -> dict[str, Any]:
    batch, sides, words, references, method = CALLS[name]
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    call = {"x": drawn(batch, 16, 1, *sides), "timesteps": torch.rand(batch, generator=generator),
            "context": drawn(batch, words, WIDTH)}  # fmt: skip
    if references:
        call["ref_latents"] = [drawn(batch, 16, 1, *one) for one in references]
    if method:
        call["ref_latents_method"] = method
    return call


def residuals(call: dict[str, Any], full: bool = True) -> dict[str, list]:
    """Two blocks' residuals, or one of the two; made once for the whole batch."""
    rows, columns = (-(-side // 2) for side in call["x"].shape[-2:])
    own = [3 * torch.randn(1, rows * columns, FEATURES) for _ in range(2)]
    return {"input": own if full else [None, own[1]], "output": [], "middle": []}


def natively(network: NativeNetwork, call: dict[str, Any], **more: Any) -> torch.Tensor:
    given = {**call, **more, "transformer_options": {}}
    if (control := given.get("control")) is not None:
        given["control"] = {name: list(found) for name, found in control.items()}
    return network.module(given.pop("x"), given.pop("timesteps"), given.pop("context"), **given)


def errors_of(network: NativeNetwork, run: Session, call: dict[str, Any]) -> tuple[float, list[float]]:
    """Return the largest error without control, with all and with one residual; and what these change natively."""
    bind = network.architecture().binding(network.module)
    found, natives = [], []
    with torch.inference_mode():
        for control in (None, residuals(call), residuals(call, full=False)):
            natives.append(natively(network, call, control=control))
            bound = bind({**call, "control": control})
            result = bound.finish(run(bound.inputs))
            assert result.shape == call["x"].shape
            found.append(relative_error(result, natives[-1]))
    return max(found), [relative_error(one, natives[0]) for one in natives[1:]]


@pytest.mark.parametrize("name", CALLS)
def test_each_call_on_live_weights_is_natives(network: NativeNetwork, name: str) -> None:
    session = LiveSession(network, backends()["torch"], "float32")
    worst, effects = errors_of(network, session.run, a_call(name))
    assert worst <= LIMIT
    assert min(effects) > 0.01, "each residual acts"


def test_one_engine_of_onnx_runtime_serves_all_calls(network: NativeNetwork, tmp_path: Path) -> None:
    engine = engine_of(network, tmp_path)
    session = FileSession(engine, backends()["onnxruntime"].load, CPU)
    worst = {name: errors_of(network, session.run, a_call(name))[0] for name in CALLS}
    assert max(worst.values()) <= LIMIT, worst


def test_references_act_and_their_method_too(network: NativeNetwork) -> None:
    """So that the calls above prove something."""
    call = a_call("references of time zero")
    methods = ("index", "index_timestep_zero", "uxo", "negative_index")
    results = [natively(network, {**call, "ref_latents_method": method}) for method in methods]
    results.append(natively(network, {name: call[name] for name in ("x", "timesteps", "context")}))
    for i, one in enumerate(results):
        assert all(relative_error(one, other) > 1e-3 for other in results[:i]), i


def test_half_precision_has_positions_of_half_precision_as_native_has(network: NativeNetwork) -> None:
    specs = {spec.name: spec.dtype for spec in network.architecture().inputs(network.module, "bfloat16")}
    assert {name: dtype for name, dtype in specs.items() if dtype != "bfloat16"} == {
        "timestep": "float32", "reference_timestep": "float32"}


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
        network.architecture().binding(network.module)({**a_call("plain"), **change})


def test_the_same_positions_are_the_same_tensors(network: NativeNetwork) -> None:
    """So that a captured graph copies them once."""
    bind, call = network.architecture().binding(network.module), a_call("one reference")
    first, second = (bind({**call, "x": call["x"] + i}).inputs for i in range(2))
    other = bind({**call, "context": call["context"][:, :5]}).inputs
    for name in ("pe_image", "pe_context", "pe_reference"):
        assert first[name] is second[name]
    assert other["pe_context"].shape != first["pe_context"].shape


def sample(model: ModelPatcher, size: tuple[int, int] = (8, 6), words: tuple[int, int] = (9, 30), cfg: float = 3.0,
           references: list[tuple[int, int]] | None = None) -> torch.Tensor:  # fmt: skip
    """A latent as KSampler samples it."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    extras = {"reference_latents": [drawn(1, 16, 1, *one) for one in references]} if references else {}
    positive, negative = ([[drawn(1, count, WIDTH), dict(extras)]] for count in words)
    noise = drawn(1, 16, 1, *size)
    with torch.inference_mode():
        return comfy.sample.sample(
            model, noise, 3, cfg, "euler", "simple", positive, negative, torch.zeros_like(noise), seed=7,
            disable_pbar=True)  # fmt: skip


class Patched:
    """The model with an engine behind the sampler patch."""

    def __init__(self, model: ModelPatcher, network: NativeNetwork, library: Library, backend: str):
        self.handle = EngineHandle(network, EngineChoice(profile_of(network), backend=backend), library, backend)
        self.model = patch_model(model, self.handle)

    def sample(self, **options: Any) -> torch.Tensor:
        with sampling_node():
            return sample(self.model, **options)

    @property
    def counts(self) -> tuple[int, int]:
        return self.handle.stats.engine, self.handle.stats.native


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_whole_prompts_are_natives(
    models: dict[str, Path], model: ModelPatcher, network: NativeNetwork, tmp_path: Path, backend: str
) -> None:
    if backend == "onnxruntime":
        engine_of(network, tmp_path)
    patched = Patched(model, network, Library([tmp_path]), backend)
    for options, calls in (({}, 6), ({"size": (13, 11), "words": (9, 9)}, 3), ({"cfg": 1.0, "words": (77, 1)}, 3),
                           ({"references": [(8, 6), (5, 9)]}, 6)):  # fmt: skip
        expected = sample(token_networks.load(str(models["tiny_qwen_image"])), **options)
        assert error(patched.sample(**options), expected) <= LIMIT
        assert patched.counts == (calls, 0), patched.handle.stats.reasons


PATCHES: dict[str, Callable[[dict], dict]] = {
    "post_input": lambda given: {**given, "img": given["img"] * 1.5},
    "double_block": lambda given: {**given, "img": given["img"] * 1.5},
    "attn1_patch": lambda q, k, v, **_: {"q": q * 1.5},
}


@pytest.mark.parametrize("name", [*PATCHES, "block replaced", "attention replaced"])
def test_a_patch_inside_the_network_gives_natives_picture_for_a_reason(
    models: dict[str, Path], model: ModelPatcher, network: NativeNetwork, tmp_path: Path, name: str
) -> None:
    patched = Patched(model, network, Library([tmp_path]), "torch")

    def change(model: ModelPatcher) -> None:
        if name == "block replaced":
            model.set_model_patch_replace(lambda given, more: {
                **(out := more["original_block"](given)), "img": out["img"] * 1.5}, "dit", "double_block", 0)
        elif name == "attention replaced":
            model.model_options["transformer_options"]["optimized_attention_override"] = (
                lambda native, *args, **kwargs: native(*args, **kwargs) * 1.5)
        else:
            model.set_model_patch(PATCHES[name], name)

    plain = sample(native := token_networks.load(str(models["tiny_qwen_image"])))
    change(native)
    change(patched.model)
    expected = sample(native)
    assert error(expected, plain) > 1e-3, "the patch acts"
    assert error(patched.sample(), expected) == 0
    assert patched.counts == (0, 6)
    (reason,) = patched.handle.stats.reasons
    assert "patch" in reason or "changed" in reason


def test_prompts_of_two_lengths_are_two_calls_of_the_latents_batch(network: NativeNetwork) -> None:
    architecture = network.architecture()
    calls = architecture.calls(profile_of(network), Picture.sampled(120, 136, 1, cfg=4.0))
    assert [(call["B"], call["R"], call["C"], call["L"]) for call in calls] == [(1, 9, 8, 0)]


def test_without_numbers_the_profile_is_what_the_family_is_used_for(network: NativeNetwork) -> None:
    architecture = network.architecture()
    profile = architecture.profile(RequestedSizes())
    for picture in (Picture(1328, 1328, (1,)), Picture(1664, 928, (1,)), Picture(928, 1664, (1,))):
        (call,) = architecture.calls(profile, picture)
        assert outside(profile, call, architecture.symbols) is None
    assert architecture.words(profile) == "up to 2 in a batch, 256 to 1664 px, 1024 tokens"
    assert architecture.call_words(call | {"T": 30, "L": 7}) == "928x1664, 30 tokens, 7 reference tokens"
