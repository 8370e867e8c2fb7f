"""The torch backend on the CPU: live weights, hints, sessions and compiled files."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import COMPILES
from fake_engine import publish_engine
from fake_recorder import Recorder
from hybrid_trt.architectures.calls import RequestedCalls
from hybrid_trt.architectures.families.unet_blocks import FREE
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.backends import AUTO
from hybrid_trt.backends.lookup import usable_backends
from hybrid_trt.backends.torch_inductor import comparison
from hybrid_trt.backends.torch_inductor.kinds import Kinds
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model import torch_kernels
from hybrid_trt.comfy_model.module_copy import plain_copy
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions import gpu_memory
from hybrid_trt.sessions.made_inputs import ResultCache
from live_sessions import PROFILE, TORCH, error, given_for, key_folder, opened
from small_networks import CPU, native_call, network, with_lora

__all__ = ["key_folder"]  # a fixture: pytest finds it by name


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_a_live_session_computes_what_native_does_in_any_order_of_shapes(kind: str) -> None:
    """Of other layouts, with one call each: ``test_fused_layers.py``."""
    net = network(kind, "unlike_levels")
    session = opened(net)
    for i, sizes in enumerate([{}, {"B": 1}, {}, {"B": 1}, {}, {"H": 5, "T": 154}, {"HB": 2}, {"HB": 2}]):
        assert error(session, net, given_for(net, i, **sizes)) <= 1e-5
    assert len(session.graphs) == (3 if kind == "controlnet" else 2)


def test_residuals_that_come_and_go_leave_nothing_behind() -> None:
    net = network("unet", "unlike_levels")
    session = opened(net)
    full = given_for(net, 1)
    names = [name for name in full if name.startswith("control_")]
    for absent in ([], names, [], names, names[:2], [], names):
        given = {name: t for name, t in full.items() if name not in absent}
        zeroed = {name: torch.zeros_like(t) if name in absent else t for name, t in full.items()}
        with torch.inference_mode():
            assert relative_error(session.run(given)["out"], native_call(net, zeroed)[0]) <= 1e-5
    assert len(session.graphs) == 2, "one per set of residuals that came twice"


def test_an_input_that_its_family_calls_steady_is_copied_when_another_tensor_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = network("unet", "unlike_levels")
    family, given = net.architecture(), given_for(net, 4)
    specs = [replace(spec, steady=spec.name == "context") for spec in family.engine_inputs(net.module, "float32")]
    monkeypatch.setattr(type(family), "engine_inputs", lambda *_: specs)
    session = opened(net)
    for step in range(3):
        assert error(session, net, given | {"x": given_for(net, step)["x"]}) <= 1e-5
    before = session.run(given)["out"]
    given["context"] += 1  # not seen: the same object
    given["timesteps"] = given["timesteps"].clone()
    assert torch.equal(session.run(given)["out"], before)
    assert error(session, net, given | {"context": given["context"].clone()}) <= 1e-5


def test_loras_come_and_go_without_moving_a_weight() -> None:
    plain = network("unet", "unlike_levels")
    patched = with_lora(plain)
    session, given = opened(plain), given_for(plain, 3)
    with torch.inference_mode():
        before = session.run(given)["out"]
        generation = session.live.weights.generation
        session.begin_run(patched.patcher)
        with_it = [session.run(given)["out"] for _ in range(3)]
        session.begin_run(plain.patcher)
        after = session.run(given)["out"]
    patched.patcher.patch_model(CPU)
    native = native_call(patched, given)[0]
    assert relative_error(native, before) > 1e-3
    assert all(relative_error(w, native) <= 1e-5 for w in with_it)
    assert torch.equal(before, after)
    assert session.live.weights.generation == generation, "graphs stay valid"
    assert len(session.graphs) == 1


def test_loaded_weights_are_used_where_they_are_and_followed_when_they_move() -> None:
    net = network("unet", "unlike_levels")
    session, given = opened(net), given_for(net, 4)
    net.patcher.patch_model(CPU)
    for _ in range(3):
        assert error(session, net, given) <= 1e-5
    weights = session.live.weights
    assert weights.bytes == 0, "nothing is duplicated"
    layer = net.module.out[2]
    assert session.live.function.unet.out[2].weight.data_ptr() == layer.weight.data_ptr()

    layer.weight = torch.nn.Parameter(layer.weight.data * 2, requires_grad=False)
    session.begin_run(net.patcher)
    generation = weights.generation
    assert error(session, net, given) <= 1e-5
    assert weights.generation == generation + 1, "graphs recorded over the old address are dropped"

    patched = with_lora(net)
    net.patcher.unpatch_model(CPU)
    patched.patcher.patch_model(CPU)
    session.begin_run(patched.patcher)
    assert error(session, net, given) <= 1e-5, "ComfyUI patched in place"
    patched.patcher.unpatch_model(CPU)
    session.begin_run(patched.patcher)
    assert weights.bytes == 0
    with torch.inference_mode():
        result = session.run(given)["out"]
    patched.patcher.patch_model(CPU)
    assert relative_error(result, native_call(net, given)[0]) <= 1e-5, "not loaded now: patched in own memory"


def test_unloading_gives_memory_back_and_the_next_call_starts_anew() -> None:
    net = network("controlnet", "unlike_levels")
    session, given = opened(net), given_for(net, 5)
    for _ in range(2):
        assert error(session, net, given) <= 1e-5
    total = sum(p.numel() for p in net.module.parameters()) * 4
    assert session.live.weights.bytes == total
    held = weakref.ref(next(session.live.function.parameters()).data)
    session.unload()
    assert held() is None, "nobody holds a weight"
    assert (session.live.weights.bytes, len(session.graphs), session.loaded) == (0, 0, False)
    assert session.bytes == total, "what it will hold again"
    assert error(session, net, given) <= 1e-5


def test_the_hint_is_encoded_once_per_image_and_size() -> None:
    net = network("controlnet", "unlike_levels")
    session, given = opened(net), given_for(net, 6)
    for step in range(5):
        given["x"], given["timesteps"] = given_for(net, step)["x"], given_for(net, step)["timesteps"]
        assert error(session, net, given) <= 1e-5
    assert session.live.passes.computed == 1
    other = given | {"hint": given_for(net, 99)["hint"]}
    for one in (given, other) * 3:  # two images on one ControlNet do not mix
        assert error(session, net, one) <= 1e-5
    assert session.live.passes.computed == 2, "another image"
    given = given_for(net, 6, H=10)
    assert error(session, net, given) <= 1e-5
    assert session.live.passes.computed == 3, "another size"
    given["hint"].mul_(0.5)
    assert error(session, net, given) <= 1e-5
    assert session.live.passes.computed == 4, "the same tensor with other values"
    net.module.input_hint_block[0].weight.data.mul_(2)
    session.unload()
    assert error(session, net, given) <= 1e-5
    assert session.live.passes.computed == 5, "other weights"


def test_the_hint_cache_is_bounded_and_never_trusts_a_reused_address() -> None:
    cache = ResultCache(lambda hint, _: (hint * 2,))
    for i in range(50):
        hint = torch.full((3,), float(i))
        assert torch.equal(cache.get(hint, None, 0)[0], hint * 2)
        del hint
    assert len(cache._entries) <= 4


def test_results_go_with_their_source() -> None:
    cache, hint = ResultCache(lambda hint, _: (hint * 2,)), torch.ones(3)
    found = weakref.ref(cache.get(hint, None, 0)[0])
    assert cache.get(hint, None, 0)[0] is found()
    del hint
    assert found() is None


@COMPILES
def test_the_backend_is_chosen_by_name_only_on_a_cpu() -> None:
    assert "torch" not in [b.name for b in usable_backends(AUTO, CPU)]
    assert [b.name for b in usable_backends("torch", CPU)] == ["torch"]
    session = opened(network("unet", "unlike_levels"))
    assert TORCH.to_build(network("unet", "unlike_levels"), RequestedCalls(PROFILE), session.engines)
    assert "not compiled; build for full speed" in session.status(PROFILE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
@COMPILES
def test_a_build_serves_other_weights_too(
    kind: str, tmp_path: Path, key_folder: Path
) -> None:
    net = network(kind, "inpainting_channels")
    library = Library([tmp_path / "library"])
    profile = Profile({**PROFILE.ranges, "B": Range(1, 1, 4), "H": Range(4, 6, 40), "W": Range(4, 8, 40)})
    engine = build_engine(BuildOrder(net, "float32", profile, TORCH), library, lambda *_: None)
    assert engine.manifest.parity["rel_err"] <= 1e-5
    assert [*engine.manifest.files] == ["B-H-HB-T-W.bin" if kind == "controlnet" else "B-H-T-W.bin"]
    for other in (net, with_lora(net)):
        session = LiveSession(other, TORCH, "float32", Recorder())
        session.use([engine])
        given = given_for(net, 11, B=1, H=6, W=8)
        other.patcher.patch_model(CPU)
        native = native_call(other, given)
        other.patcher.unpatch_model(CPU)
        with torch.inference_mode():
            results = session.run(given).values()
        assert max(relative_error(r, n) for r, n in zip(results, native, strict=True)) <= 1e-5
        assert session.refusal is None
        assert session.serving == [engine]


class Failing:
    """A double of the backend: what it opens raises an error."""

    def __init__(self, error: Exception):
        self.error, self.calls = error, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TORCH, name)

    def open_live(self, _engine: Any, _device: Any) -> Kinds:
        kind = SimpleNamespace(serves=lambda *_: True)
        blocks = len(LiveSession(network("unet", "unlike_levels"), TORCH, "float32").live.blocks)
        return Kinds([(0,)] * blocks, [kind], [self._run])

    def _run(self, *_: torch.Tensor) -> None:
        self.calls += 1
        raise self.error


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return publish_engine(tmp_path, backend="torch")


@pytest.mark.fault("a compiled file fails when it runs", see="live weights serve in its place")
def test_a_compiled_file_that_fails_when_it_runs_leaves_the_call_to_live_weights(engine: Engine) -> None:
    net, backend = network("unet", "unlike_levels"), Failing(AssertionError("expected size 640==640"))
    session, given = LiveSession(net, backend, "float32", Recorder()), given_for(net, 4)
    session.use([engine])
    for _ in range(4):
        assert error(session, net, given) <= 1e-5
    assert backend.calls == 1
    assert session.live.compiled is None
    assert session.serving == []
    assert session.uncovered is not None, "the report says that the call was not compiled"
    assert "expected size 640==640" in session.status(PROFILE)
    assert len(session.graphs) == 1
    again = LiveSession(net, backend, "float32", Recorder())
    again.use([engine])
    assert error(again, net, given) <= 1e-5
    assert backend.calls == 1, "nobody in this process tries it again"


def test_a_compiled_file_that_lacks_memory_is_not_given_up(engine: Engine) -> None:
    net, backend = network("unet", "unlike_levels"), Failing(RuntimeError("CUDA error: out of memory"))
    session = LiveSession(net, backend, "float32", Recorder())
    session.use([engine])
    with pytest.raises(Unavailable, match="out of memory"), torch.inference_mode():
        session.run(given_for(net, 4))
    assert session.live.compiled is not None
    assert session.refusal is None


def test_a_call_beyond_the_sizes_that_blocks_serve_runs_uncompiled_and_lacks_no_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, backend = network("unet", "unlike_levels"), Failing(AssertionError("it runs compiled"))
    monkeypatch.setattr(type(net.architecture()), "free", FREE | {"T": Range(1, 77, 100)})
    session = LiveSession(net, backend, "float32", Recorder())
    session.use([engine])
    for _ in range(3):
        assert error(session, net, given_for(net, 4, T=154)) <= 1e-5
    assert (backend.calls, session.uncovered, session.serving, session.refusal) == (0, None, [], None)
    monkeypatch.setattr(type(net.architecture()), "per_step", False)
    assert session.serves({"T": 77}) is None
    assert session.serves({"T": 154}).detail == "torch compiles nothing for 154 tokens"


def test_a_graph_that_finds_no_room_for_its_memory_computes_once_comfyui_has_freed_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is others' between runs; CUDA says that it is gone by an error of no class of its own."""
    net = network("unet", "unlike_levels")
    session, given, freed = opened(net), given_for(net, 4), []
    for _ in range(3):
        assert error(session, net, given) <= 1e-5
    monkeypatch.setattr(gpu_memory, "make_room", lambda size, _device: freed.append(size))
    replay, once = Recorder.Replay.replay, iter([True])

    def full(self: Recorder.Replay) -> None:
        if next(once, False):
            raise RuntimeError("CUDA error: out of memory")
        replay(self)

    monkeypatch.setattr(Recorder.Replay, "replay", full)
    for _ in range(3):
        assert error(session, net, given) <= 1e-5
    assert freed.count(gpu_memory.EVERYTHING) == 1, "all that is not in use was freed once"
    assert len(session.graphs) == 1


