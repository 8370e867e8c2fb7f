"""The kind of this CPU. Inductor compiles for the very instructions that it has."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path


@functools.cache
def cpu_kind() -> str:
    """Return what tells CPUs with different instructions apart: a file compiled on one may crash on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # other systems than Linux
        return f"{platform.machine()} {platform.processor()}"
    told = next((line for line in lines if line.startswith(("flags", "Features", "isa"))), "")
    words = " ".join(sorted(told.partition(":")[2].split()))
    return f"{platform.machine()} {hashlib.sha256(words.encode()).hexdigest()[:12]}"
