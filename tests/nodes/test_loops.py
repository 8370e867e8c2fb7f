"""Nodes that ComfyUI copies while a prompt runs: loops, and nodes that put others in their place."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from comfy_execution.graph import DynamicPrompt
from comfy_execution.progress import reset_progress_state
from comfy_execution.utils import CurrentNodeContext
from comfy_process import ComfyProcess, History
from hybrid_trt.engine_library import Fallback, Reason
from hybrid_trt.page_api.workflow_graph import node_key
from hybrid_trt.sampling import call_stats
from hybrid_trt.sampling.call_stats import open_stats
from scenarios import Prompt, Scenario, latent_of, node, prompt, relative_difference

LIMIT = 1e-5
STEPS = 2
PLAIN = Scenario(controls=(), steps=STEPS, seed=801)
STRIPPED = {"id", "preview_id"}
"""Keys that later versions of ComfyUI take out of cached results, of each dict in each list."""


def looped(built: Prompt, first: int, step: int, *linked: tuple[str, str]) -> Prompt:
    """The prompt with its sampler in a loop; ``linked`` are inputs that are the number of the iteration."""
    built["start"] = node("TestStartLoop", first=first, step=step, count=2)
    built["end"] = node("TestEndLoop", value=["sampler", 0], results=["start", 1])
    for name, entry in linked:
        built[name]["inputs"][entry] = ["start", 0]
    for name, entry in (("save", "latent"), ("report", "after")):
        if name in built:
            built[name]["inputs"][entry] = ["end", 0]
    return built


def ran(comfy: ComfyProcess, built: Prompt) -> tuple[History, dict[str, Any], str]:
    history = comfy.queue(built)
    assert history.ok, history.error
    found = [value for name in ("unet_engine", "patch", "report") if name in history.outputs
             for values in history.outputs[name].values() for value in values]
    assert all(STRIPPED.isdisjoint(value) for value in found if isinstance(value, dict))
    report, text = (history.output("report", name)[0] for name in ("report", "text"))
    return history, report, text


def test_a_report_behind_a_loop_counts_all_iterations(sd15: ComfyProcess) -> None:
    seeds = ("sampler", "seed")
    native = sd15.queue(looped(prompt(PLAIN, False, "native"), 5, 1, seeds))
    history, report, text = ran(sd15, looped(prompt(PLAIN, True, "engine"), 5, 1, seeds))
    latents = latent_of(history)
    assert latents.shape[0] == 2
    assert relative_difference(latents[:1], latents[1:]) > 1e-2, "the iterations have seeds of their own"
    assert relative_difference(latents, latent_of(native)) <= LIMIT
    assert report["unet"] == {"engine": 2 * STEPS, "native": 0, "reasons": {}}
    (row,) = report["rows"]
    assert (row["sampler_node"], row["calls"], len(row["ms"]["calls"])) == ("sampler", "eeee", 2 * STEPS)
    assert text.startswith("Accelerated: 1 of 1 model")
    assert text.endswith("Counted over 2 samplings that a loop or another node started.")


def test_an_engine_node_inside_a_loop_is_one_network_and_finds_its_pictures(sd15: ComfyProcess) -> None:
    built = prompt(PLAIN.but(width=192), True, "inside")
    built["pictures"] = node("TestPictures", engine=["unet_engine", 0])
    built["patch"]["inputs"]["engine"] = ["pictures", 0]
    history, report, text = ran(sd15, looped(built, 136, 64, ("unet_engine", "opt_size"), ("sampler", "seed")))
    found = [entry["pictures"] for entry in history.outputs.values() if "pictures" in entry]
    assert found == [[[192, 128, 2]]] * 2
    (row,) = report["rows"]
    assert (row["engine_node"], row["engine"], row["native"]) == ("unet_engine", 2 * STEPS, 0)
    assert row["node_key"] == node_key(built, "unet_engine"), "by which the page knows it"
    assert text.startswith("Accelerated: 1 of 1 model")


def test_what_a_loop_has_no_engine_for_is_said_of_the_node_in_the_users_graph(sd15: ComfyProcess) -> None:
    """A page builds what is missing by these ids."""
    missing = PLAIN.but(unet="tiny_sd15_other_unet", settings={"backend": "onnxruntime"})
    built = looped(prompt(missing, True, "missing"), 128, 64, ("unet_engine", "opt_size"), ("sampler", "seed"))
    _, report, _ = ran(sd15, built)
    assert report["missing"] == ["unet_engine"]
    assert report["unet"] == {"engine": 0, "native": 2 * STEPS, "reasons": {"no engine": 2 * STEPS}}


@pytest.fixture
def graph() -> Iterator[DynamicPrompt]:
    """A loop with a sampler and a report inside and a report behind, in its second iteration."""
    original = {
        "start": node("Start"), "sampler": node("KSampler", seed=["start", 0]),
        "inside": node("TRTReport", after=["sampler", 0]), "show": node("PreviewImage", images=["inside", 2]),
        "end": node("End", value=["inside", 0]), "behind": node("TRTReport", after=["end", 0]),
        "elsewhere": node("TRTReport", after=["other", 0]), "other": node("KSampler"),
    }  # fmt: skip
    prompt = DynamicPrompt(original)
    prompt.ephemeral_prompt["end"] = node("End")
    for i in range(2):
        prompt.add_ephemeral_node(f"{i}_sampler", node("KSampler", seed=i), "start", "sampler")
        prompt.add_ephemeral_node(f"{i}_inside", node("TRTReport", after=[f"{i}_sampler", 0]), "start", "inside")
        prompt.add_ephemeral_node(f"{i}_behind", node("TRTReport", after=["end", 0]), "start", "behind")
    prompt.add_ephemeral_node("strange", node("TRTReport", after=["1_sampler", 0]), "start", "end")
    reset_progress_state("loop", prompt)
    yield prompt
    reset_progress_state("", DynamicPrompt({}))


@pytest.fixture
def counted(graph: DynamicPrompt, monkeypatch: pytest.MonkeyPatch) -> DynamicPrompt:
    """The same, its samplers having sampled."""
    monkeypatch.setattr(call_stats, "_prompts", type(call_stats._prompts)())
    for sampler in ("0_sampler", "1_sampler", "other"):
        with CurrentNodeContext("loop", sampler):
            row = open_stats("unet", "net", f"{sampler[:1]}_engine" if sampler != "other" else "engine")
            row.count_engine("torch")
            row.count_native(Fallback(Reason.HOOKS))
    return graph


@pytest.mark.parametrize(("report", "calls", "copies"), [
    ("behind", 4, 2), ("elsewhere", 2, 0), ("0_inside", 2, 1), ("1_inside", 2, 1), ("1_behind", 4, 2),
])  # fmt: skip
def test_a_report_counts_its_own_iteration_inside_a_loop_and_all_behind_it(
    counted: DynamicPrompt, report: str, calls: int, copies: int
) -> None:
    from hybrid_trt.nodes.report import _rows_before

    with CurrentNodeContext("loop", report):
        rows, found = _rows_before(counted, report)
    assert (sum(len(row.calls) for row in rows), found) == (calls, copies)
    assert sum(row.engine for row in rows) == sum(row.reasons["LoRA tied to a prompt"] for row in rows) == calls // 2


def test_the_plot_of_a_report_inside_a_loop_is_drawn_where_it_goes_somewhere(
    graph: DynamicPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_trt.nodes import report

    queue = ([(0, "loop", graph.get_original_prompt())], [])
    server = SimpleNamespace(prompt_queue=SimpleNamespace(get_current_queue_volatile=lambda: queue))
    monkeypatch.setattr(report.PromptServer, "instance", server, raising=False)
    wanted = {name: report._wants_plot(name) for name in ("inside", "1_inside", "behind", "1_behind", "strange")}
    assert wanted == {"inside": True, "1_inside": True, "behind": False, "1_behind": False, "strange": True}


def test_iterations_that_sample_in_a_thread_are_counted_too(sd15: ComfyProcess) -> None:
    built = prompt(PLAIN, True, "threads")
    given = built["sampler"]["inputs"]
    inputs = {name: given[name] for name in ("model", "positive", "negative", "latent_image", "steps")}
    built["sampler"] = node("TestSampleInThread", way="executor", seed=0, **inputs)
    _, report, text = ran(sd15, looped(built, 51, 1, ("sampler", "seed")))
    assert report["unet"] == {"engine": 2 * STEPS, "native": 0, "reasons": {}}
    assert text.endswith("Counted over 2 samplings that a loop or another node started.")


def test_a_node_inside_a_loop_that_others_take_the_place_of_is_counted(sd15: ComfyProcess) -> None:
    built = prompt(PLAIN, True, "nested")
    given = {name: built["sampler"]["inputs"][name] for name in ("model", "positive", "negative", "latent_image")}
    built["sampler"] = node("TestSampler", steps=STEPS, **given)
    _, report, text = ran(sd15, looped(built, STEPS, 1, ("sampler", "steps")))
    assert report["unet"]["native"] == 0
    assert report["unet"]["engine"] >= 4 * STEPS
    assert "Counted over 4 samplings" in text
