"""Prepare all that `make demo` and `make test` need, then run a command in it.

What goes to a cache that all clones share: a virtual environment with pinned packages, a pinned ComfyUI, and the oldest
frontend of it that the page's tests try beside the pinned one (HYBRID_TRT_OLDEST_FRONTEND in what runs here). The
folder that ComfyUI works in (its --base-directory) lies in the clone, so no ComfyUI is ever changed and two clones
never share models, settings or outputs.

    python3 tools/environment.py                        prepare, and say where things are
    python3 tools/environment.py run -- python x.py     prepare, then run
    python3 tools/environment.py --browser run -- ...   have a Chromium and the oldest frontend too
    python3 tools/environment.py --farm run -- ...      have an environment with Ray too (HYBRID_TRT_FARM_PYTHON there)

Variables: COMFYUI_PATH (use that ComfyUI instead of the pinned one), HYBRID_TRT_CACHE (default ~/.cache/hybrid-trt).
Only the standard library is used here, since nothing else is there yet.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from setup_downloads import COMFYUI, COMFYUI_VERSION, OLDEST_FRONTEND, OLDEST_FRONTEND_VERSION, unpacked
from setup_steps import SetupError, clean_variables, pip, run_logged, say, shared_lock

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "tools" / "pins.txt"
FARM_PINS = ROOT / "tools" / "farm_pins.txt"
BASE = ROOT / "build" / "comfyui"

BASE_FOLDERS = ("models", "input", "output", "user/default", "temp", "custom_nodes")
TORCH_PACKAGES = ("torch", "torchvision", "torchaudio")  # one set works together: another ComfyUI must not move them
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHINESE_FONT = "fonts-wqy-zenhei"  # the tests measure in pixels how Chinese is drawn
OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 13)  # the newest that tools/pins.txt was resolved for

READY = ".hybrid-trt-ready"  # written last into a virtual environment


@dataclass(frozen=True)
class Environment:
    """Environment that a tool or a test runs in."""

    python: Path
    """The virtual environment's interpreter."""
    comfyui: Path
    """The folder with ComfyUI's main.py; never written to."""
    base: Path
    """ComfyUI's --base-directory inside this clone."""
    oldest_frontend: Path | None
    """The oldest frontend that the page is tested with, for ComfyUI's --front-end-root; only beside a browser."""
    farm_python: Path | None = None
    """The interpreter of an environment with Ray, for the farm and its tests."""

    def variables(self) -> dict[str, str]:
        """All variables for a child process that runs in this environment."""
        variables = clean_variables()
        variables["VIRTUAL_ENV"] = str(self.python.parent.parent)
        variables["PATH"] = f"{self.python.parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
        variables["HYBRID_TRT_COMFYUI"] = str(self.comfyui)
        variables["HYBRID_TRT_BASE"] = str(self.base)
        if self.oldest_frontend is not None:
            variables["HYBRID_TRT_OLDEST_FRONTEND"] = str(self.oldest_frontend)
        if self.farm_python is not None:
            variables["HYBRID_TRT_FARM_PYTHON"] = str(self.farm_python)
        # several processes on few cores: threads that wait by spinning took ten times the processor time of the work
        variables.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if _users_comfyui() is not None:
            variables["PYTHONDONTWRITEBYTECODE"] = "1"  # no __pycache__ in a checkout that is not ours
        else:  # whoever set it for all programs would wait a second longer for each server
            variables.pop("PYTHONDONTWRITEBYTECODE", None)
        return variables


def ensure(browser: bool = False, farm: bool = False) -> Environment:
    """Make whatever is missing and return the environment; quick when all is there.

    Args:
        browser: have a Chromium executable and the oldest frontend too.
        farm: have an environment with Ray too.

    Raises:
        SetupError: something is missing that cannot be made here.
    """
    _check_interpreter()
    users_comfyui = _users_comfyui()
    cache = _cache()
    if browser:
        _ensure_browser(cache)
    theirs = [] if users_comfyui is None else [users_comfyui / "requirements.txt"]
    python = _ensure_venv(cache, "venv", [PINS, *theirs])
    comfyui = users_comfyui or unpacked(cache, python, f"comfyui-{COMFYUI_VERSION}", COMFYUI)
    frontend = unpacked(cache, python, f"frontend-{OLDEST_FRONTEND_VERSION}", OLDEST_FRONTEND) if browser else None
    farm_python = _ensure_venv(cache, "farm", [FARM_PINS]) if farm else None
    return Environment(python, comfyui, _ensure_base(), frontend, farm_python)


