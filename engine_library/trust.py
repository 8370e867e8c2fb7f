"""Trust in engines: an engine serves only if this machine built it, and on GPUs where it matched native.

An engine's key is a hash that anybody can compute over any files, so it proves nothing about their results. A signed
record beside the manifest does, with a secret of this user as its key. Machines that share the secret's folder trust
each other's engines, and so do workers with one fleet key, which signs the record as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from . import fleet_key, schema
from .fallback import Fallback, Reason
from .gpu import driver_version
from .manifest import RECORD_NAME, Manifest
from .safe_files import claim, is_private, open_regular, read_json, replace, temporary_beside, write_file

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "HYBRID_TRT_KEY_FOLDER"
KEY_LENGTH = 32
SEAL = 64
"""Characters of a signature."""
BUILT, REFUSED = "built", "refused"
_NAMES = ("verdict", "why", "parity", "gpu")
_OWN, _FLEET = "signature", "fleet"
"""Names of a record's signatures: with this machine's secret, and with the fleet key where there is one."""


@dataclass(frozen=True)
class Record:
    """Knowledge of this machine about an engine.

    Attributes:
        verdict: ``"built"``: made here; ``"refused"``: it computes something else than native.
        why: the fault of a refused engine.
        parity: figures of the comparison on a device, as in a manifest. On a GPU also its ``driver``, and milliseconds
            of one call, ``engine_ms`` and ``native_ms``, or the ``relative_time`` of a network in blocks; for an
            engine of any weights ``refit_s``: seconds to take all.
        gpu: the GPU on which it ran and matched native; ``""``: none.
        here: False if another worker with our fleet key signed it.
    """

    verdict: str
    why: str = ""
    parity: Mapping = field(default_factory=dict)
    gpu: str = ""
    here: bool = True

    @property
    def fields(self) -> dict:
        """The part that is signed, besides the manifest."""
        texts = {"why": schema.printable(self.why), "gpu": schema.printable(self.gpu)}
        return {"verdict": self.verdict, "parity": dict(self.parity), **texts}


BUILT_HERE = Record(BUILT)
"""Record of an engine whose graph was compared with native, and that has not run on a GPU."""

_known: dict[str, tuple[tuple, Record | None]] = {}
_unkept: dict[tuple[str, str], tuple[Record, tuple]] = {}
"""Records whose signature could not be written, with stamps of the keys then: they count until such a key changes."""


def keep(folder: Path, manifest: Manifest, record: Record, home: Path | None = None) -> None:
    """Sign an engine's record and keep it in ``folder``, or beside the secret when the library is read-only.

    Beside the secret as well when another worker of the fleet built it: that worker's record stays in the folder.

    Args:
        folder: where the engine's files are now.
        home: where they will be, when that is elsewhere.
    """
    try:
        fields, place, elsewhere = record.fields, folder / RECORD_NAME, _elsewhere(manifest)
        there = _read(place, manifest)
        taken_over = there is not None and not there.here
        text = json.dumps({**fields, **_signatures(_signed(manifest, fields), taken_over)}, indent=1)
        if not taken_over and _wrote(place, text):
            elsewhere.unlink(missing_ok=True)  # it would take precedence
        else:
            elsewhere.parent.mkdir(parents=True, exist_ok=True)
            write_file(elsewhere, text)
        _unkept.pop((str(home or folder), manifest.digest), None)
    except OSError as error:
        _unkept[str(home or folder), manifest.digest] = record, (key_stamp(), fleet_key.stamp())
        log.warning(
            "Hybrid TRT: that %s was %s here cannot be kept (%s), so it is known until ComfyUI ends; let %s name a "
            "folder that can be written and that lasts",
            (home or folder).name, record.verdict, error, FOLDER_VARIABLE,
        )  # fmt: skip


def record_of(engine: Engine) -> Record | None:
    """Return this machine's record of an engine, else its fleet's, or None; cheap while no file changes."""
    keys = (key_stamp(), fleet_key.stamp())
    unkept, then = _unkept.get((str(engine.folder), engine.manifest.digest), (None, ()))
    if unkept is not None and all(stamp in (None, now) for stamp, now in zip(then, keys, strict=True)):
        return unkept
    places = [engine.folder / RECORD_NAME]
    with contextlib.suppress(OSError):  # no home
        places.insert(0, _elsewhere(engine.manifest))  # newer: it was written when the folder was read-only
    stamp = (engine.manifest.digest, *keys, *(_stamp(place) for place in places))
    known = _known.get(str(engine.folder))
    if known is None or known[0] != stamp:
        found = next((record for place in places if (record := _read(place, engine.manifest)) is not None), None)
        known = _known[str(engine.folder)] = (stamp, found)
    return known[1]


def built_here(engine: Engine) -> bool:
    """Tell whether this machine or its fleet built an engine, and nobody has changed what its manifest says since."""
    record = record_of(engine)
    return record is not None and record.verdict == BUILT


def why_unusable(engine: Engine, gpu: str = "") -> Fallback | None:
    """Return why an engine must not serve on this machine, or None.

    Args:
        gpu: where it is to run; ``""`` is the CPU.
    """
    record = record_of(engine)
    if record is None:
        lost = "" if key_stamp() is not None else (
            ", or this machine's secret is gone (in a container that forgets its home, let "
            f"{FOLDER_VARIABLE} name a folder that lasts and that only you can read)"
        )  # fmt: skip
        if refused := fleet_key.why_refused():
            lost += f", and no fleet key is used: {refused}"
        return Fallback(Reason.STALE_ENGINE, f"{engine.folder.name} was not built on this machine{lost}")
    if record.verdict == REFUSED:
        return Fallback(Reason.BROKEN_ENGINE, record.why)
    if gpu and record.gpu != gpu:
        elsewhere = f"has run on {record.gpu}" if record.gpu else "has not run on a GPU yet"
        text = f"{engine.folder.name} {elsewhere} and was not compared with the normal model on {gpu}"
        return Fallback(Reason.UNCHECKED, text)
    proved = (record.parity or engine.manifest.parity).get("driver") or "unknown"
    if gpu and not record.here and proved != driver_version():
        text = f"{engine.folder.name} was built by another worker with driver {proved}, and here it is"
        here = driver_version() or "unknown"
        return Fallback(Reason.UNCHECKED, f"{text} {here}: it was not compared with the normal model")
    return None


def _signed(manifest: Manifest, fields: Mapping) -> str:
    return json.dumps([manifest.digest, fields], sort_keys=True)


def _signatures(text: str, taken_over: bool) -> dict[str, str]:
    """Return a text's signatures: an engine outlives the fleet key on the machine that built it, and on no other."""
    if not (fleet := fleet_key.sign(text)):
        return {_OWN: sign(text)}
    with contextlib.suppress(OSError):
        return {_OWN: sign(text + fleet * taken_over), _FLEET: fleet}
    return {_OWN: "", _FLEET: fleet}  # no secret can be kept here, so this worker knows it by the fleet key alone


