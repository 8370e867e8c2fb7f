"""Run a command with other packages than the pinned ones: the newest of the registry, or another torch.

    python3 tools/other_versions.py newest -- pytest
    python3 tools/other_versions.py torch==2.7.1 -- pytest tests/backends/test_live_torch.py

Each has a virtual environment of its own in build/ of this clone, of about 6 GB; `make clean` removes it. ComfyUI is
the one of tools/environment.py. What differs from the pins is said at the start of pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import environment
from setup_steps import SetupError, pip, run_logged, say, shared_lock

BROUGHT_BY_TORCH = re.compile(r"(nvidia-|cuda-|triton\b)")


def requirements(which: str, pins: Sequence[str]) -> list[str]:
    """Return what pip is asked for.

    Args:
        which: ``newest``, or a torch with its version, for example ``torch==2.7.1``.
        pins: the lines of tools/pins.txt.
    """
    lines = [line for line in pins if line and not line.startswith("#") and not BROUGHT_BY_TORCH.match(line)]
    torch = [line for line in lines if line.partition("==")[0] in environment.TORCH_PACKAGES]
    others = [line for line in lines if line not in torch]
    if which != "newest":
        # torchaudio asks for no torch: the one of the same version, or the last that there was before it
        return [*others, which, "torchvision", f"torchaudio<={which.partition('==')[2]}"]
    return [*dict.fromkeys(re.sub(r"==[^ ;]+", "", line) for line in others), *torch]


def python_with(which: str) -> Path:
    """The interpreter of the virtual environment with these packages; the newest are looked up at each call."""
    build = environment.ROOT / "build"
    venv = build / f"venv-{which.replace('==', '-')}"
    python, log, list_file = venv / "bin" / "python", Path(f"{venv}.log"), Path(f"{venv}.txt")
    wanted = requirements(which, environment.PINS.read_text(encoding="utf-8").splitlines())
    with shared_lock(build, venv.name) as lock:
        log.unlink(missing_ok=True)
        if not python.exists():
            environment.create_venv(venv, log, lock)
        list_file.write_text("".join(f"{line}\n" for line in wanted), encoding="utf-8")
        say(f"installing into {venv}")
        upgrade = ["--upgrade", "--upgrade-strategy", "eager"] if which == "newest" else []
        command = [*pip(python), "install", *upgrade, "--requirement", str(list_file)]
        run_logged(command, f"installing packages ({which})", log, lock)
        if subprocess.run([python, "-c", "import comfy_kitchen"], stderr=subprocess.DEVNULL).returncode:
            # older Tritons want a GPU when comfy-kitchen is imported, which also works without Triton
            say("comfy-kitchen cannot be imported with this Triton here: Triton is removed")
            run_logged([*pip(python), "uninstall", "--yes", "triton"], "removing Triton", log, lock)
    return python


def main(argv: Sequence[str]) -> int:
    """Prepare, then become the given command."""
    if len(argv) < 3 or argv[1] != "--" or not re.fullmatch(r"newest|torch==\d+(\.\d+)+", argv[0]):
        say("write: other_versions.py newest -- COMMAND..., or: other_versions.py torch==2.7.1 -- COMMAND...")
        return 2
    try:
        usual = environment.ensure(browser=True)
        other = replace(usual, python=python_with(argv[0]))
    except SetupError as error:
        say(str(error))
        return 1
    os.execvpe(argv[2], argv[2:], other.variables())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
