"""The report as a picture: a row for each network, a cell for each call, green on an engine and amber native."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont

from .ledger import ON_ENGINE, Tally

WIDTH, ROW, MARGIN, LABELS = 900, 46, 20, 290
BACK, TEXT, QUIET = "#1e1f22", "#e6e6e6", "#9a9a9a"
ENGINE_COLOUR, NATIVE_COLOUR = "#4caf6a", "#f0b13c"
MAX_LABEL = 34


def plot(rows: Sequence[Tally]) -> torch.Tensor:
    """An IMAGE (1, height, width, 3) of the calls, in the order in which they were made."""
    height = 2 * MARGIN + ROW * (len(rows) + 1)
    image = Image.new("RGB", (WIDTH, height), BACK)
    draw = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(16), ImageFont.load_default(13)
    _legend(draw, small, bool(rows))
    for number, row in enumerate(rows):
        _row(draw, row, MARGIN + ROW * (number + 1), font, small)
    return torch.from_numpy(numpy.asarray(image, dtype=numpy.float32) / 255).unsqueeze(0)


def _legend(draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont, used: bool) -> None:
    if not used:
        draw.text((MARGIN, MARGIN), "No engine was asked for in this prompt.", TEXT, font)
        return
    x = LABELS
    for colour, text in ((ENGINE_COLOUR, "on an engine"), (NATIVE_COLOUR, "native")):
        draw.rectangle((x, MARGIN + 2, x + 12, MARGIN + 14), colour)
        draw.text((x + 18, MARGIN), text, TEXT, font)
        x += 130
    draw.text((MARGIN, MARGIN), "calls, first to last", QUIET, font)


def _row(
    draw: ImageDraw.ImageDraw, row: Tally, top: int, font: ImageFont.ImageFont, small: ImageFont.ImageFont
) -> None:
    name = row.name if len(row.name) <= MAX_LABEL else f"{row.name[: MAX_LABEL - 1]}…"
    draw.text((MARGIN, top), name, TEXT, font)
    served = f"{row.engine} on {row.backend}" if row.engine else "0 on an engine"
    draw.text((MARGIN, top + 20), f"{served}, {row.native} native", QUIET, small)
    calls = bytes(row.calls)
    step = (WIDTH - LABELS - MARGIN) / max(len(calls), 1)
    gap = 1 if step >= 4 else 0
    for i, call in enumerate(calls):
        left, right = LABELS + i * step, LABELS + (i + 1) * step - gap
        colour = ENGINE_COLOUR if call == ON_ENGINE else NATIVE_COLOUR
        draw.rectangle((left, top + 4, max(left, right - 1), top + 32), colour)
