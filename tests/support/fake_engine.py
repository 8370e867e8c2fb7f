"""Engines of no real model, for tests of what only reads manifests."""

from __future__ import annotations

from pathlib import Path

from hybrid_trt.architectures.shapes import Dim, Profile, Range, TensorSpec
from hybrid_trt.engine_library import Engine, EngineIdentity, EngineQuery, Library, Manifest, trust
from hybrid_trt.engine_library.engine import describe_files

PROFILE = Profile({"B": Range(1, 2, 2)})
SPECS = (TensorSpec("x", "float32", (1, 4)),)


def publish_engine(
    folder: Path, contents: bytes = b"\x08engine", name: str = "model.onnx", **changes: object
) -> Engine:
    """A small engine with parameters; ``changes`` are of its identity, or its ``source`` or ``made_here``."""
    library = Library([folder])
    source, made_here = changes.pop("source", {}), changes.pop("made_here", True)
    fields = {"architecture": "sd15_unet", "weights": "a" * 64, "precision": "float16", "backend": "onnxruntime",
              "backend_version": "1.0", "device": "any"} | changes
    identity = EngineIdentity(profile=PROFILE, **fields)
    with library.building_folder() as work:
        (work / name).write_bytes(contents)
        (work / "parameters.json").write_text("{}")
        files = describe_files(work, [name, "parameters.json"])
        engine = library.publish(work, Manifest(identity, "unet", "a.safetensors", SPECS, SPECS, files, source=source))
    if not made_here:
        (engine.folder / trust.RECORD_NAME).unlink()
    return engine


def query_of(engine: Engine, gpu: str = "") -> EngineQuery:
    """Return the query of a node that wants just this engine."""
    made = engine.manifest.identity
    return EngineQuery(made.architecture, [made.weights], made.precision, made.profile, [made.backend], gpu)


def publish(
    root: Path, contents: bytes = b"engine", weights: str = "e" * 64, label: str = "routes.safetensors",
    created: str = "2026-01-01T00:00:00+00:00", largest: int = 2, changes: str = "",
) -> str:
    """A small engine of no real model in a library; its folder's name."""
    library = Library([root])
    spec = TensorSpec("x", "float32", (Dim("B"), 4))
    profile = Profile({"B": Range(1, 1, largest)})
    identity = EngineIdentity("sd15_unet", weights, "float16", profile, "onnxruntime", "1", "any")
    with library.building_folder() as folder:
        (folder / "model.onnx").write_bytes(contents)
        manifest = Manifest(
            identity, "unet", label, (spec,), (spec,), describe_files(folder, ["model.onnx"]),
            parity={"rel_err": 1e-6}, seconds={"build": 2.0}, created=created, changes=changes,
        )  # fmt: skip
        return library.publish(folder, manifest).folder.name
