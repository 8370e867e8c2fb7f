"""One file to carry an engine to another machine: a zip without compression, read with suspicion."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import struct
import zipfile
from pathlib import Path, PureWindowsPath

from . import schema, verified
from .atomic_files import replace, temporary_beside
from .disk import LibraryError, check_room, readable
from .engine import Check, Engine, may_be_program
from .library import Library
from .manifest import EXPORT_FORMAT, MANIFEST_NAME, MAX_BYTES, Manifest, ManifestError
from .settings import check_limit

SUFFIX = ".trtengine"
CHUNK = 4 << 20

_PROGRAM_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04", b"\x7fELF", b"MZ")
# what zipfile raises at archives that somebody bent
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError, OverflowError, struct.error,
            LookupError)  # fmt: skip
_RAW = ".data"  # an ONNX graph's weights: any bytes, and only ever read as numbers


def export_engine(engine: Engine, target: Path, check: Check | None = None) -> Path:
    """Write an engine into one file; it appears under its name when it is complete.

    Args:
        target: the file, or a folder to put ``<engine>.trtengine`` in.

    Raises:
        LibraryError: the target cannot be written, or the engine holds programs and serves on this machine only.
        Unavailable: the engine is damaged.
    """
    if engine.holds_programs:
        raise LibraryError(
            f"{engine.folder.name} was not exported: it holds compiled programs, which no other machine would open. "
            "Build it there; that machine's own build is the only one it trusts"
        )
    engine.check_sizes()
    engine.check_contents(check)
    if target.is_dir():
        target = target / (engine.folder.name + SUFFIX)
    temporary = temporary_beside(target)
    try:
        check_room(target.parent, engine.manifest.bytes, f"Exporting {engine.folder.name}")
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.writestr(MANIFEST_NAME, json.dumps(_for_others(engine.manifest).to_json(), indent=1))
            for name in engine.manifest.files:
                with (engine.folder / name).open("rb") as file, archive.open(name, "w", force_zip64=True) as out:
                    while chunk := file.read(CHUNK):
                        out.write(chunk)
                        if check is not None:
                            check()
        replace(temporary, target)
    except OSError as error:
        why = error.strerror or error
        raise LibraryError(
            f"{engine.folder.name} was not exported: {target.parent} could not be written ({why}); choose a folder "
            "that is there and has room"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return target


def import_engine(library: Library, source: Path, check: Check | None = None) -> Engine:
    """Check an engine's file and put the engine into the library; an engine with the same key is replaced.

    It serves once a build has compared it with native: its hashes say that it arrived whole, not what it computes.
    Names, sizes and hashes have to be those of the manifest; files that can carry programs are refused.

    Raises:
        LibraryError: the file is none of ours, damaged or refused, or the library cannot be written.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            manifest = _manifest(archive, source)
            check_room(library.roots[0], manifest.bytes, f"Importing {source.name}")
            target = library.roots[0] / manifest.identity.folder_name
            check_limit(library, manifest.bytes, f"Importing the engine of {manifest.label}", replaced=target)
            folder = library.building_folder()
            try:
                for name in manifest.files:
                    _extract(archive, name, manifest, folder, source, check)
                engine = library.publish(folder, manifest, check, record=None)
                verified.remember(engine)
                return engine
            except OSError as error:
                raise readable(error, library.roots[0]) from error
            finally:
                library.discard(folder)
    except _DAMAGED as error:
        raise _refused(source, f"it is damaged or not an engine's file ({error})") from error
    except FileNotFoundError:
        raise LibraryError(f"there is no file {source}; nothing was imported") from None
    except OSError as error:
        raise _refused(source, f"it cannot be read ({error})") from error


def _for_others(manifest: Manifest) -> Manifest:
    """A manifest that names no place on this machine, or on any: of the weights' file only its name is left."""
    name = manifest.source.get("name") or PureWindowsPath(manifest.source.get("path", "")).name  # which splits at / too
    return dataclasses.replace(manifest, source={"name": name} if name else {})


def _manifest(archive: zipfile.ZipFile, source: Path) -> Manifest:
    """The manifest of an archive whose list of contents is exactly what the manifest says."""
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(set(names)) != len(names):
        raise _refused(source, "two of its files have the same name")
    for member in members:
        name = member.filename
        if not schema.plain_name(name):
            raise _refused(source, f"it has a file outside of the engine's folder, or with no plain name ({name!r})")
        if member.compress_type != zipfile.ZIP_STORED:
            raise _refused(source, f"{name} is compressed")
    if MANIFEST_NAME not in names or archive.getinfo(MANIFEST_NAME).file_size > MAX_BYTES:
        raise _refused(source, f"it has no {MANIFEST_NAME} of a sensible size")
    try:
        manifest = Manifest.parse(archive.read(MANIFEST_NAME), f"{MANIFEST_NAME} in {source.name}")
    except ManifestError as error:
        raise _refused(source, str(error)) from error
    if set(names) != {MANIFEST_NAME, *manifest.files} or not manifest.files:
        raise _refused(source, "its files are not those that its manifest names")
    for name, expected in manifest.files.items():
        if archive.getinfo(name).file_size != expected.bytes:
            raise _refused(source, f"{name} does not have the size that its manifest names")
        if may_be_program(name) or name.startswith("."):
            raise _refused(source, f"{name} may contain a program, which an engine from elsewhere must not")
    if manifest.identity.export_format != EXPORT_FORMAT:
        made_with = manifest.identity.export_format
        raise _refused(source, f"it has export format {made_with} and this version uses {EXPORT_FORMAT}")
    if not schema.plain_name(manifest.identity.folder_name):
        raise _refused(source, "its manifest's names do not make a folder's name")
    return _for_others(manifest)


def _extract(
    archive: zipfile.ZipFile, name: str, manifest: Manifest, folder: Path, source: Path, check: Check | None
) -> None:
    with archive.open(name) as packed, (folder / name).open("xb") as file:
        start = packed.read(8)
        if start.startswith(_PROGRAM_STARTS) and not name.endswith(_RAW):
            raise _refused(source, f"{name} begins like a program or a pickle, which an engine must not")
        h = hashlib.sha256(start)
        file.write(start)
        while chunk := packed.read(CHUNK):
            h.update(chunk)
            file.write(chunk)
            if check is not None:
                check()
    if h.hexdigest() != manifest.files[name].sha256:
        raise _refused(source, f"{name} is damaged (its hash differs)")


def _refused(source: Path, why: str) -> LibraryError:
    return LibraryError(f"{source.name} was not imported: {why}. The library is as it was; export the engine again")


def manifest_of(source: Path) -> Manifest:
    """The manifest of an engine's file.

    Raises:
        LibraryError: the file is none of ours.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            return _manifest(archive, source)
    except (OSError, *_DAMAGED) as error:
        raise LibraryError(f"{source} is no engine's file ({error}); nothing was read from it") from error
