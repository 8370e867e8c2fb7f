"""TRT Sampler Patch: a MODEL whose UNet runs on an engine, for any sampler."""

from __future__ import annotations

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ..engine_library import Fallback, Reason, Unavailable, WeightPatches
from ..engine_library.native import NativeNetwork
from ..engine_runtime.engine_handle import EngineHandle
from ..engine_runtime.unet import patch_model
from . import engine_node
from .unet_engine import UNetEngine


class TRTSamplerPatch(io.ComfyNode):
    """MODEL and engine -> MODEL that samples on the engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TRTSamplerPatch",
            display_name="TRT Sampler Patch",
            category=engine_node.CATEGORY,
            description="Routes the UNet, ControlNet residuals included, into its engine. Every call that the engine "
            "cannot serve runs native. Wire the model into any sampler.",
            search_aliases=["tensorrt sampler", "trt model patch"],
            inputs=[io.Model.Input("model"), UNetEngine.Input("engine")],
            outputs=[io.Model.Output("model_out", display_name="model")],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, engine: EngineHandle) -> io.NodeOutput:
        refusal = _other_weights(model, engine)
        status = refusal.sentence() if refusal else engine.status()
        engine_node.log_text(status)
        native = refusal is not None or engine.session is None
        return io.NodeOutput(patch_model(model, engine, refusal), ui={"text": [status], "native": [native]})


def _other_weights(model: ModelPatcher, engine: EngineHandle) -> Fallback | None:
    """Why this engine must not serve this model, or None when the model's weights are those of the engine."""
    theirs = engine.network.patcher
    if engine.follows_patches and theirs.model is model.model:
        return None
    if theirs.model is model.model and WeightPatches(theirs).same_on(model):
        return None
    if theirs.model is model.model:
        return Fallback(Reason.WEIGHTS_PATCHED, "a LoRA stands between the engine node and this node")
    network = NativeNetwork.of_model(model, engine.network.label)
    try:
        same = network.architecture() is engine.network.architecture()
    except Unavailable as unsupported:
        return unsupported.fallback
    if not same or network.weights_hash() != engine.network.weights_hash():
        return Fallback(Reason.OTHER_MODEL, f"the engine is that of {engine.network.label}")
    return None
