"""The report as a picture: the verdict, then for each network its words and a cell for each call.

Green cells ran on an engine; amber ones with dark lines across them native. The first call, which may load, stands
apart. Where calls were timed, a cell is as high as its call was long. The type is large: the page shows the picture
at a third of its size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from statistics import median

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont

from .call_stats import ON_ENGINE, CallStats
from .report import NOTHING, served, short_name, times, verdict

WIDTH, MARGIN = 900, 28
BACK, TEXT, QUIET, LINES = "#1e1f22", "#f2f2f2", "#bdbdbd", "#3a2600"
ENGINE_COLOUR, NATIVE_COLOUR = "#4caf6a", "#f0b13c"
TITLE, NAME, WORDS, SMALL = 46, 36, 28, 24
"""Sizes of the type."""
CELL, LOWEST, FIRST, APART = 64, 4, 56, 26
"""Pixels: the highest and the lowest cell, the width of the first call's and what parts it from the others."""
ROOM = 1.25
"""The highest cell stands for this times the slowest network's usual call: calls that load are cut off."""
HATCH = 8

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def plot(rows: Sequence[CallStats]) -> torch.Tensor:
    """An IMAGE (1, height, width, 3) of the calls, in the order in which they were made."""
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
    """Left and right of each call's cell: the first apart, the others in what is left of the width."""
    if count == 0:
        return []
    start = MARGIN + FIRST + APART
    step = (WIDTH - MARGIN - start) / max(count - 1, 1)
    gap = 2 if step >= 6 else 0
    return [(MARGIN, MARGIN + FIRST), *((start + i * step, start + (i + 1) * step - gap) for i in range(count - 1))]


def _row(draw: ImageDraw.ImageDraw, row: CallStats, lines: list[str], top: int, full: float) -> int:
    """A network; where the next one begins."""
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
    kinds += [(False, "native")] if any(row.native for row in rows) else []
    for engine, text in kinds:
        _cell(draw, (x, top, x + 28, top + 24), engine)
        draw.text((x + 38, top - 2), text, QUIET, font)
        x += 62 + int(font.getlength(text))
    scale = f"; full height: {times(full)}" if full else ""
    draw.text((x, top - 2), f"calls in turn, the first apart{scale}", QUIET, font)
    return top + SMALL + 26


def _fitted(name: str, row: CallStats) -> str:
    """A name cut to the room that the total time leaves."""
    room = WIDTH - 2 * MARGIN - (190 if row.ms() else 0)
    if _font(NAME).getlength(name) <= room:
        return name
    while name and _font(NAME).getlength(name + "...") > room:
        name = name[:-1]
    return name + "..."


def _wrapped(text: str, size: int) -> list[str]:
    """A text in lines that fit the picture."""
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
    """Pillow's own font, which it would unpack anew for each word."""
    return ImageFont.load_default(size)
