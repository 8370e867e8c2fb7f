"""The step of a build that compiles a network for the torch backend: in the child process, on the device itself."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..architectures.tensors import Profile, TensorSpec
from ..backends import BuildError, Progress
from .native_classes import import_comfyui

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LIMITS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative error of any output against the same network run plainly in the same precision."""


def sizes_to_compile(profile: Profile) -> list[dict[str, int]]:
    """The profile's ``opt`` sizes, with the batch that the guidance doubles and with the plain one."""
    opt = profile.sizes("opt")
    batches = [opt["B"]] + ([opt["B"] // 2] if opt["B"] % 2 == 0 else [])
    return [{**opt, "B": batch, **({"HB": 1} if "HB" in opt else {})} for batch in batches]


def compile_network(task: dict, progress: Progress) -> dict:
    """Compile the network for each of the task's sizes, and compare what came out with the network run plainly.

    The task has ``architecture``, ``structure``, ``weights``, ``weights_file`` and ``comfyui`` as for an export, the
    ``device`` (``cuda`` or ``cpu``) and the ``cases``: sets of sizes. Weights are inputs of what is compiled, so only
    their shapes and memory layout count; these make the comparison one of real values.

    Raises:
        BuildError: Inductor failed, or what it made differs from the network run plainly.
    """
    progress("starting the compiler", 0.0)
    import_comfyui(task["comfyui"])
    import torch

    from ..architectures import architectures
    from ..backends.torch_inductor import file_name
    from ..live_torch.compiled import compile_to_file
    from ..live_torch.network import laid_out
    from .handover import restore
    from .onnx_export import sample_inputs

    folder, precision, device = Path(task["folder"]), task["precision"], torch.device(task["device"])
    inputs = [TensorSpec.from_json(spec) for spec in task["inputs"]]
    outputs = [TensorSpec.from_json(spec) for spec in task["outputs"]]
    module = restore(task["structure"], task["weights"], Path(task["weights_file"]), getattr(torch, precision))
    module.to(device)
    architecture = architectures()[task["architecture"]]
    architecture.hint_encoder(module)  # what is compiled takes the hint encoded
    function = architecture.function(module).eval().requires_grad_(False)
    for parameter in function.parameters():
        parameter.data = laid_out(parameter.data)
    names = sorted(name for name, _ in function.named_parameters())
    weights = [function.get_parameter(name).data for name in names]

    seconds, record = {}, []
    for i, sizes in enumerate(task["cases"]):
        progress(f"compiling for batch {sizes['B']}", 0.05 + 0.95 * i / len(task["cases"]))
        name = file_name(sizes)
        started = time.perf_counter()
        given = [laid_out(t.to(device)) for t in sample_inputs(inputs, sizes, seed=1).values()]
        try:
            compiled = compile_to_file(function, weights, names, given, folder / name)
        except Exception as error:
            log.exception("Inductor failed")
            text = (str(error).strip().splitlines() or [""])[0]
            raise BuildError(
                f"Inductor could not compile the network ({type(error).__name__}: {text}), so no engine was made and "
                "native keeps serving; the build's log has more"
            ) from error
        seconds[f"compile_{Path(name).stem}"] = time.perf_counter() - started
        with torch.inference_mode():
            results = compiled(*weights, *given)
        record.append({**sizes, "rel_err": _error(function, given, results, outputs, sizes, precision)})
    return {
        "files": [file_name(sizes) for sizes in task["cases"]],
        "seconds": seconds,
        "parity": {"rel_err": max(case["rel_err"] for case in record), "limit": LIMITS[precision], "cases": record,
                   "against": "the same weights run plainly on the same device"},
    }  # fmt: skip


def _error(
    function: torch.nn.Module, given: list, results: tuple, outputs: list[TensorSpec], sizes: dict, precision: str
) -> float:
    """The largest relative error of any output; BuildError when it is over the limit."""
    import torch

    from ..live_torch.compiled import best_attention
    from .parity import relative_error

    with torch.inference_mode(), best_attention(given[0].device):
        expected = function(*given)
    errors = {s.name: relative_error(r, e) for s, r, e in zip(outputs, results, expected, strict=True)}
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= LIMITS[precision]:
        raise BuildError(
            f"what Inductor compiled differs from native by {errors[worst]:.2e} in {worst} at {sizes} "
            f"(limit {LIMITS[precision]:.0e} for {precision}), so no engine was made and native keeps serving"
        )
    return errors[worst]
