"""Fixtures and samplings of the tests of LLLite. A module has the fixtures that it imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lllite
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from token_calls import Patched, sample

WIDTH = 1024
TOGETHER = {"words": (12, 12)}
"""Prompts of one length, as ComfyUI makes them for Anima: one call a step."""


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> ModelPatcher:
    return lllite.anima(models)


@pytest.fixture(scope="module")
def patch(models: dict[str, Path]) -> ModelPatcher:
    return lllite.load(models)


@pytest.fixture(scope="module")
def other(models: dict[str, Path]) -> ModelPatcher:
    return lllite.load(models, "tiny_anima_lllite_other")


def own_sampling(model: ModelPatcher, **options: Any) -> torch.Tensor:
    return sample(model, WIDTH, **(TOGETHER | options))


def patched(model: ModelPatcher, folder: Path, backend: str = "torch") -> Patched:
    return Patched(lllite.network(model), folder, backend)


def mask(height: int = 72, width: int = 48) -> torch.Tensor:
    found = torch.zeros(1, height, width)
    found[:, 20:50, 10:30] = 1
    return found
