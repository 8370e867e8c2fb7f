"""Workflows of newer families, drawn at random, and every stock model node on them, act through engines as natively.

The slow part takes about half an hour on two cores:
`make test ARGS="-n 0 -m slow tests/families/test_random_families.py"`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from comfy_process import ComfyProcess
from model_nodes import model_nodes
from random_families import FAMILIES, Draws, Workflow, make_loras, model_node, plain
from random_family_prompts import prompt_of
from random_search import Seen, wrong
from random_workflows import UNUSABLE

COUNT = 60
LIMIT = 1e-5


@pytest.fixture(scope="module")
def serving(comfy: ComfyProcess) -> ComfyProcess:
    """The session's server, with a LoRA of each family."""
    make_loras(comfy.base / "models")
    return comfy


@pytest.fixture(scope="module")
def native(serving: ComfyProcess) -> Iterator[ComfyProcess]:
    """A second server, in which nothing ever runs on an engine."""
    with ComfyProcess(serving.comfyui, serving.base, log=serving.base / "native.log") as process:
        yield process


def searched(native: ComfyProcess, engines: ComfyProcess, workflows: list[Workflow]) -> Seen:
    """Compare workflows, natively and through engines in turn; each is interrupted before."""
    found, seen, interrupts = [], Seen(), Random(len(workflows))
    for workflow in workflows:
        if (what := wrong(native, engines, workflow, prompt_of, seen, LIMIT, interrupts)) is not None:
            found.append(f"{what}: {workflow}")
    assert not found, "\n".join(found)
    assert seen.workflows > len(workflows) / 2, f"ComfyUI can do too little of what is drawn: {seen}"
    assert seen.on_engines > seen.native / 4, f"too little of it runs on engines: {seen}"
    assert seen.interrupted > len(workflows) / 4, f"too little of it is interrupted: {seen}"
    return seen


def many(draws: Draws, random: Random) -> list[Workflow]:
    """Draw workflows, many of them like the one before but for two things."""
    found = [draws.workflow()]
    while len(found) < COUNT:
        found.append(draws.but_two_things(found[-1]) if random.random() < 0.4 else draws.workflow())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_random_workflow_acts_as_in_native(serving: ComfyProcess, native: ComfyProcess, seed: int) -> None:
    random = Random(seed)
    seen = searched(native, serving, many(Draws(random, serving.object_info()), random))
    assert len(seen.families) > len(FAMILIES) / 2, seen


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stock_model_node_acts_as_in_native(serving: ComfyProcess, native: ComfyProcess, family: str) -> None:
    bare, found, seen = plain(family), [], Seen()
    for name, (models, inputs) in sorted(model_nodes(serving.object_info()).items()):
        if name in UNUSABLE or name.startswith(("Test", "TRT")):
            continue
        node = model_node(FAMILIES[family], name, models, inputs)
        for workflow in (replace(bare, after=(node,)), replace(bare, before=(node,))):
            if (what := wrong(native, serving, workflow, prompt_of, seen, LIMIT)) is not None:
                found.append(f"{what}: {name} {'after' if workflow.after else 'before'} the engine")
    assert not found, "\n".join(found)
    assert seen.workflows > 60, "the list of nodes was not read"


def test_a_few_random_workflows_act_as_in_native(serving: ComfyProcess) -> None:
    """In one server, where nothing is built: families with small VAEs, each in three workflows that are much alike."""
    draws, workflows = Draws(Random(1), serving.object_info(), backends=("torch",)), []
    for family in ("qwen", "krea2", "anima", "wan"):
        workflows.append(draws.workflow(family))
        workflows += (draws.but_two_things(workflows[-1]) for _ in range(2))
    seen = searched(serving, serving, workflows)
    assert len(seen.families) == 4, seen
