"""The pack's own latest warnings and errors, kept for the report."""

from __future__ import annotations

import logging
from collections import deque
from datetime import datetime, timezone

KEPT = 30


class KeptWarnings(logging.Handler):
    """A handler of the pack's log that keeps the latest warnings and errors as lines, until it is closed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=KEPT)
        self._logger = logging.getLogger(__name__.removesuffix(".engine_builder.doctor.kept_warnings"))
        self._logger.addHandler(self)

    def close(self) -> None:
        self._logger.removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="seconds")
            error = record.exc_info[1] if record.exc_info else None
            more = "" if error is None else f" ({type(error).__name__}: {error})"
            self.lines.append(f"{when} {record.levelname.lower()}: {record.getMessage()}{more}")
        except Exception:
            self.handleError(record)
