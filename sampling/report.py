"""The report: a verdict, then one short line per network, with file names but no paths; and the same as a picture.

In the picture each call is a cell: green on an engine, amber with dark lines native. The first call, which may load
models, stands apart. Where calls were timed, a cell's height is the call's time. The type is large, because the page
shows the picture at a third of its size.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont

from ..engine_library import Reason
from .call_stats import ON_ENGINE, CallStats, CallTimes, slow_sentences

NOTHING = (
    "No engine was asked for in this prompt: no TRT node lies before this one, or the sampler's result came from "
    "ComfyUI's cache."
)
SLOW_START = 3
"""A first call slower than this many usual calls is shown apart: it loaded the engine or the model."""
MAX_DETAIL = 90
_PATH = re.compile(r"(?:[A-Za-z]:[\\/]|\\\\|(?<![\w./])/)[^\s;,:()\"']*[\\/]([^\s;,:()\"'\\/]+)")
WIDTH, MARGIN = 900, 28
BACK, TEXT, QUIET, LINES = "#1e1f22", "#f2f2f2", "#bdbdbd", "#3a2600"
ENGINE_COLOUR, NATIVE_COLOUR = "#4caf6a", "#f0b13c"
TITLE, NAME, WORDS, SMALL = 46, 36, 28, 24
"""Font sizes."""
CELL, LOWEST, FIRST, APART = 64, 4, 56, 26
"""Pixels: the highest and the lowest cell, the first call's width, and the gap after it."""
ROOM = 1.25
"""The highest cell is this many usual calls of the slowest network: calls that load are cut off."""
HATCH = 8

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def as_drawn(rows: Iterable[CallStats], drawn: Callable[[str], str]) -> list[CallStats]:
    """Merge the stats of nodes that ComfyUI copied, for example for each iteration of a loop, into a node's.

    Args:
        drawn: id of a node -> id of its node in the user's graph.

    Returns:
        Stats for each network and sampling node of the user's graph, in the order of their first calls.
    """
    found: dict[tuple[str, ...], list[CallStats]] = {}
    for row in rows:
        found.setdefault((row.kind, row.name, drawn(row.engine_node), drawn(row.sampler_node)), []).append(row)
    return [_together(key, own) for key, own in found.items()]


def _together(key: tuple[str, ...], rows: Sequence[CallStats]) -> CallStats:
    first = rows[0]
    if len(rows) == 1 and (first.engine_node, first.sampler_node) == key[2:]:
        return first
    total = CallStats(*key, node_key=first.node_key, opened=first.opened)
    for row in rows:
        for name in ("engine", "native", "calls", "beside", "late", "apart", "reopened", "plain"):
            setattr(total, name, getattr(total, name) + getattr(row, name))
        for name in ("backend", "engine_name", "remark"):  # the latest
            setattr(total, name, getattr(row, name) or getattr(total, name))
        total.why_plain = total.why_plain or row.why_plain
        total.details = {**row.details, **total.details}
        total.advices = {**row.advices, **total.advices}
        for name in ("reasons", "uncovered"):
            setattr(total, name, dict(Counter(getattr(total, name)) + Counter(getattr(row, name))))
        for symbol, size in row.beyond.items():
            total.beyond[symbol] = max(size, total.beyond.get(symbol, 0))
    if all(row.times is not None for row in rows):
        total.times = CallTimes.together(row.times for row in rows)
    return total


