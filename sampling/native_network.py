"""A native network in a run: its calls, read by the names of their arguments, and changes that other nodes make to it.

Changes are looked for once per run, and in each call as far as that is quick.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..comfy_model.edited_weights import look_for_edits
from ..comfy_model.layer_watch import LayerWatch
from ..comfy_model.network import NativeNetwork
from ..engine_library import Fallback, Reason, Unavailable
from .run_context import SamplingRun, current_run


class NetworkWatch:
    """Watches a network from run to run.

    Attributes:
        layers: the watch of its layers.
    """

    def __init__(self, network: NativeNetwork):
        self.layers = LayerWatch(network.module)
        self._patcher = network.patcher
        self._run: SamplingRun | None = None  # the one in which it was looked at last
        self._changed: Fallback | None = None  # what was found then
        self._edition = 0  # of the weights, when the engine was looked up

    def begin(self) -> None:
        """The engine is being looked up, for which its layers are looked at: the weights are too."""
        self._run, self._changed = current_run(), None
        self._edition = look_for_edits(self._patcher)

    def weights_edited(self) -> bool:
        """Look at the network once per run: an execution of a node may have several. Whether its weights are others
        since the engine was looked up. Cheap in all calls but a run's first."""
        run = current_run()
        if run is self._run:
            return False
        self._run, what = run, self.layers.look()
        self._changed = None if what is None else Fallback(Reason.MODEL_PATCHED, what)
        return look_for_edits(self._patcher) != self._edition

    def changed(self) -> Fallback | None:
        """The reason why this call's network is no longer the engine's, or None. Quick."""
        if self._changed is not None:
            return self._changed
        what = self.layers.look_again(methods=self._run is None or not self._run.comfyuis_alone)
        return None if what is None else Fallback(Reason.MODEL_PATCHED, what)


def arguments_of(network: NativeNetwork) -> Sequence[str]:
    """The positional arguments of a network's forward, in order."""
    try:
        return network.architecture().arguments
    except Unavailable:  # it is never served, but its residuals are copied and its options read
        return forward_arguments(type(network.module))


@functools.cache
def forward_arguments(kind: type) -> tuple[str, ...]:
    """The same as a class tells them, which other packs may have changed."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def by_name(names: Sequence[str], args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def with_residuals_copied(
    forward: Callable[..., Any], names: Sequence[str], args: tuple, kwargs: Mapping[str, Any]
) -> Any:
    """``forward(*args, **kwargs)`` with lists of residuals of its own: native takes them out of the lists."""
    known = dict(enumerate(names))
    args = [_copied(value) if known.get(i) == "control" else value for i, value in enumerate(args)]
    return forward(*args, **{name: _copied(v) if name == "control" else v for name, v in kwargs.items()})


def _copied(control: Mapping | None) -> dict | None:
    return None if control is None else {name: list(residuals) for name, residuals in control.items()}
