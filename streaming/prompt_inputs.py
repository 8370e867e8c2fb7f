"""Prompts as inputs of a frame: tensors apart from their form, so that a CUDA graph takes new ones of the same form."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import comfy.conds
import torch
from comfy.controlnet import ControlBase

Conds = Mapping[str, Sequence[Mapping[str, Any]]]
"""ComfyUI's prepared conditionings, positive and negative."""

TENSORS = (comfy.conds.CONDRegular, comfy.conds.CONDCrossAttn)
"""Kinds of conditions that hold only a tensor, and no options on its use."""
TEXT = ("cross_attn", "pooled_output", "model_conds", "uuid")
"""Options that ``model_conds`` repeats for the networks, ``model_conds`` itself, and an id that no network reads."""


@dataclass(frozen=True)
class Prompts:
    """The tensors of prepared conditionings by name, and their form: all else; a form of None equals no other."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    form: Hashable | None = None


def prompts_of(conds: Conds) -> Prompts:
    """Take conditionings apart."""
    try:
        form = tuple((group, tuple(map(_form_of, each))) for group, each in sorted(conds.items()))
    except TypeError:
        return Prompts()
    held = ((f"{group} {n} {name}", value.cond) for group, n, name, value in _held(conds) if type(value) in TENSORS)
    return Prompts(dict(held), form)


def with_tensors(conds: Conds, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[dict[str, Any]]]:
    """Return conditionings with other tensors of the same names."""
    made = {group: [{**cond, "model_conds": dict(cond["model_conds"])} for cond in each]
            for group, each in conds.items()}  # fmt: skip
    for group, n, name, value in _held(conds):
        if (tensor := tensors.get(f"{group} {n} {name}")) is not None:
            made[group][n]["model_conds"][name] = type(value)(tensor)
    return made


def _held(conds: Conds) -> list[tuple[str, int, str, Any]]:
    return [(group, n, name, value) for group, each in conds.items() for n, cond in enumerate(each)
            for name, value in cond["model_conds"].items()]  # fmt: skip


def _form_of(cond: Mapping[str, Any]) -> Hashable:
    options = {name: value for name, value in cond.items() if name not in TEXT}
    held = {name: _form_of_condition(value) for name, value in cond["model_conds"].items()}
    return tuple(sorted((name, _form(value)) for name, value in options.items())), tuple(sorted(held.items()))


def _form_of_condition(value: Any) -> Hashable:
    if type(value) in TENSORS and type(value.cond) is torch.Tensor:
        return type(value).__name__, tuple(value.cond.shape), str(value.cond.dtype), str(value.cond.device)
    if type(value) is comfy.conds.CONDConstant:
        return type(value).__name__, _form(value.cond)
    raise TypeError


def _form(value: Any) -> Hashable:
    """Return a key that differs between values.

    Raises:
        TypeError: it is of a kind that may change, or without a comparison by value.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, str(value)
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(_form, value))
    if isinstance(value, ControlBase):
        return type(value).__name__, str(id(value))  # a stream keeps its ControlNets
    raise TypeError
