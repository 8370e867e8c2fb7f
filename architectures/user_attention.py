"""Attention that a user chose, as an operation that compilers call without looking into it.

Which function it calls is known when it runs. So code that is compiled with it serves whatever attention is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from .blocks import OVERRIDE

Called = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor] | None]
"""A function with ComfyUI's arguments of attention, and an override that it is to be given, or None."""

Gather = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes keys and values, (batch, heads, tokens, features); returns those of all GPUs that share a call."""

_called: ContextVar[Called | None] = ContextVar("hybrid_trt_called_attention", default=None)
_gather: ContextVar[Gather | None] = ContextVar("hybrid_trt_gathered_attention", default=None)


def called() -> Called | None:
    """Return what the operation calls here; None where attention is torch's."""
    return _called.get()


def calls_others() -> bool:
    """Tell whether the operation calls another function than torch's."""
    return _called.get() not in (None, (_exact, None))


def gathers() -> bool:
    """Tell whether this thread computes a share of a call."""
    return _gather.get() is not None


@contextmanager
def gathering(gather: Gather | None) -> Iterator[None]:
    """Let attention inside have keys and values of all GPUs that share a call, or without ``gather`` its own."""
    token = _gather.set(gather)
    try:
        yield
    finally:
        _gather.reset(token)


def calling_users(extras: Mapping[str, Any], users: bool) -> AbstractContextManager[None]:
    """Let attention inside be that of ComfyUI's process, or a call's override, where ``users`` is set."""
    if not users:
        return nullcontext()
    from comfy.ldm.modules import attention

    return _calling((attention.optimized_attention, extras.get(OVERRIDE)))


@contextmanager
def calling_exact() -> Iterator[None]:
    """Let attention inside be the operation, and exact: to compile with it, and to compare what was compiled."""
    with _calling((_exact, None)):
        yield


@contextmanager
def _calling(what: Called | None) -> Iterator[None]:
    token = _called.set(what)
    try:
        yield
    finally:
        _called.reset(token)


def computed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, exact: bool = False
) -> torch.Tensor:
    """Compute attention of (batch, heads, tokens, features); the result is (batch, tokens, heads * features).

    Keys and values may have fewer heads, each for several of the queries.

    Args:
        exact: whether ComfyUI asks kernels of low precision to leave this one to torch.
    """
    each = q.shape[1] // k.shape[1]
    opaque = called() is not None
    if each > 1 and (opaque or torch.onnx.is_in_onnx_export()):
        k, v = (t.unsqueeze(2).expand(-1, -1, each, -1, -1).flatten(1, 2) for t in (k, v))
        each = 1
    if opaque:
        return _attention(q, k, v, mask, exact)
    grouped = {"enable_gqa": True} if each > 1 else {}
    return F.scaled_dot_product_attention(q, k, v, mask, **grouped).transpose(1, 2).flatten(2)


_SCHEMA = "(Tensor q, Tensor k, Tensor v, Tensor? mask, bool exact) -> Tensor"


@torch.library.custom_op("hybrid_trt::attention", mutates_args=(), schema=_SCHEMA)
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, exact: bool
) -> torch.Tensor:
    function, override = called() or (_exact, None)
    if (gather := _gather.get()) is not None:
        if mask is not None:
            raise NotImplementedError("masked attention among tokens that GPUs share")
        k, v = gather(k, v)
    options = {} if override is None else {"transformer_options": {OVERRIDE: override}}
    if exact:
        options["low_precision_attention"] = False
    return function(q, k, v, q.shape[1], mask=mask, skip_reshape=True, **options).contiguous()


@_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, exact: bool
) -> torch.Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty((batch, tokens, heads * v.shape[-1]))


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _heads: int, mask: torch.Tensor | None = None, **_: object
) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
