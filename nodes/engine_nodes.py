"""The engine nodes: each finds or builds the engines of a UNet, ControlNet or VAE and says so on the node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui

from ..comfy_model.network import NativeNetwork
from ..engine_library import Fallback
from ..page_api.node_input import NodeInput
from ..sampling.controlnet import back_with_engine, native_controlnet
from ..sampling.engine_status import status
from ..sampling.native_controls import count_control_as_native
from ..sampling.vae import native_vae, vae_with_engines
from . import building, schemas
from .engines import build, controlnet_network, engine_choice, find, find_vae, for_its_pictures

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase
    from comfy.sd import VAE


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
        node_input = NodeInput(cls.hidden.dynprompt, cls.hidden.unique_id, "model")
        network = NativeNetwork.of_model(model, node_input.label("UNet"))
        node_input, settings = for_its_pictures(network, node_input, when_missing, settings)
        handle = find(network, engine_choice(network, **settings), node_input)
        build([handle], when_missing, node_input.order)
        return io.NodeOutput(handle, ui=ui.PreviewText(status(handle)))


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
        node_input = NodeInput(cls.hidden.dynprompt, cls.hidden.unique_id, "control_net")
        network = controlnet_network(control_net, node_input)
        if isinstance(network, Fallback):
            counted = count_control_as_native(control_net, node_input.label("ControlNet"), node_input.node_id, network)
            return io.NodeOutput(counted, ui=ui.PreviewText(network.sentence()))
        node_input, settings = for_its_pictures(network, node_input, when_missing, settings)
        handle = find(network, engine_choice(network, **settings), node_input)
        build([handle], when_missing, node_input.order)
        backed = back_with_engine(native_controlnet(control_net), handle)
        return io.NodeOutput(backed, ui=ui.PreviewText(status(handle)))


class TRTVAEEngine(io.ComfyNode):
    """VAE -> the same VAE, run by engines: one to decode, and one to encode where the graph does."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.vae_engine()

    @classmethod
    def fingerprint_inputs(cls, when_missing: str, **_: object) -> str:
        return building.generation(when_missing)

    @classmethod
    def execute(cls, vae: VAE, when_missing: str, **settings: int | str) -> io.NodeOutput:
        node_input = NodeInput(cls.hidden.dynprompt, cls.hidden.unique_id, "vae")
        vae = native_vae(vae)
        handles = find_vae(vae, node_input, settings, when_missing)
        build(list(handles.values()), when_missing, node_input.order)
        text = "\n".join(f"{handle.network.label}: {status(handle)}" for handle in handles.values())
        return io.NodeOutput(vae_with_engines(vae, handles), ui=ui.PreviewText(text))
