"""Anima: float32 between its blocks, and its network for prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comfy.ldm.anima.model import Anima
from family_contract import LIMIT, difference, error_of, live, natively, on_engine
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.structure_hash import structure_hash
from model_families.anima import FAMILY, FILE
from token_calls import network_of

CALL = FAMILY.calls["odd sides, a batch"]


@pytest.fixture
def network(models: dict[str, Path]) -> NativeNetwork:
    return network_of(models, FILE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_values_in_half_precision_are_as_near_to_float32_as_native_is(
    models: dict[str, Path], dtype: torch.dtype
) -> None:
    """In float16 what goes from block to block is float32: it is large here, so that its rounding would show."""
    exact, half = (network_of(models, FILE, one) for one in (torch.float32, dtype))
    for network in (exact, half):
        network.module.x_embedder.proj[1].weight.data.mul_(30)
    call = CALL.drawn(exact)
    narrow = {name: value if name == "timesteps" else value.to(dtype) for name, value in call.items()}
    native, found = natively(half, narrow), on_engine(half, live(half, str(dtype).removeprefix("torch.")), narrow)
    rounding = difference(native.float(), natively(exact, call))
    assert difference(found.float(), natively(exact, call)) <= 1.1 * rounding
    if dtype == torch.float16:
        assert difference(found.float(), native.float()) <= 0.5 * rounding


@pytest.mark.fault("a model keeps tensors of its last call as if they were its settings",
                   see="nothing: engines are found, the tensors are not kept")
def test_what_a_call_leaves_on_the_network_is_no_part_of_it(models: dict[str, Path]) -> None:
    """Else engines would not be found again, and a copy would keep the tensors."""
    used, fresh = network_of(models, FILE), network_of(models, FILE)
    natively(used, CALL.drawn(used))
    assert used.module.crossattn_emb is not None
    assert structure_hash(used.module) == structure_hash(fresh.module)
    session = live(used)
    assert not hasattr(session.live.weights.module, "crossattn_emb")
    assert isinstance(session.live.weights.module, Anima)


def test_what_makes_the_prompt_ready_is_not_held_a_second_time(network: NativeNetwork) -> None:
    session = live(network)
    assert error_of(network, session, CALL.drawn(network)) <= LIMIT
    held = {name: p.numel() * p.element_size() for name, p in network.module.named_parameters()}
    adapters = sum(size for name, size in held.items() if name.startswith("llm_adapter."))
    assert 0 < adapters == sum(held.values()) - session.live.weights.most_bytes
