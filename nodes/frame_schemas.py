"""Schemas of the nodes that work frame by frame."""

from __future__ import annotations

from collections.abc import Sequence

from comfy_api.latest import io

from ..node_names import FRAME, STREAM
from ..streaming.frames import FOLLOW
from .schemas import node_schema

SAME_SEED, NEW_SEEDS = "the same", "a new one for each frame"


def stream(samplers: Sequence[str], schedulers: Sequence[str]) -> io.Schema:
    """TRT Stream; with the names of ComfyUI's samplers and schedulers."""
    return node_schema(
        node_id=STREAM,
        display_name="TRT Stream",
        description="Samples frame after frame without a pause: a batch of frames, for example of a video, or live "
        "ones. Each picture is the one that VAE Encode, KSampler and VAE Decode make of its frame alone.",
        search_aliases=["real time", "realtime", "live", "webcam", "video to video", "streamdiffusion", "frames"],
        inputs=[
            io.Model.Input("model", tooltip="That of TRT Accelerate is fast; any other works."),
            io.Vae.Input("vae", tooltip="TAESD is the fast one."),
            io.Conditioning.Input("positive", tooltip="With its ControlNets, if there are any."),
            io.Conditioning.Input("negative", tooltip="Does nothing at a cfg of 1."),
            io.Image.Input("frames", optional=True, tooltip="The frames. Leave it open for live ones."),
            io.Clip.Input("clip", optional=True, tooltip="Lets the prompt of a live stream change while it runs."),
            io.Combo.Input(
                "control_images",
                options=list(FOLLOW),
                default=FOLLOW[0],
                tooltip="The image of each ControlNet: its own, one for each frame or one for all; the frame; or the "
                "frame's edges.",
            ),
            io.Int.Input("steps", default=1, min=1, max=8, tooltip="Sampling steps of each frame."),
            io.Float.Input("cfg", default=1.0, min=0.0, max=30.0, step=0.1, tooltip="1 is twice as fast as any other."),
            io.Combo.Input("sampler_name", options=list(samplers), default="lcm"),
            io.Combo.Input("scheduler", options=list(schedulers), default="sgm_uniform"),
            io.Float.Input(
                "denoise",
                default=0.5,
                min=0.01,
                max=1.0,
                step=0.01,
                tooltip="How far a picture may be from its frame. At 1 it starts from noise, and a frame only acts "
                "through ControlNets.",
            ),
            io.Int.Input("seed", default=0, min=0, max=2**64 - 1, control_after_generate=True),
            io.Combo.Input(
                "seed_each_frame",
                display_name="seed of each frame",
                options=[SAME_SEED, NEW_SEEDS],
                default=SAME_SEED,
                tooltip="The same seed keeps the pictures steady. Else a frame's number is added to it.",
            ),
            io.Float.Input(
                "similar_frames",
                display_name="skip similar frames",
                default=0.0,
                min=0.0,
                max=1.0,
                step=0.001,
                tooltip="A frame that differs less from the one before gets the same picture: mean difference of the "
                "pixels, 0 to 1. 0 is off; 0.01 skips a still camera's.",
                advanced=True,
            ),
            io.Int.Input(
                "remembered_frames",
                display_name="attend to earlier frames",
                default=0,
                min=0,
                max=4,
                optional=True,
                tooltip="Steadier pictures: the UNet's self-attention sees so many earlier frames too. Pictures are "
                "then no longer those of their frames alone, and the UNet runs uncompiled: slower.",
                advanced=True,
            ),
            io.Int.Input(
                "wait_seconds",
                display_name="wait for live frames (s)",
                default=30,
                min=1,
                max=3600,
                optional=True,
                tooltip="A live stream ends when no page and no program is connected for so long.",
                advanced=True,
            ),
            io.Boolean.Input(
                "steps_as_batch",
                display_name="batch steps (more frames a second, later)",
                default=False,
                optional=True,
                tooltip="More frames a second at two steps and more, with lcm or euler: frames at different steps "
                "share each call. A picture comes as many frames later as there are steps, less one.",
                advanced=True,
            ),
        ],
        outputs=[io.Image.Output("pictures", display_name="pictures", tooltip="One for each frame.")],
        enable_expand=True,
    )


def frame() -> io.Schema:
    """TRT Frame."""
    return node_schema(
        node_id=FRAME,
        display_name="TRT Frame",
        description="Stands for the frame of TRT Stream. Wire it through any nodes, for example of depth or pose, to "
        "the image of a ControlNet: they run again for each frame.",
        search_aliases=["live", "webcam", "preprocessor", "depth", "pose", "real time", "frames"],
        inputs=[
            io.Image.Input(
                "example",
                optional=True,
                tooltip="A picture that these nodes run on before the first frame, and without a TRT Stream.",
            ),
        ],
        outputs=[io.Image.Output("frame", display_name="frame", tooltip="To the nodes that make a control image.")],
        hidden=[],
    )
