"""Stats of calls per prompt, sampling node and network: the number on the engine and native, the reasons, the times.

On the CPU a call's time is the difference of two looks at the clock. On CUDA it lies between two events on the call's
stream, read only when the report is made, so nothing waits for the GPU while sampling.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from ..architectures.calls import UncoveredCall
from ..comfy_model.comfyui_internals import switched_off
from ..comfy_model.network import NativeNetwork
from ..engine_library import Fallback, Reason
from ..engine_library.manifest import PACK_VERSION
from .run_context import executing

log = logging.getLogger(__name__)

NATIVE, ON_ENGINE = 0, 1

_counting = threading.Lock()
"""Held while counting: ComfyUI calls a network from several threads when it shares a step among GPUs."""

MOST_CALLS = 1 << 15
"""Number of a network's first calls in a run that are listed and timed one by one; a stream makes calls without end."""

MAX_PROMPTS = 64
"""Prompts remembered; the oldest is forgotten first."""

APART = "{name} did not run side by side with other ControlNets: this ComfyUI handles them in a way that is not known"
OPENED = "The engine of {name} was opened more than once in a run: ComfyUI closed it in between"
PLAIN = "{name} runs slower than it could: its calls could not be recorded ({why})"
WAITED = "{name} waited for its ControlNets in each step: their results were read before it started"
REPORT = "The picture is right, only slower. If it stays so, please report it with {versions}."

_logged: set[str] = set()
"""Messages that this server has logged already."""


def _nobody(prompt_id: str) -> bool:
    return False


wanted: Callable[[str], bool] = _nobody
"""Prompt id -> True if its calls are to be timed. Asked once per network and sampling run."""


def want_times(ask: Callable[[str], bool]) -> None:
    """Let ``ask`` decide which prompts are timed."""
    global wanted
    wanted = ask


class CallTimes:
    """Times of one network's successful calls on one device, in order."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._spans: list[tuple] = []

    @classmethod
    def together(cls, parts: Iterable[CallTimes]) -> CallTimes:
        """Return the times of several networks in turn."""
        all_times = cls(torch.device("cpu"))
        all_times._spans = [span for part in parts for span in part._spans]
        return all_times

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Time the code inside; a call that raises is not counted."""
        if len(self._spans) >= MOST_CALLS:
            yield
            return
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def ms(self) -> list[float]:
        """Return the milliseconds of each call. On CUDA this waits for the last call to end."""
        return [_ms_between(*span) for span in self._spans]

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _ms_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float):
        return 1000 * (end - start)
    end.synchronize()
    return start.elapsed_time(end)


def timed(times: CallTimes | None) -> contextlib.AbstractContextManager[None]:
    """Time the code inside, unless ``times`` is None."""
    return _NOTHING if times is None else times.call()


def range_of(network: NativeNetwork) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a function that opens a range for a network's call in NVIDIA's profilers; a no-op on other devices."""
    if network.device.type != "cuda":
        return contextlib.nullcontext
    return partial(named_range, f"Hybrid TRT {network.role.value} {network.label}")


@contextlib.contextmanager
def named_range(name: str) -> Iterator[None]:
    """Name the code inside for NVIDIA's profilers; for CUDA devices only."""
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def log_once(what: str, name: str, why: str = "") -> None:
    """Log a slow feature, once per server."""
    if what not in _logged:
        _logged.add(what)
        log.warning("Hybrid TRT: %s. %s", what.format(name=name, why=why), _report())


