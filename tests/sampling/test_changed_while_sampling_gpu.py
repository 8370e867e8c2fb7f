"""Packs change a network while it is sampled on a GPU: no CUDA graph of before is replayed.

    pytest -m gpu tests/sampling/test_changed_while_sampling_gpu.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")]

SCRIPT = Path(__file__).parents[1] / "support" / "changes_on_gpu.py"


def test_no_graph_serves_a_call_in_which_a_pack_changes_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(SCRIPT), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    sys.stdout.write(run.stdout)
    assert run.returncode == 0, run.stderr[-3000:]
    assert len([line for line in lines if line.startswith("right")]) >= 40, run.stdout
    assert not [line for line in lines if line.startswith("WRONG")], run.stdout
