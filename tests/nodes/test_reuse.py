"""Changing an input re-runs what depends on it and only that; engines are opened once."""

from __future__ import annotations

import itertools
import shutil
import time
from typing import Any

import pytest
import slow
from comfy_process import ComfyProcess
from scenarios import A, Prompt, Scenario, compare, node, prompt

SMALL = Scenario(width=64, height=64)


def warm(comfy: ComfyProcess, seed: int) -> Prompt:
    """A prompt that has run once, so that everything it needs is cached and open."""
    graph = prompt(SMALL.but(seed=seed), engines=True, name="reuse")
    assert comfy.queue(graph).ok
    return graph


def openings(comfy: ComfyProcess) -> int:
    """Return the number of engines that the server has opened since it started."""
    return comfy.log_text().count("Hybrid TRT: opened")


CHANGES: dict[str, tuple[str, str, Any, set[str]]] = {
    "seed": ("sampler", "seed", 999, {"sampler", "save", "report"}),
    "strength": ("apply", "rows.strength_1", 0.9, {"apply", "sampler", "save", "report"}),
    "image": ("image_1", "seed", 77, {"image_1", "apply", "sampler", "save", "report"}),
    "size": ("latent", "width", 192, {"latent", "sampler", "save", "report"}),
    "prompt": ("positive", "seed", 5, {"positive", "apply", "sampler", "save", "report"}),
    "profile": ("unet_engine", "opt_size", 256, {"unet_engine", "patch", "sampler", "save", "report"}),
    "controlnet_profile": (
        f"engine_{A.file}", "opt_size", 256, {f"engine_{A.file}", "apply", "sampler", "save", "report"}),
}


@pytest.mark.parametrize(
    ("changed", "name", "value", "runs"), slow.cases(CHANGES, set(CHANGES) - {"seed", "size", "profile"})
)
def test_a_change_runs_what_depends_on_it_and_opens_no_engine_again(
    sd15: ComfyProcess, changed: str, name: str, value: object, runs: set[str]
) -> None:
    graph = warm(sd15, seed=70)
    opened = openings(sd15)
    graph[changed]["inputs"][name] = value
    history = sd15.queue(graph)
    assert history.ok
    assert set(graph) - set(history.cached) == runs
    assert history.output("report", "report")[0]["unet"]["engine"] == 4
    assert openings(sd15) == opened


def test_the_same_prompt_again_runs_nothing(sd15: ComfyProcess) -> None:
    graph = warm(sd15, seed=71)
    history = sd15.queue(graph)
    assert set(history.cached) == set(graph)
    assert history.output("report", "report")[0]["unet"]["engine"] == 4, "the cached report is shown again"


def test_switching_to_a_native_prompt_and_back_opens_no_engine_again(sd15: ComfyProcess) -> None:
    warm(sd15, seed=72)
    opened = openings(sd15)
    assert sd15.queue(prompt(SMALL.but(seed=73), engines=False, name="native")).ok
    assert compare(sd15, SMALL.but(seed=74)).all_on_engines()
    assert openings(sd15) == opened


def test_freeing_memory_closes_engines_of_a_workflow_that_the_page_has_left(sd15: ComfyProcess) -> None:
    warm(sd15, seed=77)
    opened = openings(sd15)
    sd15.run_unrelated_prompt()  # ComfyUI forgets the engine nodes' outputs, the engines stay open for a return
    assert compare(sd15, SMALL.but(seed=78)).all_on_engines()
    assert openings(sd15) == opened
    sd15.run_unrelated_prompt()
    sd15.free()
    result = compare(sd15, SMALL.but(seed=79))
    assert result.all_on_engines()
    assert result.error <= 1e-5
    assert openings(sd15) == opened + 3


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_freeing_the_node_cache_lets_the_models_go(sd15: ComfyProcess, backend: str) -> None:
    turns = itertools.count(int(time.time()))

    def alive(graph: Prompt, **after: Any) -> list[int]:
        counted = node("TestModelsAlive", turn=next(turns), **after)
        return sd15.queue({**graph, "alive": counted}).output("alive", "alive")

    sd15.free()
    none = alive({})
    graph = prompt(SMALL.but(seed=80, settings={"backend": backend}), engines=True, name="alive")
    used = alive(graph, after=["sampler", 0])
    assert all(now > before for now, before in zip(used, none, strict=True))
    sd15.free()
    assert alive({}) == none


def test_build_now_builds_an_engine_again_that_was_deleted_although_its_node_is_cached(sd15: ComfyProcess) -> None:
    wanted = SMALL.but(controls=(), seed=80, settings={"when_missing": "build now"})
    graph = prompt(wanted, engines=True, name="deleted")
    assert sd15.queue(graph).output("report", "report")[0]["unet"]["engine"] == 4
    assert set(sd15.queue(graph).cached) == set(graph)
    library = sd15.base / "models" / "trt_engines"
    (engine,) = library.glob("sd15_unet*")
    shutil.rmtree(engine)
    graph["copy"] = graph.pop("unet_engine")  # ComfyUI caches by inputs, not by ids
    graph["patch"]["inputs"]["engine"] = ["copy", 0]
    again = sd15.queue(graph, timeout=120)
    assert engine.is_dir()
    assert again.output("report", "report")[0]["unet"] == {"engine": 4, "native": 0, "reasons": {}}
    assert set(sd15.queue(graph).cached) == set(graph), "nothing runs again without need"
