"""Who chose attention gets it from engines too, where blocks are compiled: native's picture with that function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import users_attention
from compiling import COMPILES
from fake_recorder import Recorder
from family_contract import ACTS, LIMIT, Family, difference, live, natively
from hybrid_trt.architectures.blocks import OVERRIDE
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model import attention as looked_at
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, trust
from hybrid_trt.sampling.engine_status import status
from hybrid_trt.sampling.report import report_text
from model_families import for_each
from model_families.wan import prompt
from newer_attention import set_model_optimized_attention
from small_networks import network as unet_of
from token_calls import Patched, network_of
from users_attention import CALLS, PathchSageAttentionKJ, registered, soft, started_with

from sampling import error

FILE = "tiny_wan"
REMARK = "Attention is by soft, as native computes it"
TORCH = backends()["torch"]


@pytest.fixture(autouse=True)
def own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))


@for_each("file", lambda family: family.files)
def test_each_call_on_live_weights_is_natives_with_the_attention_of_its_process(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: Family, file: str
) -> None:
    network = family.network(models, file)
    given = next(call for call in family.calls.values() if call.file == file).drawn(network)
    exact = natively(network, given)
    started_with(monkeypatch)
    assert difference(natively(network, given), exact) > ACTS, "it is no other attention"
    session = live(network)
    assert session.calls_attention
    family.check_calls(network, session, file)


def setter(model: Any) -> Any:
    changed = model.clone()
    set_model_optimized_attention(changed, soft)
    return changed


def kjnodes(model: Any) -> Any:
    return PathchSageAttentionKJ().patch(model)


def chosen_before(models: dict[str, Path], choose: Callable[[Any], Any]) -> NativeNetwork:
    return NativeNetwork.of_model(choose(network_of(models, FILE).patcher), FILE)


def engine_for(network: NativeNetwork, folder: Path, run: Any = None) -> Engine:
    sizes = __import__("model_families.wan", fromlist=["FAMILY"]).FAMILY.any_size[FILE][0]
    from token_calls import profile_of

    order = BuildOrder(network, "float32", profile_of(network), TORCH, calls=(sizes,))
    return build_engine(order, Library([folder]), lambda *_: None, **({"run": run} if run else {}))
