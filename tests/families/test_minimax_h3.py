"""MiniMax H3: what of a run stays the same, two results of a call, and ComfyUI's dynamic VRAM."""

from __future__ import annotations

from pathlib import Path

import comfy.sd
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.ops import mixed_precision_ops
from compiling import COMPILES
from dynamic_vram import on_cpu
from family_contract import LIMIT, difference, live, lora_of, natively, on_engine
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling import nan_guard
from model_families.minimax_h3 import FAMILY, FILE, PRUNED
from quantised import ON_CPU, quantised_state
from tiny_transformers import MINIMAX_H3, MINIMAX_H3_PRUNED
from token_calls import Patched, network_of

from sampling import error

STEADY = ("kinds", "condition", "is_sound", "pe_text", "pe_condition", "pe_sound", "pe_video")


def test_all_that_stays_the_same_in_a_run_is_made_once(models: dict[str, Path]) -> None:
    network = network_of(models, FILE)
    bind, call = network.architecture().binding(network.module), FAMILY.calls["references"].drawn(network)
    later = {**call, "x": [t + 1 for t in call["x"]], "timestep": call["timestep"] / 2}
    another = FAMILY.calls["references"].drawn(network, seed=2)
    first, second, third = (bind(given).inputs for given in (call, later, another))
    assert all(first[name] is second[name] for name in STEADY)
    assert not torch.equal(first["times"], second["times"])
    assert not torch.equal(first["condition"], third["condition"]), "another prompt has other references"


def test_other_references_in_the_same_layout_are_seen(models: dict[str, Path]) -> None:
    network = network_of(models, FILE)
    bind, call = network.architecture().binding(network.module), FAMILY.calls["references"].drawn(network)
    payload = call["minimax_payload"]
    other = {**payload, "cond_video_latents": [t + 1 for t in payload["cond_video_latents"]]}
    first, second = (bind({**call, "minimax_payload": one}).inputs["condition"] for one in (payload, other))
    assert not torch.equal(first, second)


def test_no_number_in_video_or_sound_is_seen() -> None:
    for place in range(2):
        result = [torch.ones(3), torch.ones(2)]
        result[place][1] = float("nan")
        with nan_guard.watched_apart() as watch:
            nan_guard.watch(result)
        assert watch.engines
        assert not watch.finite()


def test_under_dynamic_vram_prompts_and_loras_are_natives(models: dict[str, Path], tmp_path: Path) -> None:
    lora = lora_of(network_of(models, FILE), FAMILY.loras["text"])

    def with_lora(model: ModelPatcher) -> ModelPatcher:
        return comfy.sd.load_lora_for_models(model, None, lora, 0.7, 0)[0]

    for file, name in ((FILE, "references"), (PRUNED, "pruned")):
        dynamic, native = on_cpu(network_of(models, file).patcher), network_of(models, file).patcher
        patched = Patched(NativeNetwork.of_model(dynamic, file), tmp_path, "torch")
        prompt = FAMILY.prompts[name]
        for model, reference in ((patched.model, native), (with_lora(patched.model), with_lora(native))):
            assert error(prompt.sample(model), prompt.sample(reference)) <= LIMIT
            assert patched.counts == (prompt.calls, 0), patched.handle.stats.reasons


def quantised_in_half_precision(models: dict[str, Path], file: str) -> NativeNetwork:
    """A network with quantised layers. ComfyUI then has its other layers in the dtype that it computes in."""
    net, dtype = network_of(models, file), torch.bfloat16
    layers = [f"blocks.{i}.{layer}" for i in range(2) for layer in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1")]
    state = quantised_state(net.module.state_dict(), layers, "int8 rows")
    operations = mixed_precision_ops(compute_dtype=dtype, disabled=ON_CPU)
    config = MINIMAX_H3_PRUNED if file == PRUNED else MINIMAX_H3
    module = type(net.module)(**config, dtype=dtype, operations=operations)
    module.load_state_dict(state)
    net.patcher.model.diffusion_model = module.eval().requires_grad_(False)
    return NativeNetwork(net.patcher, module, net.prefix, dtype, net.label, net.role)


@COMPILES
@pytest.mark.parametrize("file", [PRUNED, pytest.param(FILE, marks=pytest.mark.slow)])
def test_layers_of_a_quantised_network_take_inputs_in_float32_as_natives_do(
    models: dict[str, Path], tmp_path: Path, file: str
) -> None:
    network, call = quantised_in_half_precision(models, file), FAMILY.calls["pruned" if file == PRUNED else "text"]
    assert {p.dtype for name, p in network.module.named_parameters() if "adaln" in name} == {torch.bfloat16}
    plain, session = network_of(models, file), live(network, "bfloat16")
    drawn = call.drawn(plain)
    given = {**drawn, "context": drawn["context"].to(torch.bfloat16)}
    expected = natively(network, given)
    limit = difference(expected, natively(plain, drawn))
    assert limit <= 2e-2
    assert difference(on_engine(network, session, given), expected) <= limit
    order = BuildOrder(network, "bfloat16", FAMILY.profile(network), backends()["torch"])
    session.use([build_engine(order, Library([tmp_path]), lambda *_: None)])
    assert difference(on_engine(network, session, given), expected) <= limit
    assert session.uncovered is None
    assert session.refusal is None
