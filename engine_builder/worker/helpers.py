"""Helpers of a worker process: processes that call functions for it.

A helper imports Inductor at once, while its worker reads the network, and ends when its worker does.
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

from ...backends import Submit


@contextmanager
def helpers(count: int, compilers: int) -> Iterator[Submit]:
    """Run ``count`` helpers while the block lasts; each submitted call goes to the next idle helper.

    Args:
        compilers: number of compilers of kernels that each helper may run at once.
    """
    spawn = multiprocessing.get_context("spawn")
    idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    started = []

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        helper = idle.get()
        try:
            helper.send((function, arguments))
            done, result = helper.recv()
        except (OSError, EOFError) as error:
            raise RuntimeError("one of the processes that compile parts has ended") from error
        finally:
            idle.put(helper)  # the next caller sees it if the helper has ended
        if not done:
            raise RuntimeError(result)
        return result

    with ThreadPoolExecutor(count) as threads:
        try:
            for _ in range(count):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(theirs, compilers), daemon=True)
                process.start()
                started.append(process)
                theirs.close()
                idle.put(ours)
            yield lambda function, *arguments: threads.submit(call, function, *arguments)
        finally:
            for process in started:
                process.kill()


def _serve(worker: Connection, compilers: int) -> None:
    """Call what the worker sends, in a helper."""
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
