"""The manifest: the JSON beside an engine that says what it is, for whom, and how good."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

from ..architectures.shapes import Dim, Profile, Range, TensorSpec
from . import schema
from .safe_files import read_bytes

MANIFEST_NAME = "manifest.json"
RECORD_NAME = "checked_here.json"
"""This machine's signed record of the engine, see ``trust``."""
USE_NAME = "last_used"
TIMES_NAME = "streamed_here.json"
"""Times of calls, on the engine and native, where weights do not fit the GPU; see ``streamed_choice``."""
_OURS = (MANIFEST_NAME, RECORD_NAME, USE_NAME, TIMES_NAME)
MAX_BYTES = 4 << 20
MAX_SIZE = 1 << 31
DTYPES = ("float16", "bfloat16", "float32")

PACK_VERSION = "0.1.0"
EXPORT_FORMAT = 4
"""Raise this when the exported graph changes its inputs, outputs or numbers: older engines become stale."""

LAYOUT_PREFIX = "layout2-"
"""Beginning of the layout that replaces the hash of weights for engines of any weights. Raise its number whenever
layouts are computed differently: older engines become stale."""
_ANY_LAYOUT = "layout"

_NEEDED = ("key", "identity", "kind", "label", "inputs", "outputs", "files", "parity", "seconds", "created",
           "pack_version")  # fmt: skip
