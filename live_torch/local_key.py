"""Which compiled files were made here: a secret of this user on this machine signs them.

Inductor's artefacts are pickles, and opening a pickle runs whatever it says. So only files that carry a signature with
this key are opened, and never one that came with a download, a backup of another machine or a shared drive.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

SIGNATURE_NAME = "signature.json"
FOLDER_VARIABLE = "HYBRID_TRT_KEY_FOLDER"


def _key_file() -> Path:
    folder = os.environ.get(FOLDER_VARIABLE) or Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(folder) / "hybrid-trt" / "local.key"


def _key(create: bool) -> bytes | None:
    path = _key_file()
    try:
        return path.read_bytes()
    except FileNotFoundError:
        if not create:
            return None
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process was first
        return path.read_bytes()
    with os.fdopen(descriptor, "wb") as file:
        file.write(key := secrets.token_bytes(32))
    return key


def _digest(key: bytes, identity: str, hashes: Mapping[str, str]) -> str:
    text = json.dumps([identity, sorted(hashes.items())])
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def sign(folder: Path, identity: str, hashes: Mapping[str, str]) -> str:
    """Write the signature of an engine's files into its folder and return the file's name.

    Args:
        identity: key of the engine's identity.
        hashes: file name -> sha256.
    """
    (folder / SIGNATURE_NAME).write_text(json.dumps({"signature": _digest(_key(True), identity, hashes)}))
    return SIGNATURE_NAME


def is_ours(folder: Path, identity: str, hashes: Mapping[str, str]) -> bool:
    """Whether these files, with these hashes, were signed on this machine for this identity."""
    key = _key(False)
    if key is None:
        return False
    try:
        signature = json.loads((folder / SIGNATURE_NAME).read_text())["signature"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(signature, str) and hmac.compare_digest(signature, _digest(key, identity, hashes))
