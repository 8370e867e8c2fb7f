"""Other packs change a network while it is sampled, in single calls or for good: the picture is always native's."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ops
import pytest
import torch
from changed_families import FAMILIES, IMPOSSIBLE, STEPS, OnEngine
from comfy.ldm.modules import attention
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.patcher_extension import WrappersMP
from foreign_changes import CALLS, Change, changing, fewer, with_function, with_hook, with_method, with_part
from hybrid_trt.engine_library import Library, Reason
from memory_fixtures import file, library
from patched import LIMIT, Patched, load, natively

from sampling import error, sample

__all__ = ["file", "library"]  # fixtures: pytest finds them by name

_references: dict[tuple, torch.Tensor] = {}


def native(models: dict[str, Path], family: str, change: str | None = None, place: str = "") -> torch.Tensor:
    """Native's latent of a family's model, changed or not; sampled once per process."""
    if (family, change, place) not in _references:
        f = FAMILIES[family]
        model = f.load(models)
        changed = model if change is None else changing(model, place, f.changes[change])
        _references[family, change, place] = f.sample(changed)
    return _references[family, change, place]


ALIKE = ("qwen", "hunyuan", "krea2", "anima")
"""Families that keep their blocks in lists, as others do whose blocks are changed in all ways."""


def cases() -> Iterator[Any]:
    """Each change of each family from one place, one place after the other; from all others where time is no matter."""
    number = 0
    for family, f in FAMILIES.items():
        for change in f.changes:
            if (family, change) in IMPOSSIBLE:
                continue
            number += 1
            for i, place in enumerate(CALLS):
                others_show_it = family in ALIKE and change.startswith("blocks") and change != "blocks swapped"
                marks = (pytest.mark.slow,) if others_show_it or i != number % len(CALLS) else ()
                if place == WrappersMP.DIFFUSION_MODEL and change == "method _forward":
                    continue  # it is bound by then
                yield pytest.param(family, change, place, marks=marks, id=f"{family}-{change}-{place}")


@pytest.mark.fault("another pack changes a network, its blocks or ComfyUI's functions while it is sampled",
                   see="normal speed in these calls: *changed by another node*")
@pytest.mark.parametrize(("family", "change", "place"), cases())
def test_what_a_pack_changes_in_a_sampling_acts_as_in_native_and_is_forgotten_with_it(
    models: dict[str, Path], tmp_path: Path, family: str, change: str, place: str
) -> None:
    f, plain = FAMILIES[family], native(models, family)
    changed = native(models, family, change, place)
    assert error(changed, plain) > 1e-4, "it does nothing here"
    engine = OnEngine(f.load(models), tmp_path)
    for number in range(2):  # the first call after loading is a changed one
        assert error(f.sample(changing(engine.model, place, f.changes[change])), changed) <= LIMIT
        if change.startswith(("function", "code")):  # a CUDA graph, or a file, would not know of it
            assert engine.counts[0] == 0
        assert error(f.sample(engine.model), plain) <= LIMIT, number
        assert engine.counts[1] == 0, "an engine is lost"


HARMLESS = "a method with an argument bound, here to its default"


@contextlib.contextmanager
def hooked_everywhere(net: torch.nn.Module) -> Iterator[None]:
    """Put a hook on all layers there are, which acts on those of one class."""
    kind = type(net.middle_block[0].in_layers[0])
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda layer, _given, result: result * 0.9 if isinstance(layer, kind) else None)  # fmt: skip
    with contextlib.closing(SimpleNamespace(close=hook.remove)):
        yield


@contextlib.contextmanager
def forward_put_back(net: torch.nn.Module) -> Iterator[None]:
    """Put another forward on a layer, and write the method back that was read."""
    layer = net.middle_block[0]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 0.5
    yield
    layer.forward = own


KINDS: dict[str, Change] = {
    "a hook on a layer": with_hook("middle_block.0"),
    "a hook before a layer": with_hook("middle_block.0", before=True),
    "a hook on all layers": hooked_everywhere,
    "another forward of a layer": lambda net: with_method("forward")(net.middle_block[0]),
    "another forward of a layer that is written back": forward_put_back,
    "a method": with_method("_forward"),
    "blocks": with_part("output_blocks", fewer),
    "a function": with_function(openaimodel.__name__, "apply_control"),
    "a function with other arguments": with_function(
        openaimodel.__name__, "timestep_embedding", lambda own: functools.partial(own, max_period=50)),
    HARMLESS: with_function(
        attention.__name__, "CrossAttention.forward", lambda own: functools.partialmethod(own, mask=None)),
    "another function of ComfyUI's": with_function(
        attention.__name__, "BasicTransformerBlock.forward", lambda _own: skipped),
}  # fmt: skip


def skipped(self: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Stands for a forward that leaves a block out."""
    return self.norm1(x)


