"""One engine on disk: its folder, its manifest, and whether its files are those that were built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .fallback import Reason, Unavailable
from .manifest import EngineFile, Manifest

Check = Callable[[], None]
"""Called often during long work; may raise to stop it."""

_PROGRAMS = {".pt", ".pth", ".pt2", ".pkl", ".pickle", ".ckpt", ".bin", ".py", ".pyc", ".pyd", ".so", ".dll", ".dylib"}
_PROGRAMS |= {".trt", ".plan", ".engine"}  # TensorRT's plans are code for the GPU, and its reader trusts them


@dataclass(frozen=True)
class Engine:
    """An engine in the library: its folder and its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def main_file(self) -> Path:
        """The file that the backend opens."""
        return self.folder / next(iter(self.manifest.files))

    def check_sizes(self) -> None:
        """Raise Unavailable when a file is missing or has another size than when it was built."""
        for name, expected in self.manifest.files.items():
            try:
                size = (self.folder / name).stat().st_size
            except OSError:
                raise Unavailable(Reason.BROKEN_ENGINE, f"{self.folder.name}/{name} is missing") from None
            if size != expected.bytes:
                raise Unavailable(
                    Reason.BROKEN_ENGINE,
                    f"{self.folder.name}/{name} has {size} bytes and was built with {expected.bytes}",
                )

    def check_contents(self, check: Check | None = None) -> None:
        """Raise Unavailable when a file's contents are not those that were built. Reads everything, files in parallel.

        ``verified.check_contents`` does so once per machine.
        """
        with ThreadPoolExecutor(max_workers=4) as pool:
            hashes = {name: pool.submit(file_sha256, self.folder / name, check) for name in self.manifest.files}
            for name, expected in self.manifest.files.items():
                if hashes[name].result() != expected.sha256:
                    raise Unavailable(Reason.BROKEN_ENGINE, f"{self.folder.name}/{name} is damaged (its hash differs)")


def describe_files(folder: Path, names: Sequence[str], check: Check | None = None) -> dict[str, EngineFile]:
    """Size and hash of files in a building folder, for the manifest."""
    return {name: EngineFile((folder / name).stat().st_size, file_sha256(folder / name, check)) for name in names}


def file_sha256(path: Path, check: Check | None = None) -> str:
    """sha256 of a file's contents; ``check`` is called after every few megabytes."""
    h = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(8 << 20):
            h.update(chunk)
            if check is not None:
                check()
    return h.hexdigest()