_LATER = ("fingerprint", "source", "parameters", "built_with", "changes")
_FIGURES = {"rel_err", "native_rel_err", "limit", "native_ms", "engine_ms", "relative_time", "refit_s", "wiring"}
"""Names in ``parity`` whose values are numbers; the rest is for people."""
_SYMBOL = re.compile(r"[A-Z]{1,4}")
_FACTOR = r"[A-Z]{1,4}([*/][1-9][0-9]{0,3})?(\+[1-9])?"
_DIM = re.compile(rf"{_FACTOR}(\*{_FACTOR}){{0,2}}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ManifestError(ValueError):
    """A manifest that cannot be read; the text says what is wrong with it."""


@dataclass(frozen=True)
class EngineIdentity:
    """Identity of an engine; ``key`` is a hash of all of it.

    Attributes:
        architecture: name of the architecture.
        weights: hash of the weights, see ``weight_hash.weights_hash``, or their layout, see ``any_weights``.
        precision: ``float16``, ``bfloat16`` or ``float32``: what the engine computes in.
        profile: the shapes it accepts.
        backend, backend_version: the backend that built it.
        device: what it runs on, in the backend's words: ``"any"``, or a GPU's name and compute capability.
        layout: layout of the network whose weights are built in: with other settings of a layer these weights give
            other results. ``""`` for an engine of any weights, and in manifests of earlier versions.
    """

    architecture: str
    weights: str
    precision: str
    profile: Profile
    backend: str
    backend_version: str
    device: str
    export_format: int = EXPORT_FORMAT
    layout: str = ""

    @property
    def any_weights(self) -> bool:
        """True where it serves all checkpoints of a layout with any LoRA, and not only one set of weights."""
        return self.weights.startswith(_ANY_LAYOUT)

    @property
    def outdated_layout(self) -> bool:
        """True where an earlier version computed the layout differently, so the networks that it serves are unknown."""
        return self.any_weights and not self.weights.startswith(LAYOUT_PREFIX)

    def to_json(self) -> dict:
        fields = {name: value for name, value in self.__dict__.items() if name != "layout" or value}
        return {**fields, "profile": self.profile.to_json()}

    @property
    def key(self) -> str:
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        """For people; the key decides, so a renamed folder is still found."""
        return f"{self.architecture}-{self.weights[:8]}-{self.precision}-{self.backend}-{self.key[:12]}"


@dataclass(frozen=True)
class EngineFile:
    """Size in bytes and sha256 of one of an engine's files."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Identity, tensors and record of one engine.

    Attributes:
        label: the model's name as the user knows it; not part of the identity.
        files: file name -> size and hash. The backend opens the first.
        parity: relative error, measured when it was built: ``rel_err``; in half precision it is that to float32, and
            ``native_rel_err`` is native's own (see ``measurements``).
        seconds: how long each part of the build took; together all of it.
        fingerprint: quick hash of a part of the weights, see ``weight_hash.fingerprint``; ``""`` when not known.
        source: the file that the weights came from (``path``, ``size``, ``mtime_ns``), where it is known; some engines
            have its ``name`` alone.
        parameters: how many numbers the network's weights are; 0 when not known.
        built_with: hash of the weights that an engine for any weights was built with; ``""`` when not known.
        changes: what had changed the file's weights, in words: LoRAs with their strengths; ``""`` for nothing.
    """

    identity: EngineIdentity
    kind: str
    label: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: Mapping[str, EngineFile]
    parity: Mapping = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    created: str = ""
    pack_version: str = ""
    fingerprint: str = ""
    source: Mapping = field(default_factory=dict)
    parameters: int = 0
    built_with: str = ""
    changes: str = ""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(f.bytes for f in self.files.values())

    @property
    def device_bytes(self) -> int:
        """About what its weights take on the device, also where its files hold none."""
        size = {"float32": 4}.get(self.identity.precision, 2)
        return max(self.bytes, self.parameters * size if self.identity.any_weights else 0)

    @cached_property
    def digest(self) -> str:
        """sha256 of all that the manifest says."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict:
        return {
            "key": self.identity.key,
            "identity": self.identity.to_json(),
            "kind": self.kind,
            "label": self.label,
            "inputs": [s.to_json() for s in self.inputs],
            "outputs": [s.to_json() for s in self.outputs],
            "files": {name: f.__dict__ for name, f in self.files.items()},
            "parity": dict(self.parity),
            "seconds": dict(self.seconds),
            "created": self.created,
            "pack_version": self.pack_version,
            "fingerprint": self.fingerprint,
            "source": dict(self.source),
            "parameters": self.parameters,
            **{name: value for name in ("built_with", "changes") if (value := getattr(self, name))},
        }

    @classmethod
    def from_json(cls, data: object) -> Manifest:
        """The inverse of ``to_json``, for untrusted data.

        Raises:
            MalformedInput: a value is wrong, or not known.
        """
        data = schema.mapping(data, "the manifest", _NEEDED, _LATER)
        inputs, outputs = _specs(data["inputs"], "inputs"), _specs(data["outputs"], "outputs")
        _check_symbols(inputs, outputs)
        return cls(
            identity=_identity(data["identity"]),
            kind=schema.word(data["kind"], "kind"),
            label=schema.text(data["label"], "label", 1000),
            inputs=inputs,
            outputs=outputs,
            files=_files(data["files"]),
            parity=_parity(data["parity"]),
            seconds=schema.table(data["seconds"], "seconds", 64, _is_word, schema.number),
            created=schema.text(data["created"], "created", 64),
            pack_version=schema.text(data["pack_version"], "pack_version", 64),
            fingerprint=schema.text(data.get("fingerprint", ""), "fingerprint", 128),
            source=_source(data.get("source", {})),
            parameters=schema.integer(data.get("parameters", 0), "parameters"),
            built_with=schema.text(data.get("built_with", ""), "built_with", 64),
            changes=schema.text(data.get("changes", ""), "changes", 1000),
        )

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check a manifest.

        Raises:
            ManifestError: it is not what this version writes, or has a key that its own contents do not have.
        """
        try:
            text = read_bytes(path, MAX_BYTES)
        except OSError as error:
            raise ManifestError(f"{path} cannot be read as a manifest ({type(error).__name__}: {error})") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: bytes, where: str) -> Manifest:
        """Check a manifest's text as ``read`` does; errors name ``where`` it stands."""
        try:
            if len(text) > MAX_BYTES:
                raise schema.MalformedInput(f"it has more than {MAX_BYTES >> 20} MB")
            data = schema.loads(text)
            manifest = cls.from_json(data)
            key = data["key"]
        except schema.MalformedInput as error:
            raise ManifestError(f"{where} cannot be read as a manifest ({error})") from None
        if key != manifest.identity.key:
            raise ManifestError(f"{where} was changed after the build: its key does not match its contents")
        return manifest


def _identity(data: object) -> EngineIdentity:
    names = [field.name for field in fields(EngineIdentity) if field.name != "layout"]
    data = schema.mapping(data, "identity", names, ["layout"])
    return EngineIdentity(
        architecture=schema.word(data["architecture"], "architecture"),
        weights=schema.word(data["weights"], "weights"),
        precision=schema.one_of(data["precision"], "precision", DTYPES),
        profile=read_profile(data["profile"]),
        backend=schema.word(data["backend"], "backend"),
        backend_version=schema.text(data["backend_version"], "backend_version"),
        device=schema.text(data["device"], "device"),
        export_format=schema.integer(data["export_format"], "export_format", most=1 << 20),
        layout=schema.word(data["layout"], "layout") if "layout" in data else "",
    )