skipped.__code__ = skipped.__code__.replace(co_filename=attention.__file__)  # as if it was ComfyUI's


@pytest.mark.parametrize(
    ("backend", "kind"), [*(("onnxruntime", kind) for kind in KINDS), ("torch", "another forward of a layer")])
def test_a_file_engine_serves_the_calls_in_which_a_pack_changes_nothing(
    file: Path, library: Library, backend: str, kind: str
) -> None:
    in_some = {"calls": lambda number: number in (0, 2)}
    changed = sample(changing(load(file), "function", KINDS[kind], **in_some))
    if kind != HARMLESS:
        assert error(changed, natively(file)) > 1e-3, "it does nothing here"
    patched = Patched(load(file), library, backend)
    patched.sample()
    own = patched.model
    patched.model = changing(own, "function", KINDS[kind], **in_some)
    assert error(patched.sample(), changed) <= LIMIT
    assert patched.counts == (2, 2)
    patched.model = own
    assert error(patched.sample(), natively(file)) <= LIMIT
    assert patched.counts == (4, 0)


def test_a_method_that_a_pack_left_behind_before_is_natives(models: dict[str, Path], tmp_path: Path) -> None:
    f = FAMILIES["wan"]
    left, model = f.load(models), f.load(models)
    with contextlib.ExitStack() as stack:
        for one in (left, model):
            stack.enter_context(with_method("rope_encode")(one.model.diffusion_model))
        engine = OnEngine(model, tmp_path)
        assert error(f.sample(engine.model), f.sample(left)) == 0
        assert engine.counts == (0, 2 * STEPS)
        assert list(engine.handle.stats.reasons) == [Reason.MODEL_PATCHED.value]
        # one more from a call does not hide behind it
        for one in (left, engine.model):
            assert error(f.sample(changing(one, "function", with_method("unpatchify"))), f.sample(left)) > 1e-3
        assert engine.counts == (0, 2 * STEPS)
    assert error(f.sample(engine.model), native(models, "wan")) <= LIMIT
    assert engine.counts == (2 * STEPS, 0)


@contextlib.contextmanager
def one_gone_one_new(net: torch.nn.Module) -> Iterator[None]:
    """Take an attribute off a network and put a method on it: it has as many as before."""
    kept = net.__dict__.pop("note_of_a_pack")
    try:
        with with_method("forward_orig")(net):
            yield
    finally:
        net.note_of_a_pack = kept


def test_a_method_is_seen_though_the_number_of_attributes_stays(models: dict[str, Path], tmp_path: Path) -> None:
    f = FAMILIES["flux1"]
    engine = OnEngine(f.load(models), tmp_path)
    engine.handle.network.module.note_of_a_pack = 1
    for _ in range(2):
        assert error(f.sample(engine.model), native(models, "flux1")) <= LIMIT
        latent = f.sample(changing(engine.model, "function", one_gone_one_new))
        assert error(latent, native(models, "flux1", "method forward_orig", "function")) == 0
        assert engine.counts == (0, 2 * STEPS)


def halved_weight(own: Any) -> Any:
    """A cast that gives half a weight."""

    def cast(*args: Any, **kwargs: Any) -> tuple:
        weight, *rest = own(*args, **kwargs)
        return (weight if weight is None else weight * 0.5, *rest)

    return cast


