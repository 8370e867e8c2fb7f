"""CUDA graphs for any function of tensors: captured per set of shapes, replayed on static buffers, bounded in number.

A replay runs exactly the kernels that were captured, on exactly the same addresses. So the key holds every name, shape
and dtype, the buffers belong to the graph, and results are handed out as copies. Inputs that are the same tensor share
a buffer, and the key says which do. Constants, such as the zeros of absent residuals, are read where they are. A caller
that runs a cache on its own ``stream`` is lent the result buffers instead. A copy would be memory of a stream that
another stream uses. torch's cudaMallocAsync reuses such memory only once the host has seen the GPU idle, which never
happens while sampling: memory would grow.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from ..architectures.calls import AsyncInputs
from ..comfy_model.comfyui_internals import Feature, works
from ..comfy_model.comfyui_shims import outside_recording
from .cuda_capture import (
    Capture,
    CudaCapture,
    Replay,
    WaitPoint,
    captures_would_fail,
    in_larger_graph,
    release_failed_capture,
    wait_for,
    with_wait_point,
)
from .graph_memory import free_idle_memory, graph_memory, make_room_for_graphs
from .result_blocks import Blocks, Views, blocks_for, in_blocks, views_of
from .session import first_line

log = logging.getLogger(__name__)

MAX_GRAPHS = 8
SHARE = 0.125
"""Share of a GPU's memory for the graphs of a network."""
MAX_SEEN = 64
"""Number of keys without a graph that are remembered."""
IDLE = 2
"""A graph gives way to shapes that come so many times as often."""

Tensors = Mapping[str, torch.Tensor]
Function = Callable[[Tensors], Tensors]


@dataclass
class _CapturedGraph:
    """A captured graph with its buffers.

    Attributes:
        function: the captured function, which keeps all that the graph reads.
        inputs: name -> the buffer that a replay reads, or a constant.
        copied: the inputs that a replay copies in, a name for each buffer.
        block: dtype -> the tensor that all results of this dtype lie in, so that a single copy hands them out.
        views: where the results lie in their blocks.
        targets: result name -> its part of the block.
        replay: runs the captured kernels again.
        bytes: memory that it holds.
        replayed: whether it was.
        wait_point: its wait for late inputs, or None if it needs all inputs from the start.
        last: steady input -> the tensor that was copied in last.
        used: number of the call that it served last.
    """

    function: Function
    inputs: dict[str, torch.Tensor]
    copied: list[str]
    block: Blocks
    views: Views
    targets: dict[str, torch.Tensor]
    replay: Replay | None = None
    bytes: int = 0
    replayed: bool = False
    wait_point: WaitPoint | None = None
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    used: int = 0

    @classmethod
    def with_buffers(
        cls, function: Function, given: Tensors, inputs: Tensors, views: Views, steady: Collection[str],
        device: torch.device,
    ) -> _CapturedGraph:  # fmt: skip
        """Allocate the buffers. Nothing is captured yet.

        Args:
            given: tensors as a caller gives them.
            inputs: tensors as the function takes them; an input that was not given is constant.
        """
        static, buffers = dict(inputs), {}
        for name in (name for name in inputs if name in given):
            tensor = inputs[name]
            alike = (id(given[name]), tensor.dtype, tensor.stride(), name in steady)
            if alike not in buffers:
                with torch.inference_mode(False):  # threads outside of it (ComfyUI's, for several GPUs) write here too
                    buffers[alike] = name, torch.empty_like(tensor, memory_format=torch.preserve_format)
                buffers[alike][1].copy_(tensor)
            static[name] = buffers[alike][1]
        with torch.inference_mode(False):
            block = blocks_for(views, device)
        copied = [name for name, _ in buffers.values()]
        return cls(function, static, copied, block, views, in_blocks(views, block))

    def run(self) -> None:
        """Run the function on the buffers. This is the work that is captured."""
        results = self.function(self.inputs)
        torch._foreach_copy_(list(self.targets.values()), [results[name] for name in self.targets])

    def results(self) -> dict[str, torch.Tensor]:
        """Copy the results out."""
        return in_blocks(self.views, {dtype: block.clone() for dtype, block in self.block.items()})


