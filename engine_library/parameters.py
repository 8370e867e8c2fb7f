"""Which of a graph's initialisers hold which parameters of its network: a file beside the graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

PARAMETERS_NAME = "parameters.json"


def write_parameters(folder: Path, initialisers: Mapping[str, str]) -> None:
    """Keep parameter name -> initialiser name; a parameter that the graph does not use has none."""
    (folder / PARAMETERS_NAME).write_text(json.dumps(dict(initialisers), indent=0), encoding="utf-8")


def read_parameters(folder: Path) -> dict[str, str]:
    """The inverse of ``write_parameters``.

    Raises:
        OSError, ValueError: there is no such file, or it is damaged.
    """
    found = json.loads((folder / PARAMETERS_NAME).read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ValueError(f"{PARAMETERS_NAME} holds no names")
    return found
