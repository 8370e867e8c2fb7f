"""A real ComfyUI on the GPUs of this machine, with an empty engine library."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comfy_process import ComfyProcess
from hybrid_trt.engine_library.disk import Settings, write_settings
from pack import ROOT


@contextmanager
def gpu_server(environment: Any, page: Path, *arguments: str) -> Iterator[ComfyProcess]:
    """A server that remembers no latents of prompts that it has seen before.

    Args:
        page: an empty folder, for a page with nothing on it.
    """
    (page / "index.html").write_text("<html></html>")
    library = environment.base / "models" / "trt_engines"
    shutil.rmtree(library, ignore_errors=True)
    write_settings(library, Settings(tensorrt_level=1))  # quick builds: it is not speed that is shown here
    for name, target in (("hybrid-trt", ROOT), ("comfy_test_nodes", ROOT / "tests" / "comfy_test_nodes")):
        link = environment.base / "custom_nodes" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(target, target_is_directory=True)
    given = ["--front-end-root", str(page), "--cache-classic", *arguments]
    with ComfyProcess(environment.comfyui, environment.base, arguments=given, cpu=False) as process:
        yield process
