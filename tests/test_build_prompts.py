"""A prompt that only orders builds is nobody's job: ComfyUI's history never shows it, not even for a moment."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from pack import import_comfy

import_comfy()

from execution import PromptQueue
from hybrid_trt.page_api import build_prompts


class Page:
    """The server as its queue sees it: a page asks for the history as soon as it hears that the queue has changed."""

    def __init__(self) -> None:
        self.queue = PromptQueue(self)
        self.asking: list[threading.Thread] = []
        self.seen: set[str] = set()

    def queue_updated(self) -> None:
        self.asking.append(threading.Thread(target=lambda: self.seen.update(self.queue.get_history())))
        self.asking[-1].start()

    def run(self, prompt_id: str, nodes: int, status: str = "success", orders: bool = True) -> None:
        """Run a prompt as ComfyUI's worker does, and wait until the page has its answers."""
        self.queue.put((0, prompt_id, {}, {}, [], {}))
        _, item = self.queue.get()
        for _ in range(nodes * orders):
            build_prompts.forget_when_done(prompt_id)
        self.queue.task_done(item, {"outputs": {}}, PromptQueue.ExecutionStatus(status, True, []))
        for thread in self.asking:
            thread.join()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    server = SimpleNamespace(instance=SimpleNamespace(prompt_queue=page.queue))
    monkeypatch.setattr(build_prompts, "PromptServer", server)
    return page


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_page_that_asks_as_soon_as_an_order_ends_does_not_see_it(page: Page, nodes: int) -> None:
    for count in range(20):
        page.run(f"order {count}", nodes)
    page.run("a picture", 0)
    assert page.seen == {"a picture"}


def test_an_order_that_failed_stays_for_the_page_to_show_its_error(page: Page) -> None:
    page.run("order", 1, status="error")
    assert page.seen == {"order"}


def test_the_queue_is_as_it_was_when_an_order_has_ended(page: Page) -> None:
    page.run("order", 3)
    assert "task_done" not in vars(page.queue)


def test_what_another_pack_put_there_is_called_and_put_back(page: Page) -> None:
    calls: list[Any] = []
    done = page.queue.task_done

    def theirs(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        done(*args, **kwargs)

    page.queue.task_done = theirs
    page.run("order", 2)
    assert (len(calls), page.seen, page.queue.task_done) == (1, set(), theirs)
