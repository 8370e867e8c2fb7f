"""The report for support: what runs here, what does not and why, without anything personal.

A fact that cannot be found out becomes a sentence that says why; the report goes on.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import platform
import re
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..architectures import profile_words
from ..comfy_model.hash_cache import source_changed
from ..engine_library import Fallback, Library, Reason, fleet_key, inventory, measurements, trust
from ..engine_library.disk import free_bytes, gigabytes, read_settings
from ..engine_library.gpu import driver_version, gpu_of
from ..engine_library.manifest import PACK_VERSION

if TYPE_CHECKING:
    import torch

    from .jobs import Job

log = logging.getLogger(__name__)

PACK = Path(__file__).absolute().parents[1]
PACKAGES = re.compile(
    r"(onnx|tensorrt|polygraphy|triton|torch|cuda-python|xformers|sageattention|flash.attn|numpy|safetensors|lpips|"
    r"comfyui.frontend|comfy.kitchen|comfy.aimdo)", re.IGNORECASE
)  # fmt: skip
"""Begins the names of packages that matter here."""
VARIABLES = ("COMFYUI_PATH", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
             "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS")  # fmt: skip
LOG_TAIL = 15
"""Lines of a failed build's log."""
KEPT_WARNINGS = 30
SECRETS = ("HYBRID_TRT_FARM_TOKEN", "HYBRID_TRT_FLEET_KEY", "RAY_AUTH_TOKEN")
"""Variables of the environment with secrets of the pack or of the farm: their values never leave this process."""
SHORTEST_SECRET = 8
NOT_PERSONAL = {"root", "localhost", "comfyui"}
SHORTEST_NAME = 3
"""Shorter user names are parts of sentences; in paths they go with the home folder."""
_LOGIN = r"((?<=://)[^\s/\"']+|(?<![\w/])[\w.+-]+:[^\s/\"'@]+)@(\[[^\s\]]*\]|[\w.-]*)"
"""Name and password before the host of an address, and that host."""


@dataclass(frozen=True)
class Place:
    """The process that reports, as far as a report cannot find out by itself.

    Attributes:
        comfyui: ComfyUI's folder, or None.
        library: None where no library is known.
        device: returns the device that engines run on; may raise.
        options: ComfyUI's own, as given at its start.
        limits: returns sentences on what this ComfyUI is not used for.
        jobs: builds of this process.
        lost: sentences on what could not be found out.
    """

    comfyui: Path | None
    library: Library | None
    device: Callable[[], torch.device]
    options: Sequence[str] | None = None
    limits: Callable[[], list[str]] | None = None
    jobs: Sequence[Job] | None = None
    lost: Sequence[str] = field(default_factory=list)


def report(place: Place, warnings: Callable[[], Iterable[str]]) -> dict[str, Any]:
    """Return all facts, without what is personal.

    Args:
        warnings: returns the pack's latest warnings; asked last, since looking may warn too.
    """
    found = {
        "versions": _or_reason(lambda: _versions(place)),
        "card": _or_reason(lambda: _card(place.device())),
        "backends": _or_reason(lambda: _backends(place.device())),
        "library": _or_reason(lambda: _library(place)),
        "settings": _or_reason(lambda: _settings(place)),
        "last errors": _or_reason(lambda: _errors(place, warnings)),
    }
    return hider(place.library.roots if place.library is not None else ())(found)


def as_text(found: dict[str, Any]) -> str:
    """Return a report as text that can be pasted anywhere."""
    return json.dumps(found, indent=1, ensure_ascii=False)


def _or_reason(find: Callable[[], Any]) -> Any:
    """Return facts, or in a sentence why there are none."""
    try:
        return find()
    except ModuleNotFoundError as error:
        return f"not known: {error.name} is not installed for this Python; it has to be the one that runs ComfyUI"
    except Exception as error:  # a report about faults has to survive them
        log.debug("Hybrid TRT: a part of the report failed", exc_info=True)
        return f"not known: {type(error).__name__}: {error}"


def _versions(place: Place) -> dict[str, Any]:
    return {
        "report of": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "Hybrid TRT": PACK_VERSION,
        "ComfyUI": _or_reason(lambda: _comfyui_version(place)),
        "Python": platform.python_version(),
        "system": platform.platform(),
        **_torch_versions(),
        "NVIDIA driver": _or_reason(driver_version) or "not found (nvidia-smi does not name it)",
        "packages": _or_reason(_packages),
        "missing packages": _or_reason(_missing_packages),
    }


