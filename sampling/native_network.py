"""A native network in a run: the arguments of its calls by name, and changes that other nodes make to it.

Each run looks for changes once, and each call makes the quick checks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..comfy_model.changed_layers import LayerWatch
from ..comfy_model.network import NativeNetwork
from ..comfy_model.weight_hash import look_for_edits
from ..engine_library import Fallback, Reason
from ..sessions.gpu_memory import close_engines
from .call_stats import CallStats, timed
from .run_context import SamplingRun, current_run

log = logging.getLogger(__name__)


class NetworkWatch:
    """Watch of a network from run to run.

    Attributes:
        layers: the watch of its layers.
    """

    def __init__(self, network: NativeNetwork):
        self.layers = LayerWatch(network.module)
        self._patchers = [part.patcher for part in network.parts]
        self._run: SamplingRun | None = None  # the last run in which the network was checked
        self._changed: Fallback | None = None  # the result of that check
        self._editions: list[int] = []  # editions of the weights when the engine was looked up

    def begin(self) -> None:
        """Remember the state of the weights while the engine is looked up, which has checked the layers."""
        self._run, self._changed = current_run(), None
        self._editions = self._look_for_edits()

    def weights_edited(self) -> bool:
        """Tell, once per run, whether the network's weights changed since the engine was looked up.

        Cheap in all calls but the first of a run. One execution of a node may have several runs.
        """
        run = current_run()
        if run is self._run:
            return False
        self._run, self._changed = run, _as_fallback(self.layers.look())
        return self._look_for_edits() != self._editions

    def _look_for_edits(self) -> list[int]:
        return [look_for_edits(patcher) for patcher in self._patchers]

    def changed(self) -> Fallback | None:
        """Return the reason why the network of this call is no longer the engine's, or None. Quick.

        If no other pack's code takes part, nothing can change it within a run.
        """
        if self._run is not None and self._run.comfyuis_alone:
            return self._changed
        return _as_fallback(self.layers.look_again())


def _as_fallback(what: str | None) -> Fallback | None:
    return None if what is None else Fallback(Reason.MODEL_PATCHED, what)


def by_name(names: Sequence[str], args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def with_residuals_copied(
    forward: Callable[..., Any], names: Sequence[str], args: tuple, kwargs: Mapping[str, Any]
) -> Any:
    """Call ``forward`` with copies of the lists of residuals, because native empties the lists."""
    known = dict(enumerate(names))
    args = [_copied(value) if known.get(i) == "control" else value for i, value in enumerate(args)]
    return forward(*args, **{name: _copied(v) if name == "control" else v for name, v in kwargs.items()})


def _copied(control: Mapping | None) -> dict | None:
    return None if control is None else {name: list(residuals) for name, residuals in control.items()}


def run_native(call: Callable[[], Any], stats: CallStats, device: torch.device) -> Any:
    """Make a call that no engine serves, timed like the engine's calls.

    Args:
        call: made a second time, with every engine closed, when memory is short.
    """
    with timed(stats.times):
        try:
            return call()
        except torch.OutOfMemoryError:
            log.warning("Hybrid TRT: %s lacks memory at normal speed, engines make room", stats.name)
        # outside the handler: the error's frames hold what was allocated until then
        close_engines(device)
        return call()
