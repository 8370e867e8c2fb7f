"""Is there main memory for a build? Asked before it starts, since Linux would end the builder half-way through.

Figures are of benchmarks/results/builds.json: memory of the child process's own, without the weights' file, which is
mapped and gives way when others want the room. TensorRT 8.6's are of benchmarks/results/tensorrt86_h200.json.
"""

from __future__ import annotations

from pathlib import Path

from ..backends import Backend
from ..engine_library import BuildError
from ..engine_library.disk import gigabytes

FIXED = 1_000_000_000
"""Python, torch, ComfyUI's classes and the backend's library."""
EXPORT = 0.9
"""Export and check against native, in sizes of the weights."""
CGROUP = Path("/sys/fs/cgroup")


def needed_bytes(backend: Backend, weights: int) -> int:
    """What building an engine of so many bytes of weights takes at its height; its steps run one after the other."""
    return FIXED + int(max(weights * EXPORT, backend.build_memory(weights)))


def available_bytes() -> int:
    """Main memory that a new process can have without others being swapped out or ended."""
    import psutil  # ComfyUI itself needs it

    return min(psutil.virtual_memory().available, _left_in_container())


def check_memory(backend: Backend, weights: int, label: str) -> None:
    """Raise BuildError when the memory for building the engine of ``label`` is not there."""
    needed, least, available = needed_bytes(backend, weights), FIXED + int(weights * EXPORT), available_bytes()
    if available < needed:
        other = f", or choose the backend onnxruntime, which needs {gigabytes(least)}" if least < needed else ""
        raise BuildError(
            f"building the engine of {label} with {backend.name} needs about {gigabytes(needed)} of main memory and "
            f"{gigabytes(available)} are available, so it was not started and native keeps serving; close other "
            f"programs or unload ComfyUI's models, then build again{other}"
        )


def _left_in_container() -> float:
    """What the container's limit leaves; infinite where there is no limit."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # none, "max", or not Linux
        return float("inf")
    files = sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))
    return max(0, limit - used + files)
