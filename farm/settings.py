"""Settings of a farm, from its command line to its workers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerSettings:
    """One worker's ComfyUI.

    Attributes:
        comfyui: ComfyUI's folder, with the pack among its custom nodes.
        python: the interpreter that has ComfyUI's packages.
        work: a folder for logs, and for pictures until they are sent.
        farm: a name that no other farm has: its workers leave each other's folders alone.
        base: ComfyUI's ``--base-directory``; ``""`` leaves it to ComfyUI.
        warm: API workflows that run before a worker takes prompts, as paths.
        arguments: more arguments for ComfyUI.
        threads: OMP_NUM_THREADS for ComfyUI; ``""`` leaves it unset, for Ray else sets it to 1.
    """

    comfyui: str
    python: str
    work: str
    farm: str
    base: str = ""
    warm: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    threads: str = ""


def threads_each(cores: list[int], workers: int) -> int:
    """Return how many threads a worker takes, so that the workers of a machine share its cores.

    Args:
        cores: number of cores of each machine.
    """
    return max(1, min(cores, default=1) // math.ceil(workers / max(1, len(cores))))
