"""Files that Inductor compiled on one GPU, read for another of the same kind in this machine.

A file names its GPU by number: in the program that launches the kernels, and on each kernel. Here the number is
another one. Kernels themselves are the same for all GPUs of a kind.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
from functools import partial
from typing import Any

import torch

_GUARD = re.compile(r"_DeviceGuard\((\d+)\)")
_LAUNCHES = re.compile(r"(?P<before>_DeviceGuard\(|set_device\(|get_raw_stream\(|index=|cuda:)\d+")
_QUOTES = "'" * 3
"""Around the source of each kernel in a program."""


def is_of_another(entry: Any, gpu: int) -> bool:
    """Tell whether what a file holds was compiled on another GPU than the one of this number."""
    return any(int(found) != gpu for found in _GUARD.findall(entry.compiled_fw.result.source_code))


def read_for(contents: bytes, gpu: int) -> Any:
    """Read the pickle of such a file for the GPU of this number."""
    entry, _, _ = _Reader(contents, gpu).load()
    graph = entry.compiled_fw.result
    bundle = graph._triton_bundle
    launched = set() if bundle is None else {tuner.cache_key for tuner in bundle.static_autotuners}
    graph.source_code = _program_for(graph.source_code, gpu, launched)
    graph.cache_key = f"{graph.cache_key}gpu{gpu}"  # a program of its own on disk
    graph.device_idxs = type(graph.device_idxs)([gpu])
    graph.constants = {name: held.to(torch.device("cuda", gpu)) if held.is_cuda else held
                       for name, held in (graph.constants or {}).items()}  # fmt: skip
    if bundle is not None:
        kernels = [dataclasses.replace(one, device=gpu) for one in bundle.kernel_artifacts]
        graph._triton_bundle = dataclasses.replace(bundle, kernel_artifacts=kernels)
        for tuner in bundle.static_autotuners:
            tuner.kernel.triton_meta["device"] = gpu
            for compiled in tuner.kernel.compile_results:
                compiled.compile_meta["device"] = gpu
    return entry


def _program_for(program: str, gpu: int, launched: set[str]) -> str:
    """Return a program with the number of another GPU.

    Args:
        launched: keys of the kernels that are in the file; each is found by its source, which stays as it is.
    """
    from torch._inductor.async_compile import CompiledTritonKernels

    pieces = program.split(_QUOTES)
    for i, piece in enumerate(pieces):
        if i % 2 == 0 or CompiledTritonKernels.key(piece) not in launched:
            pieces[i] = _LAUNCHES.sub(rf"\g<before>{gpu}", piece)
    return _QUOTES.join(pieces)


class _Reader(pickle.Unpickler):
    """Reads devices, and properties of one, as those of another GPU."""

    def __init__(self, contents: bytes, gpu: int):
        super().__init__(io.BytesIO(contents))
        self._gpu = gpu

    def find_class(self, module: str, name: str) -> Any:
        from torch._inductor.runtime.hints import DeviceProperties

        found, gpu = super().find_class(module, name), self._gpu
        if found is torch.device:
            return partial(_device, gpu)
        if found is not DeviceProperties:
            return found

        class There(DeviceProperties):
            def __new__(cls, type: str, index: int, *rest: Any) -> DeviceProperties:
                return DeviceProperties(type, gpu, *rest)

        return There


def _device(gpu: int, kind: str, index: int | None = None) -> torch.device:
    return torch.device(kind, gpu if kind == "cuda" and index is not None else index)
