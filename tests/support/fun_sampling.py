"""Fixtures and samplings of the tests of Fun control. A module has the fixtures that it imports."""

from __future__ import annotations

from typing import Any

import comfy.utils
import fun
import pytest
import tiny_models
import torch
import zimage
from comfy.model_patcher import ModelPatcher
from hybrid_trt.comfy_model.network import NativeNetwork

STEPS = 2
A, B, C = zimage.prompts(20, 31, 70)
GIVEN = [[A, {}]], [[B, {}]]
TWO_ONE = fun.VERSIONS["2.1"][1]


@pytest.fixture(scope="module")
def model() -> ModelPatcher:
    return fun.model()


@pytest.fixture(scope="module")
def patch() -> ModelPatcher:
    return fun.control(**TWO_ONE)


def call_of(net: NativeNetwork, **sizes: int) -> dict[str, Any]:
    return {**zimage.call(**sizes), "transformer_options": net.patcher.model_options["transformer_options"]}


def own_sampling(model: ModelPatcher, **options: Any) -> torch.Tensor:
    return zimage.sample(model, *GIVEN, steps=STEPS, **options)


def lora_of(environment: Any) -> dict[str, torch.Tensor]:
    (file,) = tiny_models.make(environment.base / "models", ["tiny_zimage_lora"]).values()
    return comfy.utils.load_torch_file(str(file))