CASTS = {
    "cast_bias_weight": with_function("comfy.ops", "cast_bias_weight", halved_weight),
    "Linear.forward_comfy_cast_weights": with_function(
        "comfy.ops", "disable_weight_init.Linear.forward_comfy_cast_weights"),
    "cast_to": with_function("comfy.model_management", "cast_to", lambda own: lambda *args, **kwargs: (
        lambda cast: cast if cast.dtype.itemsize == 1 else cast * 0.5)(own(*args, **kwargs))),
    "CastBiasWeightContext.__enter__": with_function("comfy.ops", "CastBiasWeightContext.__enter__", halved_weight),
    "CastBiasWeightContext": with_function("comfy.ops", "CastBiasWeightContext", lambda own: type(
        "HalvedContext", (own,), {"__enter__": halved_weight(own.__enter__), "__module__": __name__})),
}  # fmt: skip


@pytest.mark.fault("another pack replaces how ComfyUI casts weights", see="normal speed: *changed by another node*")
@pytest.mark.parametrize("cast", CASTS)
def test_casts_that_a_pack_replaces_act_as_in_native(models: dict[str, Path], tmp_path: Path, cast: str) -> None:
    if "Context" in cast and not hasattr(comfy.ops, "CastBiasWeightContext"):
        pytest.skip("this ComfyUI casts by functions alone")
    f, change = FAMILIES["flux1"], CASTS[cast]
    native, model = (f.load(models, torch.float8_e4m3fn) for _ in range(2))
    plain, engine = f.sample(native), OnEngine(model, tmp_path)
    assert error(f.sample(engine.model), plain) <= LIMIT
    for sampled in (lambda one: changing(one, "function", change), lambda one: one):
        with contextlib.nullcontext() if sampled(native) is not native else change(model.model):
            changed = f.sample(sampled(native))
            assert error(changed, plain) > 1e-3, "it does nothing here"
            assert error(f.sample(sampled(engine.model)), changed) == 0
            assert engine.counts == (0, 2 * STEPS)
    assert error(f.sample(engine.model), plain) <= LIMIT
    assert engine.counts == (2 * STEPS, 0)


def test_notes_that_packs_keep_on_a_network_cost_no_engine(models: dict[str, Path], tmp_path: Path) -> None:
    """As caches of steps do in each call."""

    @contextlib.contextmanager
    def noting(net: torch.nn.Module) -> Iterator[None]:
        net.calls_of_a_pack = getattr(net, "calls_of_a_pack", 0) + 1
        yield

    f = FAMILIES["flux1"]
    engine = OnEngine(f.load(models), tmp_path)
    assert error(f.sample(changing(engine.model, "function", noting)), native(models, "flux1")) <= LIMIT
    assert engine.counts == (2 * STEPS, 0)


def test_the_class_of_a_network_or_layer_that_a_pack_exchanges_is_seen_and_forgotten(
    models: dict[str, Path], tmp_path: Path
) -> None:
    f, found = FAMILIES["wan"], []

    @contextlib.contextmanager
    def reclassed(net: torch.nn.Module) -> Iterator[None]:
        """As packs do that compute a network by a class of their own."""
        own = type(net)
        net.__class__ = type("ReWan", (own,), {"forward": lambda self, *a, **k: own.forward(self, *a, **k) * 0.5})
        try:
            yield
        finally:
            net.__class__ = own

    plain, changed = native(models, "wan"), f.sample(changing(f.load(models), WrappersMP.OUTER_SAMPLE, reclassed))
    assert error(changed, plain) > 1e-3
    model = f.load(models)
    with reclassed(model.model.diffusion_model):  # the model is seen first so
        with contextlib.suppress(Exception):
            found.append(OnEngine(model, tmp_path))
    engine = OnEngine(model, tmp_path)
    assert error(f.sample(engine.model), plain) <= LIMIT
    assert engine.counts == (2 * STEPS, 0), "unsupported model is what it was"
    assert error(f.sample(changing(engine.model, WrappersMP.OUTER_SAMPLE, reclassed)), changed) <= LIMIT
    assert error(f.sample(engine.model), plain) <= LIMIT
    assert engine.counts == (2 * STEPS, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
def test_no_graph_serves_a_call_in_which_a_pack_changes_the_network(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "changes_on_gpu.py"
    command = [sys.executable, "-P", str(script), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    sys.stdout.write(run.stdout)
    assert run.returncode == 0, run.stderr[-3000:]
    assert len([line for line in lines if line.startswith("right")]) >= 40, run.stdout
    assert not [line for line in lines if line.startswith("WRONG")], run.stdout
