"""Models whose weights another pack keeps in its own way: native serves, and the reason says what they are."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hybrid_trt.backends import AUTO
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.sampling.engine_status import status
from pack import ROOT
from patched import NAME, Patched, library_of, natively

from sampling import STEPS, error, sample

KINDS = {"GGUF": "GGUF weights", "NF4": "bitsandbytes weights", "whole numbers": "Nunchaku weights",
         "another patcher": "GGUF weights"}  # fmt: skip


def _stand_in() -> Any:
    spec = importlib.util.spec_from_file_location(
        "other_packs_weights", ROOT / "tests" / "comfy_test_nodes" / "other_packs_weights.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def file(environment: Any) -> Path:
    return tiny_models.make(environment.base / "models", [NAME])[NAME]


@pytest.fixture(scope="module")
def library(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """With an engine of the plain checkpoint, so that the look-up wants to see the weights."""
    return library_of(file, tmp_path_factory.mktemp("library"))


@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, AUTO) for kind in KINDS), ("GGUF", "torch"), ("GGUF", "onnxruntime")]
)
def test_native_serves_it_and_the_reason_says_what_its_weights_are(
    file: Path, library: Library, kind: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.inference_mode():
        model = _stand_in().load(str(file), kind)
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
