"""The step that compares an engine from elsewhere with native: in the child process, on the engine's own device."""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .. import backends
from ..architectures.tensors import Profile
from ..backends import BuildError, Progress
from ..engine_library import Engine, Manifest, Reason, Unavailable
from .native_classes import import_comfyui

if TYPE_CHECKING:
    import torch

    from .parity import Case

log = logging.getLogger(__name__)

TIMESTEPS = (900.0, 50.0)
"""The first with random residuals, the second with none."""
CPU_ELEMENTS = 2 * 64 * 64
"""On a CPU the batch of a large call is halved until it has no more latent elements than this."""


def check_engine(task: dict, progress: Progress) -> dict:
    """Open an engine and compare it with native at the least, best and largest sizes that it accepts.

    The task has ``engine`` (its folder), ``manifest``, ``device`` (``cuda`` or ``cpu``) and ``limit``; ``backend`` and
    ``backend_folders`` as for a build; ``architecture``, ``structure``, ``weights``, ``weights_file`` and ``comfyui``
    as for an export.

    Raises:
        BuildError: it differs from native by more than the limit, or cannot be opened or run.
        Unavailable: this machine has not the memory for a comparison.
    """
    progress("running native", 0.0)
    import_comfyui(task["comfyui"])
    import torch

    from .parity import compare

    engine = Engine(Path(task["engine"]), Manifest.from_json(task["manifest"]))
    device = torch.device(task["device"])
    started = time.perf_counter()
    try:
        cases = _native(task, engine.manifest, device, progress)
        compared = time.perf_counter()
        progress("comparing with native", 0.6)
        backends.__path__ = task["backend_folders"]
        backend = importlib.import_module(f".{task['backend']}", backends.__name__).BACKEND
        record = compare(backend.load(engine, device), cases, engine.manifest.outputs)
    except torch.OutOfMemoryError as error:
        raise Unavailable(
            Reason.UNCHECKED, f"there is not enough GPU memory to compare {engine.folder.name} with native now"
        ) from error
    except (BuildError, Unavailable):
        raise
    except Exception as error:
        log.exception("%s failed", engine.folder.name)
        text = (str(error).strip().splitlines() or [""])[0]
        raise BuildError(
            f"{engine.folder.name}, which came from elsewhere, could not be run ({type(error).__name__}: {text}), so "
            "it does not serve and native does; build again to have an engine made here in its place"
        ) from error
    worst = max(record, key=lambda case: case["rel_err"])
    if not worst["rel_err"] <= task["limit"]:
        raise BuildError(
            f"{engine.folder.name}, which came from elsewhere, differs from native by {worst['rel_err']:.2e} in "
            f"{worst['worst_output']} at {worst['symbols']} (limit {task['limit']:.0e}), so it does not serve and "
            "native does; build again to have an engine made here in its place"
        )
    against = "native in float32 on the CPU" if device.type == "cpu" else "native on the same device"
    return {
        "parity": {"rel_err": worst["rel_err"], "limit": task["limit"], "cases": record, "against": against},
        "seconds": {"native": compared - started, "engine": time.perf_counter() - compared},
    }


def sizes_to_check(profile: Profile, on_cpu: bool) -> list[dict[str, int]]:
    """The least, best and largest sizes; a hint belongs to the whole batch or to each image."""
    found = []
    for which in ("min", "opt", "max"):
        sizes = profile.sizes(which)
        least = profile.sizes("min").get("B", 1)
        while on_cpu and sizes.get("B", 1) // 2 >= least and _elements(sizes) > CPU_ELEMENTS:
            sizes["B"] //= 2
        if "HB" in sizes and sizes["HB"] not in (1, sizes["B"]):
            sizes["HB"] = profile.clamp({"HB": 1})["HB"]
        if sizes not in found:
            found.append(sizes)
    return found


def _elements(sizes: dict[str, int]) -> int:
    return sizes["B"] * sizes.get("H", 1) * sizes.get("W", 1)


def _native(task: dict, manifest: Manifest, device: torch.device, progress: Progress) -> list[Case]:
    """What native computes; its memory is free again afterwards."""
    import torch

    from ..architectures import architectures
    from ..live_torch.compiled import best_attention
    from .handover import restore
    from .onnx_export import sample_inputs
    from .parity import Case, in_float32

    identity, on_cpu = manifest.identity, device.type == "cpu"
    dtype = getattr(torch, identity.precision)
    module = restore(task["structure"], task["weights"], Path(task["weights_file"]), dtype).to(device)
    architecture = architectures()[task["architecture"]]
    inputs = architecture.encoded_inputs(module, identity.precision)
    if tuple(inputs) != manifest.inputs or tuple(architecture.outputs(module, identity.precision)) != manifest.outputs:
        raise BuildError(
            f"{task['engine']}, which came from elsewhere, has other inputs and outputs than this network, so it does "
            "not serve and native does; build again to have an engine made here in its place"
        )
    architecture.hint_encoder(module)  # the engine takes the hint encoded
    function = architecture.function(module).eval().requires_grad_(False)
    cases = []
    calls = [(sizes, t) for sizes in sizes_to_check(identity.profile, on_cpu) for t in TIMESTEPS]
    with torch.inference_mode(), in_float32(function) if on_cpu else contextlib.nullcontext(), best_attention(device):
        for seed, (sizes, timestep) in enumerate(calls, start=1):
            progress("running native", 0.6 * seed / len(calls))
            given = sample_inputs(inputs, sizes, seed)
            for spec in inputs:
                if spec.name == "timesteps":
                    given[spec.name].fill_(timestep)
                elif spec.optional and timestep == TIMESTEPS[1]:
                    given[spec.name].zero_()
            tensors = (t.float() if on_cpu else t.to(device) for t in given.values())
            expected = tuple(result.float().cpu() for result in function(*tensors))
            cases.append(Case({**sizes, "t": int(timestep)}, given, expected))
    return cases
