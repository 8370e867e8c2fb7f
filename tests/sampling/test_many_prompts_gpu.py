"""Two hundred prompts of switching sizes in one real ComfyUI on a GPU, each held against native's picture.

Where engines are for one size, native serves the others. Be alone on the GPU: all that is in use there is looked at.

    pytest -m gpu tests/sampling/test_many_prompts_gpu.py

Without a GPU that the backend takes, each test is skipped with the reason that the node would show.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_process import ComfyProcess
from gpu_server import gpu_server
from hybrid_trt.backends import backends
from hybrid_trt.backends.tensorrt.version8.backend import OneSizeBackend
from scenarios import Scenario, control_effect, latent_of, native_latent, prompt, relative_difference

pytestmark = [pytest.mark.gpu, pytest.mark.tensorrt]

PROMPTS = 200
LIMIT = 1e-2
"""Of the latent after all steps, in half precision; without its ControlNets it changes by 0.27 at least."""
SCENARIOS = [
    Scenario(width=width, height=height, batch=batch, tokens=(tokens, 77), seed=width + batch)
    for width, height in ((128, 128), (192, 128), (128, 256), (256, 192))
    for batch, tokens in ((1, 77), (1, 154), (2, 77))
]


@pytest.fixture(scope="module", params=["torch", "tensorrt", "tensorrt_rtx"])
def backend(request: pytest.FixtureRequest) -> Any:
    chosen = backends()[request.param]
    if not torch.cuda.is_available():
        pytest.skip("there is no NVIDIA GPU")
    if (refusal := chosen.cannot_run(torch.device("cuda", 0))) is not None:
        pytest.skip(str(refusal))
    return chosen


@pytest.fixture(scope="module")
def server(
    environment: Any, models: dict[str, Path], backend: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyProcess]:
    with gpu_server(environment, tmp_path_factory.mktemp("page")) as process:
        yield process


def test_two_hundred_prompts_of_switching_sizes_give_natives_pictures(server: ComfyProcess, backend: Any) -> None:
    settings = {"backend": backend.name, "max_size": 256, "max_images": 2, "max_tokens": 154}
    scenarios = [scenario.but(settings=settings) for scenario in SCENARIOS]
    natives = [native_latent(server, scenario) for scenario in scenarios]
    assert min(control_effect(server, scenario) for scenario in scenarios[:3]) > 10 * LIMIT
    build_now = scenarios[0].but(settings=settings | {"when_missing": "build now"})
    latent_of(server.queue(prompt(build_now, True, "engine"), timeout=900))

    choose, before, errors, used, engines = random.Random(1), 0, [], [], 0
    for number in range(PROMPTS):
        which = before
        while which == before:  # the same prompt again would not run
            which = choose.randrange(len(scenarios))
        before = which
        history = server.queue(prompt(scenarios[which], True, "engine"))
        errors.append(relative_difference(latent_of(history), natives[which]))
        rows = history.output("report", "report")[0]["rows"]
        fits = which == 0 or not isinstance(backend, OneSizeBackend)
        assert len(rows) == 3
        assert all((row["engine"] > 0, row["native"] > 0) == (fits, not fits) for row in rows), (number, rows)
        assert errors[-1] <= LIMIT, (number, scenarios[which])
        engines += fits
        if number in (PROMPTS // 4, PROMPTS - 1):
            used.append(memory_in_use(server))

    assert engines >= PROMPTS // (2 * len(SCENARIOS))
    assert max(errors) > 0, "an engine computes otherwise than native, if ever so little"
    # which shapes are recorded just then, and how large they are, is another matter
    assert used[1] < used[0] + 0.5e9, f"what is recorded anew kept memory: {used}"


def memory_in_use(server: ComfyProcess) -> float:
    """Bytes of the GPU that are not free, by ComfyUI's own words."""
    device = server.get("/system_stats")["devices"][0]
    return device["vram_total"] - device["vram_free"]
