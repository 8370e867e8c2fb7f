"""TRT ControlNet Engine: finds or builds the engine for a CONTROL_NET."""

from __future__ import annotations

from comfy.controlnet import ControlBase, ControlLora, ControlNet, T2IAdapter
from comfy_api.latest import io, ui

from ..engine_library import Fallback, Reason
from ..engine_runtime.controlnet import back_with_engine, native_controlnet
from ..native_model.network import NativeNetwork
from ..page_api.prompt_graph import model_name
from . import building, engine_node

WITHOUT_ENGINE = {
    T2IAdapter: "a T2I-adapter computes once per picture, and the UNet's engine takes what it gives",
    ControlLora: "a Control-LoRA takes the model's own weights each time that sampling starts",
}
"""Kinds of controls that no engine is built for, and why."""


class TRTControlNetEngine(io.ComfyNode):
    """CONTROL_NET -> the same CONTROL_NET, run by an engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TRTControlNetEngine",
            display_name="TRT ControlNet Engine",
            category=engine_node.CATEGORY,
            description="Finds the compiled engine for this ControlNet in models/trt_engines, or builds it. The output "
            "works in TRT Apply ControlNet and in ComfyUI's own Apply ControlNet nodes.",
            search_aliases=[*engine_node.SEARCHED_FOR, "tensorrt controlnet", "compile controlnet", "trt control"],
            inputs=[io.ControlNet.Input("control_net"), *engine_node.settings_inputs()],
            outputs=[io.ControlNet.Output("control_net_out", display_name="control_net")],
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    def fingerprint_inputs(cls, when_missing: str, **_: object) -> str:
        return building.generation(when_missing)

    @classmethod
    def execute(cls, control_net: ControlBase, when_missing: str, **settings: int | str) -> io.NodeOutput:
        node_id = cls.hidden.unique_id
        label = model_name(cls.hidden.dynprompt, node_id, "control_net", "ControlNet")
        if type(control_net) is not ControlNet:
            kind = next((words for cls, words in WITHOUT_ENGINE.items() if isinstance(control_net, cls)), None)
            why = kind or f"it is a {type(control_net).__name__}"
            refusal = Fallback(Reason.UNSUPPORTED_MODEL, f"{label} runs without one: {why}")
            status = engine_node.refuse(refusal, label, node_id, cls.hidden.dynprompt)
            return io.NodeOutput(control_net, ui=ui.PreviewText(status))
        native = native_controlnet(control_net)
        network = NativeNetwork.of_controlnet(native, label)
        choice = engine_node.engine_choice(network, **settings)
        handle = engine_node.find_or_build(network, choice, when_missing, node_id, cls.hidden.dynprompt)
        return io.NodeOutput(back_with_engine(native, handle), ui=ui.PreviewText(handle.status()))
