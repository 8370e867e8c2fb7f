"""Builds as jobs: queued, one at a time, watched and cancelled from any thread."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum

from ..comfy_model.weight_patches import version_of
from ..engine_library import BuildError, Engine, Fallback, Library, LibraryError, Reason, Unavailable
from .build import MakeRoom, build_engine
from .expected_time import expected_seconds
from .order import BuildOrder

log = logging.getLogger(__name__)

LOG_LINES = 500
REMEMBERED = 100
"""Ended jobs that can still be looked at."""
REPORT_SECONDS = 0.5


class State(str, Enum):
    """State of a job; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (State.DONE, State.FAILED, State.CANCELLED)


class Cancelled(Exception):
    """Raised inside a build whose job was cancelled."""


class Job:
    """One build, from its order to its end.

    Attributes:
        id: never used twice.
        label: the model's name as the user knows it; ``wanted`` has the rest of the order.
        phase, fraction: its current phase, and how much of the build is done, 0 to 1.
        message: why it failed, for the user; ``fallback`` is set when that is a fallback reason.
        engine: the result.
        expected: forecast of the total seconds, or None; see ``expected_time``.
        attended: whether somebody waited for it, and did not leave it to the background.
        waiters: number of callers that wait for it now; when the last one leaves, a job without ``left`` is cancelled.
        left: whether a caller ordered it and did not wait.
        log: the latest lines that exporter and backend wrote.
        cleared: whether a user has read how it ended and removed it from the list.
    """

    def __init__(self, order: BuildOrder, library: Library, again: bool):
        self.id = uuid.uuid4().hex
        self.label = order.network.label
        self.kind = order.network.role.value
        self.wanted = order.words()
        self.state = State.QUEUED
        self.phase, self.fraction = "waiting for other builds", 0.0
        self.message = ""
        self.fallback: Fallback | None = None
        self.engine: Engine | None = None
        self.expected: float | None = None
        self.created = time.time()
        self.attended = False
        self.waiters = 0
        self.left = False
        self.cleared = False
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.key = _key(order, library, again)
        self._order: tuple | None = (order, library, again)
        self._begin: float | None = None
        self._end: float | None = None
        self._announced = False
        self._ended = threading.Event()

    @property
    def seconds(self) -> float:
        """Return how long it has been running, or ran."""
        if self._begin is None:
            return 0.0
        return (self._end if self._end is not None else time.monotonic()) - self._begin

    @property
    def elsewhere(self) -> bool:
        """Tell whether another machine builds the same engine in its place."""
        return self.fallback is not None and self.fallback.reason is Reason.BUILT_ELSEWHERE

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; return whether it has."""
        return self._ended.wait(timeout)

    def want(self, waits: bool) -> None:
        """Count a caller that wants it, under the queue's lock."""
        if waits:
            self.waiters += 1
            self.attended = True
        else:
            self.left = True

    def to_json(self) -> dict:
        """For the page; without the log, which can be long."""
        return {
            "id": self.id,
            "label": self.label,
            "kind": self.kind,
            "wanted": self.wanted,
            "state": self.state.value,
            "phase": self.phase,
            "percent": round(100 * self.fraction),
            "seconds": round(self.seconds, 1),
            "expected": self.expected,
            "message": self.message,
            "created": self.created,
            "engine": self.engine.folder.name if self.engine else None,
        }


Listener = Callable[[Job], None]