def read_profile(data: object) -> Profile:
    """Read the shapes that an engine accepts, from untrusted data.

    Raises:
        MalformedInput: they are none.
    """
    def read(value: object, what: str) -> Range:
        sizes = schema.sequence(value, what, 3, lambda v, w: schema.integer(v, w, 0, MAX_SIZE))
        try:
            return Range(*sizes)
        except (TypeError, ValueError) as error:
            raise schema.MalformedInput(f"{what} is no range of sizes ({error})") from None

    return Profile(schema.table(data, "profile", 16, _is_symbol, read))


def _specs(data: object, what: str) -> tuple[TensorSpec, ...]:
    specs = tuple(schema.sequence(data, what, 512, _spec))
    if len({spec.name for spec in specs}) != len(specs):
        raise schema.MalformedInput(f"{what} has a name twice")
    return specs


def _spec(data: object, what: str) -> TensorSpec:
    data = schema.mapping(data, what, ("name", "dtype", "dims", "optional"))
    if not isinstance(data["optional"], bool):
        raise schema.MalformedInput(f"{what}.optional is neither true nor false")
    return TensorSpec(
        name=schema.word(data["name"], f"{what}.name"),
        dtype=schema.one_of(data["dtype"], f"{what}.dtype", DTYPES),
        dims=tuple(schema.sequence(data["dims"], f"{what}.dims", 8, _dim)),
        optional=data["optional"],
    )


def _dim(data: object, what: str) -> int | Dim:
    if not isinstance(data, str):
        return schema.integer(data, what, 1, MAX_SIZE)
    if not _DIM.fullmatch(data):
        raise schema.MalformedInput(f"{what} is {schema.shown(data)}, which is no dimension")
    return Dim.parse(data)


def _check_symbols(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Raise MalformedInput where a call would not tell all sizes: see ``shapes.bind``."""
    required = [dim for spec in inputs if not spec.optional for dim in spec.dims]
    bound = {dim.symbol for dim in required if isinstance(dim, Dim) and dim.tells}
    for spec in (*inputs, *outputs):
        for dim in spec.dims:
            if isinstance(dim, Dim) and not dim.symbols <= bound:
                raise schema.MalformedInput(f"{spec.name} has a size {dim}, which no input tells")


def _files(data: object) -> dict[str, EngineFile]:
    def read(value: object, what: str) -> EngineFile:
        value = schema.mapping(value, what, ("bytes", "sha256"))
        if not isinstance(value["sha256"], str) or not _SHA256.fullmatch(value["sha256"]):
            raise schema.MalformedInput(f"{what}.sha256 is no sha256")
        return EngineFile(schema.integer(value["bytes"], f"{what}.bytes"), value["sha256"])

    if isinstance(data, dict):
        for name in data:
            if not schema.plain_name(name) or name.startswith("."):
                raise schema.MalformedInput(f"it names a file outside its folder, or none: {schema.shown(name)}")
    files = schema.table(data, "files", 64, schema.plain_name, read)
    if not files or len({name.lower() for name in files} | {*_OURS}) != len(files) + len(_OURS):
        raise schema.MalformedInput("it names no files, or one twice")
    return files


def _parity(data: object) -> Mapping:
    if not isinstance(data, dict):
        raise schema.MalformedInput("parity is no object")
    for name in _FIGURES & data.keys():
        schema.number(data[name], f"parity.{name}")
    return schema.plain(data, "parity")


def _source(data: object) -> Mapping:
    data = schema.mapping(data, "source", (), ("path", "size", "mtime_ns", "name"))
    kinds = {
        "path": lambda v: schema.text(v, "source.path", 4096),
        "name": lambda v: schema.text(v, "source.name", 1000),
        "size": lambda v: schema.integer(v, "source.size"),
        "mtime_ns": lambda v: schema.integer(v, "source.mtime_ns", -(1 << 63), 1 << 63),
    }
    return {name: kinds[name](value) for name, value in data.items()}


def _is_symbol(name: str) -> bool:
    return bool(_SYMBOL.fullmatch(name))


def _is_word(name: str) -> bool:
    return bool(schema.WORD.fullmatch(name))
