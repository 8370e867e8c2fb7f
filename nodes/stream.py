"""TRT Stream: frame after frame inside one execution, so that only the networks take time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from comfy import model_management
from comfy.samplers import KSampler
from comfy.utils import ProgressBar
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import GraphBuilder

from ..sampling.run_context import executing
from ..streaming.frame_nodes import FrameNodes, Link, values_needed
from ..streaming.frames import AS_CONNECTED, BatchSource, Settings
from ..streaming.live import open_session
from ..streaming.run import FrameTimes, record_times, run_stream
from ..streaming.stream import Stream
from . import frame_schemas

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy.sd import CLIP, VAE

REPORT_EVERY = 2.0
"""Seconds between two messages about progress: each takes the page and the server some time."""


class TRTStream(io.ComfyNode):
    """MODEL, VAE, conditionings and frames -> the picture of each frame, as stock nodes make it one by one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return frame_schemas.stream(KSampler.SAMPLERS, KSampler.SCHEDULERS)

    @classmethod
    def fingerprint_inputs(cls, **given: Any) -> float:
        """Run anew each time when live: the frames are not known. A wired input is there, as None."""
        return 0.0 if "frames" in given else float("nan")

    @classmethod
    def execute(
        cls, model: ModelPatcher, vae: VAE, positive: list, negative: list, seed_each_frame: str, similar_frames: float,
        control_images: str, frames: torch.Tensor | None = None, clip: CLIP | None = None, wait_seconds: int = 30,
        remembered_frames: int = 0, **sampler: Any,
    ) -> io.NodeOutput:  # fmt: skip
        graph, own = cls.hidden.dynprompt, cls.hidden.unique_id
        values = {_key(link): link for link in values_needed(graph, own)}
        if not values.keys() <= sampler.keys():
            return _again_with(values, graph.get_node(own))
        values = {link: sampler.pop(key) for key, link in values.items()}
        new_seeds = seed_each_frame == frame_schemas.NEW_SEEDS
        settings = Settings(**sampler, new_seeds=new_seeds, follow=control_images, similar=similar_frames,
                            remembered=remembered_frames)  # fmt: skip
        stream, times, shown = Stream(model, vae, positive, negative, settings, clip), FrameTimes(), own
        if values:
            own, shown = graph.get_parent_node_id(own), graph.get_display_node_id(own)
            stream.follow(FrameNodes(graph, own, values, stream.controls.controls))
        if (context := executing()) is not None:
            record_times(context.prompt_id, shown, times)
        if frames is None:
            pictures = _live(stream, times, shown, wait_seconds)
        else:
            _check_counts(stream, frames.shape[0])
            source = BatchSource(frames, _progress(frames.shape[0]))
            run_stream(stream, source, times)
            pictures = source.pictures
        return io.NodeOutput(pictures, ui=ui.PreviewText(times.sentence()))


class TRTFrame(io.ComfyNode):
    """Optional example -> an image that stands for the frame of a stream."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return frame_schemas.frame()

    @classmethod
    def execute(cls, example: torch.Tensor | None = None) -> io.NodeOutput:
        return io.NodeOutput(_drawn() if example is None else example[:1])


def _drawn() -> torch.Tensor:
    """Return a picture for nodes that run before the first frame: (1, 512, 512, 3), a gradient in each direction."""
    line = torch.linspace(0.0, 1.0, 512)
    return torch.stack(torch.broadcast_tensors(line[:, None], line, line.flip(0)), dim=-1)[None].clone()


def _key(link: Link) -> str:
    """Return a name for the value of another node's output among a stream's inputs."""
    return f"value {link[1]} of {link[0]}"


def _again_with(values: dict[str, Link], node: dict[str, Any]) -> io.NodeOutput:
    """Have ComfyUI run this node again with these values as inputs: it gives a node only its inputs' values."""
    graph = GraphBuilder()
    again = graph.node(node["class_type"], **node["inputs"], **{key: list(link) for key, link in values.items()})
    return io.NodeOutput(again.out(0), expand=graph.finalize())


def _live(stream: Stream, times: FrameTimes, node_id: str, patience: float) -> torch.Tensor:
    """Run a stream whose frames come from the page or a client, and return its last picture.

    Raises:
        ValueError: no frame came; the text is for the user.
        InterruptProcessingException: the stream was stopped before its first frame.
    """
    with open_session(node_id, stream.now(), patience, stream.settings.steps_as_batch) as session:
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
    """Return a function that reports the number of finished frames to ComfyUI, now and then."""
    bar, reported = ProgressBar(frames), 0.0

    def tell(done: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if done == frames or now - reported >= REPORT_EVERY:
            reported = now
            bar.update_absolute(done, frames)

    return tell
