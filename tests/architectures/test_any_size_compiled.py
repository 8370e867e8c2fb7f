"""Any size that a graph asks for is compiled by Inductor in a real ComfyUI, by a press on Build and by *build now*."""

from __future__ import annotations

import copy
from typing import Any

from builds import until
from comfy_process import ComfyProcess
from scenarios import Scenario, latent_of, native_latent, prompt, relative_difference

SETTINGS = {"backend": "torch", "when_missing": "use native", "opt_size": 128}
TALL = Scenario(unet="tiny_sd15_flat_unet", controls=(), width=64, height=96, steps=2, settings=SETTINGS)
ENGINE = "unet_engine"


def files(comfy: ComfyProcess) -> dict[str, int]:
    """The compiled files of this module's network -> when they were made."""
    found = (comfy.base / "models" / "trt_engines").glob("sd15_unet-*-torch-*/*.bin")
    return {file.name: file.stat().st_mtime_ns for file in found}


def state(comfy: ComfyProcess, graph: dict[str, Any]) -> dict[str, Any]:
    answer = comfy.post("/hybrid_trt/nodes", {"prompt": graph, "nodes": [ENGINE]}, headers={"X-Hybrid-TRT": "1"})
    return answer["nodes"][ENGINE]


def press_build(comfy: ComfyProcess, graph: dict[str, Any]) -> None:
    """Press the page's button and wait until the build has ended."""
    part = {name: graph[name] for name in ("unet", ENGINE)}
    part["end"] = {"class_type": "TRTReport", "inputs": {"after": [ENGINE, 0]}}
    assert comfy.queue(part, extra_data={"hybrid_trt_build": {"nodes": [ENGINE], "graph": graph}}).ok
    assert until(lambda: (job := state(comfy, graph)["job"]) is not None and job["state"] in ("done", "failed"), 240)
    assert state(comfy, graph)["job"]["state"] == "done"


def test_a_press_compiles_the_graphs_picture_and_build_now_a_longer_prompt_before_its_next_run(
    comfy: ComfyProcess,
) -> None:
    there = files(comfy)
    short = prompt(TALL, engines=True, name="size")
    long_prompt = TALL.but(tokens=(154, 77), seed=8, settings={**SETTINGS, "when_missing": "build now"})
    long = prompt(long_prompt, engines=True, name="size")

    def run(graph: dict[str, Any]) -> tuple[Any, dict[str, int], str]:
        history = comfy.queue(graph, timeout=300)
        (row,) = history.output("report", "report")[0]["rows"]
        assert (row["engine"] > 0, row["native"]) == (True, 0)
        return history, row["uncompiled"], history.output("report", "text")[0]

    press_build(comfy, short)
    first = {name: made for name, made in files(comfy).items() if name not in there}
    assert set(first) == {"B2-H12-T77-W8.bin"}, "the picture that was asked for, and not the best size"
    assert state(comfy, short)["uncompiled"] is None
    larger = copy.deepcopy(short)
    larger["latent"]["inputs"]["width"] += 64
    assert state(comfy, larger)["uncompiled"] == {"width": 128, "height": 96, "images": 1}
    assert run(short)[1] == {}

    history, uncompiled, text = run(long)
    calls = sum(uncompiled.values())
    assert uncompiled == {"64x96, 154 tokens": calls}, "how long a prompt is nobody knows before it runs"
    assert "not compiled for 64x96, 154 tokens: ran eagerly" in text
    assert "Build for 64x96, 154 tokens" in text.splitlines()[0]
    assert relative_difference(latent_of(history), native_latent(comfy, long_prompt)) <= 1e-5
    told = state(comfy, long)
    assert told["state"] == "ready"
    assert told["run"]["uncompiled"] == [{"size": "64x96, 154 tokens", "graph": False, "native": False, "count": calls}]

    again = {**long, "sampler": {**long["sampler"], "inputs": {**long["sampler"]["inputs"], "seed": 9}}}
    history, uncompiled, _ = run(again)
    assert ENGINE not in history.cached, "although nothing before the node has changed"
    assert uncompiled == {}
    assert set(comfy.queue(again).cached) == set(again), "nothing runs again without need"
    assert relative_difference(latent_of(history), native_latent(comfy, long_prompt.but(seed=9))) <= 1e-5
    now = {name: made for name, made in files(comfy).items() if name not in there}
    assert set(now) == {"B2-H12-T77-W8.bin", "B2-H12-T154-W8.bin"}
    assert now["B2-H12-T77-W8.bin"] == first["B2-H12-T77-W8.bin"], "not compiled again"
    told = state(comfy, long)
    assert set(told["engine"]["profile"].split("; ")) == {"64x96, 77 tokens", "64x96, 154 tokens"}
    listed = {e["name"]: e["profile"] for e in comfy.get("/hybrid_trt/engines")["engines"]}
    assert {listed[name] for name in told["engine"]["names"]} == {
        "batch 2, 64 x 96 px, 77 tokens", "batch 2, 64 x 96 px, 154 tokens"}, "the panel shows what the library holds"
    assert run({**short, "sampler": {**short["sampler"], "inputs": {**short["sampler"]["inputs"], "seed": 9}}})[1] == {}
