"""One engine on disk: its folder, its manifest, its parameters, and how far its numbers may be from native's."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import schema
from .fallback import Reason, Unavailable
from .manifest import EngineFile, Manifest
from .safe_files import open_regular, read_bytes

if TYPE_CHECKING:
    import torch

Check = Callable[[], None]
"""Called often during long work; may raise to stop it."""
GRAPH_NAME, DATA_NAME = "model.onnx", "model.onnx.data"
"""An exported graph, and its weights."""
PARAMETERS_NAME = "parameters.json"
"""Beside the graph: its initialisers that hold the parameters of its network."""
LIMITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest relative error of any output tensor of an engine with its own library's kernels, per precision.

In half precision an engine may be so far from float32 even where native is nearer: such kernels add up in half
precision too. TensorRT's are up to 0.017 away where native is 0.002 away.
"""

@dataclass(frozen=True)
class Engine:
    """An engine in the library: its folder and its manifest."""

    folder: Path
    manifest: Manifest

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

    def read_checked(self, name: str) -> bytes:
        """Return a file's contents, checked against the manifest. Engines are loaded from these very bytes.

        Raises:
            Unavailable: the contents differ, or the file is missing.
        """
        expected = self.manifest.files.get(name)
        if expected is None:
            raise Unavailable(Reason.BROKEN_ENGINE, f"{self.folder.name} has no file {name}")
        try:
            contents = read_bytes(self.folder / name, expected.bytes)
        except OSError as error:
            text = f"{self.folder.name}/{name} cannot be read ({error.strerror})"
            raise Unavailable(Reason.BROKEN_ENGINE, text) from error
        if hashlib.sha256(contents).hexdigest() != expected.sha256:
            raise Unavailable(Reason.BROKEN_ENGINE, f"{self.folder.name}/{name} is damaged (its content changed)")
        return contents

    def check_contents(self, check: Check | None = None) -> None:
        """Raise Unavailable when a file's contents have changed since the build. Reads everything, files in parallel.

        For users' checks. Engines that run are read by ``read_checked``: a file can change at any moment.
        """
        with ThreadPoolExecutor(max_workers=4) as pool:
            hashes = {name: pool.submit(file_sha256, self.folder / name, check) for name in self.manifest.files}
            for name, expected in self.manifest.files.items():
                if hashes[name].result() != expected.sha256:
                    why = f"{self.folder.name}/{name} is damaged (its content changed)"
                    raise Unavailable(Reason.BROKEN_ENGINE, why)

    def read_parameters(self) -> dict[str, str]:
        """Return the table that ``write_parameters`` kept.

        Raises:
            Unavailable: there is no such file, or it is damaged.
        """
        try:
            found = schema.loads(self.read_checked(PARAMETERS_NAME))
            return dict(schema.strings(found, PARAMETERS_NAME))
        except schema.MalformedInput as error:
            raise Unavailable(Reason.BROKEN_ENGINE, f"{self.folder.name} cannot take weights ({error})") from error


def describe_files(folder: Path, names: Sequence[str], check: Check | None = None) -> dict[str, EngineFile]:
    """Return size and hash of files in a building folder, for the manifest."""
    return {name: EngineFile((folder / name).stat().st_size, file_sha256(folder / name, check)) for name in names}


def file_sha256(path: Path, check: Check | None = None) -> str:
    """Return the sha256 of a file's contents; ``check`` is called after every few megabytes."""
    h = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        while chunk := file.read(8 << 20):
            h.update(chunk)
            if check is not None:
                check()
    return h.hexdigest()


def write_parameters(folder: Path, initialisers: Mapping[str, str]) -> None:
    """Keep parameter name -> initialiser name; a parameter that the graph does not use has none."""
    (folder / PARAMETERS_NAME).write_text(json.dumps(dict(initialisers), indent=0), encoding="utf-8")


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``|value - reference| / |reference|`` in the 2-norm; infinite when a value is not finite."""
    value, reference = value.double(), reference.double()
    if not (value.isfinite().all() and reference.isfinite().all()):
        return float("inf")
    scale = reference.norm()
    difference = (value - reference).norm()
    return float(difference / scale) if scale > 0 else float(difference)


def furthest(
    names: Sequence[str], values: Sequence[torch.Tensor], references: Sequence[torch.Tensor]
) -> tuple[str, float]:
    """Return the output with the largest relative error, and that error. Compared where the references lie."""
    pairs = zip(names, values, references, strict=True)
    errors = {name: relative_error(value.to(reference.device), reference) for name, value, reference in pairs}
    worst = max(errors, key=errors.__getitem__)
    return worst, errors[worst]
