"""Main memory for streamed weights: whole pages, pinned by ComfyUI and given back to it."""

from __future__ import annotations

import gc

import pytest
import torch
from comfy import model_management
from hybrid_trt.comfy_model.main_memory import PAGE, MainMemory


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """ComfyUI's pinned memory, address -> bytes; this stands for CUDA, which is not here."""
    found: dict[int, int] = {}

    def pin(tensor: torch.Tensor) -> bool:
        if len(found) < 3:
            found[tensor.data_ptr()] = tensor.nbytes
        return tensor.data_ptr() in found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model_management, "pin_memory", pin)
    monkeypatch.setattr(model_management, "unpin_memory", lambda tensor: found.pop(tensor.data_ptr()))
    return found


def test_no_two_tensors_share_a_page(pinned: dict[int, int]) -> None:
    memory = MainMemory()
    tensors = [memory.new(str(size), (size, 3), torch.float32) for size in (1, 400, 341)]
    assert [tensor.shape for tensor in tensors] == [(1, 3), (400, 3), (341, 3)]
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert pinned == {tensor.data_ptr(): -(-tensor.nbytes // PAGE) * PAGE for tensor in tensors}
    assert all(address % PAGE == 0 for address in pinned)
    memory.new("one too many", (1,), torch.float32)
    memory.free()
    assert pinned == {}


def test_memory_is_unpinned_when_it_is_let_go_replaced_or_dies(pinned: dict[int, int]) -> None:
    memory = MainMemory()
    _, second = (memory.new(name, (5,), torch.float16).data_ptr() for name in ("first", "second"))
    memory.free(["first", "never made"])
    assert list(pinned) == [second]
    memory.new("second", (7,), torch.float16)
    assert len(pinned) == 1
    del memory
    gc.collect()
    assert pinned == {}
