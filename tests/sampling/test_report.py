"""The report in words and as a picture, and the stats behind it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from comfy_process import ComfyProcess
from hybrid_trt.engine_library import Fallback, Reason
from hybrid_trt.page_api.node_states import longest_prompt
from hybrid_trt.sampling import call_stats
from hybrid_trt.sampling.call_stats import CallStats, CallTimes, last_run, named_range, open_stats, timed
from hybrid_trt.sampling.report import (
    CELL,
    ENGINE_COLOUR,
    NATIVE_COLOUR,
    WIDTH,
    cells,
    plot,
    report_text,
    times,
    verdict,
    without_paths,
)
from scenarios import Scenario, node
from scenarios import prompt as prompt_of

CPU = torch.device("cpu")


class Clock:
    """Stands in for measured times."""

    def __init__(self, *ms: float):
        self._ms = ms

    def ms(self) -> list[float]:
        return list(self._ms)


NONE = (Reason.NO_ENGINE, "none for this model")


def stats(
    calls: str, *ms: float, name: str = "a", kind: str = "unet", node: str = "1", sampler: str = "2",
    backend: str = "onnxruntime", why: tuple[Reason, str] = NONE,
) -> CallStats:  # fmt: skip
    """A network's calls, on its engine (e) or native (n), and how long they took."""
    row = CallStats(kind, f"{name}.safetensors", node, sampler)
    for call in calls:
        if call == "e":
            row.count_engine(backend)
        else:
            row.count_native(Fallback(*why))
    row.times = Clock(*ms) if ms else None
    return row


def test_a_plot_of_nothing_and_of_very_many_calls_is_an_image() -> None:
    assert plot([]).shape[-1] == 3
    image = plot([stats("e" * 5000)])
    assert image.shape[2] == WIDTH
    assert 0 <= float(image.min()) < float(image.max()) <= 1


def test_the_last_run_of_a_node_is_the_latest_prompt_that_called_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        node_id = "5"

        def __init__(self, prompt_id: str):
            self.prompt_id = prompt_id

    monkeypatch.setattr(call_stats, "_prompts", type(call_stats._prompts)())
    for prompt, key in (("p1", "a"), ("p2", "a"), ("p3", "b")):
        monkeypatch.setattr(call_stats, "executing", lambda prompt=prompt: Context(prompt))
        open_stats("unet", "m", "1", key)
    assert [found[0] if (found := last_run(key)) else None for key in ("a", "b", "c")] == ["p2", "p3", None]


def test_the_page_is_told_the_longest_prompt_that_an_engine_was_not_built_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_stats, "_prompts", type(call_stats._prompts)())
    monkeypatch.setattr(call_stats, "executing", lambda: SimpleNamespace(prompt_id="p", node_id="5"))
    stats = open_stats("unet", "m", "1", "key")
    assert longest_prompt("key", "sd15_unet") == 0
    for tokens in (308, 462, 385):
        stats.count_native(Fallback(Reason.SHAPE_OUTSIDE_PROFILE, "prompt tokens", {"B": 2, "T": tokens}))
    assert longest_prompt("key", "sd15_unet") == 462
    assert longest_prompt("key", "zimage") == 462 * 32, "a family that counts groups of tokens"
    assert longest_prompt("key", "") == 0, "of no family yet"


def test_calls_are_timed_in_their_order_and_those_that_raise_are_not() -> None:
    times = CallTimes(CPU)
    for seconds in (0.3, 0.001):
        with timed(times):
            time.sleep(seconds)
    with pytest.raises(ValueError, match="x"), timed(times):
        raise ValueError("x")
    long, short = times.ms()
    assert 300 <= long < 3000
    assert 1 <= short < long


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
def test_calls_on_a_gpu_are_timed_without_waiting_for_it() -> None:
    gpu = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=gpu)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    times, started = CallTimes(gpu), time.perf_counter()
    with timed(times), named_range("Hybrid TRT test"):
        for _ in range(50):
            torch.mm(matrix, matrix)
    queued = 1000 * (time.perf_counter() - started)
    torch.cuda.synchronize()
    took = 1000 * (time.perf_counter() - started)
    (ms,) = times.ms()
    assert queued < 0.5 * ms
    assert ms == pytest.approx(took, rel=0.2)


