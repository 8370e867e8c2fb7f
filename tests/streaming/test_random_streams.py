"""Streams drawn at random give the pictures of stock nodes, frame by frame.

Slow: some five seconds for each. `make test ARGS="-m slow tests/streaming/test_random_streams.py"`
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy
import pytest
from comfy_process import ComfyProcess, PromptRejected
from scenarios import Prompt
from streams import NODES, STRENGTHS, Case, pictures_of, stock, streamed

SEED, COUNT = 1, 40
LIMITS = {False: 2e-5, True: 5e-4}
"""Of a value, without and with engines. The rounding of several frames in one call came to 1.1e-5, with LCM at cfg 3. A
model with a LoRA twice made 2.4e-4 of the 3e-7 of a VAE's engine."""
FEW_STEPS = (1, 1, 2, 2, 3, 3, 4, 8)
SIDES = (64, 64, 72, 67, 77, 96)
PATCHES = (
    ("ModelSamplingDiscrete", {"sampling": "lcm", "zsnr": False}),
    ("ModelSamplingDiscrete", {"sampling": "v_prediction", "zsnr": True}),
    ("RescaleCFG", {"multiplier": 0.7}),
    ("FreeU_V2", {"b1": 1.1, "b2": 1.2, "s1": 0.9, "s2": 0.8}),
    ("PerturbedAttentionGuidance", {"scale": 2.0}),
)


class DrawnStreams:
    """Cases and more inputs of TRT Stream; the same seed draws the same ones.

    Args:
        samplers, schedulers: the names that ComfyUI's KSampler has.
    """

    def __init__(self, seed: int, samplers: list[str], schedulers: list[str]):
        self._random, self._samplers, self._schedulers = Random(seed), samplers, schedulers

    def draw(self) -> tuple[Case, dict[str, Any]]:
        """Return a case, and inputs of TRT Stream that must not change a picture."""
        r = self._random
        at_once = r.random() < 0.4
        usual = ("lcm", "euler") if at_once else ("lcm", "lcm", "euler", "euler_ancestral")
        sampler = r.choice(usual) if r.random() < (0.9 if at_once else 0.5) else r.choice(self._samplers)
        family, frames = r.choice(("sd15", "sd15", "sdxl")), r.choice((1, 2, 2, 3, 3, 5))
        controls = r.choice((0, 1, 2, 3) if family == "sd15" else (0, 1, 2))
        at_once_too = at_once and r.random() < 0.7  # else something has frames sampled one after another
        start, end = (0.0, 1.0) if at_once_too else r.choice(((0.0, 1.0), (0.0, 0.6), (0.3, 0.9), (0.5, 1.0)))
        hooked = family == "sd15" and not at_once and r.random() < 0.08
        region = "" if hooked else r.choice(("", "all")) if at_once_too else r.choice(("", "area", "mask", "timesteps"))
        case = Case(
            frames=frames, width=128 if region == "area" else r.choice(SIDES), height=72 if region == "area" else
            r.choice(SIDES), steps=r.choice(FEW_STEPS), cfg=r.choice((1.0, 1.0, 3.0, 0.5)), sampler=sampler,
            scheduler=r.choice(("sgm_uniform", "normal", "simple", r.choice(self._schedulers))),
            denoise=r.choice((0.5, 0.9, 1.0, 0.1, round(r.uniform(0.01, 1), 2))), seed=r.choice((7, 0, 2**63, 123456)),
            controls=controls, follow=r.choice(("as connected", "the frame", "edges of the frame", NODES)),
            images=r.choice((1, frames)), region=region, family=family,
            unet=r.choice(("", "", "tiny_sd15_other_unet", "tiny_sd15_ip2p_unet")) if family == "sd15" else "",
            vae=r.choice(("tiny_kl", "tiny_sdxl_taesd")), new_seeds=r.random() < 0.3,
            patch=r.choice(PATCHES[: 2 if at_once_too else None]) if r.random() < 0.2 else None, hooked=hooked,
            start=start, end=end, strengths=tuple(r.choice((one, one, 0.0, 1.3)) for one in STRENGTHS),
            tokens=(r.choice((77, 77, 154, 231)), r.choice((77, 77, 154))),
            lora=r.choice(("", "", "", "before", "behind")), apply=r.choice(("stock", "trt")),
        )  # fmt: skip
        return case, {"steps_as_batch": at_once, "similar_frames": r.choice((0.0, 0.0, 0.001))}


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
