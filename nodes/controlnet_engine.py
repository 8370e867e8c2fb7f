"""TRT ControlNet Engine: finds or builds the engine for a CONTROL_NET."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy.controlnet import ControlNet
from comfy_api.latest import io, ui

from ..comfy_model.network import NativeNetwork
from ..engine_library import Fallback, Reason
from ..page_api.workflow_graph import model_name
from ..sampling.controlnet import back_with_engine, native_controlnet
from ..sampling.engine_status import status
from . import building, engine_node, schemas

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase

WITHOUT_ENGINE = {
    "T2IAdapter": "a T2I-adapter computes once per picture, and the UNet's engine takes what it gives",
    "ControlLora": "a Control-LoRA takes the model's own weights each time that sampling starts",
}
"""Classes of controls that no engine is built for, and why."""


class TRTControlNetEngine(io.ComfyNode):
    """CONTROL_NET -> the same CONTROL_NET, run by an engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.controlnet_engine()

    @classmethod
    def fingerprint_inputs(cls, when_missing: str, **_: object) -> str:
        return building.generation(when_missing)

    @classmethod
    def execute(cls, control_net: ControlBase, when_missing: str, **settings: int | str) -> io.NodeOutput:
        node_id = cls.hidden.unique_id
        label = model_name(cls.hidden.dynprompt, node_id, "control_net", "ControlNet")
        if type(control_net) is not ControlNet:
            kinds = [kind.__name__ for kind in type(control_net).__mro__]
            why = next((words for kind, words in WITHOUT_ENGINE.items() if kind in kinds), f"it is a {kinds[0]}")
            refusal = Fallback(Reason.UNSUPPORTED_MODEL, f"{label} runs without one: {why}")
            text = engine_node.refuse(refusal, label, node_id, cls.hidden.dynprompt)
            return io.NodeOutput(control_net, ui=ui.PreviewText(text))
        native = native_controlnet(control_net)
        network = NativeNetwork.of_controlnet(native, label)
        choice = engine_node.engine_choice(network, **settings)
        handle = engine_node.find_or_build(network, choice, when_missing, node_id, cls.hidden.dynprompt)
        return io.NodeOutput(back_with_engine(native, handle), ui=ui.PreviewText(status(handle)))
