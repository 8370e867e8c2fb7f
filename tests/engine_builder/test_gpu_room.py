"""Room on the GPU for a build: ComfyUI unloads its models while no prompt computes, and nobody waits for himself.

ComfyUI's queue and its thread are doubles here, which do what ComfyUI 0.30 does (``PromptQueue``, ``prompt_worker``).
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builds import order, pretend, slow_backend, small_network, until
from comfy import model_management
from hybrid_trt.engine_builder import build as build_module
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library

GPU = torch.device("cuda", 0)


class QueueDouble:
    """ComfyUI's flags, and the tasks that wait or run."""

    def __init__(self) -> None:
        self.flags: dict[str, bool] = {}
        self.tasks = 0

    def set_flag(self, name: str, data: bool) -> None:
        self.flags[name] = data

    def get_flags(self, reset: bool = True) -> dict[str, bool]:
        found = dict(self.flags)
        if reset:
            self.flags.clear()
        return found

    def get_tasks_remaining(self) -> int:
        return self.tasks

    def between_prompts(self) -> None:
        """Do what ComfyUI's thread does after each prompt, and when it is woken while idle."""
        if self.get_flags().get("unload_models"):
            model_management.unload_all_models()


class Asking(threading.Thread):
    """A build that asks for room; ``told`` is what it says meanwhile."""

    def __init__(self, make_room: Callable[..., None]):
        super().__init__(daemon=True)
        self.told: list[str] = []
        self._make_room = make_room
        self.start()
        assert until(lambda: self.told, 60)

    def run(self) -> None:
        self._make_room(GPU, self.told.append)

    def ends(self) -> None:
        self.join(60)
        assert not self.is_alive()


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that had ComfyUI unload its models."""
    threads: list[str] = []
    monkeypatch.setattr(model_management, "unload_all_models", lambda: threads.append(threading.current_thread().name))
    return threads


@pytest.fixture
def queue() -> QueueDouble:
    return QueueDouble()


@pytest.fixture
def gpu_room(queue: QueueDouble, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with a server of which it sees the queue alone."""
    server = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(instance=types.SimpleNamespace(prompt_queue=queue))
    monkeypatch.setitem(sys.modules, "server", server)
    # another test's may be there already, and is to be there afterwards
    monkeypatch.setattr(importlib.import_module("hybrid_trt.engine_builder"), "gpu_room", None, raising=False)
    monkeypatch.delitem(sys.modules, "hybrid_trt.engine_builder.gpu_room", raising=False)
    yield importlib.import_module("hybrid_trt.engine_builder.gpu_room")
    del sys.modules["hybrid_trt.engine_builder.gpu_room"]


def test_a_running_prompt_is_waited_for_and_comfyuis_own_thread_unloads(
    gpu_room: Any, queue: QueueDouble, unloaded: list[str]
) -> None:
    asking = Asking(gpu_room.make_room)
    time.sleep(2 * gpu_room.POLL)
    assert asking.is_alive()
    assert unloaded == []
    assert set(asking.told) == {"waiting for the running prompt"}
    queue.between_prompts()
    asking.ends()
    assert unloaded == [threading.current_thread().name]


def test_a_prompt_that_waits_for_the_build_itself_unloads_and_is_not_waited_for(
    gpu_room: Any, queue: QueueDouble, unloaded: list[str]
) -> None:
    with gpu_room.waiting_prompt() as give_room:
        give_room()
        assert unloaded == [], "nobody asked"
        asking = Asking(gpu_room.make_room)
        give_room()
        asking.ends()
        give_room()
    assert unloaded == [threading.current_thread().name]
    assert queue.flags == {}, "ComfyUI would unload once more after the prompt"


def test_a_prompt_that_begins_to_wait_for_a_build_while_that_waits_for_it_ends_the_waiting(
    gpu_room: Any, unloaded: list[str]
) -> None:
    asking = Asking(gpu_room.make_room)
    with gpu_room.waiting_prompt() as give_room:
        give_room()
        asking.ends()
    assert len(unloaded) == 1


def test_a_prompt_that_no_longer_waits_is_waited_for(gpu_room: Any, queue: QueueDouble, unloaded: list[str]) -> None:
    with gpu_room.waiting_prompt():
        asking = Asking(gpu_room.make_room)
    time.sleep(2 * gpu_room.POLL)
    assert asking.is_alive()
    queue.between_prompts()
    asking.ends()
    assert len(unloaded) == 1


def test_a_cancelled_build_asks_no_longer(gpu_room: Any, unloaded: list[str]) -> None:
    def cancelled(_phase: str) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        gpu_room.make_room(GPU, cancelled)
    with gpu_room.waiting_prompt() as give_room:
        give_room()
    assert unloaded == []


def test_only_steps_that_need_the_gpu_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, asked = small_network(), []

    def run(task: dict, *_: Any) -> dict:
        done.append(task["step"])
        return pretend(task)

    with slow_backend() as backend:
        for on_gpu, device in ((True, GPU), (False, GPU), (True, torch.device("cpu"))):
            monkeypatch.setattr(type(backend), "builds_on_gpu", on_gpu)
            done: list[str] = []
            first = order(network, backend)
            wanted = BuildOrder(network, first.precision, first.profile, backend, device)

            def make_room(where: torch.device, tell: Callable[[str], None], done: list[str] = done) -> None:
                tell("waiting")
                asked.append((where, list(done)))
                time.sleep(0.5)

            began = time.monotonic()
            engine = build_module.build_engine(
                wanted, Library([tmp_path]), lambda *_: None, run=run, again=True, make_room=make_room
            )
            if on_gpu and device is GPU:  # what a build takes is told without what it waited for
                assert sum(engine.manifest.seconds.values()) < time.monotonic() - began - 0.45
            assert done == ["export", "build"]
    assert asked == [(GPU, ["export"])]
