"""Native calls as ComfyUI makes them, read by the names of their arguments."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..comfy_model.network import NativeNetwork
from ..engine_library import Unavailable
from ..sessions.gpu_memory import close_engines
from .call_stats import CallStats, timed

log = logging.getLogger(__name__)


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


def run_native(call: Callable[[], Any], stats: CallStats, device: torch.device) -> Any:
    """Make a call that no engine serves, timed with the others.

    Args:
        call: made a second time, with every engine closed, when memory is short.
    """
    with timed(stats.times):
        try:
            return call()
        except torch.OutOfMemoryError:
            log.warning("Hybrid TRT: %s lacks memory on native, engines make room", stats.name)
        # outside the handler: the error's frames hold what was allocated until then
        close_engines(device)
        return call()


def _copied(control: Mapping | None) -> dict | None:
    return None if control is None else {name: list(residuals) for name, residuals in control.items()}
