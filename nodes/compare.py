"""TRT Compare: the difference of two pictures, in numbers and as a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from comfy_api.latest import io, ui

from . import schemas

FACTORS = (1000, 500, 200, 100, 50, 20, 10, 5, 2, 1)
"""Factors of brightness for showing a difference; the first that clips no pixel is taken."""
HARDLY_SEEN, SEEN = 40.0, 30.0
"""PSNR in dB above which a difference is customarily called invisible, and below which the pictures differ clearly."""
PLAIN = 0.1
"""Difference of a pixel that can be seen, however few pixels have it."""
SMALLEST = 11
"""Least width and height for SSIM: the size of its window."""
INSTALL = "it needs torchmetrics (pip install torchmetrics, with the Python that runs ComfyUI)"


@dataclass(frozen=True)
class Comparison:
    """Difference between two batches of pictures; for several pictures it has the worst picture's figures.

    Attributes:
        psnr: in dB; infinite where all values are the same, 0 where a value is no number.
        ssim: 1 for the same picture, 0 where a value is no number; or why it was not computed.
        largest: largest difference of two values, 0 to 1.
        broken: number of values in each batch that are NaN or infinite.
        shown: the factor of the difference in ``picture``.
        picture: the absolute difference, 0 to 1; white where a value is no number.
    """

    psnr: float
    ssim: float | str
    largest: float
    broken: tuple[int, int]
    shown: int
    picture: torch.Tensor

    @property
    def tone(self) -> str:
        """Return the colour of the result on the node."""
        return "bad" if any(self.broken) else "good" if self.is_hardly_seen else "warn"

    @property
    def is_hardly_seen(self) -> bool:
        return self.psnr >= HARDLY_SEEN and self.largest < PLAIN


class TRTCompare(io.ComfyNode):
    """Two pictures -> their difference, as a picture, in words and in numbers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.compare()

    @classmethod
    def execute(cls, normal: torch.Tensor, accelerated: torch.Tensor, amplify: int = 0) -> io.NodeOutput:
        found = compare(normal, accelerated, amplify)
        text = words(found, len(normal))
        shown: dict[str, Any] = ui.PreviewImage(found.picture, cls=cls).as_dict()
        shown |= {"text": [text], "tone": [found.tone], "numbers": [_for_json(found)]}
        ssim = math.nan if isinstance(found.ssim, str) else found.ssim
        return io.NodeOutput(found.picture, text, found.psnr, ssim, found.largest, ui=shown)


def compare(normal: torch.Tensor, other: torch.Tensor, amplify: int = 0) -> Comparison:
    """Compare two batches of pictures, (B, H, W, C) of 0 to 1 each.

    Args:
        amplify: factor of the difference picture; 0 chooses it.

    Raises:
        ValueError: they have not the same size; the text is for the user.
    """
    if normal.shape != other.shape or normal.ndim != 4 or not normal.numel():
        raise ValueError(
            f"The pictures cannot be compared: normal is {_size(normal)}, accelerated is {_size(other)}. Wire in two "
            "results of the same size and number, made with the same settings."
        )
    normal, other = normal.detach().cpu().float(), other.detach().cpu().float()
    numbers = normal.isfinite() & other.isfinite()
    broken = tuple(int((~pictures.isfinite()).sum()) for pictures in (normal, other))
    difference = (normal - other).abs().where(numbers, 1.0)
    largest = float(difference.max())
    shown = amplify or next((factor for factor in FACTORS if factor * largest <= 1), 1)
    picture = (difference * shown).clamp(0, 1)
    if any(broken):
        return Comparison(0.0, 0.0, max(1.0, largest), broken, shown, picture)
    ssim = _ssim(normal, other) if largest else 1.0  # rounding makes it 0.999996 there
    return Comparison(_psnr(difference), ssim, largest, broken, shown, picture)


def words(found: Comparison, count: int) -> str:
    """Describe a comparison, the answer in the first line, see ``in_one_line``; ``count``: pictures in each batch."""
    if any(found.broken):
        normal, other = found.broken
        which = "both pictures" if normal and other else "the normal picture" if normal else "the accelerated picture"
        return f"Broken: {normal + other} values of {which} are no numbers (NaN). They are white in the difference."
    if found.largest == 0:
        return "The same picture: no value differs."
    how = "Hardly a difference" if found.is_hardly_seen else "Some difference" if found.psnr >= SEEN else (
        "Different pictures")  # fmt: skip
    ssim = "" if isinstance(found.ssim, str) else f", SSIM {found.ssim:.4f}"
    lines = [
        f"{how}: PSNR {found.psnr:.1f} dB{ssim}",
        f"Largest difference of a pixel: {255 * found.largest:.3g} of 255 ({found.largest:.2%}).",
        f"The difference is shown {f'{found.shown} times as bright' if found.shown > 1 else 'as it is'}.",
    ]
    if count > 1:
        lines.append(f"Of {count} pictures these are the figures of the worst.")
    if isinstance(found.ssim, str):
        lines.append(f"SSIM was not computed: {found.ssim}.")
    return "\n".join(lines)


def in_one_line(text: str) -> str:
    """Return the figures of a comparison in words, without how they are shown."""
    return ". ".join(text.splitlines()[:2])


def _psnr(difference: torch.Tensor) -> float:
    worst = float(difference.square().flatten(1).mean(1, dtype=torch.float64).max())
    return 10 * math.log10(1 / worst) if worst > 0 else math.inf


def _ssim(normal: torch.Tensor, other: torch.Tensor) -> float | str:
    """Return the structural similarity of the worst picture, or why there is none."""
    if min(normal.shape[1:3]) < SMALLEST:
        return f"a picture has to be {SMALLEST} px wide and high"
    if find_spec("torchmetrics") is None:
        return INSTALL
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure as measure
    except Exception as error:  # it imports more than it needs here
        return f"torchmetrics cannot be loaded ({type(error).__name__}: {error})"
    pairs = zip(normal.movedim(-1, 1).split(1), other.movedim(-1, 1).split(1), strict=True)
    return min(float(measure(b, a, data_range=1.0)) for a, b in pairs)


def _size(picture: torch.Tensor) -> str:
    if picture.ndim != 4:
        return f"no picture but of shape {tuple(picture.shape)}"
    count, height, width, channels = picture.shape
    more = "" if channels == 3 else f" with {channels} channels"
    return f"{count} of {width}x{height} px{more}"


def _for_json(found: Comparison) -> dict[str, float | int | None]:
    """Return the numbers; JSON has no infinite ones."""
    psnr = found.psnr if math.isfinite(found.psnr) else None
    ssim = None if isinstance(found.ssim, str) else found.ssim
    return {"same": found.largest == 0, "psnr": psnr, "ssim": ssim, "largest": found.largest, "shown": found.shown}
