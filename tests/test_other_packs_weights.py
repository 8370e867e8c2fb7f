"""Models whose weights another pack keeps in its own way: native serves, and the reason says what they are."""

from __future__ import annotations

import logging
from pathlib import Path

import other_packs_weights
import pytest
import torch
from hybrid_trt.backends import AUTO
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.sampling.engine_status import status
from memory_fixtures import file, library
from patched import Patched, natively

from sampling import STEPS, error, sample

__all__ = ["file", "library"]  # fixtures: pytest finds them by name

KINDS = {"GGUF": "GGUF weights", "NF4": "bitsandbytes weights", "whole numbers": "Nunchaku weights",
         "another patcher": "GGUF weights"}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, AUTO) for kind in KINDS), ("GGUF", "torch"), ("GGUF", "onnxruntime")]
)
def test_native_serves_it_and_the_reason_says_what_its_weights_are(
    file: Path, library: Library, kind: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.inference_mode():
        model = other_packs_weights.load(str(file), kind)
        reference = sample(model)
        if kind != "another patcher":
            assert error(natively(file), reference) > 1e-4, "its weights are rounded"
        with caplog.at_level(logging.WARNING):
            patched = Patched(model, library, backend)
    assert error(patched.sample(), reference) == 0
    assert patched.counts == (0, STEPS)
    assert list(patched.handle.stats.reasons) == [Reason.UNSUPPORTED_MODEL.value]
    assert KINDS[kind] in status(patched.handle)
    assert "Traceback" not in caplog.text
