"""Calls and prompts of transformers on the tokens of a picture, as data of a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import token_calls
from family_contract import Call, Prompt, Random
from hybrid_trt.comfy_model.network import NativeNetwork


def calls_of(file: str, width: int, calls: Mapping[str, token_calls.Call]) -> dict[str, Call]:
    """Calls of a file by name; ``width`` is that of a token of the prompt."""

    def draw(call: token_calls.Call, _network: NativeNetwork, seed: int) -> dict[str, Any]:
        return call.drawn(width, seed)

    return {name: Call(file, partial(draw, call)) for name, call in calls.items()}


def references(*sides: tuple[int, ...], method: str | None = None, row: bool = True, **more: Any
               ) -> Callable[[Random], dict[str, Any]]:  # fmt: skip
    """Entries of a conditioning that refers to pictures; in a ``row`` of one each, as most families have them."""

    def entries(random: Random) -> dict[str, Any]:
        found = more | {"reference_latents": [random(1, 16, *[1] * row, *one) for one in sides]}
        return found | ({"reference_latents_method": method} if method else {})

    return entries


def prompts_of(file: str, width: int) -> dict[str, Prompt]:
    """Prompts that all such families take."""
    return {
        "two lengths": Prompt(file, width, words=(9, 30), calls=6),
        "odd sides": Prompt(file, width, (1, 16, 1, 13, 11), (9, 9)),
        "without CFG": Prompt(file, width, words=(77, 1), cfg=1.0),
        "one length": Prompt(file, width),
    }
