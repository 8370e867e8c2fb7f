"""Run a module of the pack outside ComfyUI, whatever the pack's folder is called and whatever lies on sys.path.

Imported by ``__main__`` and run as a script by ``worker_process``; so it uses nothing of the pack, nor anything heavy.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STACK_VARIABLE = "HYBRID_TRT_BUILD_STACK"
"""Variable with the bytes of stack for this process, see ``Backend.build_stack``."""
NAME = "hybrid_trt"
"""Name of the pack as a package here; inside ComfyUI it is its folder's."""


def load_pack() -> None:
    """Make the pack importable as the package ``hybrid_trt``."""
    # the pack's `nodes` would hide ComfyUI's, and files of this folder other modules
    hidden = {str(ROOT), str(ROOT / "engine_builder")}
    sys.path[:] = [p for p in sys.path if os.path.realpath(p or os.curdir) not in hidden]
    if NAME not in sys.modules:
        init, folders = ROOT / "__init__.py", [str(ROOT)]
        spec = importlib.util.spec_from_file_location(NAME, init, submodule_search_locations=folders)
        package = sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)


def run(module: str, arguments: list[str]) -> int:
    """Call ``main(arguments)`` of a module of the pack and return its exit status."""
    load_pack()
    return importlib.import_module(f"{NAME}.{module}").main(arguments)


def take_stack() -> None:
    """Restart this process with the requested stack: threads of libraries get the stack size at its start."""
    wanted = int(os.environ.pop(STACK_VARIABLE, "0"))
    try:
        import resource
    except ImportError:  # Windows, where no program has this limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    os.execv(sys.executable, sys.orig_argv)


if __name__ == "__mp_main__":  # a child of one of the pack's processes, see ``worker.helpers``
    load_pack()
if __name__ == "__main__":
    take_stack()
    sys.exit(run(sys.argv[1], sys.argv[2:]))
