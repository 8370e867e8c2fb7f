"""Facts for the report for support. A fact that cannot be found is reported as such, and the others still appear."""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...architectures import profile_words
from ...comfy_model.hash_cache import source_changed
from ...engine_library import Fallback, Library, Reason, fleet_key, inventory, trust, yardstick
from ...engine_library.disk import free_bytes, gigabytes, read_settings
from ...engine_library.gpu_driver import driver_version
from ...engine_library.manifest import PACK_VERSION
from .privacy import SECRETS, hider

if TYPE_CHECKING:
    import torch

    from ..jobs import Job

log = logging.getLogger(__name__)

PACK = Path(__file__).absolute().parents[2]
PACKAGES = re.compile(
    r"(onnx|tensorrt|polygraphy|triton|torch|cuda-python|xformers|sageattention|flash.attn|numpy|safetensors|lpips|"
    r"comfyui.frontend|comfy.kitchen|comfy.aimdo)", re.IGNORECASE
)  # fmt: skip
"""Beginnings of the names of packages that matter here."""
VARIABLES = ("COMFYUI_PATH", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
             "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS")  # fmt: skip
LOG_TAIL = 15
"""Lines of a failed build's log."""
TITLE = "Hybrid TRT, report for support"


@dataclass(frozen=True)
class ReportContext:
    """Facts about the reporting process that a report cannot find by itself.

    Attributes:
        comfyui: ComfyUI's folder, or None.
        data: the folder of its models and pictures, if it is another folder.
        library: None where no library is known.
        device: returns the device that engines run on; may raise.
        options: ComfyUI's command-line options.
        limits: returns sentences on features that are off with this ComfyUI.
        jobs: builds of this process.
        lost: sentences on facts that could not be found.
    """

    comfyui: Path | None
    library: Library | None
    device: Callable[[], torch.device]
    data: Path | None = None
    options: Sequence[str] | None = None
    limits: Callable[[], list[str]] | None = None
    jobs: Sequence[Job] | None = None
    lost: Sequence[str] = field(default_factory=list)


