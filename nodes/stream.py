"""TRT Stream: frame after frame inside one execution, so that nothing but the networks takes time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from comfy import model_management
from comfy.samplers import KSampler
from comfy.utils import ProgressBar
from comfy_api.latest import io, ui

from ..sampling.frame_times import FrameTimes, record_times
from ..sampling.run_context import executing
from ..streaming.batch import BatchSource
from ..streaming.live import open_session
from ..streaming.run import run_stream
from ..streaming.settings import AS_CONNECTED, Settings
from ..streaming.stream import Stream
from . import schemas

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy.sd import CLIP, VAE

TOLD_EVERY = 2.0
"""Seconds between two messages about progress: each takes the page and the server some time."""


class TRTStream(io.ComfyNode):
    """MODEL, VAE, conditionings and frames -> the picture of each frame, as stock nodes make it one by one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.stream(KSampler.SAMPLERS, KSampler.SCHEDULERS)

    @classmethod
    def fingerprint_inputs(cls, **given: Any) -> float:
        """Run anew each time when live: nothing tells which frames will come. A wired input is there, as None."""
        return 0.0 if "frames" in given else float("nan")

    @classmethod
    def execute(
        cls, model: ModelPatcher, vae: VAE, positive: list, negative: list, seed_each_frame: str, similar_frames: float,
        control_images: str, frames: torch.Tensor | None = None, clip: CLIP | None = None, wait_seconds: int = 30,
        **sampler: Any,
    ) -> io.NodeOutput:  # fmt: skip
        new_seeds = seed_each_frame == schemas.NEW_SEEDS
        settings = Settings(**sampler, new_seeds=new_seeds, follow=control_images, similar=similar_frames)
        stream, times = Stream(model, vae, positive, negative, settings, clip), FrameTimes()
        if (context := executing()) is not None:
            record_times(context.prompt_id, context.node_id, times)
        if frames is None:
            pictures = _live(stream, times, cls.hidden.unique_id, wait_seconds)
        else:
            _check_counts(stream, frames.shape[0])
            source = BatchSource(frames, _progress(frames.shape[0]))
            run_stream(stream, source, times)
            pictures = source.pictures
        return io.NodeOutput(pictures, ui=ui.PreviewText(times.sentence()))


def _live(stream: Stream, times: FrameTimes, node_id: str, patience: float) -> torch.Tensor:
    """Run a stream whose frames come from the page or a client, and return its last picture.

    Raises:
        ValueError: no frame came; the text is for the user.
        InterruptProcessingException: the stream was stopped before its first frame.
    """
    with open_session(node_id, stream.now(), patience) as session:
        last = run_stream(stream, session, times)
    if last is None and session.stopped:
        raise model_management.InterruptProcessingException
    if last is None:
        raise ValueError(
            "TRT Stream got no frame, so there is no picture. Start it in the panel TRT live, or connect frames."
        )
    return last


def _check_counts(stream: Stream, frames: int) -> None:
    """Raise ValueError if a ControlNet has neither one image nor one for each frame; the text is for the user."""
    if stream.settings.follow != AS_CONNECTED:
        return
    for number, count in enumerate(stream.controls.counts(), start=1):
        if count not in (0, 1, frames):
            raise ValueError(
                f"ControlNet {number} has {count} images, and there are {frames} frames. "
                "Give it one image for all frames, or as many as there are frames."
            )


def _progress(frames: int) -> Callable[[int], None]:
    """Return a function that tells ComfyUI how many frames are done, now and then."""
    bar, told = ProgressBar(frames), 0.0

    def tell(done: int) -> None:
        nonlocal told
        now = time.monotonic()
        if done == frames or now - told >= TOLD_EVERY:
            told = now
            bar.update_absolute(done, frames)

    return tell