def _comfyui_version(place: Place) -> str:
    if place.comfyui is None:
        return " ".join(dict.fromkeys(place.lost)) or "not found; give --comfyui, or set COMFYUI_PATH"
    file = place.comfyui / "comfyui_version.py"
    found = re.search(r'__version__ = "(.+)"', file.read_text(encoding="utf-8")) if file.is_file() else None
    return "of unknown version" if found is None else found[1]


def _torch_versions() -> dict[str, str]:
    try:
        import torch
    except Exception as error:  # libraries that do not load raise what they like
        return {"torch": f"cannot be loaded ({type(error).__name__}: {error}); this has to be ComfyUI's Python"}
    built = f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda or "torch was built without it"
    return {"torch": torch.__version__, "CUDA": built}


def _packages() -> str:
    found = {f"{one.metadata['Name']} {one.version}" for one in metadata.distributions()
             if PACKAGES.match(one.metadata["Name"] or "")}  # fmt: skip
    return ", ".join(sorted(found, key=str.lower)) or "none"


def _missing_packages() -> str:
    needed = re.findall(r"^[\w-]+", (PACK / "requirements.txt").read_text(encoding="utf-8"), re.M)
    missing = [name for name in needed if find_spec(name) is None]
    return f"{', '.join(missing)}; run pip install -r requirements.txt in the pack's folder" if missing else "none"


def _card(device: torch.device) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"engines run on": str(device)}
    for index in range(torch.cuda.device_count()):
        found[f"cuda:{index}"] = _or_reason(lambda index=index: _gpu(index))
    if device.type == "cpu" and not torch.cuda.is_available():
        found["GPU"] = "torch sees none"
        if torch.version.cuda is None and torch.version.hip is None:
            found["GPU"] += "; this torch was built for the CPU alone: install one that was built for CUDA"
    return found


def _gpu(index: int) -> str:
    import torch

    name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    return f"{name}, compute capability {major}.{minor}, {gigabytes(total)}, {gigabytes(free)} free"


def _backends(device: torch.device) -> dict[str, Any]:
    from ..backends import AUTO, backends
    from ..backends.lookup import usable_backends

    def chosen() -> str:
        try:
            return usable_backends(AUTO, device)[0].name
        except Exception as none:
            return f"none ({none})"

    return {"auto takes": chosen(), **{name: _or_reason(lambda one=one: _backend(one, device))
                                       for name, one in backends().items()}}  # fmt: skip


def _backend(backend: Any, device: torch.device) -> str:
    """Say whether a backend serves and builds, and where it does not, why and what to install."""
    if (refusal := backend.cannot_run(device)) is not None:
        lacking = backend.cannot_import()  # on another GPU too
        more = "" if lacking in (None, refusal) else f"; and {lacking.detail}"
        return f"cannot serve: {refusal.detail}{more}"
    text = f"serves, version {backend.version()}"
    refusal = backend.cannot_build(device)
    return text if refusal is None else f"{text}; cannot build: {refusal.detail}"


def _library(place: Place) -> Any:
    if place.library is None:
        return " ".join(dict.fromkeys(place.lost)) or "not known"
    library = place.library
    found = inventory.entries(library, *_judges(place))
    return {
        "folders": [f"{one}{'' if one.is_dir() else ' (not there yet)'}" for one in library.roots],
        "engines": Counter(entry.state for entry in found),
        "size": gigabytes(sum(entry.bytes for entry in found)),
        "free": gigabytes(free_bytes(library.roots[0])),
        "secret of this machine": _or_reason(_secret),
        "fleet key": _or_reason(_fleet),
        "contents": [_or_reason(lambda entry=entry: _engine(entry)) for entry in found],
    }


def _judges(place: Place) -> tuple[Callable, Callable, str]:
    """Return what judges engines here; where torch cannot be had, nothing runs."""
    try:
        from ..backends.lookup import refusals

        device = place.device()
        return refusals(device), source_changed, gpu_of(device)
    except Exception as error:
        why = Fallback(Reason.BACKEND_MISSING, f"nothing runs with this Python ({error})")
        return (lambda _: why), source_changed, ""


