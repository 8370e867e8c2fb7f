"""Sizes of one order compiled side by side, a child process to each, where the machine has room for that.

Inductor is one thread of Python for most of its time: with many cores several sizes take about as long as one. Where
there is room for more children than sizes, several share a size, each with a part of the network; where the network has
room once only, they do so with one size after the other. What is timed on the GPU is timed in turns, and what goes on
record is measured when one child is left.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..backends import Progress, backends
from ..backends.gpu_lock import WAITING, GpuLock
from ..engine_library import BuildError
from .resources import children_with_room, processors
from .worker.task import Task
from .worker_process import STARTING, TICK, Log, RetryWithOneWorker, run_in_worker

MOST = 8
"""Children at once; 1 compiles the sizes one after the other, which benchmarks compare with."""
LOCK_NAME, GONE_NAME = "turns.lock", "one-is-left"
"""Files in the build's folder, see ``GpuLock``."""

Share = tuple[list[dict], tuple[int, int]]
"""Work of one worker process: sizes, and (part, number of parts) of them."""


class _Stop(Exception):
    """Raised inside a child's thread when the others have no use for it any more."""


@dataclass
class _Child:
    """One of the children, as the build's thread sees it."""

    task: Task
    name: str
    phase: str = STARTING
    fraction: float = 0.0
    result: dict | None = None

    @property
    def compiling(self) -> int:
        """Return how many sizes it has not done with."""
        return 0 if self.result is not None or self.phase == WAITING else len(self.task["compiled"])

    @property
    def leads(self) -> bool:
        """Tell whether it puts together what others do parts of, or does all of its sizes itself."""
        return self.task["part"][0] == 0


def run_step(task: Task, progress: Progress, log: Log, environment: Mapping[str, str]) -> dict:
    """Do a task of ``worker.steps`` as ``run_in_worker`` does, sizes to be compiled side by side where there is room.

    What fails there and might not alone (memory lacked, a process was killed, a part is not compiled as the whole is)
    is done one size after the other, each as a whole.
    """
    rounds = _rounds(task) if task["step"] == "compile" else []
    if not rounds:
        return run_in_worker(task, progress, log, environment)
    reached = 0.0

    def forward(phase: str, fraction: float) -> None:
        nonlocal reached
        reached = max(reached, fraction)
        progress(phase, reached)

    results = []
    try:
        for number, dealt in enumerate(rounds):
            told = _of_round(forward, number, len(rounds))
            results.append(_merged(_together(_children(task, dealt, number), told, log, environment)))
        return _joined(results)
    except BuildError as failure:
        in_parts = any(count > 1 for _, (_, count) in rounds[0])
        if not isinstance(failure, RetryWithOneWorker) and not in_parts:
            raise
        log(f"compiling with {len(rounds[0])} processes at once: {failure}")
        why = "for want of memory" + ", or because they were compiled in parts" * in_parts
        log(f"that may be {why}: now the sizes are compiled one after the other")
    return run_in_worker(task, forward, log, environment)


def _rounds(task: Task) -> list[list[Share]]:
    """Return what each child is to do, round after round. Nothing where one child does all."""
    sizes, in_parts = task["compiled"], backends()[task["backend"]].in_parts
    if MOST < 2 or (len(sizes) < 2 and not in_parts):
        return []
    room = min(MOST, children_with_room(task))
    if in_parts and room >= len(sizes):
        parts = room // len(sizes)
        dealt = [([size], (part, parts)) for size in sizes for part in range(parts)]
        return [dealt] if len(dealt) > 1 else []
    if in_parts:
        parts = min(MOST, *(children_with_room({**task, "compiled": [size]}) for size in sizes))
        if parts >= 2 * max(room, 1):
            return [[([size], (part, parts)) for part in range(parts)] for size in sizes]
    return [[(sizes[number::room], (0, 1)) for number in range(min(room, len(sizes)))]] if room > 1 else []


def _of_round(progress: Progress, number: int, count: int) -> Progress:
    """Progress of one of several rounds as that of all of them."""
    if count == 1:
        return progress
    return lambda phase, fraction: progress(f"size {number + 1} of {count}: {phase}", (number + fraction) / count)


