"""Versions that are not those that the project is tested with: of ComfyUI, and of packages beside their pins."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement


def version_of_comfyui(folder: Path) -> str:
    """Return the version in a checkout's comfyui_version.py, read and not run."""
    try:
        text = (folder / "comfyui_version.py").read_text(encoding="utf-8")
    except OSError:
        return "of unknown version"
    found = re.search(r"__version__\s*=\s*[\"']([^\"']+)", text)
    return found[1] if found else "of unknown version"


def differing_packages(pins: Iterable[str], installed: Callable[[str], str] = version) -> list[str]:
    """Each package that has another version than its pin, or is missing; ``torch 2.7.1+cu126`` is ``torch==2.7.1``."""
    differing = []
    for line in pins:
        if not line.strip() or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            found = installed(requirement.name)
        except PackageNotFoundError:
            found = "missing"
        if found == "missing" or not requirement.specifier.contains(found, prereleases=True):
            differing.append(f"{requirement.name} {found} (pinned {str(requirement.specifier).removeprefix('==')})")
    return differing


def header(comfyui: Path | None, tested: str, pins: Iterable[str]) -> list[str]:
    """Lines for the start of the tests; where nothing differs one that says so."""
    lines = []
    found = tested if comfyui is None else version_of_comfyui(comfyui)
    if found != tested:
        lines.append(f"ComfyUI {found}, the project is tested with {tested} ({comfyui})")
    if packages := differing_packages(pins):
        lines.append(f"packages beside their pins: {', '.join(packages)}")
    return lines or [f"ComfyUI {tested} and packages are the pinned ones"]
