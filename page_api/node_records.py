"""Records of engine nodes' requests, kept in the library's folder so that they outlast a restart."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from ..engine_library import Reason, schema
from ..engine_library.manifest import read_profile
from ..engine_library.safe_files import NOTES, read_json, write_file

log = logging.getLogger(__name__)

FILE_NAME = ".engine_nodes.json"


@dataclass(frozen=True)
class NodeRecord:
    """Record of an engine node's request, as learnt when it ran. ``weights`` is ``""`` until they are hashed;
    ``without_engine`` says what serves besides native while there is no engine."""

    label: str
    architecture: str
    precision: str
    profile: dict[str, list[int]]
    backend: str
    device: str
    weights: str
    refusal: tuple[str, str] | None
    source: dict | None
    without_engine: str = ""
    kind: str = ""
    parameters: int = 0


_KEPT = {field.name for field in fields(NodeRecord)}
_TEXTS = _KEPT - {"profile", "refusal", "source", "parameters"}


def read_records(path: Path) -> OrderedDict[str, NodeRecord]:
    """Return the kept records; malformed entries, which somebody else wrote, are left out."""
    known: OrderedDict[str, NodeRecord] = OrderedDict()
    try:
        data = read_json(path, NOTES)
    except (OSError, ValueError):
        return known
    for key, entry in data.items() if isinstance(data, dict) else ():
        try:
            known[key] = _record(entry)
        except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:  # torch raises the last
            log.debug("Hybrid TRT: what an engine node wants was kept in another form (%s)", error)
    return known


def _record(entry: object) -> NodeRecord:
    entry = dict(schema.mapping(entry, "a node", _KEPT))
    source, refusal = entry["source"] or {"path": ""}, entry["refusal"] or (Reason.NO_ENGINE.value, "")
    reason, detail = refusal
    texts = (source["path"], detail, *(entry[name] for name in _TEXTS))
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is none")
    schema.integer(entry["parameters"], "parameters")
    schema.integer(source.get("size", 0), "source.size")
    read_profile(entry["profile"])
    if entry["architecture"]:
        torch.device(entry["device"])
    return NodeRecord(**entry | {"refusal": (Reason(reason).value, detail) if entry["refusal"] else None})


def write_records(path: Path, known: OrderedDict[str, NodeRecord]) -> None:
    """Keep records. A library that cannot be written costs the memory of a restart only, so that is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps({key: asdict(entry) for key, entry in known.items()}))
    except OSError as error:
        log.debug("Hybrid TRT: what the engine nodes want was not kept (%s)", error)
