"""The node execution and the sampling run that a call is part of.

Other packs' code that runs between two steps can change the layers of a network. If no other
pack's code takes part, engines need not check for it in each call.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any

import torch
from comfy_execution.utils import ExecutionContext, get_executing_context

from ..comfy_model.comfyui_internals import Feature, works
from ..comfy_model.whose_code import is_known
from .run_inputs import SteadyTensors

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

_lent: ExecutionContext | None = None
_latest: ExecutionContext | None = None
"""The last result of ``executing``."""


def executing() -> ExecutionContext | None:
    """Return the node execution that the caller runs in: one object for each execution of a node.

    ComfyUI sets it in a node's own thread. Threads that a node starts belong to the node that runs now.
    """
    global _latest
    context = get_executing_context() or _lent or _running_node(_latest)
    if context is not None:
        _latest = context
    return context


@contextlib.contextmanager
def lent_context() -> Iterator[None]:
    """Let threads without a node execution of their own count as part of the caller's."""
    global _lent
    before, _lent = _lent, executing()
    try:
        yield
    finally:
        _lent = before


def _running_node(known: ExecutionContext | None) -> ExecutionContext | None:
    """Return the execution of the node that runs now, the latest of several, or None.

    Args:
        known: an execution that is returned again while its node runs, because executions are compared by identity.
    """
    if not works(Feature.QUEUE):
        return None
    from comfy_execution import progress

    registry = progress.global_progress_registry
    if registry is None:
        return None
    nodes = registry.nodes.copy()  # the thread that runs the nodes may add entries
    running = [name for name, node in nodes.items() if name and node["state"] is progress.NodeState.Running]
    # known first: a sampling in such a thread reports its progress under the id that the page shows
    if known is not None and known.prompt_id == registry.prompt_id and known.node_id in running:
        return known
    return ExecutionContext(registry.prompt_id, running[-1], None) if running else None


class SamplingRun:
    """One run of a sampler.

    Attributes:
        comfyuis_alone: True if no other pack's code was found to take part.
        tensors: cached results from its prompts.
    """

    def __init__(self, comfyuis_alone: bool):
        self.comfyuis_alone = comfyuis_alone
        self.tensors = SteadyTensors(comfyuis_alone)


_current: ContextVar[SamplingRun | None] = ContextVar("sampling run", default=None)


def current_run() -> SamplingRun | None:
    """Return the sampling run that the caller is part of; None outside, and for models without a sampler patch."""
    return _current.get()


def as_run(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
    """Make all calls of a sampling belong to one run; an OUTER_SAMPLE wrapper."""
    run = SamplingRun(comfyuis_alone=not others_take_part(executor.class_obj, (*args, *kwargs.values())))
    try:
        with inside(run):
            return executor(*args, **kwargs)
    finally:
        run.tensors.release()  # somebody may still hold the run


def in_run(context: Context | None) -> Context | None:
    """Return a context for a call, where this thread belongs to no run although a run is under way."""
    return None if context is None or current_run() is not None else context.copy()


def tensors_of_run() -> SteadyTensors | None:
    """Return the cached tensors of the caller's run, or None outside of a run."""
    run = current_run()
    return None if run is None else run.tensors


@contextlib.contextmanager
def inside(run: SamplingRun) -> Iterator[None]:
    """Make the calls inside the block part of a run."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


_stock: dict[object, dict[str, Any]] = {}
"""Modules and classes without functions of other packs -> their contents at that check."""


def others_take_part(guider: Any, given: Iterable[Any]) -> bool:
    """Tell whether other packs' code can run during a sampling.

    Such code is a sampler, guider, callback, wrapper or control, or a replacement of ComfyUI's own function.
    """
    import comfy.samplers
    from comfy import sampler_helpers
    from comfy.k_diffusion import sampling

    model = guider.model_patcher.model
    owners = (comfy.samplers, sampling, sampler_helpers, comfy.samplers.KSAMPLER, comfy.samplers.CFGGuider,
              *type(guider).__mro__, *type(model).__mro__)  # fmt: skip
    if not all(map(_is_stock, owners)):
        return True
    own = (value for owner in (guider, model) for value in vars(owner).values())
    if not all(is_known(value) for value in own if callable(value)):
        return True
    seen: set[int] = set()
    parts = [*given, *(getattr(value, "__dict__", {}) for value in given), type(guider), guider.model_options]
    return any(_has_foreign(part, seen) for part in (*parts, _controls(guider)))


def _is_stock(owner: types.ModuleType | type) -> bool:
    """Tell whether all functions in a module or class are ComfyUI's, torch's, Python's or this pack's own."""
    space = vars(owner)
    if _stock.get(owner) == space:  # compares by identity first
        return True
    if not all(is_known(value) for value in list(space.values()) if callable(value)):
        return False
    _stock[owner] = dict(space)
    return True


def _controls(guider: Any) -> list[Any]:
    """Return the controls and hooks of a run's conditionings."""
    conds = [cond for group in guider.conds.values() for cond in group or ()]
    return [part for cond in conds for part in (cond.get("control"), cond.get("hooks")) if part is not None]


def _has_foreign(value: Any, seen: set[int]) -> bool:
    """Find another pack's function or object in a value, and in dicts and sequences at any depth."""
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.Tensor) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, Mapping):
        return any(_has_foreign(part, seen) for part in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(_has_foreign(part, seen) for part in value)
    return not is_known(value)
