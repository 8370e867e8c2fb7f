"""Inductor's side: trace a network for one set of sizes, compile it, keep the result in a file, open it again.

The trace has the weights as inputs, so one file serves every checkpoint of a layout, and LoRAs. ``standalone_compile``
makes a file that a new process opens in seconds: nothing is traced, guarded or looked up again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Compiled = Callable[..., Sequence[torch.Tensor]]
"""Weights, then inputs -> outputs."""

FORMAT = 1
"""Raise this when the traced function changes: older files become stale."""


def can_compile() -> bool:
    """Whether this torch can compile to a file."""
    try:
        from torch._inductor.standalone_compile import AOTCompiledArtifact  # noqa: F401  (2.10)
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def best_attention(device: torch.device) -> Iterator[None]:
    """Inside, attention takes cuDNN's kernel where that is fastest (Hopper and later), else torch's own order."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        yield
        return
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield


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
        graph = make_fx(flat, tracing_mode="fake")(*given)
        compiled = torch._inductor.standalone_compile(graph, given, dynamic_shapes="from_example_inputs", aot=True)
    compiled.save(path=str(path))
    return compiled


def open_file(path: Path) -> Compiled:
    """Open what ``compile_to_file`` kept. It is a pickle: the caller has checked that it was made here."""
    import torch._inductor

    with torch.inference_mode(False), torch.no_grad():
        return torch._inductor.CompiledArtifact.load(path=str(path))
