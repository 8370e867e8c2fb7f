"""Blocks: the layers of a network that are compiled once for each kind. A block's call is tensors and a form.

A family's function lists its blocks in ``blocks``. It calls them with tensors, or ComfyUI's own forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

OVERRIDE = "optimized_attention_override"
"""The only entry of ComfyUI's ``transformer_options`` that a block of an engine reads."""


def in_blocks(
    layers: Iterable[torch.nn.Module], compute: Callable[..., Any] | None = None
) -> tuple[torch.nn.Module, ...]:
    """Return layers of a copy as blocks. A call of a layer is then ``compute(layer, ...)``, where that is given."""
    found = tuple(layers)
    if compute is not None:
        for layer in found:
            layer.forward = partial(compute, layer)
    return found


Form = Hashable
"""A value with its tensors taken out."""

_TENSOR, _PLAIN = "tensor", "plain"


def take_apart(value: Any, tensors: list[torch.Tensor]) -> Form:
    """Append the tensors of a value to ``tensors`` and return the rest: its form.

    Raises:
        TypeError: a part of the value is not hashable.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return (_TENSOR,)
    if isinstance(value, tuple | list):
        return type(value), *(take_apart(part, tensors) for part in value)
    if isinstance(value, dict):
        kept = {OVERRIDE: value[OVERRIDE]} if OVERRIDE in value else value
        return dict, *((name, take_apart(part, tensors)) for name, part in kept.items())
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(take_apart(getattr(value, part.name), tensors) for part in fields(value))
    hash(value)
    return _PLAIN, value


def put_together(form: Form, tensors: Iterator[torch.Tensor]) -> Any:
    """The inverse of ``take_apart``."""
    kind, *rest = form
    if kind == _TENSOR:
        return next(tensors)
    if kind == _PLAIN:
        return rest[0]
    if kind is dict:
        return {name: put_together(part, tensors) for name, part in rest}
    values = [put_together(part, tensors) for part in rest]
    return kind(values) if kind in (tuple, list) else kind(*values)


def words_of(form: Form) -> str:
    """Return a form in words that are the same in each process."""
    kind, *rest = form
    if kind in (_TENSOR, _PLAIN):
        return " ".join([kind, *map(repr, rest)])
    parts = (f"{part[0]}: {words_of(part[1])}" if kind is dict else words_of(part) for part in rest)
    return f"{kind.__qualname__}({', '.join(parts)})"
