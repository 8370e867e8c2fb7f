"""Which engines were built on this machine, or compared with native on it, and on which GPU: only these serve.

An engine's key is a hash that anybody can compute over whatever files, so it says nothing about what these compute. A
record beside the manifest, signed with this machine's secret, does; it is no part of an exported engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from . import local_key, schema
from .atomic_files import write_file
from .fallback import Fallback, Reason
from .manifest import RECORD_NAME, Manifest

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

BUILT, CHECKED, REFUSED = "built", "checked", "refused"
MAX_BYTES = 1 << 20
_NAMES = ("verdict", "why", "parity", "gpu")


@dataclass(frozen=True)
class Record:
    """What this machine knows of an engine.

    Attributes:
        verdict: ``"built"`` here; ``"checked"``: since then compared with native on another GPU; ``"refused"``.
        why: what is wrong with a refused one.
        parity: figures of the check, as in a manifest; those of a GPU also have its ``driver``, and milliseconds of one
            call, ``engine_ms`` and ``native_ms``. Those of an engine that takes any weights have ``refit_s``: so many
            seconds it took to take all of them.
        gpu: on which GPU it ran and computed what native does; ``""`` on none.
    """

    verdict: str
    why: str = ""
    parity: Mapping = field(default_factory=dict)
    gpu: str = ""

    @property
    def fields(self) -> dict:
        """What is signed, besides the manifest."""
        return {
            "verdict": self.verdict,
            "why": schema.printable(self.why),
            "parity": dict(self.parity),
            "gpu": schema.printable(self.gpu),
        }


BUILT_HERE = Record(BUILT)
"""Of an engine whose graph was compared with native, and that has not run on a GPU."""

_known: dict[str, tuple[tuple, Record | None]] = {}
_unkept: dict[tuple[str, str], Record] = {}
"""Records of engines whose signature could not be written, until this process ends."""


def keep(folder: Path, manifest: Manifest, record: Record, home: Path | None = None) -> None:
    """Sign an engine's record and keep it in ``folder``, or beside the secret when the library is read-only.

    Args:
        folder: where the engine's files are now.
        home: where they will be, when that is elsewhere.
    """
    try:
        fields = record.fields
        text = json.dumps({**fields, "signature": local_key.sign(_signed(manifest, fields))}, indent=1)
        elsewhere = _elsewhere(manifest)
        try:
            write_file(folder / RECORD_NAME, text)
        except OSError:
            elsewhere.parent.mkdir(exist_ok=True)
            write_file(elsewhere, text)
        else:
            elsewhere.unlink(missing_ok=True)  # which would win
        _unkept.pop((str(home or folder), manifest.digest), None)
    except OSError as error:
        _unkept[str(home or folder), manifest.digest] = record
        log.warning(
            "Hybrid TRT: that %s was %s here cannot be kept (%s), so it is known until ComfyUI ends; let %s name a "
            "folder that can be written and that lasts",
            (home or folder).name, record.verdict, error, local_key.FOLDER_VARIABLE,
        )  # fmt: skip


def record_of(engine: Engine) -> Record | None:
    """What this machine knows of an engine, or None; cheap while no file changes."""
    if (unkept := _unkept.get((str(engine.folder), engine.manifest.digest))) is not None:
        return unkept
    places = [engine.folder / RECORD_NAME]
    with contextlib.suppress(OSError):  # no home
        places.insert(0, _elsewhere(engine.manifest))  # newer: it was written when the folder could not be any more
    stamp = (engine.manifest.digest, local_key.stamp(), *(_stamp(place) for place in places))
    known = _known.get(str(engine.folder))
    if known is None or known[0] != stamp:
        found = next((record for place in places if (record := _read(place, engine.manifest)) is not None), None)
        known = _known[str(engine.folder)] = (stamp, found)
    return known[1]


def figures(engine: Engine) -> Mapping:
    """How far an engine is from native: by this machine's own check, else by its build's."""
    record = record_of(engine)
    return record.parity if record is not None and record.parity else engine.manifest.parity


def built_here(engine: Engine) -> bool:
    """Whether this machine built an engine, and nobody has changed what its manifest says since."""
    record = record_of(engine)
    return record is not None and record.verdict == BUILT


def pace(engine: Engine, gpu: str) -> float | None:
    """What part of native's time a call takes, as this machine measured it on this GPU: 0.5 is twice as fast.

    None without such figures. Engines are timed at their own best sizes, so milliseconds of two cannot be held against
    each other, and their parts of native's time can. Two faults stay: native waits more for launches at small sizes,
    which flatters engines for those; and native's time is in the figure, as unsteady as the machine was, so parts that
    differ by a few percent are alike. Milliseconds would be more honest if all were taken at the size a node wants.
    """
    record = record_of(engine)
    if not gpu or record is None or record.gpu != gpu:
        return None
    took, native = figures(engine).get("engine_ms"), figures(engine).get("native_ms")
    return took / native if took and native else None


def is_slow(engine: Engine, gpu: str) -> bool:
    """Whether an engine was no faster than native on this GPU."""
    found = pace(engine, gpu)
    return found is not None and found >= 1


def flaw(engine: Engine, gpu: str = "") -> Fallback | None:
    """Why an engine must not serve on this machine, or None: it was built or checked here.

    Args:
        gpu: where it is to run; ``""`` is the CPU.
    """
    record = record_of(engine)
    if record is None:
        return Fallback(Reason.STALE_ENGINE, f"{engine.folder.name} was not built on this machine{_lost()}")
    if record.verdict == REFUSED:
        return Fallback(Reason.BROKEN_ENGINE, record.why)
    if gpu and record.gpu != gpu:
        elsewhere = f"has run on {record.gpu}" if record.gpu else "has not run on a GPU yet"
        return Fallback(Reason.UNCHECKED, f"{engine.folder.name} {elsewhere} and was not compared with native on {gpu}")
    return None


def _lost() -> str:
    if local_key.stamp() is not None:
        return ""
    return (
        f", or this machine's secret is gone (a container that forgets its home: let {local_key.FOLDER_VARIABLE} name "
        "a folder that lasts and that only you can read)"
    )


def _signed(manifest: Manifest, fields: Mapping) -> str:
    return json.dumps([manifest.digest, fields], sort_keys=True)


def _read(path: Path, manifest: Manifest) -> Record | None:
    try:
        with path.open("rb") as file:
            data = schema.mapping(schema.loads(file.read(MAX_BYTES)), "", (*_NAMES, "signature"))
    except (OSError, schema.MalformedInput):
        return None
    fields = {name: data[name] for name in _NAMES}
    return Record(**fields) if local_key.is_signed(_signed(manifest, fields), data["signature"]) else None


def _elsewhere(manifest: Manifest) -> Path:
    return local_key.folder() / "checked" / f"{manifest.digest[:40]}.json"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
