"""Helpers of a worker process: processes that call functions for it, where the machine has room for them.

Inductor is one thread of Python for most of its time: on many cores it takes about as long as on two. So kinds of
blocks are compiled beside each other. A helper has a block of one kind and no other weights, so it is small. It imports
Inductor at once, and ends when its worker does.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from ...backends import Submit
from ...comfy_model.main_memory import CGROUP, available_bytes

log = logging.getLogger(__name__)

MOST = 8
CORES = 2
"""Cores for each helper: Inductor's own thread and a compiler of kernels."""
COMPILING, WORKING = 2_000_000_000, 2_000_000_000
"""Bytes of main memory for each helper with its compilers, and for the worker. A helper took 1.2 GB on 16 cores."""
ON_GPU, LEFT = 800_000_000, 2_000_000_000
"""Bytes on the GPU for each helper, and for the worker: a block of one kind. A helper took 0.64 GB on an H200."""
SHARE = 2 / 3
"""Share of free GPU memory that a build may use; the rest is for prompts that begin meanwhile."""


def room_for_helpers(device: torch.device) -> int:
    """Return how many helpers may compile for a device beside this process; 0 where there is no room for two."""
    counts = [processors() // CORES, (available_bytes() - WORKING) // COMPILING]
    if device.type == "cuda":
        try:
            counts.append((SHARE * torch.cuda.mem_get_info(device)[0] - LEFT) // ON_GPU)
        except RuntimeError as error:
            log.warning("the GPU does not tell its free memory (%s)", error)
            return 0
    log.info("cores, memory and the GPU have room for so many helpers: %s", counts)
    count = int(min(MOST, *counts))
    return count if count > 1 else 0


def processors() -> int:
    """Return how many cores this process may keep busy: its affinity, up to its container's share."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # none, "max", or not Linux
        return count


@contextmanager
def helpers(count: int) -> Iterator[Submit]:
    """Run ``count`` helpers while the block lasts; each submitted call goes to the next idle helper."""
    spawn = multiprocessing.get_context("spawn")
    idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    started = []

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        helper = idle.get()
        try:
            helper.send((function, arguments))
            done, result = helper.recv()
        except (OSError, EOFError) as error:
            raise RuntimeError("one of the processes that compile has ended") from error
        finally:
            idle.put(helper)  # the next caller sees it if the helper has ended
        if not done:
            raise RuntimeError(result)
        return result

    with ThreadPoolExecutor(count) as threads:
        try:
            for _ in range(count):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(theirs, processors() // count), daemon=True)
                process.start()
                started.append(process)
                theirs.close()
                idle.put(ours)
            yield lambda function, *arguments: threads.submit(call, function, *arguments)
        finally:
            for process in started:
                process.kill()


def _serve(worker: Connection, compilers: int) -> None:
    """Call what the worker sends, in a helper.

    Args:
        compilers: the number of compilers of kernels that it may run at once.
    """
    threading.Thread(target=_end_with_the_worker, daemon=True).start()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    from torch._inductor import config

    config.compile_threads = max(1, min(config.compile_threads or compilers, compilers))
    import torch._inductor.compile_fx  # noqa: F401 - what takes seconds, before there is something to do

    while True:
        function, arguments = worker.recv()
        try:
            answer = True, function(*arguments)
        except Exception as error:
            traceback.print_exc()
            answer = False, f"{type(error).__name__}: {error}"
        worker.send(answer)


def _end_with_the_worker() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
