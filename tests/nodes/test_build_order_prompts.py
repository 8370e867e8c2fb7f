"""Prompts of ComfyUI's queue that are still to order a node's build: the page shows them between press and job."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from comfy_execution.graph import DynamicPrompt
from execution import PromptQueue
from hybrid_trt.architectures.shapes import SIZE_NAMES
from hybrid_trt.page_api import build_orders
from hybrid_trt.page_api.build_orders import ORDER, PendingOrders, order_of, running_orders, workflow_of
from hybrid_trt.page_api.node_input import NodeInput
from hybrid_trt.page_api.workflow_graph import for_one_network, node_key

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
