"""CUDA graphs for any function of tensors: recorded per set of shapes, replayed on static buffers, bounded in number.

A replay runs exactly the kernels that were recorded, on exactly the addresses: so the key holds every name, shape and
dtype, the buffers belong to the recording, and results are handed out as copies. To who runs a cache on its own
``stream`` they are lent as they lie there: a copy would be memory of one stream that another uses, which torch's
cudaMallocAsync has again only once the host has seen the GPU idle; a sampling never waits for that, and would grow.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..architectures.calls import AsyncInputs
from ..comfy_model.comfyui_internals import Feature, works
from ..comfy_model.comfyui_shims import outside_recording
from .async_inputs import WaitPoint, at_gate, wait_for
from .graph_memory import release_failed_capture

log = logging.getLogger(__name__)

MAX_RECORDINGS = 8
MAX_SEEN = 64
IDLE = 2
"""A recording gives way to shapes that come so many times as often."""

Tensors = Mapping[str, torch.Tensor]
Function = Callable[[Tensors], Tensors]


class Replay(Protocol):
    """A recorded run: ``replay`` does it again on the same buffers."""

    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], None]], Replay]
"""Runs a function once while recording it."""


@dataclass
class _CapturedGraph:
    """One recorded graph with its buffers.

    Attributes:
        function: what was recorded; what it holds has to last as long.
        block: one tensor per dtype that all results lie in, so that one copy hands all of them out.
        views: result name -> its dtype, shape, strides and offset in its block.
        targets: result name -> that part of its block.
        last: the tensors that were copied in last, for inputs that seldom change.
        gate: where it waits for late inputs, or None if it needs all from the start.
        used: number of the call that it served last.
    """

    function: Function
    replay: Replay
    inputs: dict[str, torch.Tensor]
    block: dict[torch.dtype, torch.Tensor]
    views: dict[str, tuple[torch.dtype, torch.Size, tuple[int, ...], int]]
    targets: dict[str, torch.Tensor]
    bytes: int
    gate: WaitPoint | None = None
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
        failure: why the latest recording failed, or None. The calls concerned run plainly.
        plain: the same where the last call was one of these, else None.
    """

    def __init__(
        self,
        device: torch.device,
        limit: int = MAX_RECORDINGS,
        recorder: Recorder | None = None,
        steady: Collection[str] = (),
    ):
        """
        Args:
            limit: recordings kept; the least recently used goes first, unless it is needed about as often as what
                would take its place: recording anew at every call would be slower than not recording at all.
            recorder: records on this device; without one, and off CUDA, everything runs plainly.
            steady: inputs that are copied in only when another tensor object comes.
        """
        self.device = device
        self.failure: str | None = None
        self.plain: str | None = None
        self._limit = limit
        self._steady = frozenset(steady)
        self._recordings: OrderedDict[tuple, _CapturedGraph] = OrderedDict()
        self._seen: OrderedDict[tuple, int] = OrderedDict()  # without a recording: number of the call before
        self._calls = 0
        self._failed: set[tuple] = set()
        self._token: object = None
        self._record = recorder
        if recorder is None and device.type == "cuda" and works(Feature.GRAPHS):
            self._record = CudaCapture(device)

    def __len__(self) -> int:
        return len(self._recordings)

    @property
    def bytes(self) -> int:
        """Memory that recordings hold, measured when they were made."""
        return sum(recording.bytes for recording in self._recordings.values())

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """A stream that no other cache uses, for whoever runs several at once; None where nothing is recorded.

        Results of a call on it may be lent: the next call writes to them.
        """
        return getattr(self._record, "stream", None)

    @property
    def takes_late(self) -> bool:
        """Tell whether a recording has a use for inputs that come late."""
        return any(recording.gate is not None for recording in self._recordings.values())

    def clear(self) -> None:
        """Drop all recordings and what is known about failures."""
        self._recordings.clear()
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
            token: stands for everything else that the function reads; recordings made under another one are dropped.
            prepare: gives the tensors as the function wants them (device, dtype, layout), and those that are always
                the same for the same key. A replay copies ``inputs`` straight to where these were.
            own: gives a function for one recording alone, in the place of ``function``, where that has a state that
                other shapes change.
            late: inputs that are not computed yet; waited for before all else, unless a recording does it in its midst.
        """
        if token != self._token:
            self.clear()
            self._token = token
        self._calls += 1
        key = tuple((name, t.shape, t.dtype) for name, t in inputs.items())
        recording = self._recordings.get(key)
        if late is not None and (recording is None or recording.gate is None):
            wait_for(late.ready, late.stream, (inputs[name] for name in late.names))
            late = None
        if recording is None:
            if self._record is not None and key not in self._failed and self._worth_it(key):
                with outside_recording():
                    recording = self._make(own or (lambda: function), prepare(inputs), key)
            self.plain = self.failure if key in self._failed else None
            if recording is None:
                return function(prepare(inputs))
        self.plain = None
        self._recordings.move_to_end(key)
        recording.used = self._calls
        try:
            self._copy_in(recording, inputs, late)
            recording.replay.replay()
        except BaseException:
            if late is not None:  # its buffers may be others' soon, and are still written to
                torch.cuda.current_stream(self.device).wait_stream(late.stream)
            raise
        return dict(recording.targets) if self._lends() else recording.results()

    def _lends(self) -> bool:
        stream = self.stream
        return stream is not None and torch.cuda.current_stream(self.device) == stream

    def _worth_it(self, key: tuple) -> bool:
        """Tell whether these shapes came before; that call has also warmed up all that must not happen while recording.

        Where there is no room they must come more often than the recording that would go.
        """
        before = self._seen.pop(key, None)
        self._seen[key] = self._calls
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        if before is None or len(self._recordings) < self._limit:
            return before is not None
        oldest = next(iter(self._recordings.values()))
        return self._calls - oldest.used > IDLE * (self._calls - before)

    def _make(self, own: Callable[[], Function], inputs: Tensors, key: tuple) -> _CapturedGraph | None:
        while len(self._recordings) >= self._limit:
            self._recordings.popitem(last=False)
        before = _reserved(self.device)
        try:
            function = own()
            # Held here: ``release_failed_capture`` would take them for memory of the capture.
            buffers = self._buffers(function, inputs)
            recording = self._recordings[key] = self._recorded(function, *buffers)
        except BaseException as error:  # ComfyUI's interrupt is no Exception
            release_failed_capture(error, self.device)
            if not isinstance(error, Exception):
                raise
            self._failed.add(key)
            self.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            log.warning("Hybrid TRT: no CUDA graph for these shapes, they run plainly (%s)", self.failure)
            return None
        recording.bytes = max(_reserved(self.device) - before, _size(recording))
        return recording

    def _buffers(self, function: Function, inputs: Tensors) -> tuple[dict, dict, dict, dict]:
        """A recording's inputs, block, views and their tensors, after a plain run that tells the results' shapes."""
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

    def _recorded(self, function: Function, static: dict, block: dict, views: dict, targets: dict) -> _CapturedGraph:
        def body() -> None:
            results = function(static)
            torch._foreach_copy_(list(targets.values()), [results[name] for name in targets])

        make_gate = getattr(self._record, "gate", None)
        gate = None if make_gate is None else make_gate()
        with at_gate(gate):
            replay = self._record(body)
        passed = gate is not None and gate.passed
        return _CapturedGraph(function, replay, static, block, views, targets, 0, gate if passed else None)

    def _copy_in(self, recording: _CapturedGraph, inputs: Tensors, late: AsyncInputs | None) -> None:
        if late is not None:
            _copy_late(recording, inputs, late)
            inputs = {name: tensor for name, tensor in inputs.items() if name not in late.names}
        targets, sources = [], []
        for name, tensor in inputs.items():
            if name in self._steady:
                if recording.last.get(name) is tensor:
                    continue
                recording.last[name] = tensor
            targets.append(recording.inputs[name])
            sources.append(tensor)
        _copy_all(targets, sources)


def _copy_late(recording: _CapturedGraph, inputs: Tensors, late: AsyncInputs) -> None:
    """Copy inputs that are not there yet, on the stream that computes them, and open the recording's gate behind."""
    late.stream.wait_stream(torch.cuda.current_stream(late.stream.device))  # where the replay before reads the last
    with torch.cuda.stream(late.stream):
        _copy_all([recording.inputs[name] for name in late.names], [inputs[name] for name in late.names])
        recording.gate.event.record()


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