def _check_interpreter() -> None:
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST_PYTHON, NEWEST_PYTHON))
        raise SetupError(
            f"Python {oldest} to {newest} is needed and this is {sys.version.split()[0]} ({sys.executable}): "
            f"run it with another one, for example 'make test PYTHON=python{newest}'."
        )


def _users_comfyui() -> Path | None:
    """The checkout that COMFYUI_PATH names, if any."""
    value = os.environ.get("COMFYUI_PATH")
    if not value:
        return None
    path = Path(value).expanduser().resolve()
    for name in ("main.py", "requirements.txt"):
        if not (path / name).is_file():
            raise SetupError(
                f"COMFYUI_PATH={value} holds no ComfyUI ({path / name} does not exist): "
                f"point it at a ComfyUI checkout, or unset it to use the pinned ComfyUI {COMFYUI_VERSION}."
            )
    return path


def _cache() -> Path:
    value = os.environ.get("HYBRID_TRT_CACHE")
    cache = Path(value).expanduser().resolve() if value else Path.home() / ".cache" / "hybrid-trt"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"{cache} cannot be made ({error}): set HYBRID_TRT_CACHE to another folder.") from None
    return cache


# Virtual environment


def _ensure_venv(cache: Path, name: str, requirements: Sequence[Path]) -> Path:
    """The interpreter of a complete virtual environment for these requirements and this Python."""
    digest = hashlib.sha256(f"python {sys.version_info[0]}.{sys.version_info[1]}\n".encode())
    for file in requirements:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    venv = cache / f"{name}-{digest.hexdigest()[:12]}"
    python = venv / "bin" / "python"

    def ready() -> bool:
        return (venv / READY).is_file() and python.exists()  # its link is dead when that Python was removed

    if not ready():
        with shared_lock(cache, venv.name) as lock:
            if not ready():
                _make_venv(cache, venv, requirements, lock)
    return python


def _make_venv(cache: Path, venv: Path, requirements: Sequence[Path], lock: IO[bytes]) -> None:
    log = cache / f"{venv.name}.log"
    log.unlink(missing_ok=True)
    if venv.exists():
        say(f"removing {venv}, which was left half made")
        shutil.rmtree(venv)
    started = time.monotonic()
    say(f"making {venv} (once; {'about 6 GB and a few minutes' if PINS in requirements else 'about 0.6 GB'})")
    create_venv(venv, log, lock)
    pip_here = pip(venv / "bin" / "python")
    pins, *others = requirements
    run_logged([*pip_here, "install", "--requirement", str(pins)], "installing pinned packages", log, lock)
    if others:
        constraints = venv / "torch.txt"
        constraints.write_text("".join(f"{line}\n" for line in _torch_pins(pins)), encoding="utf-8")
        files = [argument for file in others for argument in ("--requirement", str(file))]
        run_logged(
            [*pip_here, "install", "--constraint", str(constraints), *files],
            "installing what the ComfyUI at COMFYUI_PATH asks for",
            log,
            lock,
        )
    (venv / READY).write_text("".join(f"{file}\n" for file in requirements), encoding="utf-8")
    say(f"packages are installed, {time.monotonic() - started:.0f} s")


def create_venv(venv: Path, log: Path, lock: IO[bytes]) -> None:
    """Make a virtual environment with pip alone, and Python's venv module first where a Debian has none."""
    create = [sys.executable, "-m", "venv", str(venv)]
    try:
        run_logged(create, "making a virtual environment", log, lock)
    except SetupError:
        output = log.read_text(encoding="utf-8", errors="replace")
        if not any(sign in output for sign in ("ensurepip", "No module named venv")):
            raise
        _apt_install(["python3-venv"], "Python's venv module", log, lock)
        shutil.rmtree(venv, ignore_errors=True)
        run_logged(create, "making a virtual environment", log, lock)


