"""The mark of tests that compile to a file, which older torches than the pinned one do not."""

from __future__ import annotations

import pytest
from hybrid_trt.backends.torch_inductor.compiled import can_compile

COMPILES = pytest.mark.skipif(not can_compile(), reason="this torch is too old to compile to a file")
