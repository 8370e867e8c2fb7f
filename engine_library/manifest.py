"""The manifest: the JSON beside an engine that says what it is, for whom, and how good."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..architectures.tensors import Profile, TensorSpec

MANIFEST_NAME = "manifest.json"

EXPORT_FORMAT = 2
"""Raise this when the exported graph changes its inputs, outputs or numbers: older engines become stale."""


class ManifestError(ValueError):
    """A manifest that cannot be read; the text says what is wrong with it."""


@dataclass(frozen=True)
class EngineIdentity:
    """What tells two engines apart. ``key`` is a hash of all of it.

    Attributes:
        architecture: name of the architecture.
        weights: hash of the weights, see ``weights.weights_hash``.
        precision: ``float16``, ``bfloat16`` or ``float32``: what the engine computes in.
        profile: the shapes it accepts.
        backend, backend_version: who built it.
        device: what it runs on, in the backend's words: ``"any"``, or a GPU's name and compute capability.
    """

    architecture: str
    weights: str
    precision: str
    profile: Profile
    backend: str
    backend_version: str
    device: str
    export_format: int = EXPORT_FORMAT

    def to_json(self) -> dict:
        return {**self.__dict__, "profile": self.profile.to_json()}

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
        files: file name -> size and hash. The first one is what the backend opens.
        parity: relative error to the native module, measured when it was built (see ``engine_builder.parity``).
        seconds: how long export and build took.
        fingerprint: quick hash of a part of the weights, see ``weights.fingerprint``; ``""`` when not known.
        source: the file that the weights came from (``path``, ``size``, ``mtime_ns``), where it is known.
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

    @property
    def bytes(self) -> int:
        """Size of all files; about what the weights take on the device. Scratch memory of a call is not in it."""
        return sum(f.bytes for f in self.files.values())

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
        }

    @classmethod
    def from_json(cls, data: Mapping) -> Manifest:
        identity = dict(data["identity"])
        return cls(
            identity=EngineIdentity(**{**identity, "profile": Profile.from_json(identity["profile"])}),
            kind=data["kind"],
            label=data["label"],
            inputs=tuple(TensorSpec.from_json(s) for s in data["inputs"]),
            outputs=tuple(TensorSpec.from_json(s) for s in data["outputs"]),
            files={name: EngineFile(**f) for name, f in data["files"].items()},
            parity=data["parity"],
            seconds=data["seconds"],
            created=data["created"],
            pack_version=data["pack_version"],
            fingerprint=data.get("fingerprint", ""),
            source=data.get("source", {}),
        )

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check a manifest.

        Raises:
            ManifestError: not JSON, fields missing, a file outside the engine's folder, or a key that its own
                contents do not have (someone edited it).
        """
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ManifestError(f"{path} cannot be read as a manifest ({type(error).__name__}: {error})") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: bytes, where: str) -> Manifest:
        """As ``read``, from a manifest's text; ``where`` it stands is for the error."""
        try:
            data = json.loads(text)
            manifest = cls.from_json(data)
            key = data["key"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ManifestError(f"{where} cannot be read as a manifest ({type(error).__name__}: {error})") from error
        if key != manifest.identity.key:
            raise ManifestError(f"{where} was changed after the build: its key does not match its contents")
        if any(Path(name).name != name for name in manifest.files):
            raise ManifestError(f"{where} names a file outside its folder")
        return manifest
