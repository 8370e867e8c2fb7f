"""TRT Accelerate: one node in the place of the engine nodes and the sampler patch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builds import until
from comfy_process import ComfyProcess
from one_node import NODE, accelerated
from scenarios import A, B, Scenario, control_effect, latent_of, native_latent, prompt, relative_difference

SCENARIO = Scenario(controls=(A, B), width=64, height=64)
ONE_NET = SCENARIO.but(controls=(B,))


def states(comfy: ComfyProcess, graph: dict[str, Any], node: str = NODE) -> list[dict[str, Any]]:
    """The server's answer for each network of a node."""
    answer = comfy.post("/hybrid_trt/nodes", {"prompt": graph, "nodes": [node]})["nodes"][node]
    return [answer, *answer.get("others", [])]


@pytest.mark.parametrize("settings", [{}, {"gpus": "all"}], ids=["", "all GPUs, of which there is one"])
def test_the_model_and_its_controlnets_run_on_engines_with_natives_picture(
    settings: dict[str, str], sd15: ComfyProcess
) -> None:
    assert min(control_effect(sd15, SCENARIO, without) for without in (0, 1)) > 1e-3
    graph = accelerated(SCENARIO)
    graph[NODE]["inputs"] |= settings
    history = sd15.queue(graph)
    assert relative_difference(latent_of(history), native_latent(sd15, SCENARIO)) < 1e-5
    rows = history.output("report", "report")[0]["rows"]
    assert sorted((row["kind"], row["native"]) for row in rows) == [("controlnet", 0)] * 2 + [("unet", 0)]
    assert all(row["engine"] for row in rows)


def test_loras_before_it_and_one_controlnet_alone_are_right(sd15: ComfyProcess) -> None:
    lora = ("LoraLoaderModelOnly", {"lora_name": "tiny_sd15_lora.safetensors", "strength_model": 1.0})
    scenario = SCENARIO.but(controls=(B,), loras_before=(lora,))
    assert relative_difference(native_latent(sd15, scenario), native_latent(sd15, scenario.but(loras_before=()))) > 1e-3
    history = sd15.queue(accelerated(scenario))
    assert relative_difference(latent_of(history), native_latent(sd15, scenario)) < 1e-5
    report = history.output("report", "report")[0]
    assert report["controlnets"][0]["native"] == 0, "no LoRA keeps a ControlNet from its engine"


def test_its_networks_are_those_of_nodes_for_one_network(sd15: ComfyProcess) -> None:
    """A workflow that gets the one node needs no new engines, and shows the states that it showed."""
    both, apart = accelerated(SCENARIO), prompt(SCENARIO, True, "engine")
    for graph in (both, apart):
        assert sd15.queue(graph).ok
    nodes = ("unet_engine", "engine_tiny_sd15_a", "engine_tiny_sd15_b")
    its = states(sd15, both)
    assert [state["input"] for state in its] == ["model", "control_net_1", "control_net_2"]
    assert [state["state"] for state in its] == ["ready"] * 3
    assert [state["key"] for state in its] == [states(sd15, apart, node)[0]["key"] for node in nodes]


@pytest.mark.parametrize("built", [accelerated, lambda scenario: prompt(scenario, True, "engine")], ids=["one", "all"])
def test_a_controlnet_of_a_kind_without_engines_is_in_the_report_with_its_reason(
    sd15: ComfyProcess, built: Callable[[Scenario], dict[str, Any]]
) -> None:
    scenario = SCENARIO.but(controls=(replace(A, before=[("TestQwenFun", {})]), B))
    assert control_effect(sd15, scenario, 0) > 1e-3
    history = sd15.queue(built(scenario))
    assert relative_difference(latent_of(history), native_latent(sd15, scenario)) < 1e-5
    report, text = (history.output("report", name)[0] for name in ("report", "text"))
    rows = {row["name"]: row for row in report["rows"]}
    fun = rows["tiny_sd15_a.safetensors"]
    assert (fun["kind"], fun["engine"], fun["native"] > 0) == ("controlnet", 0, True)
    assert rows["tiny_sd15_b.safetensors"]["native"] == 0
    assert text.startswith("Accelerated: 2 of 3 models")
    assert "it computes with layers of the model" in text


def test_the_last_run_is_told_to_its_own_workflow(sd15: ComfyProcess) -> None:
    graph = accelerated(SCENARIO.but(seed=12))
    history = sd15.queue(graph, extra_data={"extra_pnginfo": {"workflow": {"id": "mine"}}})
    assert history.ok
    runs = {}
    for workflow in ("mine", "another", None):
        answer = sd15.post("/hybrid_trt/nodes", {"prompt": graph, "nodes": [NODE], "workflow": workflow})
        runs[workflow] = answer["nodes"][NODE]["run"] is not None
    assert runs == {"mine": True, "another": False, None: True}


def test_a_press_builds_what_is_missing_and_the_next_one_builds_all_again(sd15: ComfyProcess) -> None:
    library = sd15.base / "models" / "trt_engines"
    for manifest in library.glob("*/manifest.json"):
        if "tiny_sd15_unet" not in manifest.read_text():
            shutil.rmtree(manifest.parent)
    there = written(library)
    press(sd15)
    built = written(library)
    assert there.items() < built.items(), "only the missing one is built"
    assert (len(there), len(built)) == (1, 2)
    press(sd15)
    again = written(library)
    assert again.keys() == built.keys()
    assert not again.items() & built.items(), "nothing was missing: all are built again"


def written(library: Path) -> dict[str, int]:
    """Return engine folder -> time of its manifest."""
    return {manifest.parent.name: manifest.stat().st_mtime_ns for manifest in library.glob("[!.]*/manifest.json")}


def press(comfy: ComfyProcess) -> None:
    """Order a node's builds as the page does, and wait for them."""
    graph = {key: entry for key, entry in accelerated(ONE_NET).items() if key not in ("save", "report", "sampler")}
    order = {"nodes": [NODE], "missing_only": False, "graph": accelerated(ONE_NET)}
    graph["build"] = {"class_type": "TRTReport", "inputs": {"after": [NODE, 0]}}
    assert comfy.queue(graph, extra_data={"hybrid_trt_build": order}).ok
    assert until(lambda: all(job["state"] not in ("queued", "running") for job in comfy.get("/hybrid_trt/builds")), 120)


def test_without_engines_the_picture_is_natives_and_the_node_says_why(comfy: ComfyProcess) -> None:
    shutil.rmtree(comfy.base / "models" / "trt_engines", ignore_errors=True)
    scenario = SCENARIO.but(seed=11)
    history = comfy.queue(accelerated(scenario))
    assert (latent_of(history) == native_latent(comfy, scenario)).all()
    assert [row["engine"] for row in history.output("report", "report")[0]["rows"]] == [0, 0, 0]
    assert history.output(NODE, "text")[0].count("no engine") == 3


def test_the_log_says_at_the_start_what_runs_here(comfy: ComfyProcess) -> None:
    (line,) = [line for line in comfy.log_text().splitlines() if "Hybrid TRT 0." in line]
    assert "CPU, backend onnxruntime; not usable here: " in line
    assert "tensorrt" in line