def test_what_a_call_takes_is_measured_and_costs_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    function = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU())
    function.forward = lambda x: (torch.nn.Sequential.forward(function, x),)
    weights, given, timed = [p.data for p in function.parameters()], [torch.randn(2, 8)], []

    def compiled(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.nn.functional.silu(x @ weight.T + bias),)

    def milliseconds(call: Callable[[], Any]) -> float:
        timed.append(call())
        return float(len(timed))

    monkeypatch.setattr(torch_kernels, "milliseconds", milliseconds)  # there is no GPU here
    figures = comparison.figures(function, partial(compiled, *weights), given)
    assert (figures["native_ms"], figures["engine_ms"]) == (1.0, 2.0)
    (plain,), replayed = timed
    assert relative_error(replayed["0"], plain) <= 1e-6
    monkeypatch.setattr(torch_kernels, "milliseconds", lambda _call: 1 / 0)
    assert comparison.figures(function, partial(compiled, *weights), given) == {}


def test_engines_serve_every_checkpoint_of_a_layout_and_no_other() -> None:
    a, b = network("unet", "unlike_levels"), network("unet", "unlike_levels")
    b.module.out[2].bias.data[0] += 1
    assert TORCH.weights(a) == TORCH.weights(b) == TORCH.weights(with_lora(a))
    assert TORCH.weights(a) != TORCH.weights(network("unet", "inpainting_channels"))


def test_a_copy_has_nothing_of_what_comfyui_keeps_on_models_and_layers_while_it_loads_them() -> None:
    """With dynamic VRAM that is memory of ComfyUI's own: a pickled copy would free it a second time."""
    net = network("unet", "sd15_as_published")
    kept = object()
    net.module.dynamic_pins = net.module.input_blocks[0][0]._pin_state = {"weights": kept}
    copy = plain_copy(net.module, torch.float32, lambda _, p: p, lambda _, b: b)
    held = [value for layer in copy.modules() for value in layer.__dict__.values()]
    assert not any(inner is kept for value in held if isinstance(value, dict) for inner in value.values())
