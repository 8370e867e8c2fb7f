"""Tensors that a failed capture leaves behind: in the frames of its error, and in modules that stopped half way.

With torch's own allocator all of them may go. With cudaMallocAsync, which ComfyUI prefers, a tensor made during the
capture has an address that only the graph can give memory. Freeing it before ends the process, and while it is there
later captures fail.

ComfyUI looks for an interrupt at each layer, so one may come during a capture. CUDA ends such a capture well. What was
captured then runs once, and everything can go. Where CUDA broke the capture off, its tensors stay for good: they hold
no memory. Later captures may get the same addresses and fail as well, and those shapes run plainly.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

log = logging.getLogger(__name__)

_never_freed: list[torch.Tensor] = []


class Replay(Protocol):
    """A captured run: ``replay`` does it again on the same buffers."""

    def replay(self) -> None: ...


def record(
    body: Callable[[], None],
    capturing: AbstractContextManager[object],
    graph: Replay,
    device: torch.device,
    leave: Callable[[], None],
) -> None:
    """Run a function while it is captured, and leave nothing behind that could end the process if it fails.

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
    """Run what was captured before an error, so that its tensors have memory; False if that fails."""
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
    """Let ``gc`` tell the objects that the block makes from all older ones."""
    collects = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _keep_young_tensors(device: torch.device) -> None:
    """Keep the tensors that the current block has made for good, where freeing them would end the process."""
    if not _frees_are_fatal(device):
        return
    for tensor in [found for found in gc.get_objects(0) if issubclass(type(found), torch.Tensor)]:
        if tensor.device.type == device.type:
            _never_freed.append(tensor)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))  # not even when the process ends


def _frees_are_fatal(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def release_failed_capture(error: BaseException, device: torch.device) -> None:
    """Empty the frames of a failed capture's error. The caller's own frame keeps what it holds."""
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
