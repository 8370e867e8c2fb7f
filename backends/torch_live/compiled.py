"""Inductor's side: trace a network for one set of sizes, compile it, keep the result in a file, open it again.

The trace has the weights as inputs, so one file serves every checkpoint of a layout, and LoRAs. ``standalone_compile``
makes a file that a new process opens in seconds: nothing is traced, guarded or looked up again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...native_model.kernels import best_attention
from . import decompositions

Compiled = Callable[..., Sequence[torch.Tensor]]
"""Weights, then inputs -> outputs."""

OLDEST_TORCH = (2, 11)
"""The first torch that this was run with."""

FORMAT = 4
"""Raise this when the traced function changes: older files become stale."""


def can_compile() -> bool:
    """Whether this torch can compile to a file; asked without importing Inductor, which takes seconds."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= OLDEST_TORCH


def _let_kernels_be_recorded() -> None:
    """Make Inductor's kernels launch while a CUDA graph is recorded, under the allocator that ComfyUI chooses.

    With cudaMallocAsync, memory allocated during a recording has no address attributes yet, and the launcher, which
    asks for them for every tensor, fails. It takes plain addresses unasked. Kernels take ``run`` when they are opened,
    so this comes first; outside a recording nothing changes.
    """
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return
    from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel as Kernel

    if getattr(Kernel.run, "takes_addresses", False):
        return
    launch = Kernel.run

    def run(self, grid_x: int, grid_y: int, grid_z: int, stream: int, *args: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            args = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        launch(self, grid_x, grid_y, grid_z, stream, *args)

    run.takes_addresses = True
    Kernel.run = run


def compile_to_file(
    function: torch.nn.Module,
    weights: Sequence[torch.Tensor],
    names: Sequence[str],
    inputs: Sequence[torch.Tensor],
    path: Path,
) -> Compiled:
    """Compile ``function`` for exactly these sizes and strides.

    Args:
        function: its parameters are called ``names``; their values are ``weights``.
        inputs: examples, in order.
        path: where to keep the result.
    """
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    count = len(weights)

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parameters = dict(zip(names, tensors[:count], strict=True))
        return torch.func.functional_call(function, parameters, tensors[count:])

    given = [*weights, *inputs]
    with torch.inference_mode(False), torch.no_grad(), best_attention(inputs[0].device):
        given = [t.clone() if t.is_inference() else t for t in given]
        graph = make_fx(flat, decomposition_table=decompositions.TABLE, tracing_mode="fake")(*given)
        compiled = torch._inductor.standalone_compile(graph, given, dynamic_shapes="from_example_inputs", aot=True)
    compiled.save(path=str(path))
    return compiled


def open_file(path: Path) -> Compiled:
    """Open what ``compile_to_file`` kept. It is a pickle: the caller has checked that it was made here."""
    import torch._inductor.config

    _let_kernels_be_recorded()
    # nothing is compiled here, and starting Inductor's pool of compilers would keep all cores busy for seconds
    with torch._inductor.config.patch(compile_threads=1), torch.inference_mode(False), torch.no_grad():
        return torch._inductor.CompiledArtifact.load(path=str(path))


def file_name(symbols: dict[str, int]) -> str:
    """Name of the compiled file for some sizes, for example ``B2-H64-HB1-T77-W64.bin``."""
    return "-".join(f"{symbol}{size}" for symbol, size in sorted(symbols.items())) + ".bin"


def sizes_of(name: str) -> dict[str, int]:
    """The inverse of ``file_name``."""
    parts = Path(name).stem.split("-")
    return {part.rstrip("0123456789"): int(part.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")) for part in parts}
