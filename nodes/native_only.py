"""Nodes for a ComfyUI without the features that engines need: they pass inputs on, so native serves, and say so.

This module imports nothing that such a ComfyUI may lack.
"""

from __future__ import annotations

import logging
from typing import Any

from comfy.samplers import KSampler
from comfy_api.latest import io, ui

from ..comfy_model.comfyui_internals import Feature, switched_off
from ..node_names import CONTROL_INPUTS
from . import frame_schemas, schemas
from .apply_controlnet import TRTApplyControlNet
from .compare import TRTCompare

log = logging.getLogger(__name__)


def why() -> str:
    """Return for people why everything runs native."""
    return f"Not accelerated: {' '.join(switched_off([Feature.ENGINES]))}"


class TRTAccelerate(io.ComfyNode):
    """MODEL, VAE and ControlNets -> themselves."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.accelerate()

    @classmethod
    def execute(cls, model: Any, vae: Any = None, **given: Any) -> io.NodeOutput:
        controls = [given.get(name) for name in CONTROL_INPUTS]
        return io.NodeOutput(model, vae, *controls, ui=ui.PreviewText(why()))


class TRTUNetEngine(io.ComfyNode):
    """MODEL -> no engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.unet_engine()

    @classmethod
    def execute(cls, **_: Any) -> io.NodeOutput:
        return io.NodeOutput(why(), ui=ui.PreviewText(why()))


class TRTControlNetEngine(io.ComfyNode):
    """CONTROL_NET -> itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.controlnet_engine()

    @classmethod
    def execute(cls, control_net: Any, **_: Any) -> io.NodeOutput:
        return io.NodeOutput(control_net, ui=ui.PreviewText(why()))


class TRTVAEEngine(io.ComfyNode):
    """VAE -> itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.vae_engine()

    @classmethod
    def execute(cls, vae: Any, **_: Any) -> io.NodeOutput:
        return io.NodeOutput(vae, ui=ui.PreviewText(why()))


class TRTSamplerPatch(io.ComfyNode):
    """MODEL -> itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.sampler_patch()

    @classmethod
    def execute(cls, model: Any, **_: Any) -> io.NodeOutput:
        return io.NodeOutput(model, ui={"text": [why()], "native": [True]})


class TRTReport(io.ComfyNode):
    """Anything -> itself, and why nothing ran on an engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.report()

    @classmethod
    def execute(cls, after: Any, **_: Any) -> io.NodeOutput:
        log.info("Hybrid TRT: %s", why())
        return io.NodeOutput(after, why(), None, ui={"text": [why()], "native": [True]})


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
    TRTAccelerate, TRTUNetEngine, TRTControlNetEngine, TRTVAEEngine, TRTApplyControlNet, TRTSamplerPatch, TRTReport,
    TRTCompare, TRTStream, TRTFrame,
]
