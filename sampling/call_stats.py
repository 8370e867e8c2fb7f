"""What ran: per prompt, sampling node and network, how many calls ran on the engine and how many native, and why."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from ..comfy_model.comfyui_internals import switched_off
from ..engine_library import Fallback, Reason
from ..engine_library.manifest import PACK_VERSION
from ..sessions.session import UncoveredCall
from .run_context import executing

log = logging.getLogger(__name__)

NATIVE, ON_ENGINE = 0, 1

_counting = threading.Lock()
"""ComfyUI calls a network from several threads when it shares a step among GPUs."""

MAX_PROMPTS = 64
"""Prompts remembered; the oldest is forgotten first."""


APART = "{name} did not run side by side with other ControlNets: this ComfyUI handles them in a way that is not known"
OPENED = "The engine of {name} was opened more than once in a run: ComfyUI closed it in between"
PLAIN = "Calls of {name} could not be recorded as a CUDA graph and run kernel by kernel ({why})"
WAITED = "{name} waited for its ControlNets in each step: their results were read before it started"
REPORT = "The picture is right, only slower. If it stays so, please report it with {versions}."

_told: set[str] = set()
"""What the log of this server has said."""


def _nobody(prompt_id: str) -> bool:
    return False


wanted: Callable[[str], bool] = _nobody
"""Whether the calls of a prompt, by its id, are to be timed. Asked once per network and sampling run."""


def want_times(ask: Callable[[str], bool]) -> None:
    """Let ``ask`` decide whose calls are timed."""
    global wanted
    wanted = ask


class CallTimes:
    """The times of one network's calls on one device, in the order in which the calls ended well."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._spans: list[tuple] = []

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Times what is done inside; a call that raises is not counted."""
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def ms(self) -> list[float]:
        """Milliseconds of each call. On CUDA this waits for the last of them to end."""
        return [self._between(*span) for span in self._spans]

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
        if not self._cuda:
            return 1000 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)


class TimesTogether:
    """The times of several, one after another."""

    def __init__(self, parts: Sequence[CallTimes]):
        self._parts = parts

    def ms(self) -> list[float]:
        """Milliseconds of each call."""
        return [ms for part in self._parts for ms in part.ms()]


def timed(times: CallTimes | None) -> contextlib.AbstractContextManager[None]:
    """Times what is done inside, if there is something to put the time into."""
    return _NOTHING if times is None else times.call()


@contextlib.contextmanager
def named_range(name: str) -> Iterator[None]:
    """Names what is done inside for NVIDIA's profilers; for CUDA devices only."""
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def log_once(what: str, name: str, why: str = "") -> None:
    """Say what is slow in the log, unless this server has said it before."""
    if what not in _told:
        _told.add(what)
        log.warning("Hybrid TRT: %s. %s", what.format(name=name, why=why), _report())


