"""Engines for one size each serve one node together: which one serves, how many are open, one that is damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import patched as patched_models
import pytest
import slow
import torch
from builds import main_file
from hybrid_trt.architectures.shapes import Picture, sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.tensorrt.version8.backend import MOST_OPEN
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_library import Engine, Library, Reason
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.nodes import building
from hybrid_trt.sampling.engine_status import status
from hybrid_trt.sessions.choice import with_live_fallback
from hybrid_trt.sessions.session import refusal_of
from one_size import BEST, OF_PORTRAIT, PORTRAIT, built_for, handle_of, of_one_size, serve
from small_networks import native_call, network

import sampling

__all__ = ["of_one_size"]  # a fixture


@pytest.fixture(params=["unet", "controlnet"])
def net(request: pytest.FixtureRequest) -> NativeNetwork:
    return network(request.param, "unlike_levels")


def damage(engine: Engine) -> None:
    main_file(engine).write_bytes(bytes(main_file(engine).stat().st_size))


def test_a_node_serves_all_sizes_that_it_has_engines_for(net: NativeNetwork, tmp_path: Path) -> None:
    handle, _ = built_for(net, tmp_path, (), (PORTRAIT,))
    assert "batch 2, 96 x 128 px, 77 tokens; batch 2, 64 px, 77 tokens" in status(handle)
    names = []
    for sizes in (OF_PORTRAIT, BEST, OF_PORTRAIT, BEST):
        served, error = serve(handle, sizes)
        assert served
        assert error <= 1e-5
        names.append(handle.session.active.name)
    assert names[:2] == names[2:]
    assert {*names} == {engine.folder.name for engine in handle.session.engines}
    for sizes in ({**BEST, "B": 1}, {**BEST, "T": 154}, {**BEST, "W": 12}):
        served, _ = serve(handle, sizes)
        assert not served, sizes
    assert list(handle.stats.reasons) == [Reason.SHAPE_OUTSIDE_PROFILE.value]
    assert serve(handle, BEST)[0], "a refused call leaves nothing behind"


def test_with_live_weights_behind_them_each_engine_serves_its_size_and_one_that_is_damaged_takes_no_other_with_it(
    tmp_path: Path,
) -> None:
    net = network("unet", "unlike_levels")
    handle, (_, portrait) = built_for(net, tmp_path, (), (PORTRAIT,))
    live = backends()["torch"].session(net, [], "float32", None)
    session = with_live_fallback(handle.session, live, net)

    def backends_of(*all_sizes: dict[str, int]) -> list[str]:
        found = []
        session.begin_run(net.patcher)
        for sizes in all_sizes:
            given = sample_inputs(net.architecture().inputs(net.module, "float32"), sizes, seed=3)
            session.sync_from(net, net.patcher)
            with torch.inference_mode():
                (result,), (expected,) = session.run(given).values(), native_call(net, given)
            assert relative_error(result, expected) <= 1e-5
            found.append(session.active.backend_name)
        return found

    assert session.serves(BEST) is None
    found = backends_of(OF_PORTRAIT, BEST, {**BEST, "W": 10}, BEST)
    assert found == ["onnxruntime", "onnxruntime", "torch", "onnxruntime"]
    session.unload()
    damage(portrait)
    assert backends_of(BEST, OF_PORTRAIT, BEST) == ["onnxruntime", "torch", "onnxruntime"]
    assert backends_of(BEST, OF_PORTRAIT) == ["onnxruntime", "torch"]
    assert [engine for engine in session.engines if refusal_of(engine) is not None] == [portrait]
    handle.refresh()
    assert portrait not in handle.session.engines
    assert handle.session.engines


@pytest.mark.fault("one of several engines of a node is damaged", see="the others serve; its sizes run at normal speed")
@slow.when("of the node's own size")
@pytest.mark.parametrize("first", [True, False], ids=["of the node's own size", "of another"])
def test_one_that_is_damaged_leaves_the_others_in_service_by_name_too(first: bool, tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    handle, (square, portrait) = built_for(net, tmp_path, (), (PORTRAIT,))
    damaged, its_calls, others = (portrait, OF_PORTRAIT, BEST) if first else (square, BEST, OF_PORTRAIT)
    damage(damaged)
    with patched_models.sampling_node():
        handle.plan()
        handle.open()  # as ComfyUI does before it samples
        assert handle.fallback is None
        for _ in range(2):
            served, error = serve(handle, others)
            assert served
            assert error <= 1e-5
            assert not serve(handle, its_calls)[0]
        assert (handle.stats.engine, handle.stats.native) == (2, 2)
        assert list(handle.stats.reasons) == [Reason.BROKEN_ENGINE.value]
    shared = handle.session
    with patched_models.sampling_node():  # it is not tried again
        handle.plan()
        assert damaged not in handle.session.engines
        assert serve(handle, others)[0]
    order = replace(building._orders(handle)[0][0], profile=damaged.manifest.identity.profile)
    builder.build_engine(order, handle.library, lambda *_: None, run=builder.run_here, again=True)
    with patched_models.sampling_node():
        handle.plan()
        assert handle.session is shared
        assert serve(handle, its_calls)[0]


def test_where_all_are_damaged_the_run_is_natives(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    handle, engines = built_for(net, tmp_path, (), (PORTRAIT,))
    for engine in engines:
        damage(engine)
    with patched_models.sampling_node():
        handle.plan()
        handle.open()
        assert not serve(handle, OF_PORTRAIT)[0]
        assert not serve(handle, BEST)[0]
        assert list(handle.stats.reasons) == [Reason.BROKEN_ENGINE.value]


def test_the_second_pass_of_a_workflow_at_another_size_runs_on_its_own_engine(
    models: dict[str, Path], tmp_path: Path
) -> None:
    native = patched_models.load(models[patched_models.NAME])
    pictures = (Picture(64, 64, (2,)), PORTRAIT)
    patched = patched_models.Patched(native, Library([tmp_path]))
    patched.handle.choice = replace(patched.handle.choice, pictures=pictures)
    for order, _anew in building._orders(patched.handle):
        builder.build_engine(order, patched.handle.library, lambda *_: None, run=builder.run_here)
    served = []
    for size in ((8, 8), (16, 12), (8, 8), (16, 12)):
        latent = patched.sample(size=size)
        assert sampling.error(latent, sampling.sample(native, size=size)) <= 1e-5
        assert patched.counts == (sampling.STEPS, 0)
        served.append(patched.handle.stats.engine_name)
    assert served[:2] == served[2:]
    assert served[0] != served[1]


def test_no_more_engines_of_a_network_are_open_than_a_workflow_uses(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    all_sizes = [BEST, OF_PORTRAIT, {**BEST, "H": 12, "W": 16}]
    handle, _ = built_for(net, tmp_path, *(
        (Picture(8 * sizes["W"], 8 * sizes["H"], (2, 1)),) for sizes in all_sizes))  # fmt: skip
    session = handle.session
    for sizes in all_sizes:
        assert serve(handle, sizes)[0]
    opened = [one.loaded for one in session.sessions]
    assert sum(opened) == MOST_OPEN
    first = next(one for one in session.sessions if one.serves({s: n for s, n in BEST.items() if s != "HB"}) is None)
    assert not first.loaded, "it was used longest ago"
    assert session.bytes == sum(one.bytes for one in session.sessions if one.loaded)
    session.unload()
    assert not session.loaded
    assert serve(handle, BEST)[0]


def test_two_nodes_that_name_the_same_engines_in_another_order_hold_their_memory_once(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    portrait, square = handle_of(net, tmp_path, PORTRAIT), handle_of(net, tmp_path)
    built_for(net, tmp_path, (PORTRAIT,), ())
    portrait.refresh()
    square.refresh()
    assert portrait.session is not square.session
    assert portrait.session.engines == square.session.engines[::-1]
    assert portrait.patcher.is_clone(square.patcher)
    alone = handle_of(network("unet", "unlike_levels"), tmp_path / "another")
    assert not portrait.patcher.is_clone(alone.patcher)
