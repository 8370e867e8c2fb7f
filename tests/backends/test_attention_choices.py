"""The choice of attention: engines take the place of exact attention alone, and say where native's is coarser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from builds import small_network
from comfy.model_patcher import ModelPatcher
from compiling import graph_of
from hybrid_trt.architectures import architecture_of
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model import attention as looked_at
from hybrid_trt.comfy_model.structure_hash import structure_hash
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.engine_status import status
from hybrid_trt.sampling.report import report_text
from live_sessions import error as live_error
from live_sessions import opened
from memory_fixtures import file, library
from newer_attention import add_config, newer, set_model_optimized_attention
from patched import LIMIT, PROFILE, Patched, load
from small_networks import native_call, network

from sampling import STEPS, error, sample

__all__ = ["file", "library", "newer"]  # fixtures: pytest finds them by name

INT8 = "comfy_kitchen_int8"
REMARK = "Native computes some attention in INT8; the engine is exact"


@pytest.fixture(scope="module")
def exact(file: Path) -> torch.Tensor:
    """Return native's latent with exact attention."""
    return sample(load(file))


def chosen(model: Any, attention: ModuleType, name: str) -> Any:
    """The model as the node *Model Attention Backend* gives it."""
    other = model.clone()
    other.set_model_optimized_attention(attention.get_attention_function(name))
    return other


def sampled(patched: Patched, model: Any) -> torch.Tensor:
    patched.model = model
    return patched.sample()


def detail(patched: Patched) -> str:
    (found,) = patched.handle.stats.details.values()
    return found