@dataclass
class CallStats:
    """The calls of one network during one execution of one sampling node.

    Attributes:
        kind: ``"unet"`` or ``"controlnet"``.
        name: the model's name as the user knows it.
        engine_node: id of the engine node in the graph.
        sampler_node: id of the node that sampled.
        backend: name of the backend that served, or None while none did.
        engine_name: the engine's folder in the library, or None while none served.
        engine, native: calls so far.
        calls: the same in their order, a byte each: ON_ENGINE or NATIVE.
        reasons: fallback reason -> how many native calls had it.
        details: fallback reason -> the particulars of its first call.
        advices: fallback reason -> what to do, where its first call knew better than the reason.
        node_key: what the engine node stands for, see ``nodes.node_key``; ids say that within one prompt only.
        times: how long the calls took, in the order of ``calls``, or None when nobody wants to know.
        uncompiled: engine calls that ran without a compiled file -> how many they were.
        unserved: native calls that an engine of their own size would serve -> how many they were.
        beyond: symbol -> the largest size of calls that the engine was not built for.
        opened: when the first call was counted, as ``time.time``.
        beside: engine calls that started beside ControlNets and waited for them on the way.
        remark: what the user should know of the engine's picture beside native's; mostly empty.
        late: engine calls of a ControlNet whose result a UNet's engine may wait for on the way.
        apart: engine calls of a ControlNet that ComfyUI ran by themselves, for no reason of the graph's.
        reopened: calls that found their engine closed after it had served.
        plain: engine calls that could not be recorded as a CUDA graph, although such calls are.
        why_plain: why the first of them could not.
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
    times: CallTimes | TimesTogether | None = None
    opened: float = field(default_factory=time.time)
    beyond: dict[str, int] = field(default_factory=dict)
    uncompiled: dict[UncoveredCall, int] = field(default_factory=dict)
    unserved: dict[UncoveredCall, int] = field(default_factory=dict)
    beside: int = 0
    remark: str = ""
    late: int = 0
    apart: int = 0
    reopened: int = 0
    plain: int = 0
    why_plain: str = ""
    advices: dict[str, str] = field(default_factory=dict)

    def count_engine(self, backend: str, uncompiled: UncoveredCall | None = None, beside: bool = False) -> None:
        """Count a call that an engine served, or live weights without a compiled file."""
        with _counting:
            if uncompiled is not None:
                self._count_lacking(self.uncompiled, uncompiled)
            self.backend = backend
            self.engine += 1
            self.beside += beside
            self.calls.append(ON_ENGINE)

    def _count_lacking(self, counts: dict[UncoveredCall, int], call: UncoveredCall) -> None:
        if call not in counts:
            _ever_uncompiled.add((self.node_key, call))
        counts[call] = counts.get(call, 0) + 1

    def count_native(self, fallback: Fallback, unserved: UncoveredCall | None = None) -> None:
        """Count a native call; the first one with its reason is logged.

        Args:
            unserved: the call, where an engine of its own size would serve it.
        """
        reason = fallback.reason.value
        with _counting:
            if unserved is not None:
                self._count_lacking(self.unserved, unserved)
            for symbol, size in fallback.sizes.items():
                self.beyond[symbol] = max(size, self.beyond.get(symbol, 0))
            if reason not in self.reasons:
                if fallback.advice:
                    self.advices[reason] = fallback.advice
                log.warning("Hybrid TRT: %s ran native. %s", self.name, fallback.sentence(self.advice(fallback.reason)))
                self.details[reason] = str(fallback)
            self.native += 1
            self.calls.append(NATIVE)
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def count_apart(self) -> None:
        """Count a call that did not join its stack although the graph lets it; the server's first one is logged."""
        self.apart += 1
        log_once(APART, self.name)

    def count_opening(self) -> None:
        """A call has to open its engine: count it unless it is a run's first; the server's first such is logged."""
        if self.engine:
            self.reopened += 1
            log_once(OPENED, self.name)

    def count_plain(self, why: str) -> None:
        """Count a call whose recording as a CUDA graph failed; the server's first one is logged."""
        if not self.plain:
            self.why_plain = why
            log_once(PLAIN, self.name, why)
        self.plain += 1

    def advice(self, reason: Reason) -> str:
        """What to do about the native calls that had a reason."""
        if reason is Reason.SHAPE_OUTSIDE_PROFILE and self.unserved:
            return f"build again for {'; '.join(call.words for call in list(self.unserved))}"
        return self.advices.get(reason.value, reason.advice)

    def ms(self) -> list[float]:
        """Milliseconds of each call; empty when they were not timed."""
        return self.times.ms() if self.times is not None else []

    def to_json(self) -> dict:
        left_out = ("times", "opened", "beyond", "uncompiled", "unserved", "beside", "late", "apart", "reopened",
                    "plain", "why_plain", "advices")  # fmt: skip
        fields = {name: value for name, value in self.__dict__.items() if name not in left_out}
        uncompiled = {call.words: count for call, count in self.uncompiled.items()}
        calls = "".join("ne"[call] for call in self.calls)
        return {**fields, "uncompiled": uncompiled, "calls": calls, "ms": _ms_json(self.ms())}


def _ms_json(ms: list[float]) -> dict | None:
    if not ms:
        return None
    return {"median": round(median(ms), 3), "total": round(sum(ms), 3), "calls": [round(m, 3) for m in ms]}


_ever_uncompiled: set[tuple[str, UncoveredCall]] = set()


def ever_uncompiled() -> int:
    """How many sizes of calls, counted for each node, ever ran without a compiled file or an engine of their size."""
    return len(_ever_uncompiled)


_prompts: OrderedDict[str, dict[tuple[str, str, str], CallStats]] = OrderedDict()


def open_stats(
    kind: str, name: str, engine_node: str, node_key: str = "", device: torch.device | None = None
) -> CallStats:
    """The stats for a network in the node execution that the caller runs in; ``device`` is where its calls run."""
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


def tallies(prompt_id: str, sampler_nodes: Collection[str] | None = None) -> list[CallStats]:
    """The tallies of a prompt, of all its sampling nodes or of some, in the order in which they were opened."""
    rows = _prompts.get(prompt_id, {}).values()
    return [row for row in rows if sampler_nodes is None or row.sampler_node in sampler_nodes]


def last_run(node_key: str) -> tuple[str, list[CallStats]] | None:
    """The latest prompt in which a network was called for an engine node with this key, and its tallies there."""
    for prompt_id in reversed(list(_prompts)):
        if rows := [row for row in list(_prompts.get(prompt_id, {}).values()) if row.node_key == node_key]:
            return prompt_id, rows
    return None


def slow_sentences(rows: Sequence[CallStats]) -> list[str]:
    """What was slow in a run, a line each, with what to report; empty where all was as fast as it should be."""
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
