"""Attention that a user chose is an engine's too, where blocks are compiled: native's picture with that function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfy.ldm.modules import attention
from compiling import COMPILES
from fake_recorder import Recorder
from family_contract import ACTS, LIMIT, Family, Prompt, difference, error_of, live, natively
from hybrid_trt.architectures import user_attention
from hybrid_trt.architectures.blocks import OVERRIDE
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.kinds import InBlocks
from hybrid_trt.backends.torch_inductor.opened_files import kinds_in
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model import attention as looked_at
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.structure_hash import structure_hash
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, Unavailable, trust
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.engine_status import status
from hybrid_trt.sampling.report import report_text
from live_sessions import given_for
from model_families import for_each
from model_families.flux import FAMILY as FLUX
from model_families.wan import FAMILY, prompt
from newer_attention import set_model_optimized_attention
from small_networks import native_call
from small_networks import network as unet_of
from token_calls import Patched, network_of, profile_of
from users_attention import CALLS, PathchSageAttentionKJ, installed, sage, started_with

from sampling import error

FILE = "tiny_wan"
ADVICE = "put the engine node behind the node that chooses attention"
REMARK = "Attention is by sage, as native computes it"
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
    set_model_optimized_attention(changed, sage)
    return changed


def kjnodes(model: Any) -> Any:
    return PathchSageAttentionKJ().patch(model)


def chosen_before(models: dict[str, Path], choose: Callable[[Any], Any]) -> NativeNetwork:
    return NativeNetwork.of_model(choose(network_of(models, FILE).patcher), FILE)


def engine_for(network: NativeNetwork, folder: Path) -> Engine:
    """An engine of blocks, compiled in this process."""
    order = BuildOrder(network, "float32", profile_of(network), TORCH)
    return build_engine(order, Library([folder]), lambda *_: None, run=run_here)


def blocks_of(patched: Patched) -> InBlocks:
    found = patched.handle.session.live.compiled
    return found


@COMPILES
@pytest.mark.parametrize(("family", "own"), [
    pytest.param(FAMILY, prompt(), id="wan"),
    pytest.param(FLUX, FLUX.prompts["two lengths"], id="flux", marks=pytest.mark.slow)])  # fmt: skip
def test_compiled_blocks_give_natives_picture_with_each_way_to_choose_attention(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, own: Prompt
) -> None:
    exact = own.sample(family.network(models, own.file).patcher)
    installed(monkeypatch)
    for choose in (setter, kjnodes, None):
        if choose is None:
            started_with(monkeypatch)
        patcher = family.network(models, own.file).patcher
        network = NativeNetwork.of_model(patcher if choose is None else choose(patcher), own.file)
        native = own.sample(network.patcher)
        assert error(native, exact) > ACTS, "it is no other attention"
        if choose is setter:
            engine = engine_for(network, tmp_path)
        patched = Patched(network, tmp_path, "torch")
        CALLS["count"] = 0
        assert error(own.sample(patched.model), native) <= LIMIT
        assert patched.handle.session.engines == [engine], "one engine is for all of them"
        assert patched.counts == (own.calls, 0)
        assert blocks_of(patched).plain == 0
        assert CALLS["count"] > 0
        said = REMARK.replace("sage", "users_attention.attention_override_sage") if choose is kjnodes else REMARK
        assert said in patched.handle.stats.remark
        assert said in status(patched.handle)


@COMPILES
def test_engines_of_exact_attention_stay_and_serve_none_of_a_users_own(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    usual, own = network_of(models, FILE), chosen_before(models, setter)
    engines = {network.live_layout: engine_for(network, tmp_path) for network in (usual, own)}
    assert len({engine.folder for engine in engines.values()}) == 2
    for network in (usual, own, usual):
        session = Patched(network, tmp_path, "torch").handle.session
        assert session.engines == [engines[network.live_layout]]
    keys = [{kind.key for kind in kinds_in(engine.read_checked(name))}
            for engine in engines.values() for name in engine.manifest.files]  # fmt: skip
    assert not keys[0] & keys[1], "neither takes the other's blocks"


def test_exact_attention_changes_neither_identity_nor_code(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = network_of(models, FILE)
    other = before.patcher.clone()
    set_model_optimized_attention(other, attention.get_attention_function("split"))
    chosen = NativeNetwork.of_model(other, FILE)
    assert chosen.live_layout == before.live_layout == structure_hash(before.module, live=True)
    assert not live(chosen).calls_attention


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_a_unet_and_a_controlnet_compute_attention_as_their_process_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = unet_of(kind, "unlike_levels")
    given = given_for(network)
    exact = native_call(network, given)
    started_with(monkeypatch)
    native = native_call(network, given)
    assert max(map(relative_error, native, exact)) > ACTS, "it is no other attention"
    session = live(network)
    assert session.calls_attention
    with torch.inference_mode():
        assert max(map(relative_error, session.run(given).values(), native)) <= LIMIT


def test_networks_that_attend_to_earlier_frames_keep_exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    started_with(monkeypatch)
    network = unet_of("unet", "unlike_levels")
    kept = network.architecture().keeping_tokens(network.module)
    assert (dict(kept.free), kept.function(network.module).blocks) == ({}, ())


@pytest.mark.parametrize("function", [attention.attention_sage, attention.attention_flash])
def test_kernels_of_comfyuis_flags_are_no_packs_code_and_an_operation_in_their_place_is(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, function: Callable
) -> None:
    network = network_of(models, FILE)
    started_with(monkeypatch, function)
    assert network.unchanged_architecture().name == "wan"
    assert network.calls_attention == (function is sage), "FlashAttention is exact"
    wrapper = "sageattn" if function is sage else "flash_attn_wrapper"
    theirs = torch.library.custom_op(f"tests::{wrapper}", _of_another_pack, mutates_args=())
    monkeypatch.setattr(attention, wrapper, theirs)
    with pytest.raises(Unavailable, match=f"replaced {wrapper}"):
        network.unchanged_architecture()


def _of_another_pack(q: torch.Tensor) -> torch.Tensor:
    return q.clone()


def unknown(model: Any) -> Any:
    changed = model.clone()
    changed.model_options["transformer_options"][OVERRIDE] = lambda _native, *args, **kwargs: sage(*args, **kwargs)
    return changed


@pytest.mark.parametrize("choose", [setter, unknown])
def test_attention_that_the_engine_node_does_not_know_of_is_natives(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: Callable
) -> None:
    installed(monkeypatch)
    network = network_of(models, FILE)
    patched = Patched(network, tmp_path, "torch")
    expected = prompt().sample(choose(network.patcher))
    assert error(prompt().sample(choose(patched.model)), expected) <= LIMIT
    assert patched.counts == (0, prompt().calls)
    advised = ADVICE in report_text([patched.handle.stats])
    assert advised == (choose is setter), "behind it an engine would serve"


def test_an_unknown_override_before_the_engine_node_is_natives_too(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """It may compute by layer or by step, which blocks cannot tell it."""
    network = chosen_before(models, unknown)
    patched = Patched(network, tmp_path, "torch")
    assert not patched.handle.session.calls_attention
    assert error(prompt().sample(patched.model), prompt().sample(network.patcher)) <= LIMIT
    assert patched.counts == (0, prompt().calls)


def test_layers_that_prefer_an_attention_are_not_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    started_with(monkeypatch)
    monkeypatch.setattr(looked_at, "_preferences", lambda *_: iter([SimpleNamespace(function=sage)]))
    patcher = SimpleNamespace(model_options={})
    assert looked_at.choice_for(torch.nn.Module(), patcher, "") is None
    monkeypatch.setattr(looked_at, "_preferences", lambda *_: iter([SimpleNamespace(function=None)]))
    assert looked_at.choice_for(torch.nn.Module(), patcher, "") is sage


def test_a_graph_holds_for_one_choice_of_attention(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    started_with(monkeypatch)
    network, recorder = network_of(models, FILE), Recorder()
    session = LiveSession(network, TORCH, "float32", recorder)
    given = sample_inputs(session.live.inputs, dict.fromkeys(symbols(session), 2), seed=1)
    exact = setter_of("pytorch")

    def run(override: Callable | None) -> torch.Tensor:
        with torch.inference_mode():
            return [session.run(given, {OVERRIDE: override})["out"].clone() for _ in range(3)][-1]

    first, other = run(None), run(exact)
    assert recorder.captured == 2
    assert relative_error(first, other) > ACTS
    assert torch.equal(run(None), first)
    assert recorder.captured == 3
    assert session.state() is None, "no larger graph has it"


def test_attention_that_no_graph_records_runs_between_compiled_blocks(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    started_with(monkeypatch)
    network, recorder = network_of(models, FILE), Recorder()
    recorder.error = RuntimeError("operation not permitted when stream is capturing")
    session = LiveSession(network, TORCH, "float32", recorder)
    call = FAMILY.calls["several frames"].drawn(network)
    for _ in range(3):
        assert error_of(network, session, call) <= LIMIT
    assert "not permitted" in session.plain


def symbols(session: LiveSession) -> set[str]:
    return {dim.symbol for spec in session.live.inputs for dim in spec.dims if not isinstance(dim, int)}


def setter_of(name: str) -> Callable:
    model = SimpleNamespace(model_options={"transformer_options": {}})
    set_model_optimized_attention(model, attention.get_attention_function(name))
    return model.model_options["transformer_options"][OVERRIDE]


@pytest.mark.parametrize("masked", [False, True])
def test_the_operation_gives_heads_that_queries_share_and_masks_to_the_function(masked: bool) -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    mask = torch.randn(5, 7) if masked else None
    plain = user_attention.computed(q, k, v, mask)
    with user_attention.calling_exact():
        assert relative_error(user_attention.computed(q, k, v, mask), plain) <= LIMIT
    with user_attention.calling_users({OVERRIDE: setter_of("pytorch")}, True):
        assert relative_error(user_attention.computed(q, k, v, mask), plain) <= LIMIT
    torch.library.opcheck(user_attention._attention, (q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), mask, False))
