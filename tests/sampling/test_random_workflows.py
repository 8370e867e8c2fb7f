"""Workflows drawn at random, and every stock node that takes a MODEL, act through engines as natively.

Slow: about a quarter of an hour. `make test ARGS="-m slow tests/sampling/test_random_workflows.py"`
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from comfy_process import ComfyProcess, PromptRejected
from model_nodes import model_nodes
from random_search import Seen, wrong
from random_workflows import Draws, prompt_of
from scenarios import Prompt, Scenario, latent_of, node, prompt, relative_difference

COUNT = 40


@pytest.fixture(scope="module")
def native(sd15: ComfyProcess) -> Iterator[ComfyProcess]:
    """A second server, in which nothing ever runs on an engine."""
    with ComfyProcess(sd15.comfyui, sd15.base, log=sd15.base / "native.log") as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_random_workflow_acts_as_in_native(sd15: ComfyProcess, native: ComfyProcess, seed: int) -> None:
    random = Random(seed)
    draws, workflow, found, seen = Draws(random, sd15.object_info()), None, [], Seen()
    for _ in range(COUNT):
        workflow = draws.but_one_thing(workflow) if workflow and random.random() < 0.4 else draws.workflow()
        if (what := wrong(native, sd15, workflow, prompt_of, seen, interrupts=random)) is not None:
            found.append(f"{what}: {workflow}")
    assert not found, "\n".join(found)
    assert seen.workflows > COUNT / 2, f"ComfyUI can do too little of what is drawn: {seen}"
    assert seen.on_engines > seen.native, f"too little of it runs on engines: {seen}"
    assert seen.interrupted > COUNT / 4, f"too little of it is interrupted: {seen}"


# Every node of ComfyUI's own that takes a MODEL and gives one acts as in native, wherever it stands in the graph

SCENARIO = Scenario(steps=2)
PLACES = ("after the sampler patch", "before the sampler patch only", "before the engine")


def graph(name: str, models: list[str], inputs: dict[str, Any], place: str | None) -> Prompt:
    """The scenario with one more model node; natively without a place."""
    built = prompt(SCENARIO, place is not None, "stock")
    built["operation"] = node("LatentOperationTonemapReinhard", multiplier=0.5)
    built["other"] = node("UNETLoader", unet_name="tiny_sd15_other_unet.safetensors", weight_dtype="default")
    built["stock"] = node(name, **inputs)
    followers = {None: ["sampler"], PLACES[0]: ["sampler"], PLACES[1]: ["patch"], PLACES[2]: ["patch", "unet_engine"]}
    source = built[followers[place][0]]["inputs"]["model"]
    for follower in followers[place]:
        built[follower]["inputs"]["model"] = ["stock", 0]
    for key, model in zip(models, [source, ["other", 0]], strict=False):
        built["stock"]["inputs"][key] = model
    return built


@pytest.mark.slow
def test_every_stock_model_node_acts_as_in_native(sd15: ComfyProcess) -> None:
    wrong, tried = {}, 0
    for name, (models, inputs) in sorted(model_nodes(sd15.object_info()).items()):
        try:
            native = sd15.queue(graph(name, models, inputs, None))
        except PromptRejected:
            continue  # it wants a file that is not here
        if not native.ok:
            continue  # it is made for another family of models
        tried += 1
        for place in PLACES:
            history = sd15.queue(graph(name, models, inputs, place), timeout=300)
            error = relative_difference(latent_of(history), latent_of(native)) if history.ok else history.error
            if not (history.ok and error <= 1e-5):
                wrong[f"{name}, {place}"] = error
    assert wrong == {}
    assert tried > 50, "the list of nodes was not read"
