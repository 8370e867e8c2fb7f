"""TRT Accelerate: one node that runs a MODEL, its VAE and up to four ControlNets on engines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui

from ..comfy_model.network import NativeNetwork
from ..engine_library import Fallback
from ..node_names import CONTROL_INPUTS
from ..page_api.node_input import NodeInput
from ..sampling.controlnet import back_with_engine, native_controlnet
from ..sampling.engine_handle import EngineHandle
from ..sampling.engine_status import status
from ..sampling.model_wrapper import patch_model
from ..sampling.native_controls import count_control_as_native
from ..sampling.vae import native_vae, vae_with_engines
from . import building, schemas
from .engines import build, controlnet_network, engine_choice, find, find_vae, for_its_pictures

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase


class TRTAccelerate(io.ComfyNode):
    """MODEL, VAE and ControlNets -> the same, run by engines where these serve; native computes the rest."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.accelerate()

    @classmethod
    def fingerprint_inputs(cls, when_missing: str, **_: object) -> str:
        return building.generation(when_missing)

    @classmethod
    def execute(cls, model: ModelPatcher, when_missing: str, vae: Any = None, **given: Any) -> io.NodeOutput:
        controls = {name: given.pop(name, None) for name in CONTROL_INPUTS}
        node_input = NodeInput(cls.hidden.dynprompt, cls.hidden.unique_id, "model")
        network = NativeNetwork.of_model(model, node_input.label("UNet"))
        node_input, given = for_its_pictures(network, node_input, when_missing, given)
        handles = {"model": find(network, engine_choice(network, **given), node_input)}
        lines = {}
        for name, control in controls.items():
            found = None if control is None else _find(control, replace(node_input, input_name=name), given)
            if isinstance(found, EngineHandle):
                handles[name] = found
            elif found is not None:
                label = replace(node_input, input_name=name).label("ControlNet")
                lines[name] = f"{label}: {found.sentence()}"
                controls[name] = count_control_as_native(control, label, node_input.node_id, found)
        vae = None if vae is None else native_vae(vae)
        vae_handles = {} if vae is None else find_vae(vae, replace(node_input, input_name="vae"), given)
        handles |= {role.value: handle for role, handle in vae_handles.items()}
        build(list(handles.values()), when_missing, node_input.order)
        lines = {name: f"{handle.network.label}: {status(handle)}" for name, handle in handles.items()} | lines
        backed = [_backed(control, handles.get(name)) for name, control in controls.items()]
        model, vae = patch_model(model, handles["model"]), vae and vae_with_engines(vae, vae_handles)
        return io.NodeOutput(model, vae, *backed, ui=ui.PreviewText("\n".join(lines.values())))


def _find(control: ControlBase, node_input: NodeInput, settings: dict[str, Any]) -> EngineHandle | Fallback:
    network = controlnet_network(control, node_input)
    if isinstance(network, Fallback):
        return network
    return find(network, engine_choice(network, **settings), node_input)


def _backed(control: ControlBase | None, handle: EngineHandle | None) -> ControlBase | None:
    """Return a ControlNet with its engine, or unchanged where it can have none."""
    return control if handle is None else back_with_engine(native_controlnet(control), handle)