def test_cells_are_as_high_as_their_calls_were_long_and_the_first_stands_apart() -> None:
    image = plot([stats("eeenn", 900.0, 10.0, 5.0, 10.0, 500.0)])[0]
    heights = []
    for (left, right), shade in zip(cells(5), [ENGINE_COLOUR] * 3 + [NATIVE_COLOUR] * 2, strict=True):
        rgb = torch.tensor([int(shade[j : j + 2], 16) / 255 for j in (1, 3, 5)])
        column = image[-150:, int((left + right) / 2)]
        heights.append(int((column - rgb).abs().amax(-1).lt(0.01).sum()))
    assert heights[1] == pytest.approx(2 * heights[2], abs=2)
    assert heights[1] < heights[0] <= CELL + 1  # the call that loaded is cut off, and does not flatten the others
    assert heights[3] < heights[1], "native cells have dark lines across them"
    (_, first), (second, _) = cells(5)[:2]
    assert second - first > 20


def two(engine: str, *reasons: tuple[Reason, str]) -> list[CallStats]:
    """A UNet with calls on its engine and ControlNets that ran native."""
    return [stats(engine), *(
        stats("nnnn", 2000.0, 100.0, 100.0, 100.0, name=f"nets/net_{i}", kind="controlnet", node=str(3 + i), why=why)
        for i, why in enumerate(reasons))]  # fmt: skip


@pytest.mark.parametrize(("rows", "first"), [
    (two("eeee"), "Accelerated: 1 of 1 model"),
    (two("eeee", NONE, NONE), "Accelerated: 1 of 3 models; about 4.6 s at normal speed. -> Build 2 missing engines"),
    (two("eeee", NONE), "Accelerated: 1 of 2 models; about 2.3 s at normal speed. -> Build 1 missing engine"),
    (two("eeen"), "Accelerated: 0 of 1 model, 3 of 4 calls; 1 call at normal speed. -> Build 1 missing engine"),
    (two("nn"), "Accelerated: 0 of 1 model; 2 calls at normal speed. -> Build 1 missing engine"),
    (two("eeee", (Reason.HOOKS, "")), "Accelerated: 1 of 2 models; about 2.3 s at normal speed. -> remove that "
     "LoRA's hook nodes if you want the engine"),
])  # fmt: skip
def test_the_first_line_says_how_many_networks_ran_on_engines_and_what_to_do(rows: list[CallStats], first: str) -> None:
    assert report_text(rows).splitlines()[0] == first


def test_a_run_that_was_all_on_engines_says_how_long_they_took() -> None:
    assert report_text([stats("eeee", 1400.0, 100.0, 100.0, 100.0)]).splitlines() == [
        "Accelerated: 1 of 1 model, 1.7 s in all", "a: 4 on onnxruntime, 100 ms each, first 1.4 s"]


def test_engines_that_were_timed_when_they_were_built_say_how_much_faster_they_are() -> None:
    unet, net = stats("eeee"), stats("ee", name="net", kind="controlnet", node="3")
    unet.proof, net.proof = (10.0, 30.0), (5.0, 5.0)
    assert str(verdict([unet, net])) == "Accelerated: 2 of 2 models, about 2.6x faster than without"
    net.proof = None
    assert "faster" not in str(verdict([unet, net])), "nobody timed one of them"


def test_a_network_that_two_samplers_call_counts_once_and_one_that_none_calls_not_at_all() -> None:
    idle = stats("", name="b", kind="controlnet", node="5")
    found = verdict([stats("n"), stats("n", sampler="7"), idle])
    assert (found.networks, found.on_engines, found.missing) == (1, 0, ["1"])


def test_what_bounds_the_step_counts_all_samplers_of_a_network() -> None:
    """A second pass without the ControlNet is short, and adds to what the UNet took in the first."""
    net = stats("eeee", *[50.0] * 4, name="net", kind="controlnet", node="3")
    rows = [stats("eeee", *[100.0] * 4), net, stats("eeee", *[10.0] * 4, sampler="7")]
    assert report_text(rows).splitlines()[-1] == "Slowest part: a (69 %)"


def test_a_unet_that_ran_beside_its_controlnets_is_told_so_and_none_is_said_to_bound_the_step() -> None:
    net = stats("eeee", *[3.9] * 4, name="net", kind="controlnet", node="3", backend="torch")
    unet = stats("ee", *[8.9] * 4, backend="torch")
    for _ in range(2):
        unet.count_engine("torch", beside=True)
    assert report_text([unet, net]).splitlines() == [
        "Accelerated: 2 of 2 models, 51 ms in all",
        "a: 4 on torch, 8.9 ms each beside its ControlNets",
        "net: 4 on torch, 3.9 ms each"]


@pytest.mark.parametrize("path", [
    "/home/me/ComfyUI/models/b.onnx", "C:\\ComfyUI\\models\\b.onnx", "\\\\nas\\models\\b.onnx"])  # fmt: skip
