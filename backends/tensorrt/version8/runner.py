"""An open engine of TensorRT 8.6: its contexts take scratch memory in an older way, and weights are numpy's arrays."""

from __future__ import annotations

from typing import Any

import torch

from ....engine_library import Engine
from ..runner import OpenedEngine


class Version8Engine(OpenedEngine):
    """Its engine on a GPU."""

    def _prepare(self, engine: Engine) -> int:
        return self._engine.device_memory_size

    def new_context(self) -> _Context | None:
        made = self._engine.create_execution_context_without_device_memory()
        if made is None:
            return None
        if made.active_optimization_profile < 0:  # only an engine's first context has one by itself
            stream = torch.cuda.current_stream()
            made.set_optimization_profile_async(0, stream.cuda_stream)
            stream.synchronize()
        return _Context(made, self.scratch_bytes)

    def _as_weights(self, tensor: torch.Tensor) -> Any:
        """A tensor in main memory as weights for a refit; its values are read where they are."""
        return self._trt.Weights(tensor.numpy())


class _Context:
    """An execution context that takes scratch memory as later versions' do."""

    def __init__(self, context: Any, scratch_bytes: int):
        self._context, self._bytes = context, scratch_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def update_device_memory_size_for_shapes(self) -> int:
        """Bytes that the next call needs: always as many as the largest call's."""
        return self._bytes

    def set_device_memory(self, pointer: int, _size: int) -> None:
        self._context.device_memory = pointer
