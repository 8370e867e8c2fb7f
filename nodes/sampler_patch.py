"""TRT Sampler Patch: a MODEL whose UNet runs on an engine, for any sampler."""

from __future__ import annotations

import logging

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ..comfy_model.network import NativeNetwork
from ..comfy_model.weight_patches import WeightPatches
from ..engine_library import Fallback, Reason, Unavailable
from ..page_api.workflow_graph import model_name
from ..sampling.engine_handle import EngineHandle
from ..sampling.engine_status import lacks_pictures, status
from ..sampling.model_wrapper import count_as_native, has_engine, patch_model
from . import schemas

log = logging.getLogger(__name__)

NOT_WIRED = Fallback(Reason.NOT_WIRED, "TRT UNet Engine is bypassed, muted or not connected")


class TRTSamplerPatch(io.ComfyNode):
    """MODEL and engine -> MODEL that samples on the engine; without an engine, on native."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.sampler_patch()

    @classmethod
    def execute(cls, model: ModelPatcher, engine: EngineHandle | None = None) -> io.NodeOutput:
        if engine is None:
            return cls._without_engine(model)
        engine, refusal = _for_model(model, engine)
        between = None if refusal is not None else _patch_between(model, engine)
        text = (refusal or between).sentence() if refusal or between else status(engine)
        log.info("Hybrid TRT: %s", text.replace("\n", ": "))
        native = refusal is not None or between is not None or lacks_pictures(engine)
        return io.NodeOutput(patch_model(model, engine, refusal), ui={"text": [text], "native": [native]})

    @classmethod
    def _without_engine(cls, model: ModelPatcher) -> io.NodeOutput:
        log.info("Hybrid TRT: %s", NOT_WIRED.sentence())
        if not has_engine(model):  # from an earlier sampler patch
            node_id = cls.hidden.unique_id
            label = model_name(cls.hidden.dynprompt, node_id, "model", "UNet")
            model = count_as_native(model, label, node_id, NOT_WIRED)
        return io.NodeOutput(model, ui={"text": [NOT_WIRED.sentence()], "native": [True]})


def _for_model(model: ModelPatcher, engine: EngineHandle) -> tuple[EngineHandle, Fallback | None]:
    """Return the engine for this model, and the reason if it must never serve."""
    if engine.network.patcher.model is model.model:
        return engine, None
    network = NativeNetwork.of_model(model, engine.network.label)
    try:
        same = network.architecture() is engine.network.architecture()
    except Unavailable as unsupported:
        return engine, unsupported.fallback
    # an engine that follows patches has no weights of its own, so this model's weights will do
    if not same or not engine.follows_patches and network.weights_hash() != engine.network.weights_hash():
        return engine, Fallback(Reason.OTHER_MODEL, f"the engine is that of {engine.network.label}")
    return engine.like(network), None  # other nodes may have changed only this model's layers


def _patch_between(model: ModelPatcher, engine: EngineHandle) -> Fallback | None:
    """Return why an engine with weights of its own, or any engine, must not serve a model; each call checks again."""
    if (fallback := engine.network.other_dtype(model)) is not None:
        return fallback
    theirs = engine.network.patcher
    if engine.follows_patches or theirs.model is not model.model:
        return None
    return WeightPatches(theirs).difference_on(model)
