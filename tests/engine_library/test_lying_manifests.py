"""Manifests that somebody else wrote: read by one reader that knows every value's form, or refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import publish, query_of
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.engine_library import Engine, Library, Manifest, Reason, Unavailable, schema
from hybrid_trt.engine_library.inventory import BROKEN, delete, entries, verify
from hybrid_trt.engine_library.manifest import ManifestError
from hybrid_trt.sessions.file_session import FileSession
from json_places import changed, places, with_true_key

NASTY: list[Any] = [
    None, True, -1, 0, 1.5, 10**400, float("nan"), float("inf"), "", "evil", "a\0b", "\ud800", "x" * 100_000, "../x",
    "con", "dot.", "blank ", [], {}, [[]], {"a": {}}, ["B/0"], {"B": [2, 1, 1]},
]  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    name = publish(tmp_path / "library")
    return next(e for e in Library([tmp_path / "library"]).engines() if e.folder.name == name)


@pytest.mark.fault("a manifest's value is of a wrong type, too large or no number",
                   see="the panel calls the engine broken")
def test_whatever_stands_in_a_manifest_it_is_refused_or_serves_every_use(engine: Engine) -> None:
    data = json.loads((engine.folder / "manifest.json").read_text())
    refused = read = 0
    for path in places(data):
        for value in NASTY:
            text = json.dumps(changed(data, path, value)).encode()
            try:
                manifest = Manifest.parse(text, "it")
            except ManifestError as error:
                str(error).encode()
                refused += 1
                continue
            read += 1
            json.dumps(manifest.to_json(), allow_nan=False).encode()
            assert Manifest.parse(json.dumps(manifest.to_json()).encode(), "it") == manifest
            FileSession(Engine(engine.folder, manifest), backends()["onnxruntime"].load, torch.device("cpu"))
            str(manifest.identity.profile), manifest.identity.folder_name.encode()
    assert refused > 5 * read > 0


@pytest.mark.fault("a manifest lies about names, sizes or files",
                   see="the panel calls the engine broken, and can delete it")
@pytest.mark.parametrize("spoil", [
    lambda d: d["inputs"][0].update(dtype="evil"),
    lambda d: d.update(source={"path": "\ud800"}),
    lambda d: d["parity"].update(rel_err=float("nan")),
    lambda d: d.update(seconds=3),
    lambda d: d.update(more="unknown"),
    lambda d: d["files"].update({"aux.onnx": d["files"].pop("model.onnx")}),
    lambda d: d["files"].update({"model.onnx ": d["files"].pop("model.onnx")}),
    lambda d: d["files"].update({"manifest.JSON": d["files"]["model.onnx"]}),
    lambda d: d["files"].clear(),
    lambda d: d["outputs"][0].update(dims=["Q"]),
    lambda d: d["outputs"][0].update(dims=["B*Q"]),
])  # fmt: skip
def test_an_engine_with_a_lie_is_broken_serves_nobody_and_can_be_removed(
    engine: Engine, tmp_path: Path, spoil: Callable[[dict], object]
) -> None:
    path = engine.folder / "manifest.json"
    data = json.loads(path.read_text())
    spoil(data)
    path.write_text(json.dumps(with_true_key(data)))
    library = Library([tmp_path / "library"])
    (entry,) = entries(library, lambda _: None, source_changed)
    assert (entry.state, entry.engine) == (BROKEN, None)
    json.dumps(entry.to_json(), allow_nan=False)
    assert verify(entry).reason is Reason.BROKEN_ENGINE
    with pytest.raises(Unavailable, match="no engine: not built yet") as told:
        library.find(query_of(engine), lambda _: None)
    assert entry.folder.name not in str(told.value), "the panel tells of damage, not every node"
    delete(entry)
    assert not engine.folder.exists()


@pytest.mark.parametrize("make", [
    lambda path: path.write_bytes(b" " * (5 << 20)),
    lambda path: path.write_bytes(b"[" * 100_000),
    lambda path: path.write_bytes(b"\xff\xfe"),
    lambda path: path.mkdir(),
], ids=["huge", "deep", "no text", "folder"])  # fmt: skip
def test_what_is_no_manifest_is_refused_without_being_read_whole(
    engine: Engine, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    (engine.folder / "manifest.json").unlink()
    make(engine.folder / "manifest.json")
    (entry,) = entries(Library([tmp_path / "library"]), lambda _: None, source_changed)
    assert entry.state == BROKEN


@pytest.mark.parametrize("name", ["a.onnx", "engine.trt", "B2-H64.bin", "model.onnx.data", "a b", "\u00e4.onnx"])
def test_plain_names_are_plain(name: str) -> None:
    assert schema.plain_name(name)


@pytest.mark.parametrize("name", [
    "", ".", "..", "a/b", "a\\b", "C:a", "a\0", "a\n", "con", "CON", "nul.onnx", "COM1.txt", "lpt\u00b9", "conin$",
    "aux .txt", "a.", "a ", "a..", "a. .", "a?", "a*", "\ud800", "x" * 300,
])  # fmt: skip
def test_names_that_some_system_cannot_have_are_refused(name: str) -> None:
    assert not schema.plain_name(name)
