"""Inductor's folder: it runs what it finds there, so nobody but this user may write in it."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

from ...engine_library.safe_files import is_own_folder

log = logging.getLogger(__name__)

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def keep_others_out() -> None:
    """Have Inductor and Triton keep their programs where nobody else can put some; cheap.

    By default that is a folder in the system's one for temporary files, of a name that anybody can make first.
    """
    if os.environ.get(TRITON) and not is_own_folder(Path(os.environ[TRITON])):
        _tell(os.environ.pop(TRITON))  # then Triton's is a folder in Inductor's
    folder = os.environ.get(INDUCTOR) or _default()
    if is_own_folder(Path(folder)):
        return
    private = os.environ[INDUCTOR] = tempfile.mkdtemp(prefix="hybrid-trt-inductor-")
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    _without_shared_headers()
    _tell(folder)


def _tell(folder: str) -> None:
    log.warning(
        "Hybrid TRT: others may write to %s, where torch keeps what it compiles, so another folder is used until "
        "ComfyUI ends, and engines of torch may open more slowly; remove it, or take that right from them",
        folder,
    )


def _default() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def _without_shared_headers() -> None:
    """Keep C++ headers out of the default folder, where Inductor has them compiled whatever folder is set."""
    import torch._inductor.config

    torch._inductor.config.cpp_cache_precompile_headers = False
