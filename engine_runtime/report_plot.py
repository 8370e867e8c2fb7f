"""The report as a picture: a row for each network, a cell for each call, green on an engine and amber native.

Where calls were timed, a cell is as high as its call was long.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont

from .ledger import ON_ENGINE, Tally

WIDTH, ROW, MARGIN, LABELS = 900, 46, 20, 290
BACK, TEXT, QUIET = "#1e1f22", "#e6e6e6", "#9a9a9a"
ENGINE_COLOUR, NATIVE_COLOUR = "#4caf6a", "#f0b13c"
MAX_LABEL = 34
CELL, LOWEST = 28, 3
"""Pixels of the highest and the lowest cell."""
ROOM = 1.25
"""The highest cell stands for this times the slowest network's usual call: the first calls, which load, are cut off."""


def plot(rows: Sequence[Tally]) -> torch.Tensor:
    """An IMAGE (1, height, width, 3) of the calls, in the order in which they were made."""
    height = 2 * MARGIN + ROW * (len(rows) + 1)
    image = Image.new("RGB", (WIDTH, height), BACK)
    draw = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(16), ImageFont.load_default(13)
    times = [row.ms() for row in rows]
    full = ROOM * max((median(ms) for ms in times if ms), default=0.0)
    _legend(draw, small, bool(rows), full)
    for number, (row, ms) in enumerate(zip(rows, times, strict=True)):
        top = MARGIN + ROW * (number + 1)
        _label(draw, row, ms, top, font, small)
        _cells(draw, row, ms, full, top)
    return torch.from_numpy(numpy.asarray(image, dtype=numpy.float32) / 255).unsqueeze(0)


def _legend(draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont, used: bool, full: float) -> None:
    if not used:
        draw.text((MARGIN, MARGIN), "No engine was asked for in this prompt.", TEXT, font)
        return
    x = LABELS
    for colour, text in ((ENGINE_COLOUR, "on an engine"), (NATIVE_COLOUR, "native")):
        draw.rectangle((x, MARGIN + 2, x + 12, MARGIN + 14), colour)
        draw.text((x + 18, MARGIN), text, TEXT, font)
        x += 130
    if full:
        draw.text((x, MARGIN), f"full height: {full:.3g} ms or more", QUIET, font)
    draw.text((MARGIN, MARGIN), "calls, first to last", QUIET, font)


def _label(
    draw: ImageDraw.ImageDraw,
    row: Tally,
    ms: list[float],
    top: int,
    font: ImageFont.ImageFont,
    small: ImageFont.ImageFont,
) -> None:
    name = row.name if len(row.name) <= MAX_LABEL else f"{row.name[: MAX_LABEL - 1]}…"
    draw.text((MARGIN, top), name, TEXT, font)
    served = f"{row.engine} on {row.backend}" if row.engine else "0 on an engine"
    took = f", {median(ms):.3g} ms each" if ms else ""
    draw.text((MARGIN, top + 20), f"{served}, {row.native} native{took}", QUIET, small)


def _cells(draw: ImageDraw.ImageDraw, row: Tally, ms: list[float], full: float, top: int) -> None:
    """The calls; all of one height when they were not timed."""
    calls = bytes(row.calls)
    if len(ms) != len(calls):
        ms, full = [1.0] * len(calls), 1.0
    step = (WIDTH - LABELS - MARGIN) / max(len(calls), 1)
    gap = 1 if step >= 4 else 0
    bottom = top + 4 + CELL
    for i, (call, took) in enumerate(zip(calls, ms, strict=True)):
        left, right = LABELS + i * step, LABELS + (i + 1) * step - gap
        colour = ENGINE_COLOUR if call == ON_ENGINE else NATIVE_COLOUR
        height = max(LOWEST, round(CELL * min(1.0, took / full))) if full else CELL
        draw.rectangle((left, bottom - height, max(left, right - 1), bottom), colour)
