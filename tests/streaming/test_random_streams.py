"""Streams drawn at random give the pictures of stock nodes, frame by frame.

Slow: some five seconds for each. `make test ARGS="-m slow tests/streaming/test_random_streams.py"`
"""

from __future__ import annotations

import numpy
import pytest
from comfy_process import ComfyProcess, PromptRejected
from random_streams import DrawnStreams
from scenarios import Prompt
from streams import pictures_of, stock, streamed

SEED, COUNT = 1, 40
LIMITS = {False: 2e-5, True: 5e-4}
"""Of a value, without and with engines. The rounding of several frames in one call came to 1.1e-5, with LCM at cfg 3. A
model with a LoRA twice made 2.4e-4 of the 3e-7 of a VAE's engine."""


def pictures(comfy: ComfyProcess, prompt: Prompt, *saved: str) -> numpy.ndarray | str:
    """Return the pictures of a prompt, or what failed."""
    try:
        history = comfy.queue(prompt, timeout=300)
    except PromptRejected as refusal:
        return str(refusal)
    return numpy.concatenate([pictures_of(history, name) for name in saved]) if history.ok else str(history.error)


@pytest.mark.slow
@pytest.mark.parametrize("engines", [False, True])
def test_streams_drawn_at_random_give_the_pictures_of_stock_nodes(comfy: ComfyProcess, engines: bool) -> None:
    given = comfy.object_info("KSampler")["input"]["required"]
    drawn, wrong, ran = DrawnStreams(SEED, given["sampler_name"][0], given["scheduler"][0]), [], 0
    for _ in range(COUNT):
        case, more = drawn.draw()
        wanted = pictures(comfy, stock(case), *(f"save_of_{n}" for n in range(case.frames)))
        found = pictures(comfy, streamed(case, engines=engines, **more), "save")
        if isinstance(wanted, str) or isinstance(found, str):
            if not (isinstance(wanted, str) and isinstance(found, str)):
                wrong.append(f"stock {wanted!s:.200}, the stream {found!s:.200}: {case} {more}")
            continue
        ran += 1
        if not numpy.allclose(found, wanted, rtol=0, atol=LIMITS[engines], equal_nan=True):
            wrong.append(f"{numpy.abs(found - wanted).max():.1e} from stock: {case} {more}")
    assert not wrong, "\n".join(wrong)
    assert ran > 0.7 * COUNT
