"""TRT UNet Engine: finds or builds the engine for a MODEL's UNet."""

from __future__ import annotations

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui

from ..comfy_model.network import NativeNetwork
from ..page_api.workflow_graph import model_name
from ..sampling.engine_status import status
from . import building, engine_node, schemas


class TRTUNetEngine(io.ComfyNode):
    """MODEL -> the engine of its UNet, for TRT Sampler Patch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.unet_engine()

    @classmethod
    def fingerprint_inputs(cls, when_missing: str, **_: object) -> str:
        return building.generation(when_missing)

    @classmethod
    def execute(cls, model: ModelPatcher, when_missing: str, **settings: int | str) -> io.NodeOutput:
        node_id = cls.hidden.unique_id
        label = model_name(cls.hidden.dynprompt, node_id, "model", "UNet")
        network = NativeNetwork.of_model(model, label)
        choice = engine_node.engine_choice(network, **settings)
        handle = engine_node.find_or_build(network, choice, when_missing, node_id, cls.hidden.dynprompt)
        return io.NodeOutput(handle, ui=ui.PreviewText(status(handle)))
