"""Choice of torch's attention kernel to compile a network with: by timing, where the GPU is not known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from ...comfy_model import torch_kernels
from ...comfy_model.torch_kernels import ATTENTION, best_attention, usual_attention
from ...sessions.cuda_graphs import GraphCache

log = logging.getLogger(__name__)

KNOWN = {9: "cudnn"}
"""Capability, its first number -> what all figures of our own on such GPUs were made with; other GPUs are asked."""
WORTH = 0.98
"""Another kernel than the usual one is taken when a call takes at most this part of the usual one's time."""

Time = Callable[[str], float]
"""A kernel's name -> milliseconds of a call with it."""


def choose(function: torch.nn.Module, given: Sequence[torch.Tensor]) -> tuple[str | None, dict[str, float]]:
    """The kernel for attention of calls like this one, and the milliseconds it was chosen by.

    Returns:
        Its name in ``ATTENTION``, None for torch's own choice; the measurement is empty where there was none.
    """
    usual = usual_attention(given[0].device)
    if not is_timed(given[0].device):
        return usual, {}
    return fastest(usual or "flash", lambda name: _milliseconds(function, given, name))


def is_timed(device: torch.device) -> bool:
    """Tell whether kernels are timed for a device: not on a CPU, nor on GPUs that are known."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in KNOWN


def fastest(usual: str, time: Time) -> tuple[str, dict[str, float]]:
    """The fastest kernel by ``time``; the usual one unless another is clearly faster. One that fails is left out."""
    found: dict[str, float] = {}
    for name in ATTENTION:
        try:
            found[name] = round(time(name), 3)
        except Exception as error:
            log.info("attention by %s was not timed: %s", name, error)
    if not found:
        return usual, found
    best = min(found, key=found.__getitem__)
    return (best if found[best] <= WORTH * found.get(usual, float("inf")) else usual), found


def _milliseconds(function: torch.nn.Module, given: Sequence[torch.Tensor], name: str) -> float:
    """A call of the network run plainly, as a CUDA graph, so that the host has no part in it.

    Raises:
        RuntimeError: it could not be recorded.
    """
    graphs = GraphCache(given[0].device)
    inputs = {str(i): tensor for i, tensor in enumerate(given)}

    def run(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {str(i): result for i, result in enumerate(function(*tensors.values()))}

    with torch.inference_mode(), best_attention(given[0].device, name):
        milliseconds = torch_kernels.milliseconds(lambda: graphs.run(run, inputs))
    if graphs.failure is not None:
        raise RuntimeError(graphs.failure)
    return milliseconds
