"""Nodes for a ComfyUI without the features that engines need: they pass inputs on, so native serves, and say so.

This module imports nothing that such a ComfyUI may lack.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from comfy.samplers import KSampler
from comfy_api.latest import io

from ..comfy_model.comfyui_internals import Feature, switched_off
from . import frame_schemas, schemas
from .apply_controlnet import TRTApplyControlNet
from .compare import TRTCompare

log = logging.getLogger(__name__)


def why() -> str:
    """Return for people why everything runs native."""
    return f"Not accelerated: {' '.join(switched_off([Feature.ENGINES]))}"


def passing_on(schema: Callable[[], io.Schema]) -> type[io.ComfyNode]:
    """Return a node whose outputs are the inputs of their names. An engine or a report says why there is none."""

    class PassingOn(io.ComfyNode):
        """Inputs -> themselves."""

        @classmethod
        def define_schema(cls) -> io.Schema:
            return schema()

        @classmethod
        def execute(cls, **given: Any) -> io.NodeOutput:
            if schema().is_output_node:
                log.info("Hybrid TRT: %s", why())
            given |= {"engine": why(), "report": why()}
            outputs = [given.get(output.id.removesuffix("_out")) for output in schema().outputs]
            return io.NodeOutput(*outputs, ui={"text": [why()], "native": [True]})

    return PassingOn


class TRTStream(io.ComfyNode):
    """Frames -> no pictures, and why: this ComfyUI lacks features that it needs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return frame_schemas.stream(KSampler.SAMPLERS, KSampler.SCHEDULERS)

    @classmethod
    def execute(cls, **_: Any) -> io.NodeOutput:
        raise ValueError(f"TRT Stream makes no pictures here. {why()} Use VAE Encode, KSampler and VAE Decode.")


class TRTFrame(io.ComfyNode):
    """An example -> itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return frame_schemas.frame()

    @classmethod
    def execute(cls, example: Any = None) -> io.NodeOutput:
        if example is None:
            raise ValueError(f"TRT Frame has no picture here. {why()} Connect an image in its place.")
        return io.NodeOutput(example)


NODES = [
    passing_on(schemas.accelerate), passing_on(schemas.unet_engine), passing_on(schemas.controlnet_engine),
    passing_on(schemas.vae_engine), TRTApplyControlNet, passing_on(schemas.sampler_patch), passing_on(schemas.report),
    TRTCompare, TRTStream, TRTFrame,
]
