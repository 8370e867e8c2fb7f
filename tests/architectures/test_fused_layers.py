"""Layers with one input are one product, and a hint is encoded outside of its engine: the same as native."""

from __future__ import annotations

from typing import Any

import pytest
import slow
import torch
from comfy.ldm.modules.attention import BasicTransformerBlock
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock
from hybrid_trt.architectures.families import ldm
from hybrid_trt.architectures.fused_linear import FusedLinear, fuse
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Reason, Unavailable
from hybrid_trt.engine_library.engine import relative_error
from live_sessions import error, given_for, opened
from small_networks import CPU, HintEncoder, native_call, network, with_lora
from torch.utils._python_dispatch import TorchDispatchMode

LAYOUTS = ["sd15_as_published", "sdxl_as_published", "unlike_levels"]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)
        return func(*args, **kwargs or {})


def products(call: Any) -> int:
    with torch.no_grad(), Products() as counter:
        call()
    return counter.count


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_a_call_makes_one_product_for_what_takes_the_same_input(kind: str, layout: str) -> None:
    net = network(kind, layout)
    session, given = opened(net), given_for(net)
    assert error(session, net, given) <= 1e-5
    live = session.live
    ready = session._prepared(live.passes.run(given, {}, 0), session._plans.of(live.passes.run(given, {}, 0)).symbols)
    blocks = sum(isinstance(layer, BasicTransformerBlock) for layer in net.module.modules())
    resblocks = sum(isinstance(layer, ResBlock) for layer in net.module.modules())
    saved = 2 * blocks + (2 * blocks - 1) + (resblocks - 1)
    native = products(lambda: native_call(net, given))
    assert native - products(lambda: live.function(*[ready[spec.name] for spec in live.inputs])) == saved
    assert saved > native / 3


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
@slow.when("unet")
def test_each_fused_parameter_is_followed(kind: str) -> None:
    net = network(kind, "unlike_levels")
    session, given = opened(net), given_for(net)
    assert error(session, net, given) <= 1e-5
    ends = ("to_q.weight", "to_k.weight", "to_v.weight", "emb_layers.1.weight", "emb_layers.1.bias")
    names = [name for name, _ in net.patcher.model.named_parameters() if name.endswith(ends)]
    assert len(names) > 20
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        plain = list(session.run(given).values())
    for name in names:
        value = net.patcher.model.get_parameter(name)
        other = NativeNetwork(net.patcher.clone(), net.module, net.prefix, net.dtype, net.label, net.role)
        other.patcher.add_patches({name: ("diff", (torch.randn(value.shape, generator=generator),))}, 1.0)
        session.begin_run(other.patcher)
        with torch.inference_mode():
            changed = list(session.run(given).values())
        other.patcher.patch_model(CPU)
        with torch.inference_mode():
            expected = native_call(other, given)
        other.patcher.unpatch_model(CPU)
        assert max(relative_error(c, p) for c, p in zip(changed, plain, strict=True)) > 1e-6, f"{name} changes nothing"
        assert max(relative_error(c, e) for c, e in zip(changed, expected, strict=True)) <= 1e-5, name


def test_fused_weights_are_there_once_and_native_keeps_its_values_whatever_comes_and_goes() -> None:
    """On a CPU ComfyUI keeps a patched weight's original where it lies, as it does with --highvram."""
    net = network("unet", "unlike_levels")
    values = {name: p.clone() for name, p in net.module.named_parameters()}
    session, given = opened(net), given_for(net)
    for _ in range(2):
        net.patcher.patch_model(CPU)
        session.begin_run(net.patcher)
        assert error(session, net, given) <= 1e-5
        weights = [*net.module.parameters(), *session.live.function.parameters()]
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in weights}
        assert sum(held.values()) == sum(v.numel() * v.element_size() for v in values.values())
        net.patcher.unpatch_model(CPU)

        patched = with_lora(net)
        patched.patcher.patch_model(CPU)
        session.begin_run(patched.patcher)
        assert error(session, net, given) <= 1e-5
        patched.patcher.unpatch_model(CPU)
        session.begin_run(patched.patcher)
        with torch.inference_mode():
            session.run(given)  # in memory of its own: native is not patched now
        assert all(torch.equal(p, values[name]) for name, p in net.module.named_parameters())