def _read(path: Path, manifest: Manifest) -> Record | None:
    """Return a record that is whole, signed by this machine or its fleet, and of this manifest.

    Earlier versions knew more verdicts.
    """
    try:
        data = schema.mapping(read_json(path), "", (*_NAMES, _OWN), (_FLEET,))
    except (OSError, schema.MalformedInput):
        return None
    fields = {name: data[name] for name in _NAMES}
    text = _signed(manifest, fields)
    fleet = fleet_key.is_signed(text, data.get(_FLEET))
    here = is_signed(text, data[_OWN]) or fleet and is_signed(text + data[_FLEET], data[_OWN])
    return Record(**fields, here=here) if (here or fleet) and fields["verdict"] in (BUILT, REFUSED) else None


def _wrote(path: Path, text: str) -> bool:
    """Write a file and tell whether that could be done."""
    try:
        write_file(path, text)
    except OSError:
        return False
    return True


def _elsewhere(manifest: Manifest) -> Path:
    return key_folder() / "checked" / f"{manifest.digest[:40]}.json"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.lstat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


# --- the secret of this user on this machine ---


def key_folder() -> Path:
    """Return the folder of the secret.

    Raises:
        OSError: this user has no home, and the variable names no folder.
    """
    if named := os.environ.get(FOLDER_VARIABLE) or os.environ.get("XDG_CONFIG_HOME"):
        return Path(named) / "hybrid-trt"
    try:
        return Path.home() / ".config" / "hybrid-trt"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def sign(text: str) -> str:
    """Return the signature of a text; makes the secret when there is none.

    Raises:
        OSError: there is no secret and none can be kept.
    """
    return fleet_key.digest(_read_key() or _make_key(), text)


def is_signed(text: str, signature: object) -> bool:
    """Tell whether a signature of a text was made here."""
    return fleet_key.matches(_read_key(), text, signature)


def seal(contents: bytes, what: str) -> bytes:
    """Return contents behind a signature, which covers their purpose ``what`` too.

    Raises:
        OSError: as ``sign``.
    """
    return sign(_sealed(contents, what)).encode() + contents


def unseal(sealed: bytes, what: str) -> bytes | None:
    """Return the contents of ``seal``; None where they were not sealed here for this purpose."""
    signature, contents = sealed[:SEAL], sealed[SEAL:]
    ours = is_signed(_sealed(contents, what), signature.decode("ascii", "replace"))
    return contents if ours else None


def _sealed(contents: bytes, what: str) -> str:
    return json.dumps([what, hashlib.sha256(contents).hexdigest()])


def key_stamp() -> tuple | None:
    """Return a value that changes when the secret does, or who may read it; None where there is none."""
    try:
        stat = _key_path().stat()
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) if stat.st_size == KEY_LENGTH else None


def _key_path() -> Path:
    return key_folder() / "local.key"


def _read_key() -> bytes | None:
    """Return the secret, if it is whole: an empty or cut file is a secret that everybody knows."""
    try:
        with os.fdopen(open_regular(_key_path()), "rb") as file:
            key, private = file.read(KEY_LENGTH + 1), is_private(file.fileno(), _key_path())
    except OSError:
        return None
    if not private:
        log.warning(
            "Hybrid TRT: %s may be read by other users, or is another user's, so engines that it signed are not used "
            "and the normal model runs; build them again, which makes a new secret", _key_path(),
        )  # fmt: skip
    return key if private and len(key) == KEY_LENGTH else None


def _make_key() -> bytes:
    path = _key_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_LENGTH))
        if path.exists() and _read_key() is None:
            replace(temporary, path)
        else:
            try:
                claim(temporary, path)
            except FileExistsError:
                pass
            except OSError:  # no links on this disk
                replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    if (key := _read_key()) is None:  # another process may have been first: then its secret counts
        raise OSError(f"{path} cannot be kept")
    return key
