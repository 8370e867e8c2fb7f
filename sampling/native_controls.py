"""ControlNets of kinds that no engine serves: they run unchanged, and the report counts their calls."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from comfy.controlnet import ControlLora, ControlNet

from ..architectures import Role
from .call_stats import open_stats, timed

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase

    from ..engine_library import Fallback


def count_control_as_native(control: ControlBase, label: str, node_id: str, fallback: Fallback) -> ControlBase:
    """Return a copy of a CONTROL_NET whose calls are counted as native for a reason.

    Controls of other packs are returned as given, since their networks may be of any kind. So are T2I-adapters, which
    compute once per picture, and Control-LoRAs, which have no network yet.
    """
    ours = type(control).__module__ == ControlNet.__module__
    if not ours or not isinstance(control, ControlNet) or isinstance(control, ControlLora):
        return control
    counted = control.copy()
    counted.control_model = CountedNetwork(control.control_model, label, node_id, fallback)
    return counted


class CountedNetwork:
    """Takes the place of ``ControlNet.control_model``: native's network, whose calls are counted."""

    def __init__(self, native: Any, *counted_as: Any):
        self.native: torch.nn.Module = native.native if isinstance(native, CountedNetwork) else native
        self._counted_as = counted_as

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        label, node_id, fallback = self._counted_as
        stats = open_stats(Role.CONTROLNET.value, label, node_id, device=kwargs["x"].device)
        stats.count_native(fallback)
        with timed(stats.times):
            return self.native(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of the native module."""
        if name == "native":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.native, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        return copy.deepcopy(self.native, memo)  # on another GPU
