"""Engines that have weights when they are opened, as TensorRT's, with ONNX Runtime as their double."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import onnx
import pytest
import slow
import torch
from any_weights import LIMIT, ORT, PROFILE, another, built, error, handle_of, lora, native, patched, served
from hybrid_trt.backends.onnxruntime import RefittableRunner
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import BuildError, Library, trust
from hybrid_trt.page_api.node_states import engine_json
from small_networks import network


class Keeping(RefittableRunner):
    """Has the weights of ``built_with`` when it is opened."""

    built_with: ClassVar[torch.nn.Module]
    given: ClassVar[list[set[str]]]

    def _open(self, *arguments: Any) -> None:
        super()._open(*arguments)
        initialisers = onnx.load_model_from_string(self._graph).graph.initializer
        names = {tensor.name.removeprefix("unet."): tensor.name for tensor in initialisers if tensor.external_data}
        self.kept = {i: self.built_with.get_parameter(name).detach().clone() for name, i in names.items()}
        super().refit(self.kept, self.kept.keys())

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        self.given.append(set(changed))
        super().refit(weights, changed)


class Forgetful(Keeping):
    """Loses all others when it is given some weights."""

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        values = {name: weights[name] if name in changed else old for name, old in self.kept.items()}
        super().refit(values, values.keys())


class Careless(Keeping):
    """Damages those that it was opened with when it is given some others."""

    def _open(self, *arguments: Any) -> None:
        self.done: set[str] = set()
        super()._open(*arguments)

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        self.done |= set(changed)
        values = {name: weights[name] if name in self.done else 0.97 * old for name, old in self.kept.items()}
        super().refit(values, values.keys())


class Stale(Keeping):
    """Has other weights when it is opened than it was built with."""

    def _open(self, *arguments: Any) -> None:
        super()._open(*arguments)
        RefittableRunner.refit(self, {name: 0.97 * value for name, value in self.kept.items()}, self.kept.keys())


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> NativeNetwork:
    """A network whose engines, from now on, have its weights when they are opened."""
    net = network("unet", "unlike_levels")
    Keeping.built_with, Keeping.given = net.module, []
    monkeypatch.setattr("hybrid_trt.backends.onnxruntime.RefittableRunner", Keeping)
    monkeypatch.setattr(type(ORT), "keeps_weights", True)
    return net


def test_an_engine_that_was_opened_with_this_very_models_weights_is_given_only_what_loras_change(
    keeping: NativeNetwork, tmp_path: Path
) -> None:
    built(keeping, tmp_path)
    handle, keys = handle_of(keeping, tmp_path), lora(keeping, 5)
    with_lora = patched(keeping, (keys, 0.8))
    changed = {name.replace("diffusion_model.", "unet.") for name in keys}
    for patcher, given in ((keeping.patcher, []), (with_lora, [changed]), (keeping.patcher, [changed])):
        Keeping.given.clear()
        assert error(served(handle, patcher), native(keeping, patcher)) <= LIMIT
        assert Keeping.given == given
    handle.session.unload()
    Keeping.given.clear()
    assert error(served(handle, with_lora), native(keeping, with_lora)) <= LIMIT
    assert Keeping.given == [changed], "it has its own weights again when it is opened again"


def test_another_models_weights_are_all_put_into_it(keeping: NativeNetwork, tmp_path: Path) -> None:
    engine, other = built(keeping, tmp_path), another(keeping)
    assert error(served(handle_of(other, tmp_path)), native(other, other.patcher)) <= LIMIT
    assert Keeping.given == [set(json.loads((engine.folder / "parameters.json").read_text()).values())]


@pytest.mark.slow
def test_so_are_all_where_it_was_built_with_a_lora(keeping: NativeNetwork, tmp_path: Path) -> None:
    patcher = patched(keeping, (lora(keeping, 5), 0.8))
    with_lora = NativeNetwork(patcher, keeping.module, keeping.prefix, keeping.dtype, keeping.label, keeping.role)
    engine = built(with_lora, tmp_path)
    assert error(served(handle_of(keeping, tmp_path)), native(keeping, keeping.patcher)) <= LIMIT
    assert Keeping.given == [set(json.loads((engine.folder / "parameters.json").read_text()).values())]


# The proof on a GPU, with the CPU as its double


class Deaf(RefittableRunner):
    """Computes with something else than the weights that it is given."""

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        super().refit({name: value * (0.97 if "to_k" in name else 1) for name, value in weights.items()}, changed)


@slow.when("Careless")
@slow.when("Stale")
@pytest.mark.parametrize("runner", [RefittableRunner, Deaf, Keeping, Forgetful, Careless, Stale])
def test_a_build_proves_on_its_gpu_that_the_engine_takes_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: type[RefittableRunner]
) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setattr(builder, "gpu_of", lambda device: "a GPU")
    monkeypatch.setattr(type(ORT), "cannot_run", lambda *_: None)
    monkeypatch.setattr("hybrid_trt.backends.onnxruntime.RefittableRunner", runner)
    tasks = []

    def run(task: dict, progress: Callable, log: Callable, environment: Mapping[str, str]) -> dict:
        tasks.append(task)
        if task["step"] == "check":
            task = {**task, "device": "cpu", "timed": None}
        return builder.run_here(task, progress, log, environment)

    net = network("unet", "inpainting_channels")
    Keeping.built_with, Keeping.given = net.module, []
    order = BuildOrder(net, "float32", PROFILE, ORT, torch.device("cuda", 0), replaceable=True)
    monkeypatch.setattr(type(ORT), "keeps_weights", issubclass(runner, Keeping))
    if runner not in (RefittableRunner, Keeping):
        with pytest.raises(BuildError, match="differs from the normal model"):
            builder.build_engine(order, Library([tmp_path]), lambda *_: None, run=run)
    else:
        engine = builder.build_engine(order, Library([tmp_path]), lambda *_: None, run=run)
        assert 0 < engine_json(engine)["refit_s"] < 60, "the page knows how long other weights take"
    assert tasks[-1]["step"] == "check"
