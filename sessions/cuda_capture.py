"""CUDA graph capture: the capture itself, wait points, and captures that fail.

*Wait points.* Residuals are needed in a UNet's second half alone. A network that was compiled to say where it needs
them is captured with a wait point there. The first half then runs beside the ControlNets that compute them.

*Another package's kernels*, such as SageAttention's, may fail in a capture under cudaMallocAsync: they ask for a
tensor's address. ComfyUI then calls torch's in their place, in a capture that is broken, and the process ends. So calls
with attention that a user chose are not captured there.

*Failed captures.* They leave tensors behind: in the frames of their errors, and in modules that stopped half way.
With torch's own allocator all of them may be freed. With cudaMallocAsync, which ComfyUI prefers, a tensor made during
the capture has an address that gets memory only when the graph runs. Freeing it earlier ends the process, and while it
exists later captures fail. ComfyUI looks for an interrupt at each layer, so an interrupt may come during a capture.
CUDA ends such a capture well: the captured work runs once, and its tensors can be freed. Where CUDA broke the capture
off, its tensors stay for good: they hold no memory. Later captures may get their addresses and fail as well. Calls of
these shapes then run plainly.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from ..architectures.user_attention import calls_others
from .graph_memory import free_idle_memory

log = logging.getLogger(__name__)

_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
"""Streams to use again: a stream keeps tens of megabytes of work space for good."""


_never_freed: list[torch.Tensor] = []


class Replay(Protocol):
    """A captured run: ``replay`` does it again on the same buffers."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Replay]
"""Runs a function once while capturing it."""


class WaitPoint:
    """The place in a graph where it waits for late inputs: each replay waits for the latest record of the event.

    Attributes:
        passed: True if the captured network has such a place.
    """

    def __init__(self, event: torch.cuda.Event):
        self.event = event
        self.passed = False

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
        self.passed = True


_wait_point: ContextVar[WaitPoint | None] = ContextVar("hybrid_trt_wait_point", default=None)


@contextmanager
def with_wait_point(wait_point: WaitPoint | None) -> Iterator[None]:
    """Let networks of this thread wait at a wait point where they need late inputs."""
    token = _wait_point.set(wait_point)
    try:
        yield
    finally:
        _wait_point.reset(token)


def wait_at_point() -> None:
    """Wait for late inputs, which are needed from here on; without a wait point they are there already."""
    wait_point = _wait_point.get()
    if wait_point is not None:
        wait_point.wait()


class LargerGraph:
    """A graph of which calls are parts: they run kernel by kernel, and no cache keeps their results.

    Tensors of a capture have no values after it.

    Attributes:
        read: cached tensors that it reads; they have to live as long as the graph.
    """

    def __init__(self) -> None:
        self.read: list[Any] = []
        self._held: list[torch.Tensor] = []
        self._streams: set[torch.cuda.Stream] = set()

    def hold(self, tensors: Iterable[torch.Tensor], stream: torch.cuda.Stream) -> None:
        """Keep tensors of another stream until all streams have joined: freeing a tensor is work of its stream."""
        self._held += tensors
        self._streams.add(stream)

    def join(self) -> None:
        """Free the held tensors on their streams, and let the current stream wait for these streams."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._held.clear()
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._streams.clear()


_larger_graph: ContextVar[LargerGraph | None] = ContextVar("hybrid_trt_larger_graph", default=None)


@contextmanager
def part_of(larger: LargerGraph) -> Iterator[None]:
    """Run calls of this thread as parts of a larger graph."""
    token = _larger_graph.set(larger)
    try:
        yield
    finally:
        try:
            larger.join()  # after an error too: CUDA breaks a capture off whose streams have not joined
        finally:
            _larger_graph.reset(token)


def in_larger_graph() -> bool:
    """Tell whether this thread's calls are part of a larger graph."""
    return _larger_graph.get() is not None


def read_by_larger_graph(tensors: Any) -> None:
    """Keep tensors of a cache as long as the larger graph that reads them, if this call is part of such a graph."""
    larger = _larger_graph.get()
    if larger is not None:
        larger.read.append(tensors)


def wait_for(ready: torch.cuda.Event, stream: torch.cuda.Stream, tensors: Iterable[torch.Tensor]) -> None:
    """Let the current stream wait for an event of another stream, and read these tensors of that stream."""
    here = torch.cuda.current_stream(stream.device)
    here.wait_event(ready)
    larger = _larger_graph.get()
    if larger is not None:
        larger.hold(tensors, stream)
        return
    for tensor in tensors:
        tensor.record_stream(here)