@pytest.mark.parametrize(("name", "backend", "later"), [
    ("pytorch", "torch", True), ("split", "onnxruntime", True), ("sub_quad", "onnxruntime", True),
    ("split", "onnxruntime", False),  # as versions of ComfyUI in between have it
])  # fmt: skip
def test_who_chooses_exact_attention_keeps_the_engine(
    file: Path, library: Library, name: str, backend: str, later: bool, exact: torch.Tensor,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if later:
        attention = request.getfixturevalue("newer")
    else:
        from comfy.ldm.modules import attention

        monkeypatch.setattr(
            ModelPatcher, "set_model_optimized_attention", set_model_optimized_attention, raising=False)
    patched = Patched(load(file), library, backend)
    assert error(sampled(patched, chosen(patched.model, attention, name)), exact) <= LIMIT
    assert patched.counts == (STEPS, 0)


def test_who_chooses_int8_attention_gets_it_and_its_name_is_told(
    newer: ModuleType, file: Path, library: Library, exact: torch.Tensor
) -> None:
    patched = Patched(load(file), library)
    reference = sample(chosen(load(file), newer, INT8))
    assert error(reference, exact) > 1e-4, "it is no other attention"
    assert error(sampled(patched, chosen(patched.model, newer, INT8)), reference) <= LIMIT
    assert patched.counts == (0, STEPS)
    assert detail(patched) == f"changed by another node: attention by {INT8}"


def halved(usual: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    return 0.5 * usual(*args, **kwargs)


class Sparse:
    """An override of no function's form, without a weak reference to it."""

    __slots__ = ()

    def __call__(self, usual: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 0.5 * usual(*args, **kwargs)


def like_comfyuis_own(attention: ModuleType) -> Callable:
    """An override that closes over an exact function under the same names, and does more than to call it."""
    optimized_attention = attention.get_attention_function("pytorch")

    def override(_usual: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 0.5 * optimized_attention(*args, **kwargs)

    return override


def by_another_pack(attention: ModuleType) -> Callable:
    """A pack's own function, of the name that ComfyUI's has, through ComfyUI's setter."""

    def attention_pytorch(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 0.5 * attention.get_attention_function("pytorch")(*args, **kwargs)

    model = SimpleNamespace(model_options={"transformer_options": {}})
    set_model_optimized_attention(model, attention_pytorch)
    return model.model_options["transformer_options"]["optimized_attention_override"]


def with_another_form(attention: ModuleType) -> Callable:
    """An exact one whose form for tensors that are handed over somebody has replaced."""
    model = SimpleNamespace(model_options={"transformer_options": {}})
    set_model_optimized_attention(model, attention.get_attention_function("pytorch"))
    override = model.model_options["transformer_options"]["optimized_attention_override"]
    override.container_function = attention.get_attention_function(INT8).container_function
    return override


UNKNOWN = {
    "test_attention_choices.halved": lambda _: halved,
    "test_attention_choices.Sparse": lambda _: Sparse(),
    "test_attention_choices.override": like_comfyuis_own,
    "test_attention_choices.attention_pytorch": by_another_pack,
    "newer_attention.override": with_another_form,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_attention_that_nobody_knows_is_natives_and_its_name_is_told(
    newer: ModuleType, file: Path, library: Library, name: str, exact: torch.Tensor
) -> None:
    patched, native, override = Patched(load(file), library), load(file), UNKNOWN[name](newer)
    model = patched.model.clone()
    for one in (native, model):
        one.model_options["transformer_options"]["optimized_attention_override"] = override
    reference = sample(native)
    assert error(reference, exact) > 1e-4, "it is no other attention"
    assert error(sampled(patched, model), reference) <= LIMIT
    assert patched.counts == (0, STEPS)
    assert detail(patched) == f"changed by another node: attention by {name}"


def test_a_packs_path_is_no_part_of_the_name() -> None:
    def override() -> None: ...

    for module in ("/home/me/ComfyUI/custom_nodes/sparse", r"C:\ComfyUI\custom_nodes\sparse", "comfy_extras.sparse"):
        override.__module__ = module
        assert looked_at._name(override) == "sparse.override"


def test_an_override_is_looked_at_once(
    newer: ModuleType, file: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, usual = [], looked_at._look_at_override
    monkeypatch.setattr(looked_at, "_look_at_override", lambda override: seen.append(override) or usual(override))
    patched = Patched(load(file), library)
    for name in ("split", INT8):
        model = chosen(patched.model, newer, name)
        for _ in range(2):
            sampled(patched, model)
    assert len(seen) == 2


def test_an_override_that_is_gone_is_not_kept(newer: ModuleType, file: Path) -> None:
    override = chosen(load(file), newer, INT8).model_options["transformer_options"]["optimized_attention_override"]
    assert looked_at.other_attention(override) == INT8
    before = len(looked_at._overrides)
    del override
    assert len(looked_at._overrides) < before


def with_a_switch(attention: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str = INT8) -> None:
    """ComfyUI as it is when it was started with --use-ck-attention."""
    for place in ("optimized_attention", "optimized_attention_masked"):
        monkeypatch.setattr(attention, place, attention.get_attention_function(name))


def said(patched: Patched) -> tuple[int, int]:
    """Count the remark on the node and in the report."""
    return status(patched.handle).count(REMARK), report_text([patched.handle.stats]).count(REMARK)


def layer_of(model: Any) -> str:
    """The name of what one of the layers prefers."""
    return next(name for name, _ in model.model.named_modules() if name.endswith("attn1.comfy_attention"))


def preferring(model: Any, function: Callable) -> Any:
    """A model whose checkpoint has a preference in it."""
    part = model.model.get_submodule(layer_of(model))
    part.config, part.function = {"attention": INT8}, function
    return model


@pytest.mark.parametrize(("backend", "switch"), [("onnxruntime", True), ("onnxruntime", False), ("torch", False)],
                         ids=["comfyui was started so", "a checkpoint prefers it", "and torch is exact"])  # fmt: skip
def test_an_engine_is_exact_where_native_computes_int8_attention_and_says_so(
    newer: ModuleType, file: Path, library: Library, backend: str, exact: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch, switch: bool,
) -> None:  # fmt: skip
    if switch:
        with_a_switch(newer, monkeypatch)
    own, native = ((load(file) if switch else preferring(load(file), newer.get_attention_function(INT8)))
                   for _ in range(2))  # fmt: skip
    assert error(sample(native), exact) > 1e-5
    patched = Patched(own, library, backend)
    assert switch or any(key.endswith("comfy_attention.config") for key in patched.native.model.state_dict())
    assert error(patched.sample(), exact) <= LIMIT
    assert patched.counts == (STEPS, 0)
    assert said(patched) == (1, 1)
    if switch:
        with_a_switch(newer, monkeypatch, "split")
        patched.sample()
        assert said(patched) == (0, 0)


def test_nothing_is_said_where_the_user_chose_exact_attention_for_the_model(
    newer: ModuleType, file: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_a_switch(newer, monkeypatch)
    patched = Patched(chosen(load(file), newer, "pytorch"), library)
    patched.sample()
    assert patched.counts == (STEPS, 0)
    assert said(patched) == (0, 0)


def test_a_preference_that_nobody_knows_is_natives(
    newer: ModuleType, file: Path, library: Library, exact: torch.Tensor
) -> None:
    def sol(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 0.5 * newer.attention_pytorch(*args, **kwargs)

    patched, reference = Patched(preferring(load(file), sol), library), sample(preferring(load(file), sol))
    assert error(reference, exact) > 1e-5
    assert error(patched.sample(), reference) <= LIMIT
    assert patched.counts == (0, STEPS)
    assert detail(patched) == "changed by another node: attention by test_attention_choices.sol"


def with_config(model: Any, function: Callable) -> Any:
    other = model.clone()
    add_config(other, layer_of(other), function)
    return other


@pytest.mark.parametrize(("backend", "before"), [("onnxruntime", True), ("torch", True), ("torch", False)])
def test_a_lora_that_only_prefers_an_attention_keeps_the_engine(
    newer: ModuleType, file: Path, library: Library, backend: str, before: bool, exact: torch.Tensor
) -> None:
    int8 = newer.get_attention_function(INT8)
    theirs = sample(with_config(load(file), int8))
    assert error(theirs, exact) > 1e-5
    model = load(file)
    patched = Patched(with_config(model, int8) if before else model, library, backend)
    other, native = with_config(patched.model, int8), with_config(model, int8)
    for _ in range(2):
        assert error(sampled(patched, other), exact) <= LIMIT
        assert patched.counts == (STEPS, 0)
        assert report_text([patched.handle.stats]).count(REMARK) == 1
        assert error(sample(native), theirs) <= LIMIT, "and leaves it on the model"


def test_a_loras_other_settings_are_natives_and_named(newer: ModuleType, file: Path, library: Library) -> None:
    class Configurable(torch.nn.GELU):
        def with_config(self, _config: object) -> Configurable:
            return self

    part, model = "diffusion_model.time_embed.1", load(file)
    model.add_object_patch(part, Configurable())
    patched = Patched(model, library)
    patched.sample()
    assert patched.counts == (0, STEPS)
    assert detail(patched) == f"changed by another node: a LoRA's 'config' changes {part}"


def a_call(net: Any) -> dict[str, torch.Tensor]:
    sizes = {"B": 1, "H": 8, "W": 12, "T": 77, "HB": 1}
    return sample_inputs(architecture_of(net.module).inputs(net.module, "float32"), sizes, seed=3)


def graph_of_network(net: Any) -> torch.fx.GraphModule:
    """Return the graph that the torch backend makes of a network."""
    return graph_of(architecture_of(net.module).function(net.module), list(a_call(net).values()))


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_live_weights_of_later_layers_compute_what_native_does(newer: ModuleType, kind: str) -> None:
    net = network(kind, "unlike_levels")
    assert any(name.endswith("comfy_attention") for name, _ in net.module.named_modules())
    call = a_call(net)
    assert live_error(opened(net), net, call) <= 1e-5


@pytest.mark.slow
def test_later_layers_are_the_same_network_to_hashes_builds_and_compilers(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    plain = small_network()
    call = a_call(plain)
    expected = native_call(plain, call)[0]
    graph = graph_of_network(plain)
    attention = request.getfixturevalue("newer")
    net = small_network()
    part = net.module.middle_block[1].transformer_blocks[0].attn2.comfy_attention
    part.function, part.config = attention.get_attention_function(INT8), {"attention": INT8}
    assert relative_error(native_call(net, call)[0], expected) > 1e-5, "its layers are the later ones"
    assert structure_hash(net.module) == structure_hash(plain.module)
    assert net.weights_hash() == plain.weights_hash()
    assert graph_of_network(net).code == graph.code
    order = BuildOrder(net, "float32", PROFILE, backends()["onnxruntime"])
    engine = build_engine(order, Library([tmp_path]), lambda *_: None, run=run_here)
    assert engine.manifest.identity.weights == plain.weights_hash()
    assert engine.manifest.parity["rel_err"] <= 1e-5
