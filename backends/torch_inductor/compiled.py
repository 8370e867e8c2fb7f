"""Inductor's side: trace a block with some sizes left free, and compile it.

The trace has the weights as inputs, so one file serves every checkpoint of a layout, and LoRAs. ``standalone_compile``
makes a file that a new process opens in seconds: nothing is traced, guarded or looked up again.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import platform
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...engine_library import BuildError
from . import graph_passes, inductor_tuning
from .launch_order import in_little_memory

if TYPE_CHECKING:
    from .free_dimensions import FreeDimensions

log = logging.getLogger(__name__)

Compiled = Callable[..., Sequence[torch.Tensor]]
"""Weights, then inputs -> outputs."""

OLDEST_TORCH = (2, 11)
"""The first torch that this was run with."""

KINDS_HEADER = b"compiled by kinds of blocks\n"
"""First bytes of a file that holds one of Inductor's for each kind of block."""

_FILE_NAME = re.compile(r"[A-Z]{1,4}[0-9]*(-[A-Z]{1,4}[0-9]*)*\.bin")

FORMAT = 10
"""Raise this when older files would be called wrongly or run much slower: they become stale."""

OBJECTS = 20_000
"""New ones between two searches for garbage, of which Inductor makes little; with Python's 700 it took 6 % longer."""


def can_compile() -> bool:
    """Tell whether this torch can compile to a file; asked without importing Inductor, which takes seconds."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= OLDEST_TORCH


@functools.cache
def cpu_kind() -> str:
    """Return what tells CPUs with different instructions apart: a file compiled on one may crash on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # other systems than Linux
        return f"{platform.machine()} {platform.processor()}"
    flags = next((line for line in lines if line.startswith(("flags", "Features", "isa"))), "")
    words = " ".join(sorted(flags.partition(":")[2].split()))
    return f"{platform.machine()} {hashlib.sha256(words.encode()).hexdigest()[:12]}"


def let_kernels_be_recorded() -> None:
    """Make Inductor's kernels launch while a CUDA graph is recorded, under the allocator that ComfyUI chooses.

    With cudaMallocAsync, memory allocated during a recording has no address attributes yet, and Inductor's launchers,
    its own and Triton's, ask for them for every tensor and fail. Plain addresses they take unasked. A kernel's launcher
    is written when the kernel is opened, so this comes first; outside a recording nothing changes. A torch that writes
    launchers otherwise stays as it is: what it cannot record, the graph cache runs plainly.
    """
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return
    try:
        from torch._inductor.runtime.triton_heuristics import CompileResult

        write = CompileResult._gen_launcher_code
    except (ImportError, AttributeError) as error:
        log.warning("Hybrid TRT: compiled kernels may not be recorded with this torch (%s)", error)
        return
    if getattr(write, "takes_addresses", False):
        return

    def write_for_recordings(self: Any, scope: dict[str, Any], *rest: Any, **named: Any) -> Callable[..., None]:
        if "runner" in scope:  # changed in place: Inductor goes on with this very dict
            scope["runner"] = _with_addresses(scope["runner"])
        return write(self, scope, *rest, **named)

    write_for_recordings.takes_addresses = True
    CompileResult._gen_launcher_code = write_for_recordings


def _with_addresses(launch: Callable[..., None]) -> Callable[..., None]:
    """``launch`` with addresses in the place of tensors while the current stream is recorded."""

    def run(*args: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            args = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        launch(*args)

    return run


def lifted(function: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a network by name: inputs of what is compiled.

    Sorted: in which order a layer registers its parameters depends on how ComfyUI loaded them.
    """
    return {name: tensor.data for name, tensor in _named(function)}


def parameters_of(function: torch.nn.Module) -> list[torch.Tensor]:
    """Return the objects whose data ``lifted`` gives, in the same order."""
    return [tensor for _, tensor in _named(function)]


def _named(function: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return sorted((*function.named_parameters(), *function.named_buffers()), key=lambda named: named[0])


@contextmanager
def _few_searches_for_garbage() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_few_searches_for_garbage()
def traced(
    function: torch.nn.Module,
    weights: Sequence[torch.Tensor],
    names: Sequence[str],
    inputs: Sequence[torch.Tensor],
    free: FreeDimensions,
) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A block as a graph, and examples of what that takes: weights, then inputs.

    Raises:
        BuildError: the block makes a tensor of plain numbers, which no file would have.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    count = len(weights)

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parameters = dict(zip(names, tensors[:count], strict=True))
        return torch.func.functional_call(function, parameters, tensors[count:])

    given = [t.clone() if t.is_inference() else t for t in (*weights, *inputs)]
    given = free.examples(given[:count], given[count:])
    graph = make_fx(flat, decomposition_table=inductor_tuning.TABLE, tracing_mode="symbolic")(*given)
    _refuse_numbers(graph)
    inductor_tuning.change_layouts(graph)
    graph_passes.write_out_quantised(graph)
    return graph, given


def _refuse_numbers(graph: torch.fx.GraphModule) -> None:
    for node in graph.graph.find_nodes(op="get_attr"):
        if node.users and isinstance(value := getattr(graph, str(node.target), None), torch.Tensor):
            log.error("The network makes a tensor of plain numbers, of shape %s, which a compiled file cannot hold: "
                      "its family has to make it of an input, or keep it as a buffer", tuple(value.shape))
            raise BuildError("this model cannot be compiled here, so no engine was made and the normal model keeps "
                             "running; please report it; the build's log has more")


@_few_searches_for_garbage()
def by_inductor(graph: torch.fx.GraphModule, given: Sequence[torch.Tensor], free: FreeDimensions) -> Any:
    """Return what Inductor makes of a graph; ``given`` are examples of what that takes, fake tensors."""
    import torch._inductor

    # from its caches Inductor takes code without the conditions on sizes that it holds for
    never_seen = torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex)
    with _choices(), in_little_memory(), free.known_to_inductor(), never_seen:
        return torch._inductor.standalone_compile(graph, given, dynamic_shapes="from_tracing_context", aot=True)


def _choices() -> AbstractContextManager[None]:
    """``row_sums.our_rows``, or nothing with a torch that makes these choices elsewhere: they only cost time."""
    try:
        from .row_sums import our_rows
    except ImportError as error:
        log.warning("Hybrid TRT: Inductor chooses alone with this torch (%s): networks run slower", error)
        return nullcontext()
    return our_rows()


def file_name(symbols: Iterable[str]) -> str:
    """Name of an engine's file, by the symbols of its network's sizes: ``B-H-T-W.bin``."""
    return "-".join(sorted(symbols)) + ".bin"


def is_file_name(name: str) -> bool:
    """Tell whether ``file_name`` gives such names, or did in earlier versions: those had sizes."""
    return bool(_FILE_NAME.fullmatch(name))


def is_for_one_size(name: str) -> bool:
    """Tell whether a file is of an earlier version, which compiled for each size."""
    return any(map(str.isdigit, name))
