"""Runs of a model on several GPUs that share its tokens. The further GPUs are doubles, the CPU under other names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import token_networks
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from family_contract import Prompt
from hybrid_trt.architectures.shared_tokens import shares
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling import several_gpus
from hybrid_trt.sampling.several_gpus import on_all_gpus
from model_families import FAMILIES
from tiny_transformers import let_comfyui_load_zimage
from token_calls import Patched, profile_of

LIMIT, STEPS = 1e-5, 3
NAMED = {family.name: family for family in FAMILIES}


@dataclass(frozen=True)
class Case:
    """A prompt of a family, and how its tokens are divided.

    Attributes:
        prompt: its name among the family's; ``changes`` are made to it.
        tensor: has the picture's tokens, ``units`` times ``each``; GPUs have whole units.
    """

    prompt: str
    tensor: str
    units: int
    each: int
    changes: Mapping[str, Any] = field(default_factory=dict)

    def of(self, kind: str, **changes: Any) -> Prompt:
        return replace(NAMED[kind].prompts[self.prompt], **{"cfg": 1.0, **self.changes, **changes})

    def tokens(self, devices: int) -> list[int]:
        """The tokens of each GPU."""
        return [size * self.each for _, size in shares(self.units, devices)]


FLUX = Case("two lengths", "image", 48, 1, {"shape": (1, 16, 16, 12)})


@pytest.fixture(params=[2, 4])
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    let_comfyui_load_zimage()
    seconds_are(monkeypatch, 1.39, 2.54)
    found = [torch.device("cpu"), *(torch.device("cpu", number) for number in range(1, request.param))]
    monkeypatch.setattr(model_management, "get_all_torch_devices",
                        lambda exclude_current=False: found[int(exclude_current):])  # fmt: skip
    return request.param


def seconds_are(monkeypatch: pytest.MonkeyPatch, shared: float, alone: float) -> None:
    """Let calls that are computed in both ways seem to take so long; doubles of GPUs are slower than one."""
    seconds = itertools.cycle((shared, alone))
    monkeypatch.setattr(several_gpus, "_timed", lambda run, _device: (run(), next(seconds)))


two = pytest.mark.parametrize("devices", [2], indirect=True)


def sample(model: ModelPatcher, cfg: float = 1.0) -> torch.Tensor:
    return FLUX.of("flux", cfg=cfg).sample(model)


def split(model: ModelPatcher) -> ModelPatcher:
    with token_networks.told():
        return on_all_gpus(model)


@contextmanager
def shared(path: Path, folder: Path, build: bool = False) -> Iterator[Patched]:
    """A model that has copies on all GPUs, and its engine."""
    network = NativeNetwork.of_model(split(token_networks.load(str(path))), "a transformer")
    if build:
        order = BuildOrder(network, "float32", profile_of(network), backends()["torch"])
        build_engine(order, Library([folder]), lambda *_: None)
    engine = Patched(network, folder, "torch")
    try:
        yield engine
    finally:
        engine.model.set_additional_models("multigpu", [])


def tokens_of_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """List the tokens of each call of a session from now on."""
    found, run = [], LiveSession.run

    def listed(self: LiveSession, given: dict[str, torch.Tensor], *rest: Any) -> dict[str, torch.Tensor]:
        found.append(given[name].shape[-2])
        return run(self, given, *rest)

    monkeypatch.setattr(LiveSession, "run", listed)
    return found
