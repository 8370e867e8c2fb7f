"""What a run's counts read like: a verdict, then one short line per network. Names of files, never paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ..engine_library import Reason
from . import fast_path
from .call_stats import ON_ENGINE, CallStats, TimesTogether


def as_drawn(rows: Iterable[CallStats], drawn: Callable[[str], str]) -> list[CallStats]:
    """One stats for each network and each sampling node of the user's graph, in the order in which they were opened.

    Args:
        drawn: id of a node -> id of the node in the user's graph that it stands for.
    """
    found: dict[tuple[str, ...], list[CallStats]] = {}
    for row in rows:
        found.setdefault((row.kind, row.name, drawn(row.engine_node), drawn(row.sampler_node)), []).append(row)
    return [_together(key, own) for key, own in found.items()]


def _together(key: tuple[str, ...], rows: Sequence[CallStats]) -> CallStats:
    if len(rows) == 1 and (rows[0].engine_node, rows[0].sampler_node) == key[2:]:
        return rows[0]
    total = CallStats(*key, node_key=rows[0].node_key, opened=rows[0].opened)
    for row in rows:
        total.backend = row.backend or total.backend
        total.engine_name = row.engine_name or total.engine_name
        total.remark = row.remark or total.remark
        total.engine += row.engine
        total.native += row.native
        total.beside += row.beside
        total.late += row.late
        total.apart += row.apart
        total.reopened += row.reopened
        total.plain += row.plain
        total.why_plain = total.why_plain or row.why_plain
        total.calls += row.calls
        total.details = {**row.details, **total.details}
        total.advices = {**row.advices, **total.advices}
        for counts, more in ((total.reasons, row.reasons), (total.uncovered, row.uncovered)):  # fmt: skip
            for what, count in more.items():
                counts[what] = counts.get(what, 0) + count
        for symbol, size in row.beyond.items():
            total.beyond[symbol] = max(size, total.beyond.get(symbol, 0))
    if all(row.times is not None for row in rows):
        total.times = TimesTogether([row.times for row in rows])
    return total


NOTHING = (
    "No engine was asked for in this prompt: no TRT node lies before this one, or the sampler's result came from "
    "ComfyUI's cache."
)
BUILDABLE = (Reason.NO_ENGINE, Reason.STALE_ENGINE, Reason.BROKEN_ENGINE, Reason.WRONG_GPU)
"""Reasons that a build takes away, with the settings as they are."""
SLOW_START = 3
"""A first call that took more than this times the usual one is told apart: it loaded the engine or the model."""
MAX_DETAIL = 90
_PATH = re.compile(r"(?:[A-Za-z]:[\\/]|\\\\|(?<![\w./])/)[^\s;,:()\"']*[\\/]([^\s;,:()\"'\\/]+)")


@dataclass(frozen=True)
class Verdict:
    """A run in one line.

    Attributes:
        networks: how many were called.
        on_engines: how many of them had every call on an engine.
        missing: the engine nodes whose engines a build would bring.
        ms: what their calls took, added up, so more than was waited for where some ran side by side; of the native ones
            alone where there are some. 0 when they were not timed.
        native: how many calls ran native.
        advice: what to do where no build helps; empty when there is nothing to do.
        uncompiled: what engines were called with and not compiled for, in words.
    """

    networks: int
    on_engines: int
    missing: list[str]
    ms: float
    native: int
    advice: str
    uncompiled: list[str]

    def __str__(self) -> str:
        told = f"{self.on_engines} of {plural(self.networks, 'network')} on engines"
        if not self.native:
            told = f"{told}: {times(self.ms)}, calls added up" if self.ms else told
            return f"{told}. -> Build for {'; '.join(self.uncompiled)}" if self.uncompiled else told
        took = f"about {times(self.ms)} native" if self.ms else f"{plural(self.native, 'call')} native"
        todo = f"Build {plural(len(self.missing), 'missing engine')}" if self.missing else self.advice
        return f"{told}: {took}." + (f" -> {todo}" if todo else "")


def verdict(rows: Sequence[CallStats]) -> Verdict:
    """Sum up what was called; a network that several samplers called counts once."""
    networks: dict[tuple[str, str], list[CallStats]] = {}
    for row in rows:
        if row.calls:
            networks.setdefault((row.engine_node, row.name), []).append(row)
    native = [key for key, own in networks.items() if any(row.native for row in own)]
    advice = [row.advice(Reason(reason)) for row in rows for reason in row.reasons]
    missing = [node for node, name in native if any(Reason(r) in BUILDABLE for row in networks[node, name]
                                                    for r in row.reasons)]
    kinds = ("native",) if native else ("engine", "native")
    spent = sum(took for row in rows for kind in kinds for took in of_kind(row, kind))
    count = sum(row.native for row in rows)
    sizes = list(dict.fromkeys(call.words for row in rows for call in row.uncompiled))
    missing = list(dict.fromkeys(missing))
    return Verdict(len(networks), len(networks) - len(native), missing, spent, count, next(iter(advice), ""), sizes)


def report_text(rows: Sequence[CallStats]) -> str:
    """The counts as a short text for people: the verdict first."""
    if not rows:
        return NOTHING
    remarks = dict.fromkeys(f"{row.remark}." for row in rows if row.remark and row.engine)
    slow = fast_path.sentences(rows)
    return "\n".join([str(verdict(rows)), *(line(row) for row in rows), *_bound(rows), *remarks, *slow])


def line(row: CallStats) -> str:
    """A network in one line."""
    return f"{short_name(row.name)}: {served(row)}"


def served(row: CallStats) -> str:
    """Who served a network's calls, how long they took, and why some ran native."""
    if not row.calls:
        return "not called"
    parts = []
    if row.engine:
        parts.append(f"{row.engine} on {row.backend}{_each(row, 'engine')}{_beside(row)}{_uncompiled(row)}")
    if row.native:
        parts.append(f"{row.native} native{_each(row, 'native')} ({'; '.join(_reasons(row))})")
    ms = row.ms()
    first = f", first {times(ms[0])}" if ms and slow_start(ms) else ""
    return ", ".join(parts) + first