class GraphCache:
    """Runs a function plainly at the first call with new shapes, captures it at the second, and replays it after.

    Attributes:
        failure: the reason why the latest capture failed, or None. Calls with these shapes run plainly.
        plain: the reason if the last call had shapes whose capture failed, else None.
    """

    def __init__(
        self,
        device: torch.device,
        limit: int = MAX_GRAPHS,
        capture: Capture | None = None,
        steady: Collection[str] = (),
        most_bytes: float | None = None,
    ):
        """
        Args:
            limit: number of graphs kept. The least recently used goes first, unless it is needed about as often as
                its successor: capturing at every call would be slower than running plainly.
            capture: captures on this device; by default a ``CudaCapture``, and off CUDA nothing is captured.
            most_bytes: the most that all graphs hold, unless a single graph holds more; by default ``SHARE`` of the
                GPU's memory.
            steady: inputs that are copied in only when another tensor object comes.
        """
        self.device = device
        self.failure: str | None = None
        self.plain: str | None = None
        self._limit = limit
        self._most_bytes = _share_of(device) if most_bytes is None else most_bytes
        self._steady = frozenset(steady)
        self._captured: OrderedDict[tuple, _CapturedGraph] = OrderedDict()
        self._seen: OrderedDict[tuple, tuple[int, Views]] = OrderedDict()  # number and results of the last plain call
        self._calls = 0
        self._failed: set[tuple] = set()
        self._token: object = None
        self._taken: int | None = None
        self._warm = False
        self._capture = capture
        if capture is None and device.type == "cuda" and works(Feature.GRAPHS):
            self._capture = CudaCapture(device)

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def bytes(self) -> int:
        """Bytes that the graphs hold, measured when they were captured."""
        return sum(graph.bytes for graph in self._captured.values())

    @property
    def taken(self) -> int | None:
        """Bytes that replays will take besides, having given them back, by the most that they ever took; None before.

        Graphs that were dropped count: others like them will come. See ``give_back_graph_memory``.
        """
        return None if self._taken is None else max(0, self._taken - graph_memory(self.device))

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """A stream that no other cache uses, for running several caches at once; None where nothing is captured.

        Results of a call on it are lent: the next call writes to them.
        """
        return getattr(self._capture, "stream", None)

    @property
    def takes_late(self) -> bool:
        """True if a graph can start before its late inputs are there."""
        return any(graph.wait_point is not None for graph in self._captured.values())

    def make_room(self) -> None:
        """Have memory free for what replays will take, at the start of a run."""
        if self._captured and self.taken:
            make_room_for_graphs(self.taken, self.device)

    def clear(self) -> None:
        """Drop all graphs, and forget which captures failed."""
        self._captured.clear()
        self._seen.clear()
        self._failed.clear()
        self.failure = None

    def run(
        self,
        function: Function,
        inputs: Tensors,
        token: object = None,
        prepare: Function = dict,
        own: Callable[[], Function] | None = None,
        late: AsyncInputs | None = None,
    ) -> Tensors:
        """Return ``function(prepare(inputs))``: the same values, in new tensors unless they are lent (see ``stream``).

        As a part of a larger graph it runs plainly.

        Args:
            function: launches work on the current stream and nothing else, always the same work for the same key.
            inputs: name -> tensor.
            token: a value that changes with all that the function reads besides. Graphs of another token are dropped.
            prepare: gives the tensors in the function's device, dtype and layout, and tensors that are constant for a
                key, which nobody changes. A replay copies ``inputs`` straight into their buffers.
            own: makes a function for a single graph, where ``function`` has a state that other shapes change.
            late: inputs that are not computed yet. A graph with a wait point waits there, other calls at the start.
        """
        if in_larger_graph():
            return self._as_part(function, inputs, prepare, late)
        if token != self._token:
            self.clear()
            self._token = token
        self._calls += 1
        which = map({}.setdefault, map(id, inputs.values()), inputs)  # the first name of the same tensor
        key = tuple((name, t.shape, t.dtype, same) for (name, t), same in zip(inputs.items(), which, strict=True))
        graph = self._captured.get(key)
        if late is not None and (graph is None or graph.wait_point is None):
            wait_for(late.ready, late.stream, (inputs[name] for name in late.names))
            late = None
        if graph is None:
            if self._may_capture(key):
                with outside_recording():
                    graph = self._make(own, function, inputs, prepare(inputs), key)
            self.plain = self.failure if key in self._failed else None
            if graph is None:
                results = function(prepare(inputs))
                self._note(key, results)
                return results
        self.plain = None
        self._captured.move_to_end(key)
        graph.used = self._calls
        try:
            self._copy_in(graph, inputs, late)
            graph.replay.replay()
            if not graph.replayed:
                graph.replayed, self._taken = True, max(self._taken or 0, graph_memory(self.device))
        except BaseException:
            if late is not None:  # late buffers are still written to, and may be freed soon
                torch.cuda.current_stream(self.device).wait_stream(late.stream)
            raise
        return dict(graph.targets) if self._lends() else graph.results()

    def _as_part(self, function: Function, inputs: Tensors, prepare: Function, late: AsyncInputs | None) -> Tensors:
        """Run plainly as a part of a larger graph; if the function can wait, while late inputs are computed."""
        prepared = prepare(inputs)
        if late is None:
            return function(prepared)
        arriving = [inputs[name] for name in late.names]
        as_they_come = all(prepared[name].data_ptr() == inputs[name].data_ptr() for name in late.names)
        if not self.takes_late or not as_they_come:
            wait_for(late.ready, late.stream, arriving)
            return function(prepare(inputs))  # the first preparation did not wait
        wait_point = WaitPoint(late.ready)
        with with_wait_point(wait_point):
            results = function(prepared)
        if not wait_point.passed:
            raise RuntimeError("the network did not wait for its late inputs")
        wait_for(late.ready, late.stream, arriving)
        return results

    def _lends(self) -> bool:
        stream = self.stream
        return stream is not None and torch.cuda.current_stream(self.device) == stream

    def _note(self, key: tuple, results: Tensors) -> None:
        """Remember a plain call of these shapes."""
        self._seen[key] = self._calls, views_of(results)
        self._seen.move_to_end(key)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _may_capture(self, key: tuple) -> bool:
        """Tell whether these shapes came before: that call also did work that must not happen during a capture.

        In a full cache they must also come more often than the graph that would go.
        """
        if self._capture is None or key in self._failed or key not in self._seen or captures_would_fail():
            return False
        oldest = next(iter(self._captured.values()), None)
        if oldest is None or not self._is_full():
            return True
        return self._calls - oldest.used > IDLE * (self._calls - self._seen[key][0])

    def _is_full(self) -> bool:
        """Tell whether another graph, as large as the largest, has no room beside the kept graphs."""
        sizes = [graph.bytes for graph in self._captured.values()]
        return len(sizes) >= self._limit or sum(sizes) + max(sizes, default=0) > self._most_bytes

    def _make(
        self, own: Callable[[], Function] | None, function: Function, given: Tensors, inputs: Tensors, key: tuple
    ) -> _CapturedGraph | None:
        while self._captured and self._is_full():
            self._captured.popitem(last=False)
        free_idle_memory(self.device)
        before = _reserved(self.device)
        try:
            used = function if own is None else own()
            graph = _CapturedGraph.with_buffers(used, given, inputs, self._seen[key][1], self._steady, self.device)
            self._capture_graph(graph, warm=own is None and self._warm)
        except BaseException as error:  # ComfyUI's interrupt is no Exception
            release_failed_capture(error, self.device)
            if not isinstance(error, Exception):
                raise
            self._failed.add(key)
            self.failure = first_line(error)
            log.warning("Hybrid TRT: no CUDA graph for these shapes, they run plainly (%s)", self.failure)
            return None
        held = sum(t.nbytes for t in (*map(graph.inputs.get, graph.copied), *graph.block.values()))
        graph.bytes = max(_reserved(self.device) - before, held)
        self._captured[key], self._warm = graph, True
        while len(self._captured) > 1 and self.bytes > self._most_bytes:  # the new graph is larger than expected
            self._captured.popitem(last=False)
        return graph

    def _capture_graph(self, graph: _CapturedGraph, warm: bool) -> None:
        """Capture a graph.

        Args:
            warm: whether what it runs was already run on the stream to capture on.
        """
        if not warm and (warm_up := getattr(self._capture, "warm_up", None)) is not None:
            warm_up(graph.run)
        new_wait_point = getattr(self._capture, "new_wait_point", None)
        wait_point = None if new_wait_point is None else new_wait_point()
        with with_wait_point(wait_point):
            graph.replay = self._capture(graph.run)
        if wait_point is not None and wait_point.passed:
            graph.wait_point = wait_point

    def _copy_in(self, graph: _CapturedGraph, inputs: Tensors, late: AsyncInputs | None) -> None:
        names = graph.copied
        if late is not None:
            _copy_late(graph, inputs, late)
            names = [name for name in names if name not in late.names]
        targets, sources = [], []
        for name in names:
            tensor = inputs[name]
            if name in self._steady:
                if graph.last.get(name) is tensor:
                    continue
                graph.last[name] = tensor
            targets.append(graph.inputs[name])
            sources.append(tensor)
        _copy_all(targets, sources)


def _copy_late(graph: _CapturedGraph, inputs: Tensors, late: AsyncInputs) -> None:
    """Copy late inputs on the stream that computes them, then let the graph pass its wait point."""
    late.stream.wait_stream(torch.cuda.current_stream(late.stream.device))  # the last replay may still read them
    with torch.cuda.stream(late.stream):
        names = [name for name in graph.copied if name in late.names]
        _copy_all([graph.inputs[name] for name in names], [inputs[name] for name in names])
        graph.wait_point.event.record()


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors, similar tensors in one launch: torch's grouped copy is fast only if dtypes and strides agree."""
    alike: dict[torch.dtype, tuple[list, list]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.dtype == source.dtype and target.stride() == source.stride():
            group = alike.setdefault(target.dtype, ([], []))
            group[0].append(target)
            group[1].append(source)
        else:
            target.copy_(source)
    for group in alike.values():
        torch._foreach_copy_(*group)


def _share_of(device: torch.device) -> float:
    return SHARE * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
