"""TRT Stream in one real ComfyUI on a GPU: each picture is the one that stock nodes make of its frame.

    pytest -m gpu tests/streaming/test_stream_gpu.py

The models are tiny; what counts is that each network is on the GPU when a frame needs it, and that graphs replay right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_process import ComfyProcess
from gpu_server import gpu_server
from streams import Case, compared, pictures_of, streamed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")]

LIMIT = 5e-3
"""The greatest difference of a pixel, in half precision: a little more than one step of eight bits."""
CASES = {
    "ControlNets": Case(frames=6, images=6, controls=2),
    "cfg": Case(controls=1, cfg=3.0, sampler="euler", vae="tiny_sdxl_taesd"),
    "from noise": Case(denoise=1.0, controls=1, new_seeds=True),
    "LoRA hook": Case(hooked=True),
    "EasyCache": Case(patch=("EasyCache", {"reuse_threshold": 0.2, "start_percent": 0.15, "end_percent": 0.95,
                                           "verbose": False})),
}  # fmt: skip


@pytest.fixture(scope="module", params=[[], ["--disable-dynamic-vram"]], ids=["default", "without dynamic VRAM"])
def server(
    request: pytest.FixtureRequest, environment: Any, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyProcess]:
    with gpu_server(environment, tmp_path_factory.mktemp("page"), *request.param) as process:
        yield process


@pytest.mark.parametrize("steps_as_batch", [False, True], ids=["frame by frame", "steps as a batch"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_streams_pictures_are_those_of_stock_nodes(server: ComfyProcess, case: Case, steps_as_batch: bool) -> None:
    """Stock nodes run between two streams, of which the first one has to load each network.

    ComfyUI's own first picture after models are loaded may differ from its second: that frame is left out.
    """
    server.free()
    loading = pictures_of(server.queue(streamed(case, steps_as_batch=steps_as_batch), timeout=300))
    difference, history = compared(server, case, steps_as_batch=steps_as_batch)
    assert difference <= LIMIT
    assert abs(loading[1:] - pictures_of(history)[1:]).max() <= LIMIT


def test_a_lora_hooked_to_the_prompt_changes_a_streams_pictures(server: ComfyProcess) -> None:
    with_hook, without = (pictures_of(server.queue(streamed(replace(CASES["LoRA hook"], hooked=hooked))))
                          for hooked in (True, False))  # fmt: skip
    assert abs(with_hook - without).max() > LIMIT
