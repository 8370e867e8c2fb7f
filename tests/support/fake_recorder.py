"""CUDA graphs without CUDA: records by keeping the function, replays by running it again."""

from __future__ import annotations

from collections.abc import Callable


class Recorder:
    """Counts recordings and replays; a replay is the recorded body on the buffers that it closed over."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0
        self.error: Exception | None = None

    def __call__(self, body: Callable[[], None]) -> Recorder.Replay:
        if self.error is not None:
            raise self.error
        self.recorded += 1
        body()
        return self.Replay(self, body)

    class Replay:
        def __init__(self, recorder: Recorder, body: Callable[[], None]):
            self.recorder, self.body = recorder, body

        def replay(self) -> None:
            self.recorder.replayed += 1
            self.body()
