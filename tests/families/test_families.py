"""Calls of all model families: on engines they equal native's, what no engine takes is a reason."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import COMPILES
from family_contract import ACTS, LIMIT, Family, difference, error_of, live, natively, on_engine
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.shapes import Picture, RequestedSizes, outside
from hybrid_trt.backends import backends
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from hybrid_trt.sessions.file_session import FileSession
from model_families import for_each
from token_calls import profile_of
from torch.utils import _pytree as pytree

CPU = torch.device("cpu")
OF_ANY_TYPE = ("timestep", "timesteps", "transformer_options", "minimax_payload")
"""Arguments that are the same in half precision."""


@for_each("file", lambda family: family.files)
def test_each_call_on_live_weights_is_natives(models: dict[str, Path], family: Family, file: str) -> None:
    network = family.network(models, file)
    family.check_calls(network, live(network), file)


@for_each("file", lambda family: family.files)
def test_one_engine_of_onnx_runtime_serves_all_calls(
    models: dict[str, Path], tmp_path: Path, family: Family, file: str
) -> None:
    network = family.network(models, file)
    session = FileSession(family.engine(network, tmp_path), backends()["onnxruntime"].load, CPU)
    family.check_calls(network, session, file)


@COMPILES
@for_each("file", lambda family: family.any_size)
def test_one_compiled_file_serves_calls_of_all_sizes(
    models: dict[str, Path], tmp_path: Path, family: Family, file: str
) -> None:
    network = family.network(models, file)
    order = BuildOrder(network, "float32", family.profile(network), backends()["torch"])
    session = live(network)
    session.use([build_engine(order, Library([tmp_path]), lambda *_: None)])
    for name in family.any_size[file]:
        assert error_of(network, session, family.calls[name].drawn(network)) <= LIMIT, name
        assert session.uncovered is None, name
    assert session.refusal is None


@for_each("name", lambda family: family.unlike)
def test_what_calls_differ_in_acts(models: dict[str, Path], family: Family, name: str) -> None:
    """So that the calls above prove something."""
    network, names = family.network(models, family.calls[name].file), (name, *family.unlike[name])
    results = [natively(network, family.calls[one].drawn(network)) for one in names]
    for (one, first), (other, second) in itertools.combinations(zip(names, results, strict=True), 2):
        assert difference(first, second) > ACTS, (one, other)


@for_each("name dtype", lambda family: [(name, dtype) for name, types in family.half.items() for dtype in types])
def test_half_precision_is_as_near_to_float32_as_native_is(
    models: dict[str, Path], family: Family, name: str, dtype: torch.dtype
) -> None:
    call = family.calls[name]
    exact, half = (family.network(models, call.file, one) for one in (torch.float32, dtype))
    given = call.drawn(exact)
    narrow = {name: value if name in OF_ANY_TYPE else pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype), value)
              for name, value in given.items()}  # fmt: skip
    wanted, native = natively(exact, given), natively(half, narrow)
    found = on_engine(half, live(half, str(dtype).removeprefix("torch.")), narrow)
    assert {t.dtype for t in pytree.tree_leaves([found, native])} == {dtype}
    found, native = (pytree.tree_map(torch.Tensor.float, one) for one in (found, native))
    assert LIMIT < difference(found, wanted) <= 1.1 * difference(native, wanted)


@for_each("file", lambda family: family.files if family.float32 else [])
def test_half_precision_keeps_in_float32_what_native_keeps(models: dict[str, Path], family: Family, file: str) -> None:
    network = family.network(models, file)
    specs = {spec.name: spec.dtype for spec in network.architecture().inputs(network.module, "bfloat16")}
    assert {name for name, dtype in specs.items() if dtype != "bfloat16"} == {*family.float32}
    assert {specs[name] for name in family.float32} == {"float32"}


@for_each("reason name change", lambda family: [
    (reason, name, change) for name, changes in family.refused.items() for change, reason in changes])  # fmt: skip
def test_what_no_engine_takes_is_a_reason(
    models: dict[str, Path], family: Family, name: str, change: dict[str, Any], reason: str
) -> None:
    call = family.calls[name]
    network = family.network(models, call.file)
    bind, given = network.architecture().binding(network.module), call.drawn(network)
    bind(given)
    with pytest.raises(Unsupported, match=reason):
        bind({**given, **change})


@for_each("name", lambda family: family.ignored)
def test_what_native_does_not_look_at_is_no_reason(models: dict[str, Path], family: Family, name: str) -> None:
    network = family.network(models, family.calls[name].file)
    session, call = live(network), family.calls[name].drawn(network)
    expected = natively(network, call)
    for more in family.ignored[name]:
        assert difference(natively(network, {**call, **more}), expected) == 0, more
        assert error_of(network, session, {**call, **more}) <= LIMIT, more


@for_each("name", lambda family: family.steady)
def test_the_same_positions_are_the_same_tensors(models: dict[str, Path], family: Family, name: str) -> None:
    """So that a captured graph copies them once."""
    network = family.network(models, family.calls[name].file)
    bind, call = network.architecture().binding(network.module), family.calls[name].drawn(network)
    first, second = (bind({**call, "x": call["x"] + i}).inputs for i in range(2))
    turned = bind({**call, "x": call["x"].transpose(-1, -2)}).inputs
    for place in family.steady[name]:
        assert first[place] is second[place]
    assert not all(torch.equal(turned[place], first[place]) for place in family.steady[name])


@for_each("file", lambda family: family.sizes)
def test_without_numbers_the_profile_is_what_the_family_is_used_for(
    models: dict[str, Path], family: Family, file: str
) -> None:
    architecture, sizes = family.network(models, file).architecture(), family.sizes[file]
    profile = architecture.profile(RequestedSizes())
    for picture in sizes.pictures:
        (call,) = architecture.calls(profile, picture)
        assert outside(profile, call, architecture.symbols) is None
    assert architecture.words(profile) == sizes.words
    assert architecture.call_words(call | sizes.more) == sizes.last


@for_each("file", lambda family: [file for file, sizes in family.sizes.items() if sizes.sampled])
def test_a_picture_or_video_is_one_call_of_its_size(models: dict[str, Path], family: Family, file: str) -> None:
    network, sizes = family.network(models, file), family.sizes[file]
    picture = Picture.sampled(120, 136, 1, cfg=4.0, length=sizes.length)
    (call,) = network.architecture().calls(profile_of(network), picture)
    assert call.items() >= sizes.sampled.items()
