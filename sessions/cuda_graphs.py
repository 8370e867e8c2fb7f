"""CUDA graphs for any function of tensors: captured per set of shapes, replayed on static buffers, bounded in number.

A replay runs exactly the kernels that were captured, on exactly the addresses: so the key holds every name, shape and
dtype, the buffers belong to the graph, and results are handed out as copies. To who runs a cache on its own
``stream`` they are lent as they lie there: a copy would be memory of one stream that another uses, which torch's
cudaMallocAsync has again only once the host has seen the GPU idle; a sampling never waits for that, and would grow.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from ..architectures.calls import AsyncInputs
from ..comfy_model.comfyui_internals import Feature, works
from ..comfy_model.comfyui_shims import outside_recording
from .cuda_capture import Capture, CudaCapture, Replay, WaitPoint, release_failed_capture, wait_for, with_wait_point

log = logging.getLogger(__name__)

MAX_GRAPHS = 8
MAX_SEEN = 64
IDLE = 2
"""A graph gives way to shapes that come so many times as often."""

Tensors = Mapping[str, torch.Tensor]
Function = Callable[[Tensors], Tensors]


@dataclass
class _CapturedGraph:
    """One captured graph with its buffers.

    Attributes:
        function: what was captured; what it holds has to last as long.
        block: one tensor per dtype that all results lie in, so that one copy hands all of them out.
        views: result name -> its dtype, shape, strides and offset in its block.
        targets: result name -> that part of its block.
        last: the tensors that were copied in last, for inputs that seldom change.
        wait_point: where it waits for late inputs, or None if it needs all from the start.
        used: number of the call that it served last.
    """

    function: Function
    replay: Replay
    inputs: dict[str, torch.Tensor]
    block: dict[torch.dtype, torch.Tensor]
    views: dict[str, tuple[torch.dtype, torch.Size, tuple[int, ...], int]]
    targets: dict[str, torch.Tensor]
    bytes: int
    wait_point: WaitPoint | None = None
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    used: int = 0

    def results(self) -> dict[str, torch.Tensor]:
        blocks = {dtype: block.clone() for dtype, block in self.block.items()}
        return {
            name: blocks[dtype].as_strided(shape, strides, offset)
            for name, (dtype, shape, strides, offset) in self.views.items()
        }


class GraphCache:
    """Runs a function plainly at the first call with new shapes, records it at the second, and replays it after.

    Attributes:
        failure: why the latest graph failed, or None. The calls concerned run plainly.
        plain: the same where the last call was one of these, else None.
    """

    def __init__(
        self,
        device: torch.device,
        limit: int = MAX_GRAPHS,
        capture: Capture | None = None,
        steady: Collection[str] = (),
    ):
        """
        Args:
            limit: graphs kept; the least recently used goes first, unless it is needed about as often as what
                would take its place: graph anew at every call would be slower than not graph at all.
            capture: records on this device; without one, and off CUDA, everything runs plainly.
            steady: inputs that are copied in only when another tensor object comes.
        """
        self.device = device
        self.failure: str | None = None
        self.plain: str | None = None
        self._limit = limit
        self._steady = frozenset(steady)
        self._captured: OrderedDict[tuple, _CapturedGraph] = OrderedDict()
        self._seen: OrderedDict[tuple, int] = OrderedDict()  # without a graph: number of the call before
        self._calls = 0
        self._failed: set[tuple] = set()
        self._token: object = None
        self._capture = capture
        if capture is None and device.type == "cuda" and works(Feature.GRAPHS):
            self._capture = CudaCapture(device)

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def bytes(self) -> int:
        """Memory that graphs hold, measured when they were made."""
        return sum(graph.bytes for graph in self._captured.values())

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """A stream that no other cache uses, for whoever runs several at once; None where nothing is captured.

        Results of a call on it may be lent: the next call writes to them.
        """
        return getattr(self._capture, "stream", None)

    @property
    def takes_late(self) -> bool:
        """Whether a graph has a use for inputs that come late."""
        return any(graph.wait_point is not None for graph in self._captured.values())

    def clear(self) -> None:
        """Drop all graphs and what is known about failures."""
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
        """``function(prepare(inputs))``: same values, fresh tensors unless they are lent, see ``stream``.

        Args:
            function: only launches work on the current stream, always the same for the same key.
            inputs: name -> tensor.
            token: stands for everything else that the function reads; graphs made under another one are dropped.
            prepare: gives the tensors as the function wants them (device, dtype, layout), and those that are always
                the same for the same key. A replay copies ``inputs`` straight to where these were.
            own: gives a function for one graph alone, in the place of ``function``, where that has a state that
                other shapes change.
            late: inputs that are not computed yet; waited for before all else, unless a graph does it in its midst.
        """
        if token != self._token:
            self.clear()
            self._token = token
        self._calls += 1
        key = tuple((name, t.shape, t.dtype) for name, t in inputs.items())
        graph = self._captured.get(key)
        if late is not None and (graph is None or graph.wait_point is None):
            wait_for(late.ready, late.stream, (inputs[name] for name in late.names))
            late = None
        if graph is None:
            if self._capture is not None and key not in self._failed and self._worth_it(key):
                with outside_recording():
                    graph = self._make(own or (lambda: function), prepare(inputs), key)
            self.plain = self.failure if key in self._failed else None
            if graph is None:
                return function(prepare(inputs))
        self.plain = None
        self._captured.move_to_end(key)
        graph.used = self._calls
        try:
            self._copy_in(graph, inputs, late)
            graph.replay.replay()
        except BaseException:
            if late is not None:  # its buffers may be others' soon, and are still written to
                torch.cuda.current_stream(self.device).wait_stream(late.stream)
            raise
        return dict(graph.targets) if self._lends() else graph.results()

    def _lends(self) -> bool:
        stream = self.stream
        return stream is not None and torch.cuda.current_stream(self.device) == stream

    def _worth_it(self, key: tuple) -> bool:
        """Whether these shapes came before; that call has also warmed up all that must not happen while graph.

        Where there is no room they must come more often than the graph that would go.
        """
        before = self._seen.pop(key, None)
        self._seen[key] = self._calls
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        if before is None or len(self._captured) < self._limit:
            return before is not None
        oldest = next(iter(self._captured.values()))
        return self._calls - oldest.used > IDLE * (self._calls - before)

    def _make(self, own: Callable[[], Function], inputs: Tensors, key: tuple) -> _CapturedGraph | None:
        while len(self._captured) >= self._limit:
            self._captured.popitem(last=False)
        before = _reserved(self.device)
        try:
            function = own()
            # Held here: ``release_failed_capture`` would take them for memory of the capture.
            buffers = self._buffers(function, inputs)
            graph = self._captured[key] = self._capture_graph(function, *buffers)
        except BaseException as error:  # ComfyUI's interrupt is no Exception
            release_failed_capture(error, self.device)
            if not isinstance(error, Exception):
                raise
            self._failed.add(key)
            self.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            log.warning("Hybrid TRT: no CUDA graph for these shapes, they run plainly (%s)", self.failure)
            return None
        graph.bytes = max(_reserved(self.device) - before, _size(graph))
        return graph

    def _buffers(self, function: Function, inputs: Tensors) -> tuple[dict, dict, dict, dict]:
        """A graph's inputs, block, views and their tensors, after a plain run that tells the results' shapes."""
        with torch.inference_mode(False):  # threads outside of it (ComfyUI's, for several GPUs) write here too
            static = {name: torch.empty_like(t, memory_format=torch.preserve_format) for name, t in inputs.items()}
        for name, tensor in inputs.items():
            static[name].copy_(tensor)
        block, views = {}, {}
        for name, result in function(static).items():
            strides = _dense_strides(result)
            place = block.get(result.dtype, 0)
            views[name] = (result.dtype, result.shape, strides, place)
            block[result.dtype] = place + -(-result.numel() // 64) * 64
        with torch.inference_mode(False):
            block = {dtype: torch.empty(size, dtype=dtype, device=self.device) for dtype, size in block.items()}
        targets = {
            name: block[dtype].as_strided(shape, strides, offset)
            for name, (dtype, shape, strides, offset) in views.items()
        }
        return static, block, views, targets

    def _capture_graph(
        self, function: Function, static: dict, block: dict, views: dict, targets: dict
    ) -> _CapturedGraph:
        def body() -> None:
            results = function(static)
            torch._foreach_copy_(list(targets.values()), [results[name] for name in targets])

        new_wait_point = getattr(self._capture, "new_wait_point", None)
        wait_point = None if new_wait_point is None else new_wait_point()
        with with_wait_point(wait_point):
            replay = self._capture(body)
        passed = wait_point is not None and wait_point.passed
        return _CapturedGraph(function, replay, static, block, views, targets, 0, wait_point if passed else None)

    def _copy_in(self, graph: _CapturedGraph, inputs: Tensors, late: AsyncInputs | None) -> None:
        if late is not None:
            _copy_late(graph, inputs, late)
            inputs = {name: tensor for name, tensor in inputs.items() if name not in late.names}
        targets, sources = [], []
        for name, tensor in inputs.items():
            if name in self._steady:
                if graph.last.get(name) is tensor:
                    continue
                graph.last[name] = tensor
            targets.append(graph.inputs[name])
            sources.append(tensor)
        _copy_all(targets, sources)


def _copy_late(graph: _CapturedGraph, inputs: Tensors, late: AsyncInputs) -> None:
    """Copy inputs that are not there yet, on the stream that computes them, and open the graph's wait_point behind."""
    late.stream.wait_stream(torch.cuda.current_stream(late.stream.device))  # where the replay before reads the last
    with torch.cuda.stream(late.stream):
        _copy_all([graph.inputs[name] for name in late.names], [inputs[name] for name in late.names])
        graph.wait_point.event.record()


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors, those alike in one launch: torch's grouped copy is only fast when dtypes and strides agree."""
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


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it has no gaps, else those of a contiguous one."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def _size(graph: _CapturedGraph) -> int:
    tensors = [*graph.inputs.values(), *graph.block.values()]
    return sum(t.numel() * t.element_size() for t in tensors)


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
