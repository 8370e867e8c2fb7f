"""CUDA graphs without CUDA: captures by keeping the function, replays by running it again."""

from __future__ import annotations

from collections.abc import Callable


class Recorder:
    """Counts captures and replays; a replay runs the captured body on the buffers that it closed over."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self.error: Exception | None = None

    def __call__(self, body: Callable[[], None]) -> Recorder.Replay:
        if self.error is not None:
            raise self.error
        self.captured += 1
        body()
        return self.Replay(self, body)

    class Replay:
        def __init__(self, recorder: Recorder, body: Callable[[], None]):
            self.recorder, self.body = recorder, body

        def replay(self) -> None:
            self.recorder.replayed += 1
            self.body()
