"""Z-Image: calls and whole runs give native's results; what no engine serves is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path

import comfy.ops
import pytest
import torch
import zimage
from built_once import built_once
from compiling import COMPILES
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.shapes import Picture, RequestedSizes
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions.file_session import FileSession

LIMIT = 1e-5
SIZES = {
    "small": {},
    "odd sides, two pictures": {"height": 13, "width": 11, "batch": 2, "tokens": 30},
    "a whole number of groups": {"height": 16, "width": 8, "tokens": 32},
    "many tokens": {"height": 10, "width": 34, "tokens": 100},
    "one token": {"tokens": 1},
}


def session_of(net: zimage.NativeNetwork) -> LiveSession:
    return LiveSession(net, backends()["torch"], "float32")


def order_of(net: zimage.NativeNetwork, backend: str, *calls: dict[str, int]) -> BuildOrder:
    profile = net.architecture().profile(RequestedSizes(64, 128, 256, 2))
    return BuildOrder(net, "float32", profile, backends()[backend], calls=calls)


def served(session: LiveSession | FileSession, net: zimage.NativeNetwork, given: dict) -> torch.Tensor:
    """The result of a call on the engine."""
    session.sync_from(net, net.patcher)
    bound = net.architecture().binding(net.module)(given)
    return bound.finish(session.run(bound.inputs, bound.extras))


def natively(net: zimage.NativeNetwork, given: dict) -> torch.Tensor:
    with torch.inference_mode():
        return net.module(**copy.deepcopy(given))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_call_gives_natives_result(sizes: dict) -> None:
    net, given = zimage.network(), zimage.call(**sizes)
    assert net.architecture().name == "zimage"
    assert relative_error(served(session_of(net), net, given), natively(net, given)) <= LIMIT


def test_calls_of_any_size_give_natives_result_on_onnx_runtime(tmp_path: Path) -> None:
    net = zimage.network()
    engine = built_once(order_of(net, "onnxruntime"), Library([tmp_path]))
    assert engine.manifest.parity["rel_err"] <= LIMIT
    assert {spec.name for spec in engine.manifest.inputs} >= {"prompt", "picture_places"}
    session = FileSession(engine, backends()["onnxruntime"].load, zimage.CPU)
    for sizes in SIZES.values():
        given = zimage.call(**sizes)
        assert relative_error(served(session, net, given), natively(net, given)) <= LIMIT, sizes
    other = zimage.call(tokens=10, seed=2)
    assert relative_error(served(session, net, other), natively(net, zimage.call(tokens=10))) > 100 * LIMIT


@COMPILES
def test_calls_of_all_sizes_give_natives_result_on_one_file(tmp_path: Path) -> None:
    net = zimage.network()
    engine = build_engine(order_of(net, "torch", {"B": 1, "N": 1, "T": 1}), Library([tmp_path]), lambda *_: None)
    session = session_of(net)
    session.use([engine])
    for sizes in ({}, {"height": 10, "width": 12, "tokens": 30}, {"batch": 2}, {"height": 40, "tokens": 90}):
        given = zimage.call(**sizes)
        assert relative_error(served(session, net, given), natively(net, given)) <= LIMIT
        assert session.uncovered is None, sizes
    assert session.refusal is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_as_near_to_float32_as_native_is(dtype: torch.dtype) -> None:
    exact, net = zimage.network(), zimage.network(dtype)
    given = zimage.call(height=16, width=16, tokens=40)
    expected = natively(exact, given)
    halved = {**given, "x": given["x"].to(dtype), "context": given["context"].to(dtype)}
    session = LiveSession(net, backends()["torch"], str(dtype).removeprefix("torch."))
    found, native = served(session, net, halved), natively(net, halved)
    assert found.dtype == native.dtype == dtype
    assert 1e-4 < relative_error(found, expected) <= 1.2 * relative_error(native, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_weights_that_are_cast_at_every_call_compute_as_natives(dtype: torch.dtype) -> None:
    net, given = zimage.network(dtype, comfy.ops.manual_cast), zimage.call(tokens=40)
    assert relative_error(served(session_of(net), net, given), natively(net, given)) <= LIMIT


def test_sizes_are_those_of_tokens_in_groups() -> None:
    family = zimage.network().architecture()
    profile = family.profile(RequestedSizes())
    assert profile.to_json() == {"B": [1, 1, 2], "N": [32, 128, 288], "T": [1, 4, 17]}
    assert family.words(profile) == "1 image, 512 to 1536 px, 544 tokens"
    usual = family.calls(profile, Picture(832, 1216, (1,)))
    assert usual == [{"B": 1, "N": 124, "T": 4}]
    assert family.call_words(usual[0]) == "3968 image tokens, 128 tokens"
    assert family.calls(profile, Picture(1024, 1024, (4, 2)))[0] == {"B": 4, "N": 128, "T": 4}
    small = family.profile(RequestedSizes(64, 72, 80, 3, 20))
    assert small.to_json() == {"B": [1, 1, 6], "N": [1, 1, 1], "T": [1, 1, 1]}
    assert family.words(small) == "up to 3 images, 80 px, 32 tokens"


def test_padding_prompt_place_and_time_each_change_the_picture() -> None:
    net, given = zimage.network(), zimage.call(height=6, tokens=9)
    session = session_of(net)
    before = served(session, net, given)
    changes = {"context": given["context"].flip(1), "timesteps": given["timesteps"] / 2,
               "transformer_options": {"rope_options": {"scale_x": 1.5, "shift_y": 3.0}}}
    for name, value in changes.items():
        changed = {**given, name: value}
        found = served(session, net, changed)
        assert relative_error(found, before) > 1e-3, name
        assert relative_error(found, natively(net, changed)) <= LIMIT, name
    for name in ("x_pad_token", "cap_pad_token"):
        other = zimage.network()
        getattr(other.module, name).data.mul_(3)
        found = served(session_of(other), other, given)
        assert relative_error(found, before) > 1e-3, name
        assert relative_error(found, natively(other, given)) <= LIMIT, name


def test_what_native_ignores_without_references_is_served() -> None:
    net, given = zimage.network(), zimage.call()
    given |= {"attention_mask": torch.zeros(1, 9), "ref_latents": [], "ref_contexts": [torch.ones(1, 3, 64)],
              "siglip_feats": [torch.ones(1, 2, 2, 8)], "control": {"output": [torch.ones(1)]},
              "clip_text_pooled": torch.ones(1, 8)}
    assert relative_error(served(session_of(net), net, given), natively(net, given)) <= LIMIT


@pytest.mark.parametrize(("name", "value"), [
    ("ref_latents", [torch.ones(1, 16, 8, 8)]), ("guidance", torch.ones(1)), ("context", None),
])  # fmt: skip
def test_what_no_engine_serves_is_refused_by_name(name: str, value: object) -> None:
    net = zimage.network()
    words = {"ref_latents": "reference latents", "context": "there is no prompt"}.get(name, name)
    with pytest.raises(Unsupported, match=words):
        net.architecture().binding(net.module)({**zimage.call(), name: value})


@pytest.mark.parametrize("changes", [
    {"pad_tokens_multiple": None}, {"n_kv_heads": 2}, {"clip_text_dim": 32}, {"qk_norm": False},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_relatives_with_other_layers_are_not_taken_for_it(changes: dict) -> None:
    with pytest.raises(Unavailable, match="is a NextDiT"):
        zimage.network(**changes).architecture()
