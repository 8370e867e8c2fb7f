"""The driver of NVIDIA's GPUs."""

from __future__ import annotations

import subprocess


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or ``""`` if its tool does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return (output.split() or [""])[0]