class BuildQueue:
    """Jobs in the order in which they came. One is built at a time; the same order is never in it twice."""

    def __init__(self, make_room: MakeRoom | None = None) -> None:
        """``make_room``: frees a GPU for builds that need it, see ``build_engine``."""
        self._make_room = make_room
        self._jobs: dict[str, Job] = {}
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._listeners: list[Listener] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, order: BuildOrder, library: Library, again: bool = False, waits: bool = False) -> Job:
        """Queue a build and return its job at once, or the job that already builds the same.

        Args:
            again: build although the engine is there.
            waits: the caller is going to wait for it, and says so by ``leave`` when it no longer does.
        """
        key = _key(order, library, again)
        with self._arrived:
            for job in self._jobs.values():
                if job.key == key and not job.state.final:
                    job.want(waits)
                    return job
            job = Job(order, library, again)
            job.want(waits)
            self._jobs[job.id] = job
            self._forget_old()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hybrid-trt builds", daemon=True)
                self._thread.start()
                atexit.register(self.close)
        self._tell(job)
        with self._arrived:
            job._announced = True  # so that listeners hear of its arrival before its start
            self._arrived.notify()
        return job

    def jobs(self) -> list[Job]:
        """Return all jobs that are remembered, the oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def get(self, job_id: str) -> Job | None:
        """Return the job with an id, or None."""
        with self._lock:
            return self._jobs.get(job_id)

    def latest(self, order: BuildOrder, library: Library) -> Job | None:
        """Return the last job of an equal order."""
        key = _key(order, library, False)
        return next((job for job in reversed(self.jobs()) if job.key == key), None)

    def cancel(self, job: Job) -> bool:
        """Cancel a job; it counts as cancelled at once. Its processes end within a second. Returns if it was alive."""
        with self._lock:
            if job.state.final:
                return False
            self._finish(job, State.CANCELLED)
        self._tell(job)
        return True

    def clear_ended(self) -> int:
        """Mark all jobs that have ended as cleared; return the number of new ones."""
        with self._lock:
            found = [job for job in self._jobs.values() if job.state.final and not job.cleared]
            for job in found:
                job.cleared = True
        return len(found)

    def leave(self, job: Job) -> bool:
        """End a caller's wait: a job that nobody else wants is cancelled. Returns whether it was."""
        with self._lock:
            job.waiters -= 1
            if job.left or job.waiters > 0:
                return False
        return self.cancel(job)

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with a job whenever it changes, from any thread."""
        with self._lock:
            self._listeners.append(listener)

    def close(self, patience: float = 5.0) -> None:
        """Cancel everything and wait for the running build to clean up."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
        for job in self.jobs():
            self.cancel(job)
        if self._thread is not None:
            self._thread.join(patience)

    def _work(self) -> None:
        while True:
            with self._arrived:
                while (job := self._next()) is None:
                    if self._closed:
                        return
                    self._arrived.wait()
                job.state, job.phase = State.RUNNING, "starting"
                job._begin = time.monotonic()
                order, library, again = job._order
            try:
                self._build(job, order, library, again)
            except BaseException:  # raised by a listener at the end
                log.exception("Hybrid TRT: the end of the build of %s was not announced", job.label)
            del order, library  # nothing may hold a model that nobody builds from any more

    def _next(self) -> Job | None:
        return next((job for job in self._jobs.values() if job.state is State.QUEUED and job._announced), None)

    def _build(self, job: Job, order: BuildOrder, library: Library, again: bool) -> None:
        reported = 0.0

        def progress(phase: str, fraction: float) -> None:
            nonlocal reported
            if job.state is not State.RUNNING:
                raise Cancelled
            new, job.phase = phase != job.phase, phase
            job.fraction = max(job.fraction, min(1.0, fraction))
            if new:
                job.log.append(f"[{job.seconds:.1f} s] {phase}")
            if new or time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                self._tell(job)

        try:
            self._tell(job)
            job.expected = expected_seconds(order, library)
            job.engine = build_engine(
                order, library, progress, job.log.append, again=again, make_room=self._make_room, patient=False
            )
            ended = State.DONE
        except Cancelled:
            return
        except BaseException as failure:  # ComfyUI's interrupt is no Exception; the thread serves later builds too
            # the exception itself is not kept: its traceback would keep the model
            ended = State.FAILED
            job.message = _sentence(failure)
            job.fallback = failure.fallback if isinstance(failure, Unavailable) else None
            if not isinstance(failure, BuildError | LibraryError | Unavailable):
                log.exception("Hybrid TRT: the build of %s failed", job.label)
        with self._lock:
            if job.state is not State.RUNNING:
                return  # cancelled at the last moment
            self._finish(job, ended)
        if job.elsewhere:
            log.info("Hybrid TRT: %s: %s", job.label, job.message)
        elif ended is State.FAILED:
            log.error("Hybrid TRT: the engine for %s was not built: %s", job.label, job.message)
        self._tell(job)

    def _finish(self, job: Job, state: State) -> None:
        job.state = state
        if state is State.DONE:
            job.phase, job.fraction = "ready", 1.0
        else:
            job.phase = state.value
        job._order = None
        job._end = time.monotonic()
        job.log.append(f"[{job.seconds:.1f} s] {job.message or state.value}")
        job._ended.set()

    def _forget_old(self) -> None:
        ended = [job.id for job in self._jobs.values() if job.state.final]
        for job_id in ended[: max(0, len(ended) - REMEMBERED)]:
            del self._jobs[job_id]

    def _tell(self, job: Job) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(job)
            except Exception:
                log.exception("Hybrid TRT: a listener of the builds failed")


def _key(order: BuildOrder, library: Library, again: bool) -> tuple:
    """Return a key that equal orders share, without reading weights. Holds no model."""
    network = order.network
    patchers = [(part.patcher, part.prefix) for part in network.parts]
    weights = [(weakref.ref(patcher.model), version_of(patcher), prefix) for patcher, prefix in patchers]
    profile = tuple(order.profile.to_json().items())
    made = (order.precision, str(profile), order.backend.name, str(order.target_device), str(library.roots[0]))
    return (*weights, *made, order.any_weights, again)


def _sentence(error: BaseException) -> str:
    if isinstance(error, Unavailable):
        return error.fallback.sentence()
    if isinstance(error, BuildError | LibraryError):
        text = str(error)
        return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
    return (
        f"The build stopped with {type(error).__name__} ({error}), so no engine was made and the normal model keeps "
        "running; see the server's log."
    )
