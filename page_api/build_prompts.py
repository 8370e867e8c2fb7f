"""The page's prompts that only order builds: to their user the job is the build, so they leave no job behind."""

from __future__ import annotations

from typing import Any

from server import PromptServer

from ..comfy_model.comfyui_internals import Feature, works


def forget_when_done(prompt_id: str) -> None:
    """Take a running prompt out of ComfyUI's history as it ends well, before anybody can read it there.

    ComfyUI has no word for a prompt that is nobody's job; its page tells the end of whatever the history holds. One
    that failed stays, so that the page shows its error. The queue's `task_done` is replaced for this one prompt: to
    look at the history afterwards is a race with the page, which asks for it as soon as a prompt has ended.
    """
    queue = PromptServer.instance.prompt_queue if PromptServer.instance is not None else None
    if queue is None or not works(Feature.QUIET_BUILDS) or getattr(queue.task_done, "forgets", None) == prompt_id:
        return
    before, patched = queue.task_done, vars(queue).get("task_done")

    def task_done(*args: Any, **kwargs: Any) -> None:
        with queue.mutex:  # readers of the history wait for it
            if patched is None:
                del queue.task_done
            else:
                queue.task_done = patched
            before(*args, **kwargs)
            if (queue.history.get(prompt_id, {}).get("status") or {}).get("status_str") == "success":
                queue.history.pop(prompt_id)

    task_done.forgets = prompt_id
    queue.task_done = task_done
