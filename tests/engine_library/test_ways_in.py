"""Ways in which an engine comes into the library that this machine did not build: by none of them is it opened."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from any_weights import PROFILE, inputs_of
from fake_engine import publish_engine
from hybrid_trt.architectures.calls import EngineCall
from hybrid_trt.backends import backends
from hybrid_trt.backends.lookup import refusals
from hybrid_trt.backends.torch_inductor import compiled
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder.check import unchecked_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, Manifest, Unavailable, trust
from hybrid_trt.engine_library.engine import describe_files
from hybrid_trt.engine_library.inventory import READY, entries
from hybrid_trt.engine_library.manifest import MANIFEST_NAME, RECORD_NAME
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sessions.file_session import FileSession
from small_networks import CPU, network

ORT, TORCH = backends()["onnxruntime"], backends()["torch"]


class Program:
    """A pickle that leaves a mark when it is opened, as any program could."""

    def __init__(self, mark: Path):
        self._mark = mark

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self._mark),)


@pytest.fixture(scope="module")
def net() -> NativeNetwork:
    return network("unet", "unlike_levels")


@pytest.fixture(scope="module")
def made_elsewhere(net: NativeNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of another machine: its library, its secret, and where its program leaves its mark."""
    machine = tmp_path_factory.mktemp("another machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(trust.FOLDER_VARIABLE, str(machine / "keys"))
        library = Library([machine / "library"])
        builder.build_engine(BuildOrder(net, "float32", PROFILE, ORT), library, lambda *_: None, run=builder.run_here)
        publish_engine(machine / "library", name="engine.trt", backend="tensorrt")
        publish_program(net, library, machine / "mark")
    return machine


def publish_program(net: NativeNetwork, library: Library, mark: Path) -> Engine:
    """An engine of the torch backend for every size, whose compiled file is a program."""
    identity = builder._identity(BuildOrder(net, "float32", PROFILE, TORCH), lambda *_: None)
    architecture, name = net.architecture(), compiled.file_name(identity.profile.ranges)
    inputs = tuple(architecture.engine_inputs(net.module, "float32"))
    outputs = tuple(architecture.outputs(net.module, "float32"))
    with library.building_folder() as folder:
        (folder / name).write_bytes(compiled.KINDS_HEADER + pickle.dumps(Program(mark)))
        files = describe_files(folder, [name])
        return library.publish(folder, Manifest(identity, "unet", "x", inputs, outputs, files))


def dropped(source: Path, library: Path) -> list[Path]:
    shutil.copytree(source / "library", library, dirs_exist_ok=True)
    for record in library.glob(f"*/{RECORD_NAME}"):
        record.unlink()
    return [library]


def with_its_record(source: Path, library: Path) -> list[Path]:
    shutil.copytree(source / "library", library, dirs_exist_ok=True)
    return [library]


def with_its_secret(source: Path, library: Path) -> list[Path]:
    """Wherever in the library it may lie."""
    for folder in (".", "hybrid-trt", ".config/hybrid-trt", "keys/hybrid-trt"):
        (library / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / "keys" / "hybrid-trt" / "local.key", library / folder)
    return with_its_record(source, library)


def in_another_folder(source: Path, library: Path) -> list[Path]:
    library.mkdir()
    return [library, *with_its_record(source, library.with_name("extra_model_paths"))]


def linked(source: Path, library: Path) -> list[Path]:
    library.mkdir()
    for folder in (source / "library").glob("[!.]*"):
        (library / folder.name).symlink_to(folder)
    return [library]


def linked_as_a_whole(source: Path, library: Path) -> list[Path]:
    library.symlink_to(source / "library")
    return [library]


def each_manifest(library: Path, change: Callable[[Path, dict], dict]) -> list[Path]:
    for path in library.glob(f"*/{MANIFEST_NAME}"):
        data = change(path.parent, json.loads(path.read_text()))
        data["key"] = hashlib.sha256(json.dumps(data["identity"], sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(data))
    return [library]


def with_fields_of_ours(source: Path, library: Path) -> list[Path]:
    """All that our own engine's manifest says, but for the files; and our record."""
    ours = publish_engine(library.with_name("ours"))
    with_its_record(source, library)
    for folder in library.glob("[!.]*"):
        shutil.copy2(ours.folder / RECORD_NAME, folder)
    fields = ours.manifest.to_json()
    copied = {name: fields[name] for name in ("label", "created", "pack_version", "parity", "seconds", "fingerprint")}
    return each_manifest(library, lambda _folder, data: data | copied)


def under_our_manifest(source: Path, library: Path) -> list[Path]:
    """Its files, of the right sizes, in the folder of an engine that we built."""
    for folder in (source / "library").glob("[!.]*"):
        manifest = Manifest.read(folder / MANIFEST_NAME)
        with Library([library]).building_folder() as work:
            for name, file in manifest.files.items():
                (work / name).write_bytes(bytes(file.bytes))
            signed = replace(manifest, files=describe_files(work, list(manifest.files)))
            ours = Library([library]).publish(work, signed)
        for name in manifest.files:
            shutil.copy2(folder / name, ours.folder / name)
    return [library]


def signed_with(key: bytes) -> Callable[[Path, Path], list[Path]]:
    """Signed with a secret that everybody knows."""

    def way(source: Path, library: Path) -> list[Path]:
        with_its_record(source, library)
        for folder in library.glob("[!.]*"):
            fields = trust.BUILT_HERE.fields
            text = trust._signed(Manifest.read(folder / MANIFEST_NAME), fields)
            signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
            (folder / RECORD_NAME).write_text(json.dumps({**fields, "signature": signature}))
        return [library]

    return way


WAYS = {
    "dropped": dropped,
    "with its record": with_its_record,
    "with its secret": with_its_secret,
    "in a second folder of the library": in_another_folder,
    "linked": linked,
    "linked as a whole": linked_as_a_whole,
    "with fields and the record of ours": with_fields_of_ours,
    "under our manifest": under_our_manifest,
    "signed with nothing": signed_with(b""),
    "signed with zeros": signed_with(bytes(trust.KEY_LENGTH)),
}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that ONNX Runtime was given to open."""
    import onnxruntime

    found, real = [], onnxruntime.InferenceSession

    def session(*arguments: Any, **options: Any) -> Any:
        found.append(arguments[0])
        return real(*arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    return found


def serve(net: NativeNetwork, roots: list[Path], backend: str) -> bool:
    """Sample a call as a node does; whether an engine was used, or compiled files."""
    choice = EngineChoice(PROFILE, backend=backend)
    handle = EngineHandle.look_up(net, choice, Library(roots), f"node of {roots[0]} {backend}")
    handle.plan()
    handle.open()
    with torch.inference_mode():
        done, _ = handle.serve(None, lambda: EngineCall(inputs_of(net), dict))
    return done and bool(handle.session.serving)


@pytest.mark.fault(
    "an engine of another machine is copied, linked or signed into the library, in ten ways",
    see="normal speed: *outdated engine*; it is never opened",
)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_engine_from_elsewhere_is_never_opened(
    way: Callable[[Path, Path], list[Path]],
    net: NativeNetwork,
    made_elsewhere: Path,
    opened: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "own keys"))
    trust.sign("this machine has a secret of its own")
    roots = way(made_elsewhere, tmp_path / "library")
    engines = Library(roots).engines()
    assert {engine.manifest.identity.backend for engine in engines} == {"onnxruntime", "torch", "tensorrt"}
    for engine in engines:
        if engine.manifest.identity.backend == "torch":
            with pytest.raises(Unavailable):
                TORCH.open_live(engine, torch.device("cpu"))
            continue
        load = backends()[engine.manifest.identity.backend].load
        with pytest.raises(Unavailable):
            FileSession(engine, load, CPU).load()
    assert not serve(net, roots, "onnxruntime")
    assert not serve(net, roots, "torch")
    assert unchecked_engine(BuildOrder(net, "float32", PROFILE, ORT), Library(roots),
                            builder._identity(BuildOrder(net, "float32", PROFILE, ORT), lambda *_: None)) is None
    if way is not under_our_manifest:  # that one's files have to be read to be told from ours
        found = entries(Library(roots), refusals(CPU), source_changed)
        assert READY not in {entry.state for entry in found}
    assert not opened
    assert not (made_elsewhere / "mark").exists()


def test_where_they_were_built_the_same_engines_are_opened(
    net: NativeNetwork, made_elsewhere: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests above would show nothing."""
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(made_elsewhere / "keys"))
    roots = [made_elsewhere / "library"]
    assert serve(net, roots, "onnxruntime")
    assert opened
    serve(net, roots, "torch")
    assert (made_elsewhere / "mark").exists()
