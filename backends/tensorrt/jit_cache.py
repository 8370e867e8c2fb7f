"""Kernels that TensorRT-RTX compiled at run time, kept beside the engine: the next start need not compile them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...engine_library.atomic_files import write_file

log = logging.getLogger(__name__)


class JitCache:
    """The runtime cache of one execution context and its file.

    The file is no part of the engine: it is in no manifest, and whatever is wrong with it costs time only.
    """

    def __init__(self, config: Any, path: Path):
        """Attach a cache to an IRuntimeConfig, filled from ``path`` when the file is there and fits this GPU."""
        self._path = path
        self._cache = config.create_runtime_cache()
        self._saved = self._load()
        config.set_runtime_cache(self._cache)

    def _load(self) -> bytes:
        try:
            contents = self._path.read_bytes()
            if self._cache.deserialize(contents):
                return contents
            why = "it is of another GPU, driver or version"
        except Exception as error:
            why = str(error)
        log.debug("%s is not used (%s): kernels are compiled anew", self._path, why)
        return b""

    def save(self) -> None:
        """Write the file when there are kernels that it has not; a library that cannot be written to is no failure."""
        try:
            contents = bytes(self._cache.serialize())
            if contents and contents != self._saved:
                write_file(self._path, contents)
                self._saved = contents
        except Exception as error:
            log.debug("%s was not saved (%s): kernels are compiled again at the next start", self._path, error)