@dataclass(frozen=True)
class Verdict:
    """A run in one line.

    Attributes:
        networks: number of networks that were called.
        on_engines: number of networks with every call on an engine.
        missing: engine nodes whose engines are missing.
        ms: time of the native calls, or of all calls if none was native, added up; 0 if they were not timed. Calls
            that run side by side make it longer than the sampling.
        native: number of native calls.
        advice: advice where no build helps, or empty.
        uncompiled: sizes of calls that engines were not compiled for, in words.
        calls: number of calls on engines and of all calls, where a network had both kinds; else empty.
        faster: native's time as a multiple of the engines', as timed when they were built; 0 if not known.
    """

    networks: int
    on_engines: int
    missing: list[str]
    ms: float
    native: int
    advice: str
    uncompiled: list[str]
    calls: str = ""
    faster: float = 0.0

    def __str__(self) -> str:
        text = f"Accelerated: {self.on_engines} of {plural(self.networks, 'model')}"
        if not self.native:
            if self.faster:
                text = f"{text}, about {self.faster:.1f}x faster than without"
            elif self.ms:
                text = f"{text}, {times(self.ms)} in all"
            return f"{text}. -> Build for {'; '.join(self.uncompiled)}" if self.uncompiled else text
        text += f", {self.calls} calls" if self.calls else ""
        took = f"about {times(self.ms)}" if self.ms else plural(self.native, "call")
        todo = f"Build {plural(len(self.missing), 'missing engine')}" if self.missing else self.advice
        return f"{text}; {took} at normal speed." + (f" -> {todo}" if todo else "")


def verdict(rows: Sequence[CallStats]) -> Verdict:
    """Sum up the calls; a network that several samplers called counts once."""
    networks: dict[tuple[str, str], list[CallStats]] = {}
    for row in rows:
        if row.calls:
            networks.setdefault((row.engine_node, row.name), []).append(row)
    native = [key for key, own in networks.items() if any(row.native for row in own)]
    advice = [row.advice(Reason(reason)) for row in rows for reason in row.reasons]
    missing = [node for node, name in native if any(Reason(r).lacks_engine for row in networks[node, name]
                                                    for r in row.reasons)]
    kinds = ("native",) if native else ("engine", "native")
    spent = sum(took for row in rows for kind in kinds for took in of_kind(row, kind))
    count, served = sum(row.native for row in rows), sum(row.engine for row in rows)
    partly = any(sum(row.engine for row in networks[key]) for key in native)
    calls = f"{served} of {served + count}" if partly else ""
    sizes = list(dict.fromkeys(call.words for row in rows for call in row.uncompiled))
    missing = list(dict.fromkeys(missing))
    faster = _faster([row for row in rows if row.calls])
    on_engines = len(networks) - len(native)
    return Verdict(len(networks), on_engines, missing, spent, count, next(iter(advice), ""), sizes, calls, faster)


def _faster(rows: Sequence[CallStats]) -> float:
    """Return native's time as a multiple of the engines', where both were timed for all models; else 0."""
    if not rows or not all(row.proof for row in rows):
        return 0.0
    return sum(row.engine * row.proof[1] for row in rows) / max(1e-9, sum(row.engine * row.proof[0] for row in rows))


def report_text(rows: Sequence[CallStats], frames: Sequence[str] = ()) -> str:
    """Return the stats as a short text, the verdict first and the sentences on streams' frame times last."""
    if not rows:
        return "\n".join([NOTHING, *frames])
    remarks = dict.fromkeys(f"{row.remark}." for row in rows if row.remark and row.engine)
    slow = slow_sentences(rows)
    return "\n".join([str(verdict(rows)), *(line(row) for row in rows), *_slowest(rows), *remarks, *slow, *frames])


def line(row: CallStats) -> str:
    """Describe a network in one line."""
    return f"{short_name(row.name)}: {served(row)}"


def served(row: CallStats) -> str:
    """Return in words who served a network's calls, their times, and why some ran native."""
    if not row.calls:
        return "did not run"
    parts = []
    if row.engine:
        parts.append(f"{row.engine} on {row.backend}{_each(row, 'engine')}{_beside(row)}{_uncompiled(row)}")
    if row.native:
        parts.append(f"{row.native} at normal speed{_each(row, 'native')} ({'; '.join(_reasons(row))})")
    ms = row.ms()
    first = f", first {times(ms[0])}" if ms and slow_start(ms) else ""
    return ", ".join(parts) + first


