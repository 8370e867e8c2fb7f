"""Folder of this ComfyUI's library."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import folder_paths

from ..comfy_model import hash_cache
from ..engine_library import Library

FOLDER_KEY = "trt_engines"

# after the folders of extra_model_paths.yaml: builds go to the first folder, and engines of all are found
folder_paths.add_model_folder_path(FOLDER_KEY, str(Path(folder_paths.models_dir) / FOLDER_KEY))


@cache
def _library(roots: tuple[str, ...]) -> Library:
    found = Library([Path(root) for root in roots])
    found.sweep()
    hash_cache.use(Path(roots[0]))
    return found


def library() -> Library:
    """Return the library of this ComfyUI, wherever its settings put ``models/trt_engines``."""
    return _library(tuple(folder_paths.get_folder_paths(FOLDER_KEY)))
