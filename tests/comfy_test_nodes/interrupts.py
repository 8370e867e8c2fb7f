"""Interrupts a prompt at one of its networks' operations, where a user's click may come as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from comfy import model_management, ops
from server import PromptServer

_of_comfyui = ops.run_every_op


@dataclass
class _Countdown:
    """Operations of a prompt that are left before its interrupt."""

    prompt: str | None = None
    left: int = 0


_countdown = _Countdown()


def _counting() -> None:
    _of_comfyui()
    if _countdown.prompt != PromptServer.instance.last_prompt_id or torch.compiler.is_compiling():
        return
    _countdown.left -= 1
    if _countdown.left == 0:
        raise model_management.InterruptProcessingException


def interrupted_at(samples: dict[str, Any], operation: int) -> dict[str, Any]:
    """Interrupt this prompt at an operation after this node, counted from one."""
    ops.run_every_op = _counting
    _countdown.prompt, _countdown.left = PromptServer.instance.last_prompt_id, operation
    return samples