def _engine(entry: inventory.Entry) -> dict[str, Any]:
    found = {"engine": entry.name, "state": entry.state, "why": entry.reason, "size": gigabytes(entry.bytes)}
    if entry.engine is None:
        return {**found, "trusted": False}
    engine, manifest = entry.engine, entry.engine.manifest
    identity = manifest.identity
    return {
        **found,
        "trusted": trust.built_here(engine),
        "of": f"{manifest.label}, {identity.architecture}, {identity.precision}, {identity.backend} "
        f"{identity.backend_version}, {profile_words(identity.architecture, identity.profile)}",
        "quality": measurements.error_words(measurements.figures(engine)),
        "built": manifest.created[:10],
        "last used": entry.last_used[:10] if entry.last_used else "never",
    }


def _secret() -> str:
    """Say whether there is a secret, and never which."""
    trust.is_signed("", "")  # which warns of a secret that other users may read
    return "there" if trust.key_stamp() is not None else "none yet, or it cannot be read"


def _fleet() -> str:
    """Say whether a fleet key is in use, and never which."""
    return "in use" if fleet_key.in_use() else fleet_key.why_refused() or "none"


def _settings(place: Place) -> dict[str, Any]:
    names = [*VARIABLES, *sorted(name for name in os.environ if name.startswith("HYBRID_TRT_"))]
    found: dict[str, Any] = {name: os.environ[name] for name in names if name in os.environ}
    found |= {name: "set" for name in SECRETS if name in found}
    if place.library is not None:
        found |= asdict(read_settings(place.library.roots[0]))
    if place.options is not None:
        found["ComfyUI was started with"] = ", ".join(place.options) or "no options"
    if place.limits is not None:
        found["not used of this ComfyUI"] = _or_reason(place.limits)
    return found


def _errors(place: Place, warnings: Callable[[], Iterable[str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if place.jobs is None:
        found["failed builds"] = "see the report of ComfyUI's panel 'TRT engines'"
    else:
        failed = [job for job in place.jobs if job.message]
        found["failed builds"] = [{"build": job.label, "wanted": job.wanted, "why": job.message,
                                   "log": list(job.log)[-LOG_TAIL:]} for job in failed]  # fmt: skip
    return {**found, "warnings": list(dict.fromkeys(warnings()))}


class KeptWarnings(logging.Handler):
    """A handler of the pack's log that keeps the latest warnings and errors as lines, until it is closed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=KEPT_WARNINGS)
        self._logger = logging.getLogger(__name__.removesuffix(".engine_builder.doctor"))
        self._logger.addHandler(self)

    def close(self) -> None:
        self._logger.removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="seconds")
            error = record.exc_info[1] if record.exc_info else None
            more = "" if error is None else f" ({type(error).__name__}: {error})"
            self.lines.append(f"{when} {record.levelname.lower()}: {record.getMessage()}{more}")
        except Exception:
            self.handleError(record)


def hider(libraries: Sequence[Path]) -> Callable[[Any], Any]:
    """Return a function that takes what is personal out of a text, or out of all texts of some data."""
    words = [(re.compile(pattern, re.IGNORECASE), word) for pattern, word in _personal(libraries)]

    def hide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: hide(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [hide(one) for one in value]
        if isinstance(value, str):
            for pattern, word in words:
                value = pattern.sub(word, value)
        return value

    return hide


def _personal(libraries: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield patterns and the words that replace them: longer patterns before their parts."""
    for name in SECRETS:
        if len(secret := os.environ.get(name, "").strip()) >= SHORTEST_SECRET:
            yield re.escape(secret), "<secret>"
    yield _LOGIN, "<login>@<host>"
    home, host = os.path.expanduser("~"), socket.gethostname()
    folders = {home: "~"} | {str(folder): f"<library {n}>" for n, folder in enumerate(libraries, 1)}
    known = {spelt(folder): word for folder, word in folders.items() for spelt in (os.path.abspath, os.path.realpath)}
    for folder in sorted(known, key=len, reverse=True):
        if len(Path(folder).parts) > 1:  # a disk's own folder says nothing
            parts = map(re.escape, re.split(r"[\\/]+", folder))  # backslashes may be doubled
            yield r"[\\/]+".join(parts) + r"(?![\w-])", known[folder]
    names = {host: "<host>", host.partition(".")[0]: "<host>", Path(home).name: "<user>", _user(): "<user>"}
    for name, word in names.items():
        if len(name) >= SHORTEST_NAME and name.lower() not in NOT_PERSONAL:
            yield rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", word


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # nobody knows this user's number
        return ""
