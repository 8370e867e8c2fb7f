"""A second GPU for one process: the CPU under another name, which ComfyUI takes for a device of its own."""

from __future__ import annotations

import comfy.multigpu
import pytest
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher

SECOND = torch.device("cpu", 1)


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [torch.device("cpu"), SECOND]
    monkeypatch.setattr(model_management, "get_all_torch_devices",
                        lambda exclude_current=False: devices[int(exclude_current):])  # fmt: skip


def split(model: ModelPatcher) -> ModelPatcher:
    """Return a model as *MultiGPU CFG Split* shares it between both devices."""
    return comfy.multigpu.create_multigpu_deepclones(model, 2)
