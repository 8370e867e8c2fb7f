"""Engines on disk: names, profiles, finding the right one, appearing at once or not at all."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pack
import pytest
from builds import contents, main_file, order, small_network
from fake_engine import publish_engine
from hybrid_trt.architectures.shapes import Dim, Profile, Range, ShapeMismatch, TensorSpec, bind, outside
from hybrid_trt.architectures.sizes import ANY
from hybrid_trt.backends import backends
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_library import (
    Engine,
    EngineIdentity,
    EngineQuery,
    Fallback,
    Library,
    LibraryError,
    Manifest,
    Reason,
    Unavailable,
)
from hybrid_trt.engine_library import library as library_module
from hybrid_trt.engine_library.atomic_files import REPLACED, sweep
from hybrid_trt.engine_library.disk import Settings, write_settings
from hybrid_trt.engine_library.engine import describe_files
from windows_rules import windows_rules

UNDER_WINDOWS_RULES_TOO = True
SMALL = Profile({"B": Range(1, 2, 2), "H": Range(8, 16, 32), "W": Range(8, 16, 32)})
LARGE = Profile({"B": Range(1, 2, 8), "H": Range(8, 64, 128), "W": Range(8, 64, 128)})
HUGE = Profile({"B": Range(1, 2, 64), "H": Range(1, 64, 512), "W": Range(1, 64, 512)})

SPECS = (
    TensorSpec("x", "float32", (Dim("B"), 4, Dim("H"), Dim("W"))),
    TensorSpec("hint", "float32", (Dim("HB"), 3, Dim("H", up=8), Dim("W", up=8))),
    TensorSpec("control_0", "float32", (Dim("B"), 32, Dim("H", down=4), Dim("W", down=4)), optional=True),
)


def identity(profile: Profile = SMALL, **changes: str) -> EngineIdentity:
    fields = {"architecture": "sd15_unet", "weights": "w" * 64, "precision": "float16", "backend": "onnxruntime",
              "backend_version": "1.0", "device": "any"} | changes
    return EngineIdentity(profile=profile, **fields)


def publish(library: Library, which: EngineIdentity, contents: bytes = b"engine") -> Engine:
    with library.building_folder() as folder:
        (folder / "model.onnx").write_bytes(contents)
        files = describe_files(folder, ["model.onnx"])
        return library.publish(folder, Manifest(which, "unet", "a.safetensors", SPECS, SPECS[:1], files))


def wanted(profile: Profile = SMALL, backends: tuple[str, ...] = ("onnxruntime",)) -> EngineQuery:
    return EngineQuery("sd15_unet", ["w" * 64], "float16", profile, backends)


def find(library: Library, what: EngineQuery) -> Engine:
    return library.find(what, lambda _manifest: None)[0]


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    engine = publish(Library([tmp_path]), identity(LARGE))
    (found,) = Library([tmp_path]).engines()
    assert found == engine
    assert found.manifest.inputs == SPECS


@pytest.mark.parametrize("field", ["architecture", "weights", "precision", "backend", "backend_version", "device"])
def test_the_key_changes_with_everything_that_tells_engines_apart(field: str) -> None:
    assert identity(**{field: "another"}).key != identity().key != identity(LARGE).key


def test_the_smallest_profile_that_holds_the_wanted_one_is_found(tmp_path: Path) -> None:
    library = Library([tmp_path])
    for profile in (HUGE, SMALL, LARGE):
        publish(library, identity(profile))
    assert find(library, wanted(SMALL)).manifest.identity.profile == SMALL
    assert find(library, wanted(LARGE)).manifest.identity.profile == LARGE


def test_a_smaller_profile_than_wanted_is_better_than_none(tmp_path: Path) -> None:
    library = Library([tmp_path])
    publish(library, identity(SMALL))
    assert find(library, wanted(LARGE)).manifest.identity.profile == SMALL


def test_the_preferred_backend_wins_over_the_smaller_profile(tmp_path: Path) -> None:
    library = Library([tmp_path])
    publish(library, identity(SMALL))
    publish(library, identity(LARGE, backend="tensorrt"))
    found = find(library, wanted(SMALL, ("tensorrt", "onnxruntime")))
    assert found.manifest.identity.backend == "tensorrt"


@pytest.mark.fault("the library holds engines of other networks, precisions and sizes", see="normal speed: *no engine*")
@pytest.mark.parametrize("field", ["architecture", "weights", "precision", "backend"])
def test_an_engine_of_something_else_is_never_found(tmp_path: Path, field: str) -> None:
    library = Library([tmp_path])
    publish(library, identity(**{field: "float32" if field == "precision" else "another"}))
    with pytest.raises(Unavailable) as refused:
        find(library, wanted())
    assert refused.value.fallback.reason is Reason.NO_ENGINE


def test_an_engine_that_the_backend_refuses_is_passed_over_and_told_when_alone(tmp_path: Path) -> None:
    library = Library([tmp_path])
    publish(library, identity(SMALL, device="sm_89"))

    def refuse(manifest: Manifest) -> Fallback | None:
        return Fallback(Reason.WRONG_GPU, "sm_90") if manifest.identity.device == "sm_89" else None

    with pytest.raises(Unavailable, match="wrong GPU: sm_90"):
        library.find(wanted(), refuse)
    publish(library, identity(LARGE))
    assert library.find(wanted(), refuse)[0].manifest.identity.device == "any"


def test_publishing_the_same_key_replaces_the_engine(tmp_path: Path) -> None:
    library = Library([tmp_path])
    publish(library, identity(), b"old")
    engine = publish(library, identity(), b"newer")
    assert main_file(engine).read_bytes() == b"newer"
    assert [p.name for p in tmp_path.iterdir()] == [engine.folder.name]


def test_a_renamed_folder_is_still_found(tmp_path: Path) -> None:
    engine = publish(Library([tmp_path]), identity())
    engine.folder.rename(tmp_path / "my favourite engine")
    assert find(Library([tmp_path]), wanted()).folder.name == "my favourite engine"


def test_engines_in_further_folders_are_found_and_builds_go_to_the_first(tmp_path: Path) -> None:
    publish(Library([tmp_path / "shared"]), identity())
    library = Library([tmp_path / "own", tmp_path / "shared"])
    assert find(library, wanted()).folder.parent.name == "shared"
    with library.building_folder() as folder:
        assert folder.parent.name == "own"


def test_nothing_heavy_is_imported_when_the_pack_is(tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('p', {str(pack.ROOT / '__init__.py')!r},"
        f" submodule_search_locations=[{str(pack.ROOT)!r}])\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['p'] = module; spec.loader.exec_module(module)\n"
        "import p.backends; p.backends.backends()\n"
        "heavy = {'onnx', 'onnxruntime', 'tensorrt', 'tensorrt_rtx', 'polygraphy'} & set(sys.modules)\n"
        "heavy |= {'triton', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""})


def test_sizes_follow_from_symbols_with_ceilings() -> None:
    assert SPECS[2].shape({"B": 2, "H": 17, "W": 15}) == (2, 32, 5, 4)
    assert SPECS[1].shape({"HB": 1, "H": 17, "W": 15}) == (1, 3, 136, 120)
    assert [Dim.parse(str(d)) for d in (Dim("H"), Dim("H", up=8), Dim("W", down=4))] == [
        Dim("H"), Dim("H", up=8), Dim("W", down=4)]


def test_a_dimension_may_be_a_product_of_two_sizes() -> None:
    """A picture in tokens: as many as its patches, rows times columns."""
    tokens, mixed = Dim("H", down=2) * Dim("W", down=2), Dim("B", up=3) * Dim("H") * Dim("W")
    assert (str(tokens), str(mixed)) == ("H/2*W/2", "B*3*H*W")
    assert [Dim.parse(str(dim)) for dim in (tokens, mixed)] == [tokens, mixed]
    rows = TensorSpec("rows", "float32", (Dim("H"), Dim("W")))
    for specs in ([TensorSpec("x", "float32", (Dim("B"), tokens, 4)), rows],
                  [rows, TensorSpec("x", "float32", (Dim("B"), tokens, 4))]):
        assert bind(specs, {"x": (2, 9 * 8, 4), "rows": (17, 15)}) == {"B": 2, "H": 17, "W": 15}
        with pytest.raises(ShapeMismatch, match="x is .2, 71, 4., the network takes 72"):
            bind(specs, {"x": (2, 71, 4), "rows": (17, 15)})
    assert specs[1].shape({"B": 2, "H": 17, "W": 15}) == (2, 72, 4)
    assert specs[1].dynamic_axes() == {0: "B", 1: "H/2*W/2"}


def test_symbols_are_found_from_shapes() -> None:
    shapes = {"x": (2, 4, 17, 15), "hint": (1, 3, 136, 120), "control_0": (2, 32, 5, 4)}
    assert bind(SPECS, shapes) == {"B": 2, "H": 17, "W": 15, "HB": 1}
    del shapes["control_0"]
    assert bind(SPECS, shapes)["H"] == 17


@pytest.mark.parametrize(("name", "shape"), [
    ("x", (2, 5, 17, 15)),
    ("x", (2, 4, 17)),
    ("hint", (1, 3, 137, 120)),
    ("hint", (1, 4, 136, 120)),
    ("control_0", (2, 32, 4, 4)),
    ("control_0", (1, 32, 5, 4)),
])
def test_shapes_that_contradict_are_refused(name: str, shape: tuple[int, ...]) -> None:
    shapes = {"x": (2, 4, 17, 15), "hint": (1, 3, 136, 120), "control_0": (2, 32, 5, 4), name: shape}
    with pytest.raises(ShapeMismatch, match=name):
        bind(SPECS, shapes)


def test_a_missing_input_is_refused_unless_it_is_optional() -> None:
    with pytest.raises(ShapeMismatch, match="hint is missing"):
        bind(SPECS, {"x": (2, 4, 17, 15)})


def test_what_is_outside_a_profile_is_said_in_pixels() -> None:
    assert outside(SMALL, {"B": 2, "H": 8, "W": 32}, ANY.symbols) is None
    assert outside(SMALL, {"B": 2, "H": 8, "W": 33}, ANY.symbols) == "width 264 px is outside the engine's 64 to 256 px"
    assert outside(SMALL, {"B": 3, "H": 8, "W": 8}, ANY.symbols) == "batch 3 is outside the engine's 1 to 2"


def test_every_reason_says_what_becomes_of_the_picture_and_what_to_do() -> None:
    for reason in Reason:
        sentence = Fallback(reason).sentence()
        assert reason.advice
        assert sentence.endswith(f"{reason.advice}.")
        assert re.search("normal|without engines", sentence), "the speed, or what runs in the engine's place"
    assert "FreeU" not in Reason.MODEL_PATCHED.advice, "it names no node that a graph may not have"


# Building again: the engine that is there stays until the new one has its place, whatever happens in between


def test_on_windows_a_scanner_that_holds_a_new_file_leaves_the_old_engine_in_its_place(tmp_path: Path) -> None:
    old, library, held = publish_engine(tmp_path, b"\x08old"), Library([tmp_path]), []
    with windows_rules():
        work = library.building_folder()
        (work / "model.onnx").write_bytes(b"\x08new")
        (work / "parameters.json").write_text("{}")
        manifest = dataclasses.replace(old.manifest, files=describe_files(work, ["model.onnx", "parameters.json"]))

        def scanner() -> None:
            if not held and (work / "manifest.json").exists():
                held.append((work / "model.onnx").open("rb"))

        try:
            with pytest.raises(OSError, match="in use"):
                library.publish(work, manifest, scanner)
        finally:
            held[0].close()
            library.discard(work)
    assert contents(tmp_path) == [old.folder.name]
    assert (old.folder / "model.onnx").read_bytes() == b"\x08old"
    assert library.engines() == [old]


@pytest.mark.fault("a process is killed while it replaces an engine", see="nothing: the old engine comes back")
def test_an_engine_that_a_killed_process_had_put_aside_comes_back(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path)
    aside = tmp_path / ".building-1-x" / REPLACED
    aside.mkdir(parents=True)
    engine.folder.rename(aside / engine.folder.name)
    sweep(tmp_path)
    assert (contents(tmp_path), Library([tmp_path]).engines()) == ([engine.folder.name], [engine])

    aside.mkdir(parents=True)
    (aside / engine.folder.name).mkdir()
    sweep(tmp_path)
    assert Library([tmp_path]).engines() == [engine], "the new one had taken its place"
    assert contents(tmp_path) == [engine.folder.name]


def test_an_engine_that_cannot_go_back_waits_for_the_next_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, move = publish_engine(tmp_path), library_module.move

    def refuse(source: Path, target: Path) -> None:
        if target == engine.folder:
            raise PermissionError(errno.EACCES, "held")
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(library_module, "move", refuse)
        patch.setattr("hybrid_trt.engine_library.atomic_files.move", refuse)
        with pytest.raises(PermissionError):
            publish_engine(tmp_path, b"\x08new")
        assert Library([tmp_path]).engines() == []
    sweep(tmp_path)
    assert Library([tmp_path]).engines() == [engine]


def test_the_limit_counts_the_engine_that_is_replaced_once(tmp_path: Path) -> None:
    backend = backends()["onnxruntime"]
    made, library = order(small_network(), backend), Library([tmp_path])
    engine = build_engine(made, library, lambda *_: None, run=run_here)
    write_settings(tmp_path, Settings(limit_gb=1.5 * engine.manifest.bytes / 1e9))
    assert build_engine(made, library, lambda *_: None, run=run_here, again=True).folder == engine.folder
    with pytest.raises(LibraryError, match="the settings allow"):
        library.check_limit(engine.manifest.bytes, "Another")


def test_two_names_of_one_folder_are_one(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert Library([tmp_path / "a", tmp_path / "b"]).roots == [tmp_path / "a"]
    assert Library([tmp_path / "a", tmp_path / "b"]).engines() == [engine]
