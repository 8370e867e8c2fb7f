"""The pack's own latest warnings and errors, kept for the report."""

from __future__ import annotations

import logging
from collections import deque
from datetime import datetime, timezone
from types import TracebackType

KEPT_WARNINGS = 30


class KeptWarnings(logging.Handler):
    """A handler of the pack's log that keeps the latest warnings and errors as lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[str] = deque(maxlen=KEPT_WARNINGS)
        self._logger = logging.getLogger(__name__.removesuffix(".engine_builder.doctor.kept_warnings"))

    @property
    def lines(self) -> list[str]:
        return list(self._lines)

    def start(self) -> None:
        """Listen until ``stop``."""
        self._logger.addHandler(self)

    def stop(self) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="seconds")
            error = record.exc_info[1] if record.exc_info else None
            more = "" if error is None else f" ({type(error).__name__}: {error})"
            self._lines.append(f"{when} {record.levelname.lower()}: {record.getMessage()}{more}")
        except Exception:
            self.handleError(record)

    def __enter__(self) -> KeptWarnings:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
