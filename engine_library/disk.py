"""Room on the library's disk, and what the system says about it in words for users."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from . import atomic_files

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
NOT_WRITABLE = _FULL | _FORBIDDEN
_MOVE = "point 'trt_engines' in ComfyUI's extra_model_paths.yaml to another disk"
ALMOST_NOTHING = 8 << 20
"""Fewer free bytes than this explain any failed write."""


class LibraryError(Exception):
    """The library could not do what it was asked; the text is for the user."""


def gigabytes(size: float) -> str:
    """A number of bytes as people say it."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk that a folder lies on, or will lie on."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise LibraryError when ``folder``'s disk has fewer than ``needed`` free bytes. ``what`` begins the sentence."""
    free = free_bytes(folder)
    if free < needed:
        raise LibraryError(
            f"{what} needs about {gigabytes(needed)} in {folder} and its disk has {gigabytes(free)} free. Nothing was "
            f"changed and native keeps serving; delete engines that you no longer use, or {_MOVE}"
        )


def readable(error: OSError, folder: Path) -> LibraryError:
    """A system's refusal to write to the library as a sentence."""
    if error.errno in _FULL:
        return LibraryError(
            f"the disk of {folder} is full. Nothing was changed in the library and native keeps serving; delete "
            f"engines that you no longer use, or {_MOVE}"
        )
    if error.errno == errno.EACCES and atomic_files.WINDOWS:
        return LibraryError(
            f"{folder} could not be changed ({error.strerror}): one of its files is in use, or ComfyUI may not write "
            "there. Nothing was changed in the library and native keeps serving; press 'Free model and node cache', "
            "end other programs that use these engines, and try again"
        )
    if error.errno in _FORBIDDEN:
        return LibraryError(
            f"{folder} cannot be written ({error.strerror}). Nothing was changed in the library and native keeps "
            f"serving; give ComfyUI the right to write there, or {_MOVE}"
        )
    return LibraryError(
        f"the library {folder} could not be used ({error}). Nothing was changed in it and native keeps serving; check "
        "this folder and its disk"
    )