def slow_start(ms: Sequence[float]) -> bool:
    """Tell whether the first call loaded something."""
    return len(ms) > 1 and ms[0] > SLOW_START * median(ms)


def of_kind(row: CallStats, kind: str) -> list[float]:
    """Return the milliseconds of a network's calls of a kind, ``engine`` or ``native``."""
    ms = row.ms()
    if len(ms) != len(row.calls):
        return ms if not (row.engine and row.native) and getattr(row, kind) else []
    return [took for call, took in zip(row.calls, ms, strict=True) if (call == ON_ENGINE) == (kind == "engine")]


def times(ms: float) -> str:
    """Return milliseconds in words."""
    if ms >= 9950:
        return f"{ms / 1000:.0f} s"
    if ms >= 995:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms"


def plural(count: int, word: str) -> str:
    """Return a number with its noun: "1 call", "2 calls"."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def short_name(name: str) -> str:
    """Return a model's file name without folders and ending."""
    return re.sub(r"\.(safetensors|ckpt|pth?|bin|gguf)$", "", re.split(r"[\\/]", name)[-1])


def without_paths(text: str) -> str:
    """Replace the paths in a text by file names."""
    return _PATH.sub(r"\1", text)


def _each(row: CallStats, kind: str) -> str:
    ms = of_kind(row, kind)
    return f", {times(median(ms))} each" if ms else ""


def _beside(row: CallStats) -> str:
    """Return words for times that include waiting for the ControlNets."""
    return " beside its ControlNets" if row.beside and of_kind(row, "engine") else ""


def _uncompiled(row: CallStats) -> str:
    """Return words for calls without a compiled file."""
    if not row.uncompiled:
        return ""
    several = len(row.uncompiled) > 1 or sum(row.uncompiled.values()) < row.engine
    calls = [f"{count} x {call.words}" if several else call.words for call, count in row.uncompiled.items()]
    return f" (not compiled for {'; '.join(calls)}: ran uncompiled)"


def _reasons(row: CallStats) -> list[str]:
    found = []
    for reason, count in row.reasons.items():
        words = reason if reason == Reason.NO_ENGINE.value else without_paths(row.details[reason])
        words = words if len(words) <= MAX_DETAIL else f"{words[: MAX_DETAIL - 3]}..."
        found.append(words if len(row.reasons) == 1 else f"{count} x {words}")
    return found


def _slowest(rows: Sequence[CallStats]) -> list[str]:
    """Return a line with the slowest of several networks, by usual times, so that loading does not count.

    It is left out where a UNet runs beside its ControlNets: its time is then the whole step's.
    """
    if any(row.beside for row in rows):
        return []
    usual: dict[str, float] = {}
    for row in rows:  # a network has a row for each sampler
        if ms := row.ms():
            usual[row.name] = usual.get(row.name, 0.0) + median(ms) * len(ms)
    if len(usual) < 2:
        return []
    name = max(usual, key=usual.get)
    return [f"Slowest part: {short_name(name)} ({100 * usual[name] / sum(usual.values()):.0f} %)"]


def plot(rows: Sequence[CallStats]) -> torch.Tensor:
    """Draw the calls in order: an IMAGE, float32 (1, height, width, 3)."""
    heading = _wrapped(str(verdict(rows)) if rows else NOTHING, TITLE)
    words = [_wrapped(served(row), WORDS)[:3] for row in rows]
    height = MARGIN + _height(heading, TITLE) + (SMALL + 26 if rows else 0) + MARGIN
    height += sum(_height([""], NAME) + _height(lines, WORDS) + CELL + 44 for lines in words)
    image = Image.new("RGB", (WIDTH, height), BACK)
    draw = ImageDraw.Draw(image)
    top = _write(draw, heading, MARGIN, TITLE, TEXT)
    full = ROOM * max((median(row.ms()) for row in rows if row.ms()), default=0.0)
    if rows:
        top = _legend(draw, rows, top + 6, full)
    for row, lines in zip(rows, words, strict=True):
        top = _row(draw, row, lines, top, full)
    return torch.from_numpy(numpy.asarray(image, dtype=numpy.float32) / 255).unsqueeze(0)


