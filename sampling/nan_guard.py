"""NaN guard: where an engine gives values that are not finite, native makes the picture.

A run of a patched model is checked at its end, so no step waits for the GPU; if it fails, native samples again. A NaN
in a ControlNet's residuals shows in the UNet's result, on an engine or native. Without a sampler patch there is no end
of a run to check. Then each call of a ControlNet is checked before ComfyUI gets its result, which waits for the GPU,
and native repeats the call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..architectures.calls import Control, EngineCall
from ..comfy_model.comfyui_shims import outside_recording
from ..engine_library import Fallback, Reason, Unavailable
from .call_stats import prompt_stats
from .run_context import executing

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

log = logging.getLogger(__name__)

NOT_FINITE = Fallback(
    Reason.ENGINE_FAILED, "an engine of this run gave values that are no numbers (NaN), so the whole run was done again"
)

NATIVE_TOO = "the normal model gives values that are no numbers (NaN) too"
NATIVE_TOO_ADVICE = "see what ComfyUI's own nodes give with this model, precision and prompt"

NOT_FINITE_HERE = "it gave values that are no numbers (NaN), so the normal model does this step and the rest of the run"

_watch: ContextVar[Watch | None] = ContextVar("watch of the run", default=None)
_again: ContextVar[Fallback | None] = ContextVar("why native does the run again", default=None)


class Watch:
    """Sum of a run's results on each device: not finite if one result is not.

    Attributes:
        engines: True if an engine computed a result or a part of its inputs.
    """

    def __init__(self) -> None:
        self.engines = False
        self._sums: dict[torch.device, torch.Tensor] = {}

    def see(self, result: torch.Tensor) -> None:
        total = result.sum(dtype=torch.float32)  # no sum of half precision numbers overflows it
        known = self._sums.get(result.device)
        self._sums[result.device] = total if known is None else known.add_(total)

    def sums(self) -> list[torch.Tensor]:
        """Return the sums, for later checks."""
        return list(self._sums.values())

    def finite(self) -> bool:
        """Tell whether all results were finite. Waits for the GPU: call it once, at the end."""
        return all(bool(torch.isfinite(total)) for total in self._sums.values())


def watch(result: torch.Tensor | Sequence[torch.Tensor], by_engine: bool = True) -> None:
    """Add a backbone's result, by native or an engine, to the run's sum. Does not wait for the GPU.

    Args:
        result: a tensor; or several, as of video and sound.
    """
    run = _watch.get()
    several = result if isinstance(result, list | tuple) else [result]
    found = [one for one in several if torch.is_tensor(one)]
    if run is not None and found:
        with outside_recording():
            for tensor in found:
                run.see(tensor)
        run.engines = run.engines or by_engine


def checked_for_nan(call: EngineCall) -> EngineCall:
    """Return a ControlNet's or a VAE's call with a check for NaN: at the end of a watched run, else at once."""
    run = _watch.get()
    if run is None:
        call.finish = partial(_numbers, call.finish)
    else:
        run.engines = True
    return call


@contextlib.contextmanager
def watched_apart() -> Iterator[Watch]:
    """Watch the calls inside separately, for a caller that checks their sums; the run's own watch misses them."""
    run = Watch()
    token = _watch.set(run)
    try:
        yield run
    finally:
        _watch.reset(token)


@contextlib.contextmanager
def native_again() -> Iterator[None]:
    """Leave all calls inside to native, because an engine gave a NaN in them."""
    token = _again.set(NOT_FINITE)
    try:
        yield
    finally:
        _again.reset(token)


def _numbers(finish: Callable[[Mapping[str, torch.Tensor]], Control], results: Mapping[str, torch.Tensor]) -> Control:
    """Return ``finish(results)`` if all results are finite; waits for the GPU.

    Raises:
        Unavailable: a result is not finite.
    """
    if not _all_finite(results.values()):
        raise Unavailable(Reason.ENGINE_FAILED, NOT_FINITE_HERE)
    return finish(results)


def _all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors])
    return bool(torch.isfinite(sums).all())


def why_again() -> Fallback | None:
    """Return the reason why every call of this run goes to native, or None."""
    return _again.get()


def redo_unless_finite(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
    """Sample, and again with native only if an engine gave a NaN; an OUTER_SAMPLE wrapper."""
    if _watch.get() is not None:  # a sampling inside another sampling
        return executor(*args, **kwargs)
    guider, run = executor.class_obj, Watch()
    conds = {name: [dict(cond) for cond in group] for name, group in guider.conds.items()}  # sampling changes them
    device = guider.model_patcher.load_device
    random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    token = _watch.set(run)
    try:
        result = executor(*args, **kwargs)
    finally:
        _watch.reset(token)
    if not run.engines or (run.finite() and _is_finite(result)):
        return result
    log.error("Hybrid TRT: %s; the normal model's image takes its place", NOT_FINITE.detail)
    guider.conds = conds
    torch.set_rng_state(random[0])
    if random[1] is not None:
        torch.cuda.set_rng_state(random[1], device)
    with native_again():
        result = executor(*args, **kwargs)
    if not _is_finite(result):
        _blame_no_engine()
    return result


def _is_finite(result: Any) -> bool:
    return not isinstance(result, torch.Tensor) or _all_finite([result])


def _blame_no_engine() -> None:
    """Report on the sampling node that the normal model gives NaN too."""
    log.warning("Hybrid TRT: %s, so no engine is at fault", NATIVE_TOO)
    if (context := executing()) is not None:
        for row in prompt_stats(context.prompt_id, [context.node_id]):
            if row.details.get(NOT_FINITE.reason.value) == str(NOT_FINITE):
                row.details[NOT_FINITE.reason.value] = NATIVE_TOO
                row.advices[NOT_FINITE.reason.value] = NATIVE_TOO_ADVICE