def test_fused_layers_that_are_there_in_part_are_copied_whole() -> None:
    net = network("unet", "unlike_levels")
    session, given = opened(net), given_for(net)
    net.patcher.patch_model(CPU)
    query = next(layer for layer in net.module.modules() if isinstance(layer, BasicTransformerBlock)).attn1.to_q
    query.weight_function = [lambda weight: weight]  # as when ComfyUI patches a weight at each call
    session.begin_run(net.patcher)
    assert error(session, net, given) <= 1e-5
    assert session.live.weights.bytes == 3 * query.weight.numel() * 4
    query.weight_function = []
    session.begin_run(net.patcher)
    net.patcher.model.model_loaded_weight_memory += 1  # ComfyUI loaded more of it
    assert error(session, net, given) <= 1e-5
    assert session.live.weights.bytes == 0


def test_a_fused_weight_is_bounded_for_it_is_made_while_its_parts_are_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ldm, "MOST_FUSED", 50_000)
    net = network("unet", "unlike_levels")
    session = opened(net)
    assert error(session, net, given_for(net)) <= 1e-5
    fused = [layer for layer in session.live.function.modules() if isinstance(layer, FusedLinear)]
    parts = [[layer.weight.numel() for layer in one.layers] for one in fused if one.first is not None]
    assert len(parts) > 2
    assert all(sum(sizes) <= 50_000 or len(sizes) == 1 for sizes in parts)


def test_a_pass_that_ended_in_the_middle_leaves_nothing_for_the_next() -> None:
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(4, 3) for name in "abc"})
    expected = {name: layer for name, layer in layers.items()}
    (fused,) = fuse(layers, [[(layers, name) for name in "abc"]])
    assert isinstance(fused, FusedLinear)
    given = torch.randn(2, 4)
    with torch.no_grad():
        assert relative_error(layers["a"](given), expected["a"](given)) <= 1e-6
        assert relative_error(layers["b"](given), expected["b"](given)) <= 1e-6
        given.mul_(2)  # the same tensor with the values of the next call, as in a CUDA graph
        for name in "abc":
            assert relative_error(layers[name](given), expected[name](given)) <= 1e-6, name
        other = torch.randn(5, 4)
        assert relative_error(layers["c"](other), expected["c"](other)) <= 1e-6


def hint_of(net: NativeNetwork, seed: int = 1, **sizes: int) -> torch.Tensor:
    specs = [spec for spec in net.architecture().inputs(net.module, "float32") if spec.name == "hint"]
    return sample_inputs(specs, {"HB": 1, "H": 9, "W": 12} | sizes, seed)["hint"]


@pytest.mark.parametrize("sizes", [{}, {"H": 8, "W": 8}, {"HB": 2}])
def test_the_encoded_hint_is_natives_bit_for_bit(sizes: dict[str, int]) -> None:
    net = network("controlnet", "unlike_levels")
    hint = hint_of(net, **sizes)
    with torch.inference_mode():
        assert torch.equal(HintEncoder(net)(hint), net.module.input_hint_block(hint, None, None))


def test_the_encoder_holds_its_own_layers_only_and_takes_nothing_from_the_native_module() -> None:
    net = network("controlnet", "unlike_levels")
    encoder = HintEncoder(net)
    with torch.inference_mode():
        encoder(hint_of(net))
    own = sum(p.numel() * p.element_size() for p in net.module.input_hint_block.parameters())
    assert encoder.live._weights.bytes == own
    assert sum(1 for name, _ in net.module.named_parameters() if name.startswith("input_hint_block.")) > 0
    net.patcher.model.to("meta")  # ComfyUI may have the native weights anywhere by now
    hint = hint_of(net, 2)
    with torch.inference_mode():
        assert encoder(hint).isfinite().all()


def test_a_hint_of_another_form_is_refused_with_a_reason() -> None:
    encoder = HintEncoder(network("controlnet", "unlike_levels"))
    for shape in ((1, 4, 64, 64), (1, 3, 64)):
        with pytest.raises(Unavailable) as refused:
            encoder(torch.zeros(shape))
        assert refused.value.fallback.reason is Reason.UNSUPPORTED_INPUT


def test_a_lora_of_other_layers_changes_nothing() -> None:
    plain = network("controlnet", "unlike_levels")
    hint = hint_of(plain)
    with torch.inference_mode():
        assert torch.equal(HintEncoder(plain)(hint), HintEncoder(with_lora(plain))(hint))
