"""What TensorRT says while it works: to the log, and its errors to whoever tells the user."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)


@functools.cache
def shared_logger(trt: ModuleType) -> Any:
    """The logger of a flavour, one per process because TensorRT keeps the first that it is given.

    Messages go to ``logging`` at debug level, errors at info level: who meets an error raises it with its text. The
    lists in ``listeners`` get the text of each error.
    """

    class Messages(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.listeners: dict[int, list[str]] = {}

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                log.info("%s: %s", trt.__name__, text)
                for lines in list(self.listeners.values()):
                    lines.append(text)
            elif severity in (trt.ILogger.WARNING, trt.ILogger.INFO):  # verbose ones are tens of thousands
                log.debug("%s: %s", trt.__name__, text)

    return Messages()


@contextlib.contextmanager
def collected_errors(logger: Any) -> Iterator[list[str]]:
    """The errors that TensorRT logs meanwhile, in order."""
    lines: list[str] = []
    logger.listeners[id(lines)] = lines
    try:
        yield lines
    finally:
        del logger.listeners[id(lines)]


def last_errors(lines: list[str], count: int = 2) -> str:
    """The last few errors as one short line for a message."""
    frames = ("--- Begin node ---", "--- End node ---")  # the parser's dump of a node it cannot read
    telling = (" ".join(line.split()) for line in lines if not any(frame in line for frame in frames))
    unique = list(dict.fromkeys(telling))
    return "; ".join(line if len(line) <= 400 else f"{line[:397]}..." for line in unique[-count:])
