"""One real ComfyUI with two GPUs: MultiGPU CFG Split and Select Model Device, with engines on each GPU.

    pytest -m gpu tests/sampling/test_two_gpus_gpu.py

With fewer than two NVIDIA GPUs each test is skipped. What holds with a double of a GPU is in ``test_several_gpus.py``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_process import ComfyProcess, History
from gpu_server import gpu_server
from hybrid_trt.backends import backends
from scenarios import Prompt, Scenario, latent_of, native_latent, node, prompt, relative_difference

LIMIT = 1e-2
"""Of the latent after all steps, in half precision."""
STEPS = 6
PLAIN = Scenario(controls=(), seed=41, steps=STEPS)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")]


@pytest.fixture(scope="module", params=[[], ["--disable-dynamic-vram"]], ids=["default", "without dynamic VRAM"])
def server(
    request: pytest.FixtureRequest, environment: Any, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyProcess]:
    with gpu_server(environment, tmp_path_factory.mktemp("page"), *request.param) as process:
        yield process


@pytest.fixture(params=["torch", "compiled", "tensorrt"])
def settings(request: pytest.FixtureRequest, server: ComfyProcess) -> dict[str, Any]:
    """Those of an engine node: live weights as CUDA graphs, compiled, or an engine with weights of its own."""
    name = "torch" if request.param == "compiled" else request.param
    if (refusal := backends()[name].cannot_run(torch.device("cuda", 0))) is not None:
        pytest.skip(str(refusal))
    when = "use native" if request.param == "torch" else "build now"
    for folder in (server.base / "models" / "trt_engines").glob("[!.]*_*"):
        shutil.rmtree(folder)
    return {"backend": name, "when_missing": when, "min_size": 128, "max_size": 128, "max_images": 2, "max_tokens": 77}


def with_node(built: Prompt, name: str, links: tuple[str, ...], **inputs: Any) -> Prompt:
    """Put a node that takes a model in front of others."""
    built["between"] = node(name, model=built[links[0]]["inputs"]["model"], **inputs)
    for link in links:
        built[link]["inputs"]["model"] = ["between", 0]
    return built


def split(scenario: Scenario, engines: bool, link: str = "sampler") -> Prompt:
    return with_node(prompt(scenario, engines, f"split_{engines}"), "MultiGPU_WorkUnits", (link,), max_gpus=2)


def rows(history: History) -> list[tuple[int, int, dict]]:
    """Return the UNets' calls on an engine, the native ones, and their reasons."""
    assert history.ok, history.error
    return [(r["engine"], r["native"], r["reasons"]) for r in history.output("report", "report")[0]["rows"]
            if r["kind"] == "unet"]  # fmt: skip


@pytest.mark.parametrize("link", ["sampler", "patch"])
def test_a_split_step_runs_on_an_engine_of_each_gpu_and_the_latent_is_that_of_one(
    server: ComfyProcess, settings: dict[str, Any], link: str
) -> None:
    used = []
    for seed in (41, 42, 43):
        scenario = PLAIN.but(settings=settings, seed=seed)
        reference = native_latent(server, scenario)
        history = server.queue(split(scenario, True, link), timeout=900)
        assert rows(history) == [(2 * STEPS, 0, {})], seed
        assert relative_difference(latent_of(history), reference) <= LIMIT
        text = " ".join(history.output("report", "text"))
        assert "captured" not in text, "no capture failed"
        used.append([device["vram_total"] - device["vram_free"] for device in server.get("/system_stats")["devices"]])
    assert all(later <= earlier + 0.3e9 for later, earlier in zip(used[2], used[1], strict=True)), used


def test_the_next_prompt_without_the_split_runs_on_the_first_gpu_alone(
    server: ComfyProcess, settings: dict[str, Any]
) -> None:
    scenario = PLAIN.but(settings=settings)
    reference = native_latent(server, scenario)
    assert rows(server.queue(split(scenario, True), timeout=900)) == [(2 * STEPS, 0, {})]
    history = server.queue(prompt(scenario.but(seed=50), True, "one"), timeout=900)
    assert rows(history) == [(STEPS, 0, {})]
    assert relative_difference(latent_of(history), native_latent(server, scenario.but(seed=50))) <= LIMIT
    again = server.queue(split(scenario, True))
    assert relative_difference(latent_of(again), reference) <= LIMIT


def test_four_conditionings_share_two_gpus(server: ComfyProcess) -> None:
    """Two calls of other shapes on a GPU in a step: a batch of 2, and of 1 for the part of the picture."""
    scenario = PLAIN.but(settings={"backend": "torch"}, area=True)
    history = server.queue(split(scenario, True))
    ((engine, native, reasons),) = rows(history)
    assert (native, reasons) == (0, {})
    assert engine >= 2 * STEPS
    assert relative_difference(latent_of(history), native_latent(server, scenario)) <= LIMIT


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "and the split"])
def test_a_model_on_the_second_gpu_runs_on_an_engine_there(
    server: ComfyProcess, settings: dict[str, Any], shared: bool
) -> None:
    scenario = PLAIN.but(settings=settings)
    built = prompt(scenario, True, "second")
    built = with_node(built, "SelectModelDevice", ("unet_engine", "patch"), device="gpu:1")
    if shared:
        built["split"] = node("MultiGPU_WorkUnits", model=built["sampler"]["inputs"]["model"], max_gpus=2)
        built["sampler"]["inputs"]["model"] = ["split", 0]
    history = server.queue(built, timeout=900)
    assert rows(history) == [((1 + shared) * STEPS, 0, {})]
    assert relative_difference(latent_of(history), native_latent(server, scenario)) <= LIMIT


def test_controlnets_of_a_split_step_give_natives_latent(server: ComfyProcess) -> None:
    scenario = Scenario(seed=41, steps=STEPS, settings={"backend": "torch"})
    reference = native_latent(server, scenario)
    assert relative_difference(native_latent(server, scenario.but(controls=())), reference) > 10 * LIMIT
    for _ in range(2):
        history = server.queue(split(scenario, True))
        assert rows(history) == [(2 * STEPS, 0, {})]
        assert all(row["native"] == 0 for row in history.output("report", "report")[0]["rows"])
        assert relative_difference(latent_of(history), reference) <= LIMIT
        scenario = scenario.but(seed=scenario.seed + 1)
        reference = native_latent(server, scenario)
