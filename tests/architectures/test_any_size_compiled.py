"""One press on Build is for every size, prompt and batch that a graph asks for later, in a real ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest
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


@pytest.mark.slow
def test_a_press_compiles_once_for_the_pictures_and_prompts_of_all_graphs(comfy: ComfyProcess) -> None:
    asked = prompt(TALL, engines=True, name="size")
    press_build(comfy, asked)
    made = files(comfy)
    assert set(made) == {"B-H-T-W.bin"}
    others = {"wide": TALL.but(width=136, seed=3), "long": TALL.but(tokens=(154, 77), seed=8),
              "now": TALL.but(height=200, seed=9, settings={**SETTINGS, "when_missing": "build now"})}  # fmt: skip
    for wanted in (TALL, *others.values()):
        graph = prompt(wanted, engines=True, name="size")
        assert state(comfy, graph)["uncompiled"] is None
        history = comfy.queue(graph, timeout=300)
        (row,) = history.output("report", "report")[0]["rows"]
        assert (row["engine"] > 0, row["native"], row["uncompiled"]) == (True, 0, {})
        assert relative_difference(latent_of(history), native_latent(comfy, wanted)) <= 1e-5
        told = state(comfy, graph)
        assert (told["state"], told["engine"]["profile"]) == ("ready", "every size")
    assert files(comfy) == made, "nothing was compiled again"