def _size(recording: _CapturedGraph) -> int:
    tensors = [*recording.inputs.values(), *recording.block.values()]
    return sum(t.numel() * t.element_size() for t in tensors)


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
"""Streams that recorders have left behind: each keeps tens of megabytes of work space for good."""


class CudaCapture:
    """Records on CUDA. All recordings of one recorder share a pool of memory, because they never run at once.

    Attributes:
        stream: a stream that no other recorder has, to record on. torch keeps one work space for matrix products per
            stream, a recording has its address, and graphs of several recorders do run at once.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        idle = _idle_streams.setdefault(device, [])
        self.stream = idle.pop() if idle else torch.cuda.Stream(device)
        weakref.finalize(self, idle.append, self.stream)

    def __call__(self, body: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            body()  # makes the work space now: made while recording, it would belong to this graph alone
        here.wait_stream(self.stream)
        try:
            # thread_local: other threads of ComfyUI may use CUDA while this one records
            with torch.cuda.device(self._device), torch.cuda.graph(
                graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                body()
        except BaseException:
            self._leave_pool()
            self._leave_recording()
            raise
        torch.cuda.empty_cache()  # what the runs before took outside the graph
        return graph

    def gate(self) -> WaitPoint:
        """A gate for one recording, open."""
        event = torch.cuda.Event(external=True)
        event.record(torch.cuda.current_stream(self._device))  # what was never recorded would not be waited for
        return WaitPoint(event)

    def _leave_pool(self) -> None:
        """A failed recording leaves torch allocating to its pool, which then neither records nor is ever freed."""
        index = torch.device(self._device).index or 0
        for leave in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            try:
                leave(index, self._pool)
            except Exception as error:  # where this torch has left it by itself
                log.debug("Hybrid TRT: %s: %s", leave.__name__, error)
        self._pool = torch.cuda.graph_pool_handle()  # recordings that were made before keep theirs

    def _leave_recording(self) -> None:
        """A failed recording leaves torch's random numbers in recording mode; one that succeeds takes them out."""
        try:
            torch.cuda.synchronize(self._device)
            with torch.cuda.device(self._device), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream):
                torch.zeros(1, device=self._device)
        except Exception as error:
            log.warning("Hybrid TRT: random numbers on %s may fail until ComfyUI restarts (%s)", self._device, error)
