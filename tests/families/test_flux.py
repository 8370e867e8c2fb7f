"""Flux.1 and Flux.2: what native rounds in half precision, a LoRA that widens a layer, a build that serves all."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import torch
from builds import until
from comfy.ldm.flux.layers import timestep_embedding
from comfy_process import ComfyProcess
from family_contract import ACTS, LIMIT, drawing, error_of, live
from flux_networks import call, network, residuals
from hybrid_trt.architectures.families.flux import thousandths
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Reason
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.engine_status import status
from hybrid_trt.sampling.report import report_text
from model_families.flux import FILE, TWO, prompt
from scenarios import Scenario, latent_of, native_latent, relative_difference
from scenarios import prompt as prompt_of
from token_calls import Patched, network_of, profile_of

from sampling import error


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


@pytest.mark.fault("a LoRA gives a layer more inputs (Flux.1 Canny, Depth)",
                   see="normal speed: *weights changed*, with the layer's name")
@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_lora_that_widens_a_layer_runs_native_with_the_reason(
    models: dict[str, Path], tmp_path: Path, place: str
) -> None:
    random, layer = drawing(3), "diffusion_model.img_in"
    lora = {f"{layer}.lora_A.weight": random(4, 128), f"{layer}.lora_B.weight": random(256, 4),
            f"{layer}.reshape_weight": torch.tensor([256, 128])}  # fmt: skip
    native, plain, model = (network_of(models, FILE).patcher for _ in range(3))

    def widened(model: Any) -> Any:
        return comfy.sd.load_lora_for_models(model, None, lora, 0.8, 0)[0]

    own = NativeNetwork.of_model(widened(model) if place == "before" else model, FILE)
    patched = Patched(own, tmp_path, "torch", profile=profile_of(network_of(models, FILE)))
    # the control image comes as further channels
    control = prompt(entries=lambda random: {"concat_latent_image": random(1, 16, 8, 6)})
    expected = control.sample(widened(native))
    assert error(prompt().sample(widened(native)), expected) > ACTS
    assert error(control.sample(patched.model if place == "before" else widened(patched.model)), expected) == 0
    assert patched.counts == (0, control.calls)
    assert list(patched.handle.stats.reasons) == [Reason.WEIGHTS_PATCHED.value]
    assert "img_in" in (status(patched.handle) if place == "before" else report_text([patched.handle.stats]))
    patched = Patched(NativeNetwork.of_model(model, FILE), tmp_path, "torch")
    assert error(prompt().sample(patched.model), prompt().sample(plain)) <= LIMIT
    assert patched.counts[1] == 0, "the model without the LoRA has its engine again"


SIDES = ((64, 64), (96, 64), (64, 112), (128, 128), (48, 80), (160, 64), (80, 80), (32, 144), (112, 96))
TOKENS, BATCHES = (77, 9, 154, 30, 256), (1, 2, 3)


def compiled_files(comfy: ComfyProcess) -> dict[Path, int]:
    found = (comfy.base / "models" / "trt_engines").glob("flux1-*-torch-*/*.bin")
    return {file: file.stat().st_mtime_ns for file in found}


def test_the_first_prompt_starts_a_build_that_serves_all_later_ones(comfy: ComfyProcess) -> None:
    """Each size comes, in ever other company."""
    turning = [itertools.cycle(sizes) for sizes in (SIDES, TOKENS, BATCHES)]
    cases = [Scenario(
        "flux1", FILE, controls=(), width=size[0], height=size[1], tokens=(tokens, 77), batch=batch, steps=2, cfg=1.0,
        settings={"backend": "torch", "when_missing": "auto"}) for size, tokens, batch in itertools.islice(
            zip(*turning, strict=True), 24)]  # fmt: skip
    built = compiled_files(comfy)
    for number, case in enumerate([cases[0], *cases]):
        history = comfy.queue(prompt_of(case, True, "engine"))
        assert relative_difference(latent_of(history), native_latent(comfy, case)) <= LIMIT, case
        (row,) = history.output("report", "report")[0]["rows"]
        assert (row["engine"] > 0, row["native"]) == (True, 0), case
        if number == 0:
            assert until(lambda: not any(job["state"] in ("queued", "running")
                                         for job in comfy.get("/hybrid_trt/builds")), 240)  # fmt: skip
            there, built = built, compiled_files(comfy)
            assert len(built.keys() - there.keys()) <= 1, "one file, of this test or of one before"
        else:
            assert row["uncompiled"] == {}, case
    assert compiled_files(comfy) == built, "nothing was built again"