def _children(task: Task, dealt: Sequence[Share], number_of_round: int) -> list[_Child]:
    """A child for each that was dealt; the first one has the first size, which goes on record, and measures it."""
    folder, sizes = Path(task["folder"]), task["compiled"]
    told = [symbol for symbol in sizes[0] if len({size.get(symbol) for size in sizes}) > 1]
    children = []
    for number, (own, part) in enumerate(dealt):
        first = number == number_of_round == 0
        turns = GpuLock(folder / LOCK_NAME, folder / GONE_NAME if first else None, first, processors() // len(dealt))
        names = [" ".join(f"{symbol}{size[symbol]}" for symbol in told) for size in own if told]
        names += [f"part {part[0] + 1} of {part[1]}"] * (part[1] > 1)
        child_task = {**task, "compiled": own, "turns": turns.to_json(), "part": list(part)}
        children.append(_Child(child_task, ", ".join(names)))
    return children


def _together(children: Sequence[_Child], progress: Progress, log: Log, environment: Mapping[str, str]) -> list[dict]:
    """Run all children at once and return their results.

    Raises:
        Exception: what ``progress`` raised, or the first child that failed; the others are gone by then.
    """
    ended: queue.SimpleQueue[tuple[_Child, dict | BaseException]] = queue.SimpleQueue()
    stop, whole_lines = threading.Event(), threading.Lock()

    def run(child: _Child) -> None:
        def hear(phase: str, fraction: float) -> None:
            if stop.is_set():
                raise _Stop
            child.phase, child.fraction = phase, fraction

        def write(line: str) -> None:
            with whole_lines:
                log(f"[{child.name}] {line}")

        try:
            ended.put((child, run_in_worker(child.task, hear, write, environment)))
        except BaseException as failure:
            ended.put((child, failure))

    gone = Path(children[0].task["folder"]) / GONE_NAME
    gone.unlink(missing_ok=True)
    # daemons, as no server shall wait at its end for what nobody wants any more
    threads = [threading.Thread(target=run, args=(child,), daemon=True) for child in children]
    try:
        for thread in threads:
            thread.start()
        while not all(child.result is not None for child in children):
            progress(*_told(children))
            try:
                child, result = ended.get(timeout=TICK)
            except queue.Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            child.result = result
            if all(child.result is not None for child in children[1:]):
                gone.touch()
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return [child.result for child in children if child.leads]


def _told(children: Sequence[_Child]) -> tuple[str, float]:
    """Phase and fraction of all children as one."""
    leading = [child for child in children if child.leads]
    total, left = sum(len(child.task["compiled"]) for child in leading), sum(child.compiling for child in leading)
    each = [len(child.task["compiled"]) * (1.0 if child.result else child.fraction) for child in children]
    done = sum(each) / sum(len(child.task["compiled"]) for child in children)
    if not left:
        return children[0].phase, done
    if len(leading) < len(children):
        what = "one size" if total == 1 else f"{total} sizes"
        return f"compiling {what} with {len(children)} processes", done
    return f"compiling {total} sizes side by side" + (f", {total - left} done" if left < total else ""), done


def _merged(results: Sequence[dict]) -> dict:
    """The results of children as one that had all sizes would have given it, in the order of the sizes."""
    return {
        "files": _dealt_back([result["files"] for result in results]),
        "seconds": _shared([result["seconds"] for result in results]),
        "parity": _parity(results, _dealt_back([result["parity"]["cases"] for result in results])),
    }


def _joined(rounds: Sequence[dict]) -> dict:
    """The results of rounds as one."""
    return {
        "files": [file for result in rounds for file in result["files"]],
        "seconds": {name: value for result in rounds for name, value in result["seconds"].items()},
        "parity": _parity(rounds, [case for result in rounds for case in result["parity"]["cases"]]),
    }


def _parity(results: Sequence[dict], cases: list[dict]) -> dict:
    """Return what goes on record: the figures of the first result, and all cases."""
    return {**results[0]["parity"], "rel_err": max(result["parity"]["rel_err"] for result in results), "cases": cases}


def _dealt_back(hands: Sequence[Sequence]) -> list:
    """The inverse of dealing out one by one."""
    return [hands[i % len(hands)][i // len(hands)] for i in range(sum(map(len, hands)))]


def _shared(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of children that ran at once, as shares of the seconds that went by: together they are all of them."""
    each = [sum(seconds.values()) for seconds in every]
    share = max(each) / sum(each) if sum(each) else 1.0
    return {name: share * seconds[name] for name, seconds in zip(
        _dealt_back([list(seconds) for seconds in every]), _dealt_back([[seconds] * len(seconds) for seconds in every]),
        strict=True)}  # fmt: skip
