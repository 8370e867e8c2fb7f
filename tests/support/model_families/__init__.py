"""The model families that keep the contract, each in a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from family_contract import Family

from . import (
    anima,
    flux,
    flux_controlnet,
    hunyuan_video,
    krea2,
    ltx2,
    minimax_h3,
    qwen_image,
    qwen_image21,
    qwen_image_controlnet,
    wan,
    zimage,
)

FAMILIES: tuple[Family, ...] = tuple(family.FAMILY for family in (
    anima, flux, flux_controlnet, hunyuan_video, krea2, ltx2, minimax_h3, qwen_image,
    qwen_image21, qwen_image_controlnet, wan, zimage))  # fmt: skip


def for_each(names: str, cases: Callable[[Family], Iterable[Any]]) -> Callable[[Callable], Callable]:
    """Parametrise a test over ``family`` and some of its data, as ``pytest.mark.parametrize`` does."""

    def parametrised(test: Callable) -> Callable:
        found = []
        for family in FAMILIES:
            slow = set(family.slow.get(test.__name__, ()))
            for case in cases(family):
                values = case if isinstance(case, tuple) else (case,)
                words = ", ".join(str(one).removeprefix("torch.") for one in values if not isinstance(one, dict))
                marks = [pytest.mark.slow] * (words in slow)
                found.append(pytest.param(family, *values, id=f"{family}: {words}", marks=marks))
                slow.discard(words)
            assert not slow, f"cases that {family} does not have"
        return pytest.mark.parametrize(("family", *names.split()), found)(test)

    return parametrised
