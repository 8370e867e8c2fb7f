"""What other packs do to ControlNets while a step is computed acts on engines as it does on native ControlNets.

ComfyUI samples. The packs are doubles, see ``comfy_test_nodes/other_packs_controls.py``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_process import ComfyProcess
from pack import import_comfy
from scenarios import A, B, Scenario, compare, native_latent, relative_difference

import_comfy()

import comfy.controlnet
import comfy.samplers
from comfy.controlnet import ControlBase, ControlNet
from comfy.patcher_extension import WrappersMP
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_runtime import control_stack
from hybrid_trt.engine_runtime.backbone import patch_model
from hybrid_trt.engine_runtime.controlnet import back_with_engine
from hybrid_trt.engine_runtime.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.native_model.network import NativeNetwork
from memory_fixtures import CONTROLNET, files, nothing_loaded
from patched import LIMIT, PROFILE, Patched, load, sampling_node
from sampling import error, sample

__all__ = ["files", "nothing_loaded"]  # fixtures: pytest finds them by name


def _others() -> Any:
    file = Path(__file__).parent / "comfy_test_nodes" / "other_packs_controls.py"
    spec = importlib.util.spec_from_file_location("other_packs_controls", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


others = _others()
STEPS, SIZE = 3, (8, 16)
"""A latent of three tiles that overlap."""

ENGINES = {"both on engines": (True, True), "the first on an engine": (True, False), "plain": (False, False)}


class Graphs:
    """A UNet with two ControlNets in a row, native and on live weights, sampled in the same way."""

    def __init__(self, files: dict[str, Path], folder: Path):
        self._files, self._library = files, Library([folder])
        self._file = next(iter(files.values()))
        self.handles: list[EngineHandle] = []
        self._known: dict[str, torch.Tensor] = {}

    def controls(self, engines: tuple[bool, bool]) -> ControlNet:
        """The last of both; where one has an engine that is in ``handles``."""
        previous, self.handles = None, []
        for number, on_engine in enumerate(engines):
            net = comfy.controlnet.load_controlnet(str(self._files[CONTROLNET]))
            if on_engine:
                network, choice = NativeNetwork.of_controlnet(net, f"net {number}"), EngineChoice(PROFILE, backend="torch")
                self.handles.append(EngineHandle(network, choice, self._library, str(number)))
                net = back_with_engine(net, self.handles[-1])
            net = net.copy()
            with torch.inference_mode():  # as nodes make images
                image = torch.rand(1, 100, 60, 3, generator=torch.Generator().manual_seed(number)).movedim(-1, 1)
            previous = net.set_cond_hint(image, 0.9 - 0.3 * number).set_previous_controlnet(previous)
        return previous

    def native(self, way: str | None = None) -> torch.Tensor:
        if way not in self._known:
            model = load(self._file)
            model = model if way is None else others.in_tiles(model, way)
            self._known[way] = self._sampled(model, self.controls((False, False)))
        return self._known[way]

    def patched(self, way: str, engines: tuple[bool, bool], before: bool = False) -> torch.Tensor:
        """With the pack's node before or behind the sampler patch."""
        made = Patched(load(self._file), self._library, "torch")
        patch: Callable = lambda model: patch_model(model, made.handle)  # noqa: E731
        model = patch(others.in_tiles(made.native, way)) if before else others.in_tiles(made.model, way)
        self.unet = made.handle
        return self._sampled(model, self.controls(engines))

    def _sampled(self, model: Any, control: ControlNet) -> torch.Tensor:
        with sampling_node():
            return sample(model, steps=STEPS, control=control, size=SIZE)


@pytest.fixture(scope="module")
def graphs(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(files, tmp_path_factory.mktemp("library"))


@pytest.mark.parametrize("before", [False, True], ids=["node behind the patch", "node before the patch"])
@pytest.mark.parametrize("engines", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("way", others.ALL_WAYS)
def test_what_a_pack_does_to_controlnets_acts_as_without_engines(
    graphs: Graphs, way: str, engines: tuple[bool, bool], before: bool
) -> None:
    reference = graphs.native(way)
    assert error(graphs.native(), reference) > 100 * LIMIT, "the pack's way acts"
    latent = graphs.patched(way, engines, before)
    assert error(latent, reference) <= LIMIT
    assert graphs.unet.tally.native == 0
    assert all(handle.tally.engine > 0 and handle.tally.native == 0 for handle in graphs.handles)