def _torch_pins(pins: Path) -> list[str]:
    lines = pins.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in TORCH_PACKAGES]


# This clone's folders


def _ensure_base() -> Path:
    """ComfyUI's --base-directory in this clone, with this pack as its custom node."""
    for name in BASE_FOLDERS:
        (BASE / name).mkdir(parents=True, exist_ok=True)
    link = BASE / "custom_nodes" / "hybrid-trt"
    if not link.is_symlink() or link.resolve() != ROOT:  # the clone may have been moved
        fresh = link.with_name(f".hybrid-trt-{os.getpid()}")
        fresh.symlink_to(ROOT, target_is_directory=True)
        try:
            fresh.replace(link)
        except OSError as error:
            fresh.unlink()
            raise SetupError(f"{link} is in the way ({error}): remove it.") from None
    return BASE


# System packages


def _ensure_browser(cache: Path) -> None:
    """Have one of the known Chromium executables on PATH."""
    may_install = os.geteuid() == 0 and shutil.which("apt-get") is not None
    if any(map(shutil.which, BROWSERS)) and (_draws_chinese() or not may_install):  # without a font its test is skipped
        return
    with shared_lock(cache, "chromium") as lock:
        log = cache / "chromium.log"
        log.unlink(missing_ok=True)
        if not any(map(shutil.which, BROWSERS)):
            try:
                _apt_install(["chromium"], "Chromium, which the browser tests drive,", log, lock)
            except SetupError as error:
                raise SetupError(f"{error}\nAny of these on PATH will do: {', '.join(BROWSERS)}.") from None
        if may_install and not _draws_chinese():
            try:
                _apt_install([CHINESE_FONT], "A Chinese font", log, lock)
            except SetupError as error:
                say(f"{error} The tests of Chinese are skipped without one.")
    if not any(map(shutil.which, BROWSERS)):
        raise SetupError(f"apt-get installed chromium, yet none of {', '.join(BROWSERS)} is on PATH.")


def _draws_chinese() -> bool:
    """Return whether a font for Chinese lies where systems keep fonts."""
    places = (Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), Path.home() / ".fonts")
    return any(re.search("wqy|cjk|notosanssc", file.name.lower()) for place in places for file in place.rglob("*.tt*"))


def _apt_install(packages: Sequence[str], what: str, log: Path, lock: IO[bytes]) -> None:
    """Install Debian packages where we may; otherwise say what to install."""
    names = " ".join(packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(
            f"{what} is missing: install it (Debian, Ubuntu: sudo apt-get install {names}), then try again."
        )
    run_logged(["apt-get", "update"], "refreshing the package lists", log, lock)
    run_logged(["apt-get", "install", "--yes", "--no-install-recommends", *packages], f"installing {names}", log, lock)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", action="store_true",
                        help="have a Chromium and the oldest frontend too, for the browser tests")  # fmt: skip
    parser.add_argument("--farm", action="store_true", help="have an environment with Ray too, for the farm's tests")
    parser.add_argument("action", nargs="?", choices=["run"], help="run the command that follows '--'")
    own, command = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    arguments = parser.parse_args(own)
    if (arguments.action == "run") != bool(command):
        parser.error("to run a command, write: run -- COMMAND...")
    arguments.command = command
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare, then become the given command."""
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        environment = ensure(arguments.browser, arguments.farm)
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    if not arguments.command:
        say(f"python {environment.python}, ComfyUI {environment.comfyui}, base directory {environment.base}")
        return 0
    program, *rest = arguments.command
    if program in ("python", "python3"):
        program = str(environment.python)
    try:
        os.execvpe(program, [program, *rest], environment.variables())
    except OSError as error:
        say(f"{program} cannot be run: {error.strerror}")
        return 127


if __name__ == "__main__":
    sys.exit(main())