def report(context: ReportContext, warnings: Callable[[], list[str]]) -> dict[str, Any]:
    """Return all facts, without personal data.

    Args:
        warnings: returns the pack's latest warnings; asked last, since looking may warn too.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found = {
        TITLE: f"{now}; no personal folders are in it",
        "versions": _or_reason(lambda: _versions(context)),
        "card": _or_reason(lambda: _card(context.device())),
        "backends": _or_reason(lambda: _backends(context.device())),
        "library": _or_reason(lambda: _library(context)),
        "settings": _or_reason(lambda: _settings(context)),
        "last errors": _or_reason(lambda: _errors(context, warnings)),
    }
    return _hider(context)(found)


def _hider(context: ReportContext) -> Callable[[Any], Any]:
    places: dict[str, Path | None] = {
        "<pack>": PACK, "<comfyui>": context.comfyui, "<comfyui data>": context.data, "<python>": Path(sys.prefix),
        "<temporary>": Path(tempfile.gettempdir()),
    }  # fmt: skip
    for number, root in enumerate(context.library.roots if context.library is not None else (), 1):
        places["<library>" if number == 1 else f"<library {number}>"] = Path(root).absolute()
    try:
        places["<key folder>"] = trust.key_folder().absolute()
    except OSError:  # no home
        pass
    return hider(places)


def _or_reason(find: Callable[[], Any]) -> Any:
    """Return facts, or a sentence on why there are none."""
    try:
        return find()
    except ModuleNotFoundError as error:
        return f"not known: {error.name} is not installed for this Python; it has to be the one that runs ComfyUI"
    except Exception as error:  # a report about faults has to survive them
        log.debug("Hybrid TRT: a part of the report failed", exc_info=True)
        return f"not known: {type(error).__name__}: {error}"


def _versions(context: ReportContext) -> dict[str, Any]:
    return {
        "Hybrid TRT": PACK_VERSION,
        "ComfyUI": _or_reason(lambda: _comfyui_version(context)),
        "Python": platform.python_version(),
        "system": platform.platform(),
        **_torch_versions(),
        "NVIDIA driver": _or_reason(_driver),
        "packages": _or_reason(_packages),
        "missing packages": _or_reason(_missing_packages),
    }


def _comfyui_version(context: ReportContext) -> str:
    if context.comfyui is None:
        return " ".join(dict.fromkeys(context.lost)) or "not found; give --comfyui, or set COMFYUI_PATH"
    file = context.comfyui / "comfyui_version.py"
    found = re.search(r'__version__ = "(.+)"', file.read_text(encoding="utf-8")) if file.is_file() else None
    return "of unknown version" if found is None else found[1]


def _torch_versions() -> dict[str, str]:
    try:
        import torch
    except Exception as error:  # libraries that do not load raise what they like
        return {"torch": f"cannot be loaded ({type(error).__name__}: {error}); this has to be ComfyUI's Python"}
    built = f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda or "torch was built without it"
    return {"torch": torch.__version__, "CUDA": built}


def _driver() -> str:
    return driver_version() or "not found (nvidia-smi does not tell it)"


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
    from ...backends import AUTO, backends
    from ...backends.lookup import usable_backends

    def chosen() -> str:
        try:
            return usable_backends(AUTO, device)[0].name
        except Exception as none:
            return f"none ({none})"

    return {"auto takes": chosen(), **{name: _or_reason(lambda one=one: _backend(one, device))
                                       for name, one in backends().items()}}  # fmt: skip


def _backend(backend: Any, device: torch.device) -> str:
    """Say whether a backend serves and builds; if not, why, and what to install."""
    if (refusal := backend.unavailable(device)) is not None:
        return f"cannot serve: {refusal.detail}{_not_installed(backend, refusal)}"
    text = f"serves, version {backend.version()}"
    refusal = backend.cannot_build(device)
    return text if refusal is None else f"{text}; cannot build: {refusal.detail}"


def _not_installed(backend: Any, known: Fallback) -> str:
    """Say that a backend needs another GPU, and also the packages that are missing."""
    from ...backends.tensorrt.backend import TensorRTBackend
    from ...backends.tensorrt.flavour import missing

    lacking = missing(backend.flavour) if isinstance(backend, TensorRTBackend) else None
    return "" if lacking is None or lacking == known else f"; and {lacking.detail}"


def _library(context: ReportContext) -> Any:
    if context.library is None:
        return {"folder": " ".join(dict.fromkeys(context.lost)) or "not known"}
    library, root = context.library, context.library.roots[0]
    found = inventory.entries(library, *_judges(context))
    states = {entry.state: sum(one.state == entry.state for one in found) for entry in found}
    there = "" if root.is_dir() else " (not there yet: the first build makes it)"
    return {
        "folder": "".join((str(root), there)),
        "further folders": ", ".join(str(other) for other in library.roots[1:]),
        "engines": f"{len(found)}" + "".join(f", {count} {state}" for state, count in states.items()),
        "size": gigabytes(sum(entry.bytes for entry in found)),
        "free": gigabytes(free_bytes(root)),
        "secret of this machine": _or_reason(_secret),
        "fleet key": _or_reason(_fleet),
        "contents": [_or_reason(lambda entry=entry: _engine(entry)) for entry in found],
    }


def _judges(context: ReportContext) -> tuple[Callable, Callable, str]:
    """Return the functions that judge engines here; without torch nothing runs."""
    try:
        from ...backends import gpu_of
        from ...backends.lookup import refusals

        device = context.device()
        return refusals(device), source_changed, gpu_of(device)
    except Exception as error:
        why = Fallback(Reason.BACKEND_MISSING, f"nothing runs with this Python ({error})")
        return (lambda _: why), source_changed, ""


def _engine(entry: inventory.Entry) -> dict[str, Any]:
    facts = {"engine": entry.name, "state": entry.state, "why": entry.reason, "size": gigabytes(entry.bytes)}
    if entry.engine is None:
        return {**facts, "trusted": False}
    engine, manifest = entry.engine, entry.engine.manifest
    identity = manifest.identity
    return {
        **facts,
        "trusted": trust.built_here(engine),
        "of": f"{manifest.label}, {identity.architecture}, {identity.precision}, {identity.backend} "
        f"{identity.backend_version}, {profile_words(identity.architecture, identity.profile)}",
        "quality": yardstick.words(trust.figures(engine)),
        "built": manifest.created[:10],
        "last used": entry.last_used[:10] if entry.last_used else "never",
    }


def _secret() -> str:
    """Say whether there is a secret, and never which."""
    trust.is_signed("", "")  # this warns of a secret that others may read
    named = f"; {trust.FOLDER_VARIABLE} is set" if os.environ.get(trust.FOLDER_VARIABLE) else ""
    return ("there" if trust.key_stamp() is not None else "none yet, or it cannot be read") + named


def _fleet() -> str:
    """Say whether a fleet key is in use, and never which."""
    return "in use" if fleet_key.in_use() else fleet_key.why_refused() or "none"


def _settings(context: ReportContext) -> dict[str, Any]:
    names = [*VARIABLES, *sorted(name for name in os.environ if name.startswith("HYBRID_TRT_"))]
    found: dict[str, Any] = {name: _quoted(os.environ[name]) for name in names if name in os.environ}
    found |= {name: "set" for name in SECRETS if name in found}
    if context.library is not None:
        found |= asdict(read_settings(context.library.roots[0]))
    if context.options is not None:
        found["ComfyUI was started with"] = ", ".join(context.options) or "no options"
    if context.limits is not None:
        found["not used of this ComfyUI"] = _or_reason(context.limits)
    return found


def _quoted(value: str) -> str:
    """Return a value in quotes if it may be a folder, so that its end is clear."""
    return f"'{value}'" if re.search(r"[\\/]", value) else value


def _errors(context: ReportContext, warnings: Callable[[], list[str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if context.jobs is None:
        found["failed builds"] = "those of ComfyUI are in the report of its panel 'TRT engines'"
    else:
        failed = [job for job in context.jobs if job.message]
        found["failed builds"] = [{"build": job.label, "wanted": job.wanted, "why": job.message,
                                   "log": list(job.log)[-LOG_TAIL:]} for job in failed]  # fmt: skip
    return {**found, "warnings": list(dict.fromkeys(warnings()))}
