"""What is slower on the user's ComfyUI than it should be: told in the report, once in the log. Pictures are right."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..comfy_model.comfyui_internals import switched_off
from ..engine_library.manifest import PACK_VERSION

if TYPE_CHECKING:
    from .call_stats import CallStats

log = logging.getLogger(__name__)

APART = "{name} did not run side by side with other ControlNets: this ComfyUI handles them in a way that is not known"
OPENED = "The engine of {name} was opened more than once in a run: ComfyUI closed it in between"
PLAIN = "Calls of {name} could not be recorded as a CUDA graph and run kernel by kernel ({why})"
WAITED = "{name} waited for its ControlNets in each step: their results were read before it started"
REPORT = "The picture is right, only slower. If it stays so, please report it with {versions}."

_told: set[str] = set()
"""What the log of this server has said."""


def log_once(what: str, name: str, why: str = "") -> None:
    """Say what is slow in the log, unless this server has said it before."""
    if what not in _told:
        _told.add(what)
        log.warning("Hybrid TRT: %s. %s", what.format(name=name, why=why), _report())


def sentences(rows: Sequence[CallStats]) -> list[str]:
    """What was slow in a run, a line each, with what to report; empty where all was as fast as it should be."""
    found = [APART.format(name=row.name) for row in rows if row.apart]
    found += [OPENED.format(name=row.name) for row in rows if row.reopened]
    found += [PLAIN.format(name=row.name, why=row.why_plain) for row in rows if row.plain]
    if any(row.late for row in rows):
        unets = [row for row in rows if row.kind == "unet" and row.engine and not row.native]
        found += [WAITED.format(name=row.name) for row in unets if not row.beside]
    found = [f"{what}." for what in dict.fromkeys(found)]
    return [*found, *switched_off(), *([_report()] if found else [])]


def _report() -> str:
    try:
        comfyui = f"ComfyUI {importlib.import_module('comfyui_version').__version__}"
    except (ImportError, AttributeError):
        comfyui = "your version of ComfyUI"
    return REPORT.format(versions=f"{comfyui} and Hybrid TRT {PACK_VERSION}")
