"""Prompts of ComfyUI's queue that are still to order a node's build: the page shows them between press and job.

A malformed prompt of another user costs nobody a thing.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from comfy_execution.graph import DynamicPrompt
from comfy_process import ComfyProcess
from execution import PromptQueue
from hybrid_trt.architectures.shapes import SIZE_NAMES
from hybrid_trt.nodes.engines import NodeInput
from hybrid_trt.page_api import build_orders
from hybrid_trt.page_api.build_orders import (
    ORDER,
    PendingOrders,
    order_of,
    running_orders,
    running_pictures,
    workflow_of,
)
from hybrid_trt.page_api.graph_pictures import asked_pictures
from hybrid_trt.page_api.workflow_graph import (
    for_one_network,
    model_name,
    node_key,
    nodes_of,
    upstream,
    whole_prompt,
)
from our_routes import post

PROMPT: dict[str, Any] = {
    "1": {"class_type": "Loader", "inputs": {"ckpt_name": "a"}},
    "2": {"class_type": "TRTUNetEngine", "inputs": {"model": ["1", 0]}},
    "3": {"class_type": "TRTControlNetEngine", "inputs": {"control_net": ["1", 1]}},
    "4": {"class_type": "TRTReport", "inputs": {"after": ["2", 0]}},
    "5": {"class_type": "TRTReport", "inputs": {"after": ["3", 0]}},
}
UNET, NET = node_key(PROMPT, "2"), node_key(PROMPT, "3")


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> PromptQueue:
    queue = PromptQueue(SimpleNamespace(queue_updated=lambda: None))
    server = SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue))
    monkeypatch.setattr(build_orders, "PromptServer", server)
    return queue


EXTRA = {ORDER: {"nodes": ["2", "3", "6", "7", "8", 9], "missing_only": True, "graph": PROMPT}}


def put(
    queue: PromptQueue, name: str, outputs: tuple[str, ...] = ("4", "5"), extra: Any = EXTRA, **changes: Any
) -> None:
    queue.put((0, name, copy.deepcopy(PROMPT) | changes, extra, list(outputs), {}))


def test_a_prompt_orders_from_its_arrival_to_its_end_or_the_nodes_own(queue: PromptQueue) -> None:
    orders = PendingOrders()
    assert orders.by_prompt() == {}
    put(queue, "order")
    put(queue, "picture", extra={"client_id": "a"})
    assert orders.by_prompt() == {"order": sorted([UNET, NET])}
    _, item = queue.get()
    assert orders.by_prompt() == {"order": sorted([UNET, NET])}
    orders.forget("order", UNET)
    assert orders.by_prompt() == {"order": [NET]}
    queue.task_done(item, {}, None)
    assert orders.by_prompt() == {}
    put(queue, "order")
    orders.forget("no such prompt", UNET)
    assert orders.by_prompt() == {"order": sorted([UNET, NET])}
    queue.wipe_queue()
    assert orders.by_prompt() == {}


def test_what_comfyui_refused_of_a_prompt_is_not_ordered(queue: PromptQueue) -> None:
    put(queue, "order", outputs=("5",))
    assert PendingOrders().by_prompt() == {"order": [NET]}


def test_nodes_without_a_key_and_odd_nodes_order_nothing(queue: PromptQueue) -> None:
    loop = {"class_type": "TRTUNetEngine", "inputs": {"model": ["2", 0]}}
    put(queue, "order", **{"2": loop, "6": {"class_type": "TRTUNetEngine"}, "7": None})
    assert PendingOrders().by_prompt() == {"order": [NET]}


def test_a_prompt_is_read_once_however_often_it_is_asked_for(
    queue: PromptQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(build_orders, "_ordered", lambda item: read.append(item.prompt_id) or set())
    orders = PendingOrders()
    put(queue, "order")
    for _ in range(3):
        orders.by_prompt()
    queue.get()
    orders.by_prompt()
    assert len(read) == 1


def test_a_running_prompt_carries_its_order_and_is_never_answered_from_the_cache(queue: PromptQueue) -> None:
    put(queue, "order")
    assert (order_of("order"), running_orders()) == (None, ""), "it waits"
    queue.get()
    order = order_of("order")
    assert (order.missing_only, order.graph, {"2", "3"} <= order.nodes) == (True, PROMPT, True)
    assert running_orders() == "order"


def test_a_prompt_tells_its_workflow_while_it_runs_and_when_it_has_ended(queue: PromptQueue) -> None:
    extra = {"extra_pnginfo": {"workflow": {"id": "w", "nodes": []}}}
    for name, given, told in (("of the page", extra, "w"), ("of a script", {}, ""), ("odd", {"extra_pnginfo": 7}, "")):
        put(queue, name, extra=given)
        _, item = queue.get()
        assert workflow_of(name) == told
        queue.task_done(item, {}, None)
        workflow_of.cache_clear()
        assert workflow_of(name) == told, "by ComfyUI's history"
    assert workflow_of("no such prompt") == ""


@pytest.mark.parametrize("extra", [{}, None, {ORDER: "2"}, {ORDER: {"nodes": "2"}}, {ORDER: {}}])
def test_a_prompt_without_an_order_and_a_malformed_order_build_nothing(queue: PromptQueue, extra: Any) -> None:
    put(queue, "picture", extra=extra)
    queue.get()
    assert (order_of("picture"), running_orders(), PendingOrders().by_prompt()) == (None, "", {})


@pytest.mark.parametrize(("kind", "network"), [
    ("TRTUNetEngine", "model"), ("TRTVAEEngine", "vae"), ("TRTVAEEngine", "vae:encode"), ("TRTAccelerate", "model"),
    ("TRTAccelerate", "control_net_1"), ("TRTAccelerate", "vae")])
def test_a_node_that_builds_for_other_numbers_has_the_key_that_the_page_asks_by_once_it_follows(
    kind: str, network: str
) -> None:
    sizes = dict.fromkeys(SIZE_NAMES, 0)
    if kind == "TRTVAEEngine":
        sizes = {name: 0 for name in sizes if name not in ("max_images", "max_tokens")}
    links = {name: ["1", i] for i, name in enumerate(("model", "vae", "control_net_1"))}
    inputs = {**(links if kind == "TRTAccelerate" else {network.partition(":")[0]: ["1", 0]}), **sizes}
    auto, sent = {"max_size": 1088, "min_size": 320}, {"1": PROMPT["1"], "2": {"class_type": kind, "inputs": inputs}}
    follows = {**sent, "2": {"class_type": kind, "inputs": inputs | auto}}
    node_input = NodeInput(DynamicPrompt(sent), "2", network, auto)
    assert node_input.key == node_key(for_one_network(follows, "2", network), "2")
    assert node_input.key != node_key(for_one_network(sent, "2", network), "2")


# Prompts that no page makes

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


def put_graph(queue: PromptQueue, name: str, prompt: Any, graph: Any = None, outputs: Any = ("6",)) -> None:
    order = {ORDER: {"nodes": list(GRAPH), "graph": GRAPH if graph is None else graph}}
    queue.put((0, name, copy.deepcopy(prompt), order, outputs, {}))


@pytest.mark.fault("a malformed prompt of another user waits in the queue", see="nothing")
def test_a_malformed_prompt_that_waits_costs_other_prompts_nothing(queue: PromptQueue) -> None:
    put_graph(queue, "0 own", GRAPH)
    queue.get()
    for number, graph in enumerate(variants()):
        put_graph(queue, f"{number} prompt", graph)
        put_graph(queue, f"{number} order", GRAPH, graph)
    for number, outputs in enumerate([None, 7, "6", [7], [["6"]], {}]):
        put_graph(queue, f"{number} outputs", GRAPH, outputs=outputs)
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
    put_graph(queue, "0 own", GRAPH)
    queue.get()
    put_graph(queue, "1 another", GRAPH)
    PendingOrders().forget("0 own", "key")
    assert read == ["0 own"]


@pytest.mark.fault("the running prompt has malformed nodes", see="nothing of ours: ComfyUI tells about them")
def test_a_running_prompt_is_read_without_its_malformed_nodes(queue: PromptQueue) -> None:
    for number, graph in enumerate(variants()):
        put_graph(queue, f"{number}", graph)
        item, handle = queue.get()
        running_pictures()
        prompt = DynamicPrompt(item[2])
        for node in ("2", "3", "6"):
            assert set(whole_prompt(prompt, node)) <= set(nodes_of(item[2]))
            assert isinstance(model_name(prompt, node, "model", "none"), str)
            assert len(set(upstream(prompt, node))) <= len(item[2]) + 1
            assert isinstance(asked_pictures(item[2], node, "model"), tuple)
        queue.task_done(handle, {}, None)


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
