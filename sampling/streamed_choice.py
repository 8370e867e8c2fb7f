"""Engine or native, whichever is faster where weights are streamed: measured once for a GPU's memory, and remembered.

The engine's calls are timed in the second run that streams, native's in the third. From then on the faster one serves
such runs. An engine that wins gains more at larger pictures, where copies hide behind computing; one that loses loses
more at smaller ones. So only a size between two measured ones is measured again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from comfy import model_management

from ..engine_library import Engine, Fallback, Reason
from ..engine_library.gpu import gpu_of
from ..engine_library.manifest import PACK_VERSION, TIMES_NAME
from ..engine_library.safe_files import read_json, write_file
from ..sessions.session import Session
from . import NotCopied
from .call_stats import NATIVE, ON_ENGINE, CallStats

if TYPE_CHECKING:
    import torch
    from comfy.model_patcher import ModelPatcher

    from .engine_handle import EngineHandle

log = logging.getLogger(__name__)

SLOWER = 1.03
"""An engine may take so many times native's time."""
NEAR = 1e9
"""Bytes of memory more or less for which times still hold."""


class Times(NamedTuple):
    """Milliseconds of a call, on the engine and native, with so much memory and latents of so many values."""

    room: float
    values: float
    engine: float
    native: float

    @property
    def native_wins(self) -> bool:
        return self.engine > SLOWER * self.native


@dataclass
class TimedRun:
    """A run whose calls are timed; ``stats`` are there once it has begun.

    Attributes:
        where: see ``_where``.
        room: see ``_room``.
        call: ``NATIVE`` or ``ON_ENGINE``: all its calls have to be of this kind.
    """

    where: str
    room: float
    values: int
    call: int
    stats: CallStats | None = None

    def median(self) -> float | None:
        """Return the median of all calls but the first; None where there are too few, or others among them."""
        found = [] if self.stats is None else self.stats.ms()
        if len(found) < 2 or set(self.stats.calls) != {self.call} or len(self.stats.calls) != len(found):
            return None
        return median(found[1:])


class StreamedChoice(NotCopied):
    """Chooses for the runs of one session: the engine, or native where that is faster."""

    def __init__(self) -> None:
        self._run: TimedRun | None = None
        self._engine: dict[tuple[str, int], Times] = {}  # where and values -> times that lack native's
        self._rows: dict[str, list[Times]] = {}
        self._measured: Engine | None = None  # whose times these are; one that is built again is another

    def why_native(self, handle: EngineHandle, patcher: ModelPatcher, values: int) -> Fallback | None:
        """Return why native serves the run that begins, or None; have its calls timed where that is to be known."""
        session, run = handle.session, self._run
        if session.engines[0] is not self._measured:
            self._measured = session.engines[0]
            self._engine, self._rows = {}, _read(self._measured.folder)
        elif run is not None:
            self._learn(run, session)
        device = handle.network.device
        coming = TimedRun(_where(device, patcher), _room(device), values, ON_ENGINE)
        known = self._decided(coming)
        session.pace = "" if known is None else f"{_seconds(known.engine)} a call instead of {_seconds(known.native)}"
        self._run = handle.timed_run = None
        if known is not None:
            return _slower(known) if known.native_wins else None
        half = self._engine.get((coming.where, values))
        if half is not None and abs(half.room - coming.room) <= NEAR:
            coming.call = NATIVE
        elif not session.remark:
            return None
        self._run = handle.timed_run = coming
        return _trial(half.engine) if coming.call == NATIVE else None

    def _learn(self, run: TimedRun, session: Session) -> None:
        """Take the times of a run that has ended; keep them once both are known."""
        took, place = run.median(), (run.where, run.values)
        if took is None or run.call == ON_ENGINE and not session.remark:
            return
        if run.call == ON_ENGINE:
            self._engine[place] = Times(run.room, run.values, took, math.nan)
            return
        found = self._engine.pop(place)._replace(native=took)
        self._rows.setdefault(run.where, []).append(found)
        log.info("Hybrid TRT: with %.1f GB of the GPU a call of %s takes %.0f ms on the engine, and native %.0f",
                 run.room / 1e9, self._measured.manifest.label, found.engine, found.native)  # fmt: skip
        with contextlib.suppress(OSError):  # a library that cannot be written: it is measured again after a restart
            write_file(self._measured.folder / TIMES_NAME, json.dumps({"version": PACK_VERSION, "rows": self._rows}))

    def _decided(self, run: TimedRun) -> Times | None:
        """Return the measured times that decide for a run, those of the nearest latents; or None."""
        rows = [row for row in self._rows.get(run.where, ()) if abs(row.room - run.room) <= NEAR]
        fit = [row for row in rows if row.values == run.values or (row.values > run.values) == row.native_wins]
        return min(fit, key=lambda row: abs(row.values - run.values), default=None)


_choices: weakref.WeakKeyDictionary[Session, StreamedChoice] = weakref.WeakKeyDictionary()


def why_native(handle: EngineHandle, patcher: ModelPatcher, noise_shape: Sequence[Any]) -> Fallback | None:
    """Return why native serves a run whose weights would be streamed, or None.

    Args:
        noise_shape: that of the run's latents, or of each of several.
    """
    session = handle.session
    if session is None or not session.follows_patches or not session.engines:
        return None
    return _choices.setdefault(session, StreamedChoice()).why_native(handle, patcher, _values(noise_shape))


def _values(shape: Sequence[Any]) -> int:
    """Return the number of values of a shape, or of several shapes."""
    if any(isinstance(size, Iterable) for size in shape):
        return sum(map(_values, shape))
    found = 1
    for size in shape:
        found *= int(size)
    return found


def _where(device: torch.device, patcher: ModelPatcher) -> str:
    """Return the GPU in words, how ComfyUI loads the model there, and whether native would have to apply patches."""
    found = [gpu_of(device), model_management.vram_state.name.lower()]
    found += ["dynamic"] if patcher.is_dynamic() else []
    found += ["patched weights"] if patcher.patches else []
    return ", ".join(filter(None, found))


def _room(device: torch.device) -> float:
    """Return the bytes of a device that are free or taken by ComfyUI's models and ours; 0 on a CPU."""
    if model_management.is_device_cpu(device):
        return 0
    models = [model for model in model_management.loaded_models() if model is not None and model.load_device == device]
    return model_management.get_free_memory(device) + sum(model.loaded_size() for model in models)


def _slower(times: Times) -> Fallback:
    took = f"a call takes {_seconds(times.native)} on the normal model, and {_seconds(times.engine)} on the engine"
    return Fallback(Reason.LARGER_THAN_GPU, took)


def _trial(engine: float) -> Fallback:
    why = f"this run times the normal model; the engine takes {_seconds(engine)} a call"
    return Fallback(Reason.LARGER_THAN_GPU, why, advice="nothing to do: later runs use the faster of both")


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.2g} s"


def _read(folder: Path) -> dict[str, list[Times]]:
    """Return the rows of an engine's file; none where it is of another version, or damaged."""
    try:
        found = read_json(folder / TIMES_NAME)
        rows = found["rows"] if found["version"] == PACK_VERSION else {}
        return {where: [Times(*map(float, one)) for one in its] for where, its in rows.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