class CudaCapture:
    """Captures on CUDA. All its graphs share a pool of memory, because they never run at once.

    Attributes:
        stream: a stream to capture on, of this object alone. torch keeps a work space for matrix products per stream,
            and a graph has its address. Graphs of several objects may run at once, so they need several streams.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        idle = _idle_streams.setdefault(device, [])
        self.stream = idle.pop() if idle else torch.cuda.Stream(device)
        weakref.finalize(self, idle.append, self.stream)

    def warm_up(self, body: Callable[[], None]) -> None:
        """Run a function on the stream: libraries make what they keep for good."""
        here = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            self._make_work_space()
            body()
        here.wait_stream(self.stream)

    def __call__(self, body: Callable[[], None]) -> Replay:
        """Capture a function. Its work was run on the stream before, maybe for other sizes; see ``warm_up``."""
        graph = torch.cuda.CUDAGraph()
        free_idle_memory(self._device)
        # thread_local: other threads of ComfyUI may use CUDA while this one captures
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device):
            record(body, capturing, graph, self._device, self._leave)
        free_idle_memory(self._device)
        return graph

    def _make_work_space(self) -> None:
        """Have torch make the stream's work space for matrix products.

        A work space made in a capture would belong to this graph alone. Made during a run, it would lie between the
        run's tensors, and their memory could not be freed.
        """
        ones = torch.ones(16, 16, device=self._device, dtype=torch.float16)
        torch.addmm(ones[0], ones, ones)

    def new_wait_point(self) -> WaitPoint:
        """Return a wait point for a graph, whose event has already been recorded."""
        event = torch.cuda.Event(external=True)
        event.record(torch.cuda.current_stream(self._device))  # a replay does not wait for an event without a record
        return WaitPoint(event)

    def _leave(self) -> None:
        """Leave a capture that CUDA broke off."""
        self._leave_pool()
        self._leave_random_numbers()

    def _leave_pool(self) -> None:
        """Leave the pool: after a failed capture torch still allocates to it, and it can neither be used nor freed."""
        index = torch.device(self._device).index or 0
        for leave in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            try:
                leave(index, self._pool)
            except Exception as error:  # this torch has left the pool by itself
                log.debug("Hybrid TRT: %s: %s", leave.__name__, error)
        self._pool = torch.cuda.graph_pool_handle()  # graphs that were made before keep theirs

    def _leave_random_numbers(self) -> None:
        """Make a capture that succeeds: it takes torch's random numbers out of capture mode after a failure."""
        try:
            torch.cuda.synchronize(self._device)
            with torch.cuda.device(self._device), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream):
                torch.zeros(1, device=self._device)
        except Exception as error:
            log.warning("Hybrid TRT: random numbers on %s may fail until ComfyUI restarts (%s)", self._device, error)


def record(
    body: Callable[[], None],
    capturing: AbstractContextManager[object],
    graph: Replay,
    device: torch.device,
    leave: Callable[[], None],
) -> None:
    """Run a function while it is captured; if it fails, leave no tensors that could end the process.

    Args:
        capturing: begins and ends the capture of ``graph``.
        leave: called where CUDA broke the capture off.
    """
    own: BaseException | None = None
    with _young_objects_kept_young():
        try:
            with capturing:
                try:
                    body()
                except BaseException as error:
                    own = error
                    raise
        except BaseException as error:
            if error is not own:  # CUDA did not end the capture
                _keep_young_tensors(device)
                leave()
            elif not _run_once(graph, device):
                _keep_young_tensors(device)
            raise
        finally:
            del own


def _run_once(graph: Replay, device: torch.device) -> bool:
    """Run the work captured before an error, so that its tensors have memory; return False if that fails."""
    try:
        graph.replay()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        log.warning("Hybrid TRT: CUDA graphs may fail until ComfyUI restarts, and calls are slower then (%s)", error)
        return False
    return True


@contextmanager
def _young_objects_kept_young() -> Iterator[None]:
    """Let ``gc`` distinguish objects made inside from all older objects."""
    collects = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _keep_young_tensors(device: torch.device) -> None:
    """Keep for good the tensors made by the current block, where freeing them would end the process."""
    if not _frees_are_fatal(device):
        return
    for tensor in [found for found in gc.get_objects(0) if issubclass(type(found), torch.Tensor)]:
        if tensor.device.type == device.type:
            _never_freed.append(tensor)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))  # not even when the process ends


def _frees_are_fatal(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def release_failed_capture(error: BaseException, device: torch.device) -> None:
    """Clear the frames of a failed capture's error, but not the caller's own frame."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and its causes."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            waiting += [link.__cause__, link.__context__]
            yield link


def captures_would_fail() -> bool:
    """Tell whether calls here have another package's attention, which may not be captured with this allocator."""
    return calls_others() and torch.cuda.get_allocator_backend() == "cudaMallocAsync"
