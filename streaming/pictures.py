"""Frames as bytes of a live client: JPEG, PNG, or raw pixels behind a small header.

Raw: ``RGB8``, width and height as two whole numbers of 32 bits (little endian), then 3 bytes a pixel, row by row.
"""

from __future__ import annotations

import struct
from io import BytesIO

import numpy
import torch
from PIL import Image, ImageOps

FORMATS = ("jpeg", "png", "raw")
LEAST_SIDE, MOST_SIDE = 64, 2048
MAX_BYTES = 32 << 20
"""Enough for raw frames of twice the largest size, so that these are answered with a sentence."""
RAW = b"RGB8"
_HEADER = struct.Struct("<4sII")
QUALITY = 90


class BadFrame(ValueError):
    """Error for bytes that are no frame; the text is a sentence for the user."""


def read(data: bytes) -> torch.Tensor:
    """Return a frame as shape (1, H, W, 3), float32, 0 to 1, as ComfyUI's LoadImage reads it.

    Raises:
        BadFrame: the bytes are no frame, or their size is refused, which is found before decoding.
    """
    pixels = _raw(data) if data.startswith(RAW) else _packed(data)
    return torch.from_numpy(pixels.astype(numpy.float32) / numpy.iinfo(pixels.dtype).max)[None]


def _raw(data: bytes) -> numpy.ndarray:
    if len(data) < _HEADER.size:
        raise BadFrame("The raw frame has no whole header, so it was left out.")
    _, width, height = _HEADER.unpack_from(data)
    _check(width, height)
    if len(data) != _HEADER.size + 3 * width * height:
        raise BadFrame(f"A raw frame of {width}x{height} pixels has 3 bytes each; this one has not, and was left out.")
    return numpy.frombuffer(data, numpy.uint8, offset=_HEADER.size).reshape(height, width, 3)


def _packed(data: bytes) -> numpy.ndarray:
    try:
        with Image.open(BytesIO(data), formats=("JPEG", "PNG")) as image:
            _check(*image.size)  # before its pixels are unpacked
            turned = ImageOps.exif_transpose(image)
            if turned.mode.startswith("I"):  # grey of 16 bits, which PIL cuts off where it makes 8 of them
                return numpy.repeat(numpy.array(turned).astype(numpy.uint16)[..., None], 3, axis=2)
            return numpy.array(turned.convert("RGB"))
    except BadFrame:
        raise
    except Exception:  # damaged files make PIL raise errors of many kinds
        raise BadFrame("The frame is no JPEG, PNG or raw frame that can be read, so it was left out.") from None


def _check(width: int, height: int) -> None:
    if not (LEAST_SIDE <= width <= MOST_SIDE and LEAST_SIDE <= height <= MOST_SIDE):
        raise BadFrame(
            f"A frame is {LEAST_SIDE} to {MOST_SIDE} pixels wide and high; this one has {width}x{height}, so it was "
            "left out."
        )


def write(picture: torch.Tensor, kind: str) -> bytes:
    """Return a picture, shape (1, H, W, 3), as one of ``FORMATS``; pixels are rounded as ComfyUI saves them."""
    pixels = numpy.clip(255.0 * picture[0, ..., :3].float().numpy(), 0, 255).astype(numpy.uint8)
    if kind == "raw":
        return _HEADER.pack(RAW, pixels.shape[1], pixels.shape[0]) + pixels.tobytes()
    packed = BytesIO()
    options = {"quality": QUALITY} if kind == "jpeg" else {"compress_level": 1}
    Image.fromarray(pixels).save(packed, kind.upper(), **options)
    return packed.getvalue()
