"""A UNet with ControlNets in a row, native or on live weights, sampled in this process; no engine has to be built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.controlnet
import pytest
import torch
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling import control_stack
from hybrid_trt.sampling.engine_handle import EngineHandle
from memory_fixtures import CONTROLNET, on_engine
from patched import Patched, load, sampling_node

from sampling import sample

STEPS, SIZE = 3, (8, 16)
"""Of the latent: height and width."""


class Graphs:
    """Makes models and chains of ControlNets, and samples them all in the same way.

    Attributes:
        handles: of the engines of what was made last.
    """

    def __init__(self, files: dict[str, Path], folder: Path):
        self._files, self.library = files, Library([folder])
        self.file = next(iter(files.values()))
        self.handles: list[EngineHandle] = []
        self._known: dict[str, torch.Tensor] = {}

    def patched(self) -> Patched:
        """A model with an engine behind a sampler patch; its handle is the first one."""
        made = Patched(load(self.file), self.library, "torch")
        self.handles = [made.handle]
        return made

    def controls(self, *on_engines: bool) -> ControlNet:
        """The last of a chain of ControlNets, with an engine or without."""
        previous = None
        for number, wanted in enumerate(on_engines):
            net = comfy.controlnet.load_controlnet(str(self._files[CONTROLNET]))
            if wanted:
                net, handle = on_engine(net, self.library, node=str(number))
                self.handles.append(handle)
            net = net.copy()
            with torch.inference_mode():  # as nodes make images
                image = torch.rand(1, 100, 60, 3, generator=torch.Generator().manual_seed(number)).movedim(-1, 1)
            previous = net.set_cond_hint(image, 0.9 - 0.3 * number).set_previous_controlnet(previous)
        return previous

    def native(self, name: str = "", change: Callable[[ModelPatcher], ModelPatcher] = lambda model: model) -> Any:
        """Native's latent of two ControlNets, sampled once for each name of a change of the model."""
        if name not in self._known:
            self._known[name] = self.sampled(change(load(self.file)), self.controls(False, False))
        return self._known[name]

    def sampled(self, model: ModelPatcher, control: ControlNet | None) -> torch.Tensor:
        """A latent of a node that samples."""
        with sampling_node():
            return sample(model, steps=STEPS, control=control, size=SIZE)


@pytest.fixture(scope="module")
def graphs(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(files, tmp_path_factory.mktemp("library"))


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of ControlNets in each stack that ran as one."""
    found, run = [], control_stack._run
    monkeypatch.setattr(control_stack, "_run", lambda chain, *rest: found.append(len(chain)) or run(chain, *rest))
    return found
