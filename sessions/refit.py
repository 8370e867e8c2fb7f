"""Refit: an engine with replaceable weights is given the weights that ComfyUI samples with, when they change."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from ..comfy_model.network import patchers_of
from ..comfy_model.weight_hash import edition_of, hash_of_parts, own_hash
from ..comfy_model.weight_patches import all_same, version_of
from ..comfy_model.weight_values import PatchedWeight, patched_weights, value_of
from ..engine_library import Engine, Reason, Unavailable, trust

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from ..comfy_model.network import NativeNetwork
    from .session import Runner

log = logging.getLogger(__name__)


class EngineWeights:
    """Weights of a native module for an engine, refitted from patcher to patcher. It keeps no module or patcher alive.

    It knows the patches of each parameter in the engine, so a LoRA at another strength refits only the parameters of
    that LoRA. An engine that was built with the weights of this very model is given only patched weights.
    """

    def __init__(self, network: NativeNetwork, engine: Engine, keeps: bool = False):
        """
        Args:
            keeps: True if the engine has the weights that it was built with when it is opened.

        Raises:
            Unavailable: the engine has other parameters than this network.
        """
        self._module = weakref.ref(network.module)
        self._places = list(zip(network.starts, (part.prefix for part in network.parts), strict=True))
        self._companion = None if network.companion is None else weakref.ref(network.companion.module)
        self._device = network.device
        self._dtype = getattr(torch, engine.manifest.identity.precision)
        self._label = network.label
        self._initialisers = engine.read_parameters()
        strange = self._initialisers.keys() - {name for name, _ in network.module.named_parameters()}
        if strange or not self._initialisers:
            what = f"wants a weight {min(strange)}" if strange else "takes no weights"
            raise Unavailable(Reason.BROKEN_ENGINE, f"{engine.folder.name} {what}, unlike {network.label}")
        # a manifest from another machine is not trusted
        self._built_with = engine.manifest.built_with if keeps and trust.built_here(engine) else ""
        self._patcher: weakref.ref[ModelPatcher] | None = None
        self._inside: dict[str, list] | None = None  # parameter -> its patches; None: the weights are unknown
        self._as_opened = True  # no weights were put into the engine yet
        self._version: tuple = ((), ())

    def belong_to(self, module: torch.nn.Module) -> bool:
        """Tell whether these are the weights of that native module."""
        return self._module() is module

    def sync_from(self, patcher: ModelPatcher) -> None:
        """Use a patcher's weights from the next ``refit`` on. Cheap."""
        self._patcher = weakref.ref(patcher)

    def forget(self) -> None:
        """Forget the weights of an engine that was closed: when it is opened again, it has its own."""
        self._inside, self._as_opened = None, True

    @property
    def changed(self) -> bool:
        """True if the engine needs a refit. Cheap, unless the patcher's LoRAs are new."""
        return self._inside is None or self._state() != self._version

    def _state(self) -> tuple:
        """Return a value that changes with the patcher's weights: versions of patches, then editions of weights."""
        patchers = self._patchers()
        return tuple(map(version_of, patchers)), tuple(map(edition_of, patchers))

    def _patchers(self) -> tuple[ModelPatcher, ...]:
        return patchers_of(self._patcher(), None if self._companion is None else self._companion())

    def refit(self, runner: Runner) -> None:
        """Put the weights that differ into a runner's engine."""
        started = time.perf_counter()
        version, entries = self._state(), self._entries()
        values = _Values(entries, {i: name for name, i in self._initialisers.items()}, self)
        wanted = {name: entries[name].patches for name in self._initialisers}
        edited = self._inside is not None and self._version[1] != version[1]
        inside = self._models_own() if self._as_opened else None if edited else self._inside
        self._inside, self._as_opened = None, False  # even if this fails, the old weights are no longer complete
        changed = {
            initialiser
            for name, initialiser in self._initialisers.items()
            if inside is None or not all_same(inside[name], wanted[name])
        }
        if changed:
            runner.refit(values, changed)
            seconds = time.perf_counter() - started
            log.info("Hybrid TRT: %s: %d weights put into the engine in %.1f s", self._label, len(changed), seconds)
        self._inside, self._version = wanted, version

    def _models_own(self) -> dict[str, list] | None:
        """Return no patches for each parameter, if the engine was built with this model's own weights, else None."""
        if not self._built_with or self._own_hash() != self._built_with:
            return None
        return {name: [] for name in self._initialisers}

    def _own_hash(self) -> str:
        parts = zip(self._patchers(), self._places, strict=True)
        return hash_of_parts([own_hash(patcher, prefix) for patcher, (_, prefix) in parts])

    def _entries(self) -> dict[str, PatchedWeight]:
        """Return the weights of the network by their names in it."""
        return {
            start + weight.key.removeprefix(prefix): weight
            for patcher, (start, prefix) in zip(self._patchers(), self._places, strict=True)
            for weight in patched_weights(patcher, prefix)
        }

    def _value(self, weight: PatchedWeight) -> torch.Tensor:
        """Return a copy of a weight in the engine's dtype, in main memory."""
        return value_of(weight, self._device).to("cpu", self._dtype, copy=True).contiguous()


class _Values(Mapping[str, torch.Tensor]):
    """Mapping of initialiser -> its value, computed when it is read."""

    def __init__(self, entries: Mapping[str, PatchedWeight], names: Mapping[str, str], weights: EngineWeights):
        self._entries, self._names, self._weights = entries, names, weights

    def __getitem__(self, initialiser: str) -> torch.Tensor:
        return self._weights._value(self._entries[self._names[initialiser]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