@dataclass
class CallStats:
    """The calls of one network during one execution of one sampling node.

    Attributes:
        kind: a value of ``Role``.
        name: the model's name as the user knows it.
        engine_node: id of the engine node in the graph.
        sampler_node: id of the node that sampled.
        backend: name of the backend that served, or None.
        engine_name: the engine's folder in the library, or None.
        engine, native: numbers of calls.
        calls: the first ``MOST_CALLS`` calls in order, a byte each: ON_ENGINE or NATIVE.
        reasons: fallback reason -> number of native calls.
        details: fallback reason -> details of its first call.
        advices: fallback reason -> advice of its first call, where that replaces the reason's own.
        proof: milliseconds of one call on the engine and of one native call, as timed on this GPU; None if unknown.
        node_key: key of the engine node, the same from prompt to prompt, unlike its id.
        times: times of the calls, in the order of ``calls``, or None if they are not timed.
        uncovered: calls that had no engine or compiled file of their size -> their number.
        beyond: symbol -> the largest size of calls that the engine was not built for.
        opened: ``time.time`` of the first call.
        beside: engine calls that started beside ControlNets and waited for them on the way.
        remark: note on the engine's picture compared with native's; mostly empty.
        late: engine calls of a ControlNet whose result a UNet's engine may wait for on the way.
        apart: engine calls of a ControlNet that ran alone, although the graph lets it join a stack.
        reopened: calls that found their engine closed after it had served.
        plain: engine calls whose capture as a CUDA graph failed.
        why_plain: reason of the first such failure.
    """

    kind: str
    name: str
    engine_node: str
    sampler_node: str
    backend: str | None = None
    engine_name: str | None = None
    engine: int = 0
    native: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    node_key: str = ""
    calls: bytearray = field(default_factory=bytearray)
    times: CallTimes | None = None
    opened: float = field(default_factory=time.time)
    beyond: dict[str, int] = field(default_factory=dict)
    uncovered: dict[UncoveredCall, int] = field(default_factory=dict)
    beside: int = 0
    remark: str = ""
    late: int = 0
    apart: int = 0
    reopened: int = 0
    plain: int = 0
    why_plain: str = ""
    advices: dict[str, str] = field(default_factory=dict)
    proof: tuple[float, float] | None = None

    def count_engine(self, backend: str, uncovered: UncoveredCall | None = None, beside: bool = False) -> None:
        """Count a call that an engine served, or live weights without a compiled file."""
        with _counting:
            self._count_uncovered(uncovered)
            self.backend = backend
            self.engine += 1
            self.beside += beside
            self._list(ON_ENGINE)

    def add_remark(self, sentence: str) -> None:
        """Add a sentence, without its full stop, to what the report remarks on the picture; once."""
        if sentence not in self.remark:
            self.remark = ". ".join(filter(None, (self.remark, sentence)))

    def _list(self, call: int) -> None:
        if len(self.calls) < MOST_CALLS:
            self.calls.append(call)

    def _count_uncovered(self, call: UncoveredCall | None) -> None:
        if call is None:
            return
        if call not in self.uncovered:
            _ever_uncovered.add((self.node_key, call))
        self.uncovered[call] = self.uncovered.get(call, 0) + 1

    @property
    def uncompiled(self) -> dict[UncoveredCall, int]:
        """Calls that live weights ran without a compiled file -> their number."""
        return {call: count for call, count in list(self.uncovered.items()) if call.ran != "native"}

    def count_native(self, fallback: Fallback, uncovered: UncoveredCall | None = None) -> None:
        """Count a native call; the first with its reason is logged.

        Args:
            uncovered: the call, where an engine of its own size would serve it.
        """
        reason = fallback.reason.value
        with _counting:
            self._count_uncovered(uncovered)
            for symbol, size in fallback.sizes.items():
                self.beyond[symbol] = max(size, self.beyond.get(symbol, 0))
            if reason not in self.reasons:
                if fallback.advice:
                    self.advices[reason] = fallback.advice
                sentence = fallback.sentence(self.advice(fallback.reason))
                log.warning("Hybrid TRT: %s ran at normal speed. %s", self.name, sentence)
                self.details[reason] = str(fallback)
            self.native += 1
            self._list(NATIVE)
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def count_apart(self) -> None:
        """Count a call that did not join its stack although the graph lets it; the server's first is logged."""
        self.apart += 1
        log_once(APART, self.name)

    def count_opening(self) -> None:
        """Count a call that has to open its engine again; the server's first is logged."""
        self.reopened += 1
        log_once(OPENED, self.name)

    def count_plain(self, why: str) -> None:
        """Count a call whose capture as a CUDA graph failed; the server's first is logged."""
        if not self.plain:
            self.why_plain = why
            log_once(PLAIN, self.name, why)
        self.plain += 1

    def advice(self, reason: Reason) -> str:
        """Return the advice for native calls with this reason."""
        unserved = [call.words for call in list(self.uncovered) if call.ran == "native"]
        if reason is Reason.SHAPE_OUTSIDE_PROFILE and unserved:
            return f"build again for {'; '.join(unserved)}"
        return self.advices.get(reason.value, reason.advice)

    def ms(self) -> list[float]:
        """Return the milliseconds of each call; empty if they were not timed."""
        return self.times.ms() if self.times is not None else []

    def to_json(self) -> dict:
        left_out = ("times", "opened", "beyond", "uncovered", "beside", "late", "apart", "reopened",
                    "plain", "why_plain", "advices", "proof")  # fmt: skip
        fields = {name: value for name, value in self.__dict__.items() if name not in left_out}
        uncompiled = {call.words: count for call, count in self.uncompiled.items()}
        calls = "".join("ne"[call] for call in self.calls)
        return {**fields, "uncompiled": uncompiled, "calls": calls, "ms": _ms_json(self.ms())}