def slow_start(ms: Sequence[float]) -> bool:
    """Whether the first call loaded something."""
    return len(ms) > 1 and ms[0] > SLOW_START * median(ms)


def of_kind(row: CallStats, kind: str) -> list[float]:
    """The milliseconds of a network's calls on its engine, or of its native ones."""
    ms = row.ms()
    if len(ms) != len(row.calls):
        return ms if not (row.engine and row.native) and getattr(row, kind) else []
    return [took for call, took in zip(row.calls, ms, strict=True) if (call == ON_ENGINE) == (kind == "engine")]


def times(ms: float) -> str:
    """Milliseconds as people say them."""
    if ms >= 9950:
        return f"{ms / 1000:.0f} s"
    if ms >= 995:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms"


def plural(count: int, word: str) -> str:
    """A number with its word: "1 call", "2 calls"."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def short_name(name: str) -> str:
    """A model's file name without folders and ending."""
    return re.sub(r"\.(safetensors|ckpt|pth?|bin|gguf)$", "", re.split(r"[\\/]", name)[-1])


def without_paths(text: str) -> str:
    """A text in which paths are names of files."""
    return _PATH.sub(r"\1", text)


def _each(row: CallStats, kind: str) -> str:
    ms = of_kind(row, kind)
    return f", {times(median(ms))} each" if ms else ""


def _beside(row: CallStats) -> str:
    """Whose time has in it what a call waited for ControlNets."""
    return " beside its ControlNets" if row.beside and of_kind(row, "engine") else ""


def _uncompiled(row: CallStats) -> str:
    """Which calls no compiled file was for, and how they ran."""
    if not row.uncompiled:
        return ""
    several = len(row.uncompiled) > 1 or sum(row.uncompiled.values()) < row.engine
    told = [f"{count} x {call.words}" if several else call.words for call, count in row.uncompiled.items()]
    how = "as a CUDA graph" if next(iter(row.uncompiled)).ran == "graph" else "eagerly"
    return f" (not compiled for {'; '.join(told)}: ran {how})"


def _reasons(row: CallStats) -> list[str]:
    found = []
    for reason, count in row.reasons.items():
        words = reason if reason == Reason.NO_ENGINE.value else without_paths(row.details[reason])
        words = words if len(words) <= MAX_DETAIL else f"{words[: MAX_DETAIL - 3]}..."
        found.append(words if len(row.reasons) == 1 else f"{count} x {words}")
    return found


def _bound(rows: Sequence[CallStats]) -> list[str]:
    """Which of several networks the sampling waits for most, as a line; usual times, so loading does not count.

    Where a UNet runs beside its ControlNets its time is the whole step's, and says nothing of the kind.
    """
    if any(row.beside for row in rows):
        return []
    usual: dict[str, float] = {}
    for row in rows:  # of a network one for each sampler
        if ms := row.ms():
            usual[row.name] = usual.get(row.name, 0.0) + median(ms) * len(ms)
    if len(usual) < 2:
        return []
    name = max(usual, key=usual.get)
    return [f"{short_name(name)} bounds the step: {usual[name] / sum(usual.values()):.0%} of the networks' time"]
