"""The command line's progress bar."""

from __future__ import annotations

import sys
import time
from types import TracebackType

WIDTH = 24
REDRAW_SECONDS = 0.1


class Bar:
    """Progress on stderr: one line that is redrawn on a terminal, else a line for each phase."""

    def __init__(self) -> None:
        self._out = sys.stderr
        self._terminal = self._out.isatty()
        self._started = time.monotonic()
        self._drawn = 0.0
        self._phase = ""
        self._length = 0

    def __call__(self, phase: str, fraction: float) -> None:
        """Show a phase and the fraction done, 0 to 1."""
        now = time.monotonic()
        new, self._phase = phase != self._phase, phase
        if not new and (not self._terminal or now - self._drawn < REDRAW_SECONDS):
            return
        self._drawn = now
        seconds = now - self._started
        if self._terminal:
            filled = round(WIDTH * fraction)
            line = f"[{'#' * filled}{'-' * (WIDTH - filled)}] {fraction:4.0%} {seconds:5.0f} s  {phase}"
            self._out.write("\r" + line.ljust(self._length))
            self._length = len(line)
        else:
            self._out.write(f"{seconds:6.1f} s {fraction:4.0%}  {phase}\n")
        self._out.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and self._length:
            self._out.write("\r" + " " * self._length + "\r")
