"""``python -m engine_builder`` in the pack's folder: the command line, see ``command_line``."""

from __future__ import annotations

import sys

from .standalone import run

if __name__ == "__main__":
    sys.exit(run("engine_builder.command_line.main", sys.argv[1:]))
