"""The library's own settings: a small file in the folder that builds go to, the same for every page and the shell."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from . import strict
from .disk import LibraryError, gigabytes, readable
from .files import write_file
from .library import Library

log = logging.getLogger(__name__)

FILE_NAME = ".settings.json"
MAX_LIMIT_GB = 1e6


@dataclass(frozen=True)
class Settings:
    """``limit_gb``: how many gigabytes all engines together may take; 0 is no limit."""

    limit_gb: float = 0.0

    @classmethod
    def from_json(cls, data: object) -> Settings:
        """
        Raises:
            LibraryError: a value that makes no sense; the text is for the user.
        """
        limit = data.get("limit_gb", 0.0) if isinstance(data, dict) else None
        if isinstance(limit, bool) or not isinstance(limit, int | float) or limit != limit:
            raise LibraryError("The limit of the engine library has to be a number of gigabytes; nothing was changed")
        if not 0 <= limit <= MAX_LIMIT_GB:
            raise LibraryError(
                f"The limit of the engine library has to lie between 0 (none) and {MAX_LIMIT_GB:.0f} GB; nothing was "
                "changed"
            )
        return cls(float(limit))


def read_settings(folder: Path) -> Settings:
    """The settings of the library in a folder; the defaults where there are none."""
    try:
        return Settings.from_json(strict.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
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


def check_limit(library: Library, more: int, what: str) -> None:
    """Raise LibraryError when ``more`` bytes of engines do not fit the limit. ``what`` begins the sentence."""
    limit = read_settings(library.roots[0]).limit_gb * 1e9
    used = sum(engine.manifest.bytes for engine in library.engines()) if limit else 0
    if limit and used + more > limit:
        raise LibraryError(
            f"{what} needs about {gigabytes(more)}, the engines take {gigabytes(used)}, and the settings allow "
            f"{gigabytes(limit)} in all. Nothing was changed and native keeps serving; delete engines that you no "
            "longer use, or raise the limit in Settings > Hybrid TRT"
        )
