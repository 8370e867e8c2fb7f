"""Which prompts of ComfyUI's queue are still to order a node's build: what the page shows between press and job."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from pack import import_comfy

import_comfy()

from execution import PromptQueue
from hybrid_trt.page_api import pending_orders
from hybrid_trt.page_api.node_key import node_key
from hybrid_trt.page_api.pending_orders import PendingOrders

PROMPT: dict[str, Any] = {
    "1": {"class_type": "Loader", "inputs": {"ckpt_name": "a"}},
    "2": {"class_type": "TRTUNetEngine", "inputs": {"model": ["1", 0], "build_request": "page 1"}},
    "3": {"class_type": "TRTControlNetEngine", "inputs": {"control_net": ["1", 1], "build_request": "page 1"}},
    "4": {"class_type": "TRTReport", "inputs": {"after": ["2", 0]}},
    "5": {"class_type": "TRTReport", "inputs": {"after": ["3", 0]}},
}
UNET, NET = node_key(PROMPT, "2"), node_key(PROMPT, "3")


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> PromptQueue:
    queue = PromptQueue(SimpleNamespace(queue_updated=lambda: None))
    server = SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue))
    monkeypatch.setattr(pending_orders, "PromptServer", server)
    return queue


def put(queue: PromptQueue, name: str, outputs: tuple[str, ...] = ("4", "5"), **changes: Any) -> None:
    queue.put((0, name, copy.deepcopy(PROMPT) | changes, {}, list(outputs), {}))


def test_a_prompt_orders_from_its_arrival_to_its_end_or_the_nodes_own(queue: PromptQueue) -> None:
    orders = PendingOrders()
    assert orders.by_prompt() == {}
    put(queue, "order")
    put(queue, "picture", **{node: {"class_type": "Loader", "inputs": {}} for node in ("2", "3")})
    assert orders.by_prompt() == {"order": sorted([UNET, NET])}
    _, item = queue.get()
    assert orders.by_prompt() == {"order": sorted([UNET, NET])}
    orders.given("order", UNET)
    assert orders.by_prompt() == {"order": [NET]}
    queue.task_done(item, {}, None)
    assert orders.by_prompt() == {}
    put(queue, "order")
    orders.given("no such prompt", UNET)
    assert orders.by_prompt() == {"order": sorted([UNET, NET])}
    queue.wipe_queue()
    assert orders.by_prompt() == {}


def test_what_comfyui_refused_of_a_prompt_is_not_ordered(queue: PromptQueue) -> None:
    put(queue, "order", outputs=("5",))
    assert PendingOrders().by_prompt() == {"order": [NET]}


def test_nodes_without_a_key_and_odd_nodes_order_nothing(queue: PromptQueue) -> None:
    loop = {"class_type": "TRTUNetEngine", "inputs": {"model": ["2", 0], "build_request": "x"}}
    put(queue, "order", **{"2": loop, "6": {"class_type": "TRTUNetEngine"}, "7": None})
    assert PendingOrders().by_prompt() == {"order": [NET]}


def test_a_prompt_is_read_once_however_often_it_is_asked_for(
    queue: PromptQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(pending_orders, "_ordered", lambda prompt, outputs: read.append(outputs) or set())
    orders = PendingOrders()
    put(queue, "order")
    for _ in range(3):
        orders.by_prompt()
    queue.get()
    orders.by_prompt()
    assert len(read) == 1
