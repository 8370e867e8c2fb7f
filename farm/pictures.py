"""Pictures of a request for its workflow: read from it, named by their content, and put into the workflow."""

from __future__ import annotations

import base64
import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .prompts import Prompt, inputs_of

Pictures = dict[str, bytes]
"""Name in the workflow -> the file's bytes."""
KINDS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
FOLDER = "inputs"
"""Folder below ComfyUI's temporary folder."""


def read(carried: Any, prompt: Prompt) -> Pictures:
    """Return the pictures of a request, which has them in base64 by the names that its workflow uses.

    Raises:
        ValueError: an entry has no picture's name, is not in base64, or is not used; the text says which.
    """
    if carried is None:
        return {}
    if not isinstance(carried, Mapping):
        raise ValueError('"inputs" is an object: the name of each picture, and the picture in base64.')
    used = {value for _, _, value in inputs_of(prompt) if isinstance(value, str)}
    found = {}
    for name, data in carried.items():
        if _kind(name) not in KINDS:
            raise ValueError(f"{name!r} is no picture's name: it ends with {', '.join(KINDS)}.")
        if name not in used:
            raise ValueError(f"The request brings {name!r}, and no input of the workflow has this value.")
        try:
            found[name] = base64.b64decode(data, validate=True)
        except (ValueError, TypeError):
            raise ValueError(f"{name!r} is not in base64.") from None
    return found


def of_folder(prompt: Prompt, folder: Path) -> Pictures:
    """Return the pictures of a folder, and of folders in it, that a workflow names.

    Raises:
        ValueError: a picture cannot be read.
    """
    root, found = folder.resolve(), {}
    for _, _, value in inputs_of(prompt):
        if not isinstance(value, str) or _kind(value) not in KINDS:
            continue
        path = (root / value).resolve()
        if path.is_relative_to(root) and path.is_file():
            try:
                found[value] = path.read_bytes()
            except OSError as error:
                raise ValueError(f"A picture of the workflow cannot be read: {error}") from None
    return found


def for_request(pictures: Pictures) -> dict[str, str]:
    """Return pictures in the form of a request."""
    return {name: base64.b64encode(data).decode() for name, data in pictures.items()}


def put(prompt: Prompt, pictures: Pictures, temporary: Path) -> Prompt:
    """Write pictures below ComfyUI's temporary folder, and return a copy of the workflow that reads them there.

    Their names are hashes of their contents, so ComfyUI recognises the same picture and reuses its cached results.
    """
    names = {}
    for name, data in pictures.items():
        path = temporary / FOLDER / f"{hashlib.sha256(data).hexdigest()}{_kind(name)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        names[name] = f"{FOLDER}/{path.name} [temp]"
    ready = copy.deepcopy(prompt)
    for inputs, key, value in inputs_of(ready):
        if isinstance(value, str) and value in names:
            inputs[key] = names[value]
    return ready


def _kind(name: Any) -> str:
    return Path(name).suffix.lower() if isinstance(name, str) else ""
