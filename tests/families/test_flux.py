"""Flux.1 and Flux.2 in half precision: what native rounds is rounded alike."""

from __future__ import annotations

import pytest
import torch
from comfy.ldm.flux.layers import timestep_embedding
from family_contract import error_of, live
from flux_networks import call, network, residuals
from hybrid_trt.architectures.families.flux import thousandths
from hybrid_trt.engine_library.engine import relative_error
from model_families.flux import TWO


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("layout", ["dev", "flux2"])
def test_in_half_precision_it_rounds_as_native_does(layout: str, dtype: torch.dtype, limit: float) -> None:
    """Guidance too: native multiplies it by 1000 in half precision, which makes 3.5 another number."""
    net = network(layout, dtype)
    session = live(net, net.precision)
    for number, changes in enumerate(({}, {"batch": 2, "references": TWO})):
        given = call(net, **changes, control=residuals(net, 24 if layout == "dev" else 96, "ab", "cca"))
        assert error_of(net, session, given) <= limit, number


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
