"""The report for support from the command line, whatever is missing: ComfyUI, torch, a GPU or the library."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from ...engine_library import Library
from ..doctor import KeptWarnings, ReportContext, as_text, report
from . import comfyui


def examined(options: Namespace) -> tuple[dict[str, Any], str]:
    """Return the report as data and as text."""
    root = library = None
    lost: list[str] = []
    with KeptWarnings() as warnings:
        try:
            root = comfyui.find(options.comfyui)
            library = comfyui.library(options.library, root)
        except Exception as error:  # also what ComfyUI raises where its packages are missing
            lost.append(f"{error}" if isinstance(error, comfyui.Unusable) else f"{type(error).__name__}: {error}")
            library = None if options.library is None else Library([options.library])
        limits = None if root is None or lost else _limits
        place = ReportContext(root, library, lambda: comfyui.device(options.device), limits=limits, lost=lost)
        data = report(place, lambda: warnings.lines)
    return data, as_text(data)


def _limits() -> list[str]:
    import torch
    from comfy.cli_args import args

    from ...comfy_model.comfyui_internals import switched_off

    args.cpu = args.cpu or not torch.cuda.is_available()
    return switched_off()