def test_each_network_is_one_line_without_a_path(path: str) -> None:
    text = report_text(two("ee", (Reason.BROKEN_ENGINE, f"{path} is damaged")))
    assert text.splitlines()[1] == "a: 2 on onnxruntime"
    assert text.splitlines()[2] == (
        "net_0: 4 at normal speed, 100 ms each (damaged engine: b.onnx is damaged), first 2.0 s")
    assert without_paths("width 768/8 px and/or 3/4") == "width 768/8 px and/or 3/4"


def test_times_are_said_as_people_say_them() -> None:
    assert [times(ms) for ms in (3.44, 9.96, 420.4, 995, 1740, 12300)] == [
        "3.4 ms", "10 ms", "420 ms", "1.0 s", "1.7 s", "12 s"]


@pytest.fixture(scope="module")
def timed_and_not(sd15: ComfyProcess) -> list[tuple[dict, str, float]]:
    """Report, text and the prompt's milliseconds: of a run to warm up, a timed run, and one with timing off."""
    found = []
    for seed, timing in ((601, True), (602, True), (603, False)):
        graph = prompt_of(Scenario(seed=seed, width=192, height=192, steps=4), True, "timed")
        graph["report"]["inputs"]["time_calls"] = timing
        history = sd15.queue(graph)
        assert history.ok, history.error
        report, text = (history.output("report", name)[0] for name in ("report", "text"))
        found.append((report, text, 1000 * history.seconds))
    return found


def test_each_call_has_its_time_and_together_they_are_the_sampling(sd15: ComfyProcess, timed_and_not: list) -> None:
    report, text, prompt_ms = timed_and_not[1]
    assert len(report["rows"]) == 3
    for row in report["rows"]:
        ms = row["ms"]
        assert len(ms["calls"]) == len(row["calls"]) == row["engine"] + row["native"] == 4
        assert min(ms["calls"]) > 0
        assert sum(ms["calls"]) == pytest.approx(ms["total"], abs=0.1)
        assert sorted(ms["calls"])[1] <= ms["median"] <= sorted(ms["calls"])[2]
    total = sum(row["ms"]["total"] for row in report["rows"])
    assert 0.5 * prompt_ms < total < prompt_ms
    usual = {row["name"]: row["ms"]["median"] for row in report["rows"]}
    assert f"Slowest part: {max(usual, key=usual.get).removesuffix('.safetensors')} (" in text
    assert text.startswith("Accelerated: 3 of 3 models")
    assert text.count(" each") == 3
    assert (report["networks"], report["on_engines"], report["missing"]) == (3, 3, [])
    assert {row["calls"] for row in report["rows"]} == {"eeee"}
    assert "slower" not in text
    assert "please report" not in sd15.log_text(), "this ComfyUI has no complaint"


def test_with_timing_off_nothing_is_measured(timed_and_not: list) -> None:
    report, text, _ = timed_and_not[2]
    assert [row["ms"] for row in report["rows"]] == [None] * 3
    assert all(row["engine"] == 4 for row in report["rows"])
    assert " ms" not in text
    assert "Slowest" not in text


def test_a_plot_that_goes_nowhere_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_trt.nodes import report  # which needs ComfyUI's server

    def running(*inputs: object) -> SimpleNamespace:
        nodes = {str(i): {"class_type": "any", "inputs": {"value": value}} for i, value in enumerate(inputs, start=8)}
        queue = ([(0, "p", {"7": {"class_type": "TRTReport", "inputs": {"after": ["6", 2]}}, **nodes})], [])
        return SimpleNamespace(prompt_queue=SimpleNamespace(get_current_queue_volatile=lambda: queue))

    def wanted(server: object, node: str = "7") -> bool:
        monkeypatch.setattr(report.PromptServer, "instance", server, raising=False)
        return report._wants_plot(node)

    assert not wanted(running(["7", 0], ["7", 1], ["6", 2], 2, [7, 2]))
    assert wanted(running(["7", 0], ["7", 2]))
    assert wanted(running(["7", 0]), "5:7"), "a node that another one put there"
    assert wanted(None)


def test_a_plot_that_is_linked_after_a_run_without_it_is_drawn(sd15: ComfyProcess) -> None:
    graph = prompt_of(Scenario(seed=605, steps=1, controls=()), True, "plain")
    assert sd15.queue(graph).ok
    linked = {**graph, "picture": node("PreviewImage", images=["report", 2])}
    history = sd15.queue(linked)
    assert history.ok, history.error
    assert history.output("picture", "images")