def _ms_json(ms: list[float]) -> dict | None:
    if not ms:
        return None
    return {"median": round(median(ms), 3), "total": round(sum(ms), 3), "calls": [round(m, 3) for m in ms]}


_ever_uncovered: set[tuple[str, UncoveredCall]] = set()


def ever_uncovered() -> int:
    """Return the number of call sizes, per node, that ever ran without a compiled file or an engine of their size."""
    return len(_ever_uncovered)


_prompts: OrderedDict[str, dict[tuple[str, str, str], CallStats]] = OrderedDict()


def open_stats(
    kind: str, name: str, engine_node: str, node_key: str = "", device: torch.device | None = None
) -> CallStats:
    """Return the stats of a network in the caller's node execution; its calls run on ``device``."""
    context = executing()
    prompt, sampler = (context.prompt_id, context.node_id) if context else ("", "")
    rows = _prompts.setdefault(prompt, {})
    _prompts.move_to_end(prompt)
    while len(_prompts) > MAX_PROMPTS:
        _prompts.popitem(last=False)
    new = CallStats(kind, name, engine_node, sampler, node_key=node_key)
    stats = rows.setdefault((sampler, engine_node, name), new)
    if stats.times is None and device is not None and wanted(prompt):
        stats.times = CallTimes(device)
    return stats


def prompt_stats(prompt_id: str, sampler_nodes: Collection[str] | None = None) -> list[CallStats]:
    """Return the stats of a prompt, of all its sampling nodes or of some, in the order of their first calls."""
    rows = _prompts.get(prompt_id, {}).values()
    return [row for row in rows if sampler_nodes is None or row.sampler_node in sampler_nodes]


def last_run(node_key: str) -> tuple[str, list[CallStats]] | None:
    """Return the latest prompt with calls for an engine node with this key, and their stats, or None."""
    for prompt_id in reversed(list(_prompts)):
        if rows := [row for row in list(_prompts.get(prompt_id, {}).values()) if row.node_key == node_key]:
            return prompt_id, rows
    return None


def slow_sentences(rows: Sequence[CallStats]) -> list[str]:
    """Return a sentence for each slow feature of a run, with advice on reporting; empty if nothing was slow."""
    found = [APART.format(name=row.name) for row in rows if row.apart]
    found += [OPENED.format(name=row.name) for row in rows if row.reopened]
    found += [PLAIN.format(name=row.name, why=row.why_plain) for row in rows if row.plain]
    if any(row.late for row in rows):
        unets = [row for row in rows if row.kind == "unet" and row.engine and not row.native]
        found += [WAITED.format(name=row.name) for row in unets if not row.beside]
    found = [f"{what}." for what in dict.fromkeys(found)]
    return [*found, *switched_off(), *([_report()] if found else [])]


def _report() -> str:
    try:
        comfyui = f"ComfyUI {importlib.import_module('comfyui_version').__version__}"
    except (ImportError, AttributeError):
        comfyui = "your version of ComfyUI"
    return REPORT.format(versions=f"{comfyui} and Hybrid TRT {PACK_VERSION}")
