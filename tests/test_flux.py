"""Flux.1 and Flux.2: each call of a small network on an engine gives what ComfyUI's own forward gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from built_once import built_once
from comfy.ldm.flux.layers import timestep_embedding
from compiling import COMPILES
from flux_networks import LAYOUTS, call, native, network, residuals
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.flux import thousandths
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions.file_session import FileSession
from hybrid_trt.sessions.session import Session
from small_networks import CPU

LIMIT = 1e-5
TWO = ((10, 8), (7, 9))
"""Sizes of two pictures that are referred to."""


def live(net: NativeNetwork) -> LiveSession:
    return LiveSession(net, backends()["torch"], net.precision)


def error(net: NativeNetwork, session: Session, given: dict[str, Any]) -> float:
    bound = net.architecture().binding(net.module)(given)
    with torch.inference_mode():
        result = bound.finish(session.run(bound.inputs))
    return relative_error(result, native(net, given))


CASES = {
    "a picture": {},
    "batch 2, an odd size, a long prompt": {"batch": 2, "size": (13, 11), "prompt": 30},
    "two references": {"references": TWO},
    "two references side by side": {"references": TWO, "ref_latents_method": "uxo"},
    "two references by index": {"references": TWO, "ref_latents_method": "index", "batch": 2, "size": (9, 8)},
    "a prompt for ControlNets alone": {"crossattn_controlnet": torch.ones(1, 9, 48)},
    "places changed by another node": {"transformer_options": {
        "rope_options": {"scale_x": 1.5, "scale_y": 0.7, "shift_t": 2.0, "shift_x": 3.0, "shift_y": 1.0}}},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_call_is_natives(layout: str) -> None:
    net = network(layout)
    session = live(net)
    for name, changes in CASES.items():
        assert error(net, session, call(net, **changes)) <= LIMIT, name
        assert error(net, session, call(net, **changes, seed=2)) <= LIMIT, name


CONTROLS = {
    "all": ("ab", "cde"), "the first alone": ("a", ""), "some": (".a", "b.a"), "one in all": ("aa", "aaa"),
    "more than it has blocks": ("abab", "abcabc"), "none": ("..", "..."),
}  # fmt: skip
"""Residuals at the double and at the single blocks."""


@pytest.mark.parametrize("layout", ["dev", "flux2"])
def test_residuals_of_controlnets_are_added_where_native_adds_them(layout: str) -> None:
    net = network(layout)
    session = live(net)
    tokens = 24 if layout == "dev" else 96
    for batch in (1, 2):
        plain = native(net, call(net, batch=batch))
        for name, (doubles, singles) in CONTROLS.items():
            given = call(net, batch=batch, control=residuals(net, tokens, doubles, singles, batch=1))
            assert error(net, session, given) <= LIMIT, name
            assert (relative_error(native(net, given), plain) > 0.1) is (name != "none"), name


def test_no_residual_is_added_to_the_tokens_of_references() -> None:
    net = network("dev")
    session, control = live(net), residuals(net, 24, "ab", "aca")
    for more in ({}, {"control": control}):
        assert error(net, session, call(net, references=TWO, **more)) <= LIMIT
    alone, referring = (call(net, references=one, control=control) for one in ((), TWO))
    assert relative_error(native(net, referring), native(net, alone)) > 0.01


def test_a_call_without_a_pooled_prompt_is_natives() -> None:
    net = network("dev")
    with_y, without = call(net), call(net, y=None)
    assert error(net, live(net), without) <= LIMIT
    assert relative_error(native(net, with_y), native(net, without)) > 0.01


REFUSED = {
    "attention_mask": {"attention_mask": torch.ones(1, 1, 33, 33)},
    "there is no guidance": {"guidance": None},
    "a timestep of their own": {"references": TWO, "ref_latents_method": "index_timestep_zero"},
    "something_new": {"something_new": 1},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_no_engine_takes_is_refused_with_a_reason(why: str) -> None:
    net = network("dev")
    with pytest.raises(Unsupported, match=why):
        net.architecture().binding(net.module)(call(net, **REFUSED[why]))


def test_rotary_embeddings_are_made_once_for_each_size() -> None:
    net = network("dev")
    bind = net.architecture().binding(net.module)
    first, again, other = (bind(call(net, seed=seed, size=size)).inputs
                           for seed, size in ((1, (12, 8)), (2, (12, 8)), (1, (8, 12))))  # fmt: skip
    for name in ("pe_prompt", "pe_image"):
        assert first[name] is again[name]
    assert not torch.equal(first["pe_image"], other["pe_image"]), "of the same number of tokens"


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("layout", ["dev", "flux2"])
def test_in_half_precision_it_rounds_as_native_does(layout: str, dtype: torch.dtype, limit: float) -> None:
    """Guidance too: native multiplies it by 1000 in half precision, which makes 3.5 another number."""
    net = network(layout, dtype)
    session = live(net)
    for number, changes in enumerate(({}, {"batch": 2, "references": TWO})):
        given = call(net, **changes, control=residuals(net, 24 if layout == "dev" else 96, "ab", "cca"))
        assert error(net, session, given) <= limit, number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_graph_that_rounds_no_product_embeds_the_guidance_that_native_embeds(dtype: torch.dtype) -> None:
    """As a compiled one: it multiplies by 1000 in float32, whatever it takes. In bfloat16 native makes 3504 of 3.5."""
    for value in (1.0, 2.5, 3.5, 4.0, 7.3, 30.0):
        guidance = torch.tensor([value]).to(dtype)
        expected = timestep_embedding(guidance, 256)
        assert relative_error(timestep_embedding(thousandths(guidance), 256), expected.float()) <= 1e-2, value
    raw = relative_error(timestep_embedding(torch.tensor([3.5]), 256), timestep_embedding(
        torch.tensor([3.5], dtype=dtype), 256).float())  # fmt: skip
    assert (raw > 0.1) == (dtype is torch.bfloat16), "this test would not see it"
    net = network("dev", dtype)
    assert net.architecture().binding(net.module)(call(net)).inputs["guidance"].dtype is torch.float32


PROFILE = Profile({"B": Range(1, 1, 2), "N": Range(4, 24, 300), "T": Range(1, 9, 64)})


@pytest.mark.parametrize("layout", ["dev", "klein", "ovis"])
def test_a_graph_for_all_sizes_computes_what_native_does(layout: str, tmp_path: Path) -> None:
    net = network(layout)
    engine = built_once(BuildOrder(net, "float32", PROFILE, backends()["onnxruntime"]), Library([tmp_path]))
    assert engine.manifest.parity["rel_err"] <= LIMIT
    session = FileSession(engine, backends()["onnxruntime"].load, CPU)
    for name, changes in CASES.items():
        assert error(net, session, call(net, **changes)) <= LIMIT, name
    tokens = 24 if layout != "klein" else 96
    for name, (doubles, singles) in CONTROLS.items():
        assert error(net, session, call(net, control=residuals(net, tokens, doubles, singles))) <= LIMIT, name


@COMPILES
@pytest.mark.slow  # ``test_blocks.py`` and ``test_zimage.py`` compile networks in tokens in CI
@pytest.mark.parametrize("layout", ["dev", "klein"])
def test_a_compiled_file_computes_what_native_does(layout: str, tmp_path: Path) -> None:
    net = network(layout)
    torch_backend, tokens = backends()["torch"], 24 if layout == "dev" else 96
    size = {"B": 1, "N": tokens, "T": 9}
    order = BuildOrder(net, "float32", PROFILE, torch_backend, calls=(size,))
    engine = build_engine(order, Library([tmp_path]), lambda *_: None)
    session = live(net)
    session.use([engine])
    for changes in ({}, {"control": residuals(net, tokens, "ab", "a.b")}):
        assert error(net, session, call(net, **changes)) <= LIMIT
        assert session.uncovered is None
    assert session.refusal is None
