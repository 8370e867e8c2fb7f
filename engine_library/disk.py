"""Disk space and settings of the library, and the system's refusals in words for users.

The settings are a small file in the folder that builds go to, the same for page and shell.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from . import safe_files
from .safe_files import read_json, write_file

log = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
NOT_WRITABLE = _FULL | _FORBIDDEN
_MOVE = "point 'trt_engines' in ComfyUI's extra_model_paths.yaml to another disk"
ALMOST_NOTHING = 8 << 20
"""Fewer free bytes than this explain any failed write."""


class LibraryError(Exception):
    """Request that the library could not fulfil; the text is for the user."""


def gigabytes(size: float) -> str:
    """Return a number of bytes in gigabytes, for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk that a folder lies on, or will lie on."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise LibraryError when ``folder``'s disk has fewer than ``needed`` free bytes. ``what`` begins the sentence."""
    free = free_bytes(folder)
    if free < needed:
        raise LibraryError(
            f"{what} needs about {gigabytes(needed)} in {folder} and its disk has {gigabytes(free)} free. Nothing was "
            f"changed and the normal model keeps running; delete engines that you no longer use, or {_MOVE}"
        )


def readable(error: OSError, folder: Path) -> LibraryError:
    """Turn the system's refusal to write to the library into a sentence."""
    if error.errno in _FULL:
        return LibraryError(
            f"the disk of {folder} is full. Nothing was changed in the library and the normal model keeps running; "
            f"delete engines that you no longer use, or {_MOVE}"
        )
    if error.errno == errno.EACCES and safe_files.WINDOWS:
        return LibraryError(
            f"{folder} could not be changed ({error.strerror}): one of its files is in use, or ComfyUI may not write "
            "there. Nothing was changed in the library and the normal model keeps running; press 'Free model and "
            "node cache', end other programs that use these engines, and try again"
        )
    if error.errno in _FORBIDDEN:
        return LibraryError(
            f"{folder} cannot be written ({error.strerror}). Nothing was changed in the library and the normal "
            f"model keeps running; give ComfyUI the right to write there, or {_MOVE}"
        )
    return LibraryError(
        f"the library {folder} could not be used ({error}). Nothing was changed in it and the normal model keeps "
        "running; check this folder and its disk"
    )


FILE_NAME = ".settings.json"
MAX_LIMIT_GB = 1e6
MAX_MINUTES = 24 * 60
MAX_LEVEL = 5


@dataclass(frozen=True)
class Settings:
    """Settings of a user for all engines.

    Attributes:
        limit_gb: how many gigabytes all engines together may take; 0 is no limit.
        build_minutes: how long all steps of a build may take together; 0 is no limit.
        tensorrt_level: how hard TensorRT searches for fast kernels, 1 to 5; 0 leaves it to TensorRT.
    """

    limit_gb: float = 0.0
    build_minutes: float = 0.0
    tensorrt_level: int = 0

    @classmethod
    def from_json(cls, data: object) -> Settings:
        """Read settings of any form.

        Raises:
            LibraryError: a value that makes no sense; the text is for the user.
        """
        given = data if isinstance(data, dict) else {"limit_gb": None}
        limit = _number(given, "limit_gb", "The limit of the engine library", "gigabytes", MAX_LIMIT_GB)
        minutes = _number(given, "build_minutes", "The longest build", "minutes", MAX_MINUTES)
        level = _number(given, "tensorrt_level", "TensorRT's optimization level", "levels", MAX_LEVEL)
        if level != int(level):
            raise LibraryError("TensorRT's optimization level has to be a whole number; nothing was changed")
        return cls(limit, minutes, int(level))


def _number(data: dict, name: str, what: str, unit: str, most: float) -> float:
    value = data.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise LibraryError(f"{what} has to be a number of {unit}; nothing was changed")
    if not 0 <= value <= most:
        raise LibraryError(f"{what} has to lie between 0 (none) and {most:.0f} {unit}; nothing was changed")
    return float(value)


def read_settings(folder: Path) -> Settings:
    """Return the settings of the library in a folder; the defaults where there are none."""
    try:
        return Settings.from_json(read_json(folder / FILE_NAME))
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError, LibraryError) as error:
        log.warning("Hybrid TRT: the library's settings are not readable, so there is no limit (%s)", error)
        return Settings()


def write_settings(folder: Path, settings: Settings) -> None:
    """Keep settings.

    Raises:
        LibraryError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / FILE_NAME, json.dumps(asdict(settings)), durable=True)
    except OSError as error:
        raise readable(error, folder) from error