def cells(count: int) -> list[tuple[float, float]]:
    """Return left and right of each call's cell: the first apart, the later calls in the rest of the width."""
    if count == 0:
        return []
    start = MARGIN + FIRST + APART
    step = (WIDTH - MARGIN - start) / max(count - 1, 1)
    gap = 2 if step >= 6 else 0
    return [(MARGIN, MARGIN + FIRST), *((start + i * step, start + (i + 1) * step - gap) for i in range(count - 1))]


def _row(draw: ImageDraw.ImageDraw, row: CallStats, lines: list[str], top: int, full: float) -> int:
    """Draw a network; return the top of the next network."""
    top = _write(draw, [_fitted(short_name(row.name), row)], top, NAME, TEXT)
    ms = row.ms()
    if ms:
        total = times(sum(ms))
        draw.text((WIDTH - MARGIN - _font(NAME).getlength(total), top - NAME - 10), total, TEXT, _font(NAME))
    bottom = _write(draw, lines, top, WORDS, QUIET) + 8 + CELL
    timed = len(ms) == len(row.calls) and full > 0
    for (left, right), call, i in zip(cells(len(row.calls)), bytes(row.calls), range(len(row.calls)), strict=True):
        height = max(LOWEST, round(CELL * min(1.0, ms[i] / full))) if timed else CELL
        _cell(draw, (left, bottom - height, max(left, right - 1), bottom), call == ON_ENGINE)
    return bottom + 36


def _cell(draw: ImageDraw.ImageDraw, box: tuple[float, float, float, float], engine: bool) -> None:
    draw.rectangle(box, ENGINE_COLOUR if engine else NATIVE_COLOUR)
    if not engine:
        left, top, right, bottom = box
        for y in range(int(bottom) - HATCH, int(top), -HATCH):
            draw.line((left, y, right, y), LINES)


def _legend(draw: ImageDraw.ImageDraw, rows: Sequence[CallStats], top: int, full: float) -> int:
    font, x = _font(SMALL), MARGIN
    kinds = [(True, "engine")] if any(row.engine for row in rows) else []
    kinds += [(False, "normal speed")] if any(row.native for row in rows) else []
    for engine, text in kinds:
        _cell(draw, (x, top, x + 28, top + 24), engine)
        draw.text((x + 38, top - 2), text, QUIET, font)
        x += 62 + int(font.getlength(text))
    scale = f"; full height: {times(full)}" if full else ""
    draw.text((x, top - 2), f"calls in turn, the first apart{scale}", QUIET, font)
    return top + SMALL + 26


def _fitted(name: str, row: CallStats) -> str:
    """Cut a name to the width that the total time leaves."""
    room = WIDTH - 2 * MARGIN - (190 if row.ms() else 0)
    if _font(NAME).getlength(name) <= room:
        return name
    while name and _font(NAME).getlength(name + "...") > room:
        name = name[:-1]
    return name + "..."


def _wrapped(text: str, size: int) -> list[str]:
    """Break a text into lines that fit the picture."""
    font, lines = _font(size), [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= WIDTH - 2 * MARGIN or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _write(draw: ImageDraw.ImageDraw, lines: list[str], top: int, size: int, colour: str) -> int:
    for number, text in enumerate(lines):
        draw.text((MARGIN, top + number * (size + 10)), text, colour, _font(size))
    return top + _height(lines, size)


def _height(lines: list[str], size: int) -> int:
    return len(lines) * (size + 10)


@functools.cache
def _font(size: int) -> Font:
    """Return Pillow's own font, which it would unpack again for each word."""
    return ImageFont.load_default(size)
