"""Graphs that no page makes: whatever a client sends is answered, and a prompt of another user costs nobody a thing."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
from comfy_execution.graph import DynamicPrompt
from comfy_process import ComfyProcess
from drawn_workflows import drawn
from execution import PromptQueue
from hybrid_trt.page_api import build_orders
from hybrid_trt.page_api.build_orders import ORDER, PendingOrders, order_of, running_orders, running_pictures
from hybrid_trt.page_api.graph_pictures import asked_pictures
from hybrid_trt.page_api.workflow_graph import model_name, nodes_of, upstream, whole_prompt
from our_routes import ask, post

DRAWN = drawn({"load": "Loader", "s": "Sampler"}, "load.0 s.0")
GRAPH: dict[str, Any] = {
    "1": {"class_type": "Loader", "inputs": {"ckpt_name": "a"}},
    "2": {"class_type": "TRTUNetEngine", "inputs": {"model": ["1", 0]}},
    "3": {"class_type": "TRTAccelerate", "inputs": {"model": ["1", 0], "vae": ["1", 2], "control_net_1": ["1", 1]}},
    "4": {"class_type": "KSampler", "inputs": {"model": ["2", 0], "latent_image": ["5", 0], "cfg": 7}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64}},
    "6": {"class_type": "VAEDecode", "inputs": {"samples": ["4", 0], "vae": ["3", 1]}},
}


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


NO_NODES: list[Any] = [
    None, True, 7, 1.5, "", "x", [], ["1", 0], {}, {"class_type": "A"}, {"inputs": {}},
    {"class_type": None, "inputs": {}},
    {"class_type": 7, "inputs": {}}, {"class_type": ["A"], "inputs": {}}, {"class_type": {}, "inputs": {}},
    {"class_type": "A", "inputs": None}, {"class_type": "A", "inputs": []}, {"class_type": "A", "inputs": "x"},
    {"class_type": "A", "inputs": 7}, {"class_type": "TRTUNetEngine"}, {"class_type": nested(50), "inputs": {}},
]  # fmt: skip
"""Things that may stand in the place of a node."""
VALUES: list[Any] = [
    ["2", 0], ["9", 0], ["9", []], ["9", None], ["9", {"a": nested(20)}], ["9", "0"], [7, 0], ["9"], ["1", 10**400],
    10**400, -(10**400), 1e308, nested(60), nested(90), {"a": nested(90)}, "\ud800", "x\0y", True, None, {}, "x" * 9999,
]  # fmt: skip
"""Values that may stand in the place of an input."""


def variants() -> list[dict[str, Any]]:
    """The graph with each place of it in turn in a form that nobody expects."""
    found = [{**GRAPH, "1": {"class_type": "Loader", "inputs": {name: ["9", 0]}}, "9": wrong}
             for wrong in NO_NODES for name in ("opt_size", "when_missing", "a")]  # fmt: skip
    found += [{**GRAPH, node: wrong} for wrong in NO_NODES for node in GRAPH]
    for node, entry in GRAPH.items():
        for name in (*entry["inputs"], "more", "opt_size", "samples", "latent_image", "guider", "tile_size"):
            found += [{**GRAPH, node: {**entry, "inputs": {**entry["inputs"], name: value}}} for value in VALUES]
    chain = {str(n): {"class_type": "A", "inputs": {"a": [str(n + 1), 0]}} for n in range(100, 900)}
    return [*found, {**GRAPH, **chain, "1": {"class_type": "A", "inputs": {"a": ["100", 0], "b": ["4", 0]}}}]


@pytest.mark.fault("the page asks about a graph with malformed nodes or links",
                   see="an answer, or an error in one sentence")
@pytest.mark.parametrize("node", ["2", "3"])
def test_every_malformed_graph_is_answered_with_states_or_one_sentence(comfy: ComfyProcess, node: str) -> None:
    answers = {}
    for graph in variants()[::5]:
        status, answer = post(comfy, "/nodes", {"prompt": graph, "nodes": [node]})
        answers.setdefault(status, []).append(answer)
        assert status in (200, 400), f"{status} for {str(graph)[:2000]}: {answer}"
        assert status == 200 or answer["error"].endswith(".")
    assert answers.keys() == {200, 400}


@pytest.mark.fault("a request nests 800 deep", see="an error in one sentence")
@pytest.mark.parametrize("body", [
    {"prompt": GRAPH, "nodes": [nested(500)]}, {"prompt": GRAPH, "nodes": [[["2"]]]},
    {"prompt": nested(900), "nodes": []},
    {"prompt": {**GRAPH, "2": {"class_type": "TRTUNetEngine", "inputs": {"a": ["1", nested(800)]}}}, "nodes": ["2"]},
    {"prompt": {**GRAPH, "9": {"class_type": nested(800), "inputs": {}}}, "nodes": ["2"]},
])  # fmt: skip
def test_what_is_nested_beyond_reason_is_refused(comfy: ComfyProcess, body: dict) -> None:
    status, answer = post(comfy, "/nodes", body)
    assert status == 400
    assert answer["error"].endswith("nothing was done.")


@pytest.mark.parametrize("change", [
    {"nodes": [{**DRAWN["nodes"][0], "pos": [10**400, 0]}, *DRAWN["nodes"][1:]]},
    {"nodes": [{**DRAWN["nodes"][0], "pos": [1.7e308, 0], "size": [1.7e308, 0]}, *DRAWN["nodes"][1:]]},
    {"last_node_id": int("9" * 4300)},
])
def test_a_workflow_with_numbers_beyond_json_comes_back_as_a_sentence(comfy: ComfyProcess, change: dict) -> None:
    status, answer = post(comfy, "/accelerate", {"workflow": {**DRAWN, **change}, "what": "add"})
    assert status == 400
    assert "it is damaged" in answer["error"]


def test_a_number_that_json_cannot_give_back_is_refused(comfy: ComfyProcess) -> None:
    body = json.dumps({"workflow": {**DRAWN, "extra": {"x": "HERE"}}, "what": "add"}).replace('"HERE"', "1e999")
    status, answer = ask(comfy, "POST", "/accelerate", body.encode())
    assert status == 400
    assert "larger than any number" in answer["error"]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> PromptQueue:
    queue = PromptQueue(SimpleNamespace(queue_updated=lambda: None))
    monkeypatch.setattr(build_orders, "PromptServer", SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue)))
    return queue


def put(queue: PromptQueue, name: str, prompt: Any, graph: Any = None, outputs: Any = ("6",)) -> None:
    order = {ORDER: {"nodes": list(GRAPH), "graph": GRAPH if graph is None else graph}}
    queue.put((0, name, copy.deepcopy(prompt), order, outputs, {}))


@pytest.mark.fault("a malformed prompt of another user waits in the queue", see="nothing")
def test_a_malformed_prompt_that_waits_costs_other_prompts_nothing(queue: PromptQueue) -> None:
    put(queue, "0 own", GRAPH)
    queue.get()
    for number, graph in enumerate(variants()):
        put(queue, f"{number} prompt", graph)
        put(queue, f"{number} order", GRAPH, graph)
    for number, outputs in enumerate([None, 7, "6", [7], [["6"]], {}]):
        put(queue, f"{number} outputs", GRAPH, outputs=outputs)
    queue.put((0, "z short"))
    orders = PendingOrders()
    orders.forget("0 own", "key")
    assert len(orders.by_prompt()["0 own"]) == 3, "UNet, ControlNet and VAE"
    assert order_of("0 own").graph == GRAPH
    assert running_orders() == "0 own"


def test_only_the_own_prompt_is_read_when_a_node_tells_of_its_order(
    queue: PromptQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(build_orders, "_ordered", lambda item: read.append(item.prompt_id) or set())
    put(queue, "0 own", GRAPH)
    queue.get()
    put(queue, "1 another", GRAPH)
    PendingOrders().forget("0 own", "key")
    assert read == ["0 own"]


@pytest.mark.fault("the running prompt has malformed nodes", see="nothing of ours: ComfyUI tells about them")
def test_a_running_prompt_is_read_without_its_malformed_nodes(queue: PromptQueue) -> None:
    for number, graph in enumerate(variants()):
        put(queue, f"{number}", graph)
        item, handle = queue.get()
        running_pictures()
        prompt = DynamicPrompt(item[2])
        for node in ("2", "3", "6"):
            assert set(whole_prompt(prompt, node)) <= set(nodes_of(item[2]))
            assert isinstance(model_name(prompt, node, "model", "none"), str)
            assert len(set(upstream(prompt, node))) <= len(item[2]) + 1
            assert isinstance(asked_pictures(item[2], node, "model"), tuple)
        queue.task_done(handle, {}, None)
