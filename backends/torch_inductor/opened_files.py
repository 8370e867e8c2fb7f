"""Compiled files, opened: each once in this process for each GPU, whatever GPU of its kind it was compiled on.

torch keeps a program's kernels in memory for good, so one that was opened a second time would have them twice.

A file names the GPU that it was compiled on by number: in the program that launches the kernels, and on each kernel. On
another GPU that number is replaced. Kernels themselves are the same for all GPUs of a kind.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import logging
import pickle
import re
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .cache_folder import keep_others_out
from .compiled import KINDS_HEADER, Compiled, let_kernels_be_recorded
from .kinds import Kind, Kinds

log = logging.getLogger(__name__)

_GUARD = re.compile(r"_DeviceGuard\((\d+)\)")
_LAUNCHES = re.compile(r"(?P<before>_DeviceGuard\(|set_device\(|get_raw_stream\(|index=|cuda:)\d+")
_QUOTES = "'" * 3
"""Around the source of each kernel in a program."""

_opened: dict[tuple[bytes, int | None], Kinds] = {}
"""By a file's hash and its GPU. A program has no weights, and calls do not change it."""
_lock = threading.Lock()


def open_contents(contents: bytes, device: torch.device) -> Kinds:
    """Open what such a file holds, or return what was opened before: a pickle, which the caller knows to be ours."""
    key = hashlib.sha256(contents).digest(), device.index if device.type == "cuda" else None
    with _lock:
        if key not in _opened:
            of, kinds = _read(contents)
            _opened[key] = Kinds(of, kinds, [open_one(kind.contents, key[1]) for kind in kinds])
        return _opened[key]


def kinds_in(contents: bytes) -> list[Kind]:
    """The kinds of blocks in a file that the caller knows to be ours."""
    return _read(contents)[1]


def _read(contents: bytes) -> tuple[list[tuple[int, ...]], list[Kind]]:
    if not contents.startswith(KINDS_HEADER):
        raise ValueError("it holds no kinds of blocks")
    of, kinds = pickle.loads(contents[len(KINDS_HEADER) :])
    return of, [Kind(**kind) for kind in kinds]


def ahead(open_file: Callable[[], object], device: torch.device) -> threading.Thread:
    """Open a file in a thread while ComfyUI loads the model. The first call waits for it, and raises what failed."""

    def opening() -> None:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                open_file()
        except Exception as error:
            log.info("Hybrid TRT: a compiled file was not opened ahead of its first call (%s)", error)

    thread = threading.Thread(target=opening, name="hybrid-trt-opens", daemon=True)
    thread.start()
    return thread


@functools.cache
def import_ahead() -> threading.Thread:
    """Import torch's compiler in a thread, once in this process: opening a file needs it, and it takes a second."""

    def importing() -> None:
        with suppress(ImportError):  # opening says what is missing
            import torch._functorch._aot_autograd.aot_autograd_result
            import torch._inductor.config  # noqa: F401

    thread = threading.Thread(target=importing, name="hybrid-trt-imports", daemon=True)
    thread.start()
    return thread


def open_one(contents: bytes, gpu: int | None = None) -> Compiled:
    """Open one of Inductor's files.

    Args:
        gpu: the number of the GPU that is to run it; None for a CPU, and in the process that has compiled it.
    """
    import torch._inductor.config

    keep_others_out()
    let_kernels_be_recorded()
    # nothing is compiled here, and starting Inductor's pool of compilers would keep all cores busy for seconds
    with torch._inductor.config.patch(compile_threads=1), torch.inference_mode(False), torch.no_grad():
        opened = _without_a_copy(contents, gpu)
        if opened is None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "compiled"
                path.write_bytes(contents)
                opened = torch._inductor.CompiledArtifact.load(path=str(path))
    return opened


def _without_a_copy(contents: bytes, gpu: int | None) -> Compiled | None:
    """Return what ``CompiledArtifact.load`` gives, or None where this torch keeps its files otherwise.

    torch first copies, object by object, all that it has read, so as to be able to write it once more, and reads all of
    its own sources to tell whether it is the torch that wrote the file: an engine knows that by torch's version.
    """
    try:
        from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry
        from torch._inductor.standalone_compile import AOTCompiledArtifact
        from torch.utils._appending_byte_serializer import BytesReader

        reader = BytesReader(contents)
        if reader.read_bytes() != AOTCompiledArtifact.AOT_HEADER:
            return None
        reader.read_bytes()  # the hash of torch's sources
        held = reader.read_bytes()
        entry, kernels, arguments = pickle.loads(held)
        if kernels or arguments:  # which have to be put in their place
            return None
        if gpu is not None and _is_of_another(entry, gpu):
            entry = _read_for(held, gpu)
        entry.__deepcopy__ = lambda memo: entry
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        log.info("Hybrid TRT: compiled files open more slowly with this torch (%s)", error)
        return None
    return deserialize_bundled_cache_entry(entry)


def _is_of_another(entry: Any, gpu: int) -> bool:
    """Tell whether what a file holds was compiled on another GPU than the one of this number."""
    return any(int(found) != gpu for found in _GUARD.findall(entry.compiled_fw.result.source_code))


def _read_for(contents: bytes, gpu: int) -> Any:
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
    """Reads devices and their properties as another GPU's."""

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
