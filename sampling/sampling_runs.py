"""One sampling run: what tells it from the next one, and whether other packs' code takes part in it.

Code that runs between two steps can change the layers of a network there. Where ComfyUI samples by itself nobody can,
and engines need not look for that in each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..comfy_model.changed_layers import LayerWatch
from ..comfy_model.network import NativeNetwork
from ..comfy_model.weight_hash import look_for_edits
from ..comfy_model.whose_code import is_known
from ..engine_library import Fallback, Reason

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

@dataclass(frozen=True, eq=False)
class SamplingRun:
    """One run of a sampler: an object of its own.

    Attributes:
        comfyuis_alone: whether no other pack's code was seen to take part.
    """

    comfyuis_alone: bool


_current: ContextVar[SamplingRun | None] = ContextVar("sampling run", default=None)


def current_run() -> SamplingRun | None:
    """The run that the caller is part of; None outside of runs, and in those of models without a sampler patch."""
    return _current.get()


def as_run(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
    """An OUTER_SAMPLE wrapper: all calls inside belong to one run."""
    others = _others_take_part(executor.class_obj, (*args, *kwargs.values()))
    with inside(SamplingRun(comfyuis_alone=not others)):
        return executor(*args, **kwargs)


@contextlib.contextmanager
def inside(run: SamplingRun) -> Iterator[None]:
    """Inside, calls are part of a run."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


def _others_take_part(guider: Any, given: Iterable[Any]) -> bool:
    """Tell whether other packs' code can run during a sampling.

    That is a sampler, guider, callback, wrapper or control of theirs, or a function in the place of ComfyUI's own.
    """
    import comfy.samplers
    from comfy.k_diffusion import sampling

    spaces = [vars(comfy.samplers), vars(type(guider)), vars(comfy.samplers.CFGGuider), vars(comfy.samplers.KSAMPLER),
              vars(sampling), vars(type(guider.model_patcher.model)), vars(guider)]  # fmt: skip
    if not all(is_known(value) for space in spaces for value in list(space.values()) if callable(value)):
        return True
    seen: set[int] = set()
    parts = [*given, *(getattr(one, "__dict__", {}) for one in given), type(guider), guider.model_options]
    return any(_has_stranger(part, seen) for part in (*parts, _controls(guider)))


def _controls(guider: Any) -> list[Any]:
    """The controls and hooks of a run's conditionings."""
    conds = [cond for group in guider.conds.values() for cond in group or ()]
    return [part for cond in conds for part in (cond.get("control"), cond.get("hooks")) if part is not None]


def _has_stranger(value: Any, seen: set[int]) -> bool:
    """Find another pack's function or object in a value, and in dicts and sequences at any depth."""
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.Tensor) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, Mapping):
        return any(_has_stranger(one, seen) for one in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(_has_stranger(one, seen) for one in value)
    return not is_known(value)


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
