"""Steps of a sampling in which the UNet is not called through the sampler patch: another node computes it by itself."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from ..engine_library import Fallback, Reason
from .call_stats import open_stats
from .engine_patcher import Shared

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

    from .engine_handle import EngineHandle

FUNCTION = "model_function_wrapper"
"""Under this name model_options have the function of another node that ComfyUI calls in the place of a model."""

_PACK = re.compile(r".*[\\/]custom_nodes[\\/]([^\\/]+)")


class Reached(Shared):
    """Counts the sampling steps in which a patched model's UNet was not called.

    Step caches leave some steps out, which is right: they call the UNet at least once, and not from a function that
    takes the model's place.

    Attributes:
        calls: how many calls of the UNet came so far.
    """

    def __init__(self, handle: EngineHandle):
        self._handle = handle
        self._left_out = 0
        self.calls = 0

    def sample(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """An OUTER_SAMPLE wrapper: afterwards the steps that did not call the UNet are counted as native."""
        before, self._left_out = self.calls, 0
        result = executor(*args, **kwargs)
        steps = self._left_out
        if self.calls == before:
            sigmas = kwargs["sigmas"] if "sigmas" in kwargs else args[3]
            steps = len(sigmas) - 1
        if steps > 0:
            self._count(steps, executor.class_obj.model_options.get(FUNCTION))
        return result

    def step(self, executor: WrapperExecutor, model: Any, conds: Any, x: Any, timestep: Any, options: dict) -> Any:
        """A CALC_COND_BATCH wrapper: notices a function in the model's place that did not call the UNet."""
        if FUNCTION not in options:
            return executor(model, conds, x, timestep, options)
        before = self.calls
        result = executor(model, conds, x, timestep, options)
        self._left_out += self.calls == before
        return result

    def _count(self, steps: int, function: Any) -> None:
        network = self._handle.network
        stats = open_stats(network.role.value, network.label, self._handle.node_id, self._handle.node_key)
        for _ in range(steps):
            stats.count_native(Fallback(Reason.NOT_REACHED, _who(function)))


def _who(function: Any) -> str:
    """The words for who computes instead, with the folder of its pack where that is known."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    found = _PACK.match(getattr(module, "__file__", None) or "")
    pack = f" ({found[1]})" if found else ""
    return f"another node{pack} computes the UNet by itself"
