"""What backends share whose engines are files with the weights in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ..architectures.sizes import PRECISIONS
from ..engine_library import BuildError, Engine, Fallback
from . import LiveTask, Progress

if TYPE_CHECKING:
    import torch

    from ..comfy_model.network import NativeNetwork
    from ..sessions.file_session import FileSession
    from ..sessions.session import Runner
    from ..sessions.several_sizes import SeveralSizes


class FileBackend:
    """Base of such backends. They have ``load`` in the place of sessions of their own."""

    build_stack = 0
    runs_live_weights = False
    refits = False
    keeps_weights = False
    one_size = False
    in_parts = False
    precisions: Collection[str] = PRECISIONS

    def build_memory(self, weights: int) -> int:
        return 0

    def weights(self, network: NativeNetwork, check: Callable[[], None] | None = None) -> str:
        return network.weights_hash(check)

    def compile(self, function: torch.nn.Module, task: LiveTask, progress: Progress) -> dict:
        raise BuildError("this backend builds from ONNX graphs, not from live networks")

    def sizes(self, engine: Engine) -> list[dict[str, int]]:
        return []

    def load(self, engine: Engine, device: torch.device) -> Runner:
        """Open an engine for running on a device.

        Raises:
            Unavailable: it cannot be opened here.
        """
        raise NotImplementedError

    def session(
        self, network: NativeNetwork, engines: Sequence[Engine], precision: str, passed_over: Fallback | None
    ) -> FileSession | SeveralSizes:
        from ..sessions.file_session import file_session  # which needs ComfyUI
        from ..sessions.session import refusal_of
        from ..sessions.several_sizes import several_sizes

        def opened(engine: Engine) -> FileSession:
            return file_session(
                engine, lambda engine, device: self.load(engine, device), network.device, network, self.keeps_weights
            )

        weights = engines[0].manifest.identity.weights
        alike = [engine for engine in engines if engine.manifest.identity.weights == weights]
        sound = [engine for engine in alike if refusal_of(engine) is None] or alike  # what did not open before is left
        return several_sizes([opened(engine) for engine in (sound if self.one_size else engines[:1])])
