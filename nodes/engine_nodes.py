"""The nodes that bring engines: each finds or builds the engines of its networks, and says so on the node."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui

from ..backends import backends
from ..comfy_model.network import NativeNetwork
from ..engine_library import Fallback, Reason, Unavailable
from ..node_names import CONTROL_INPUTS
from ..page_api.node_input import NodeInput
from ..page_api.workflow_graph import model_name
from ..sampling.controlnet import back_with_engine, count_control_as_native, native_controlnet
from ..sampling.engine_handle import EngineHandle
from ..sampling.engine_status import lacks_pictures, status
from ..sampling.model_wrapper import count_as_native, has_engine, patch_model
from ..sampling.several_gpus import on_all_gpus
from ..sampling.vae import native_vae, vae_with_engines
from . import building, schemas
from .engines import build, find, find_vae, for_its_pictures, why_without_engine

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase
    from comfy.sd import VAE

log = logging.getLogger(__name__)

NOT_WIRED = Fallback(Reason.NOT_WIRED, "TRT UNet Engine is bypassed, muted or not connected")



class _BuildingNode(io.ComfyNode):
    """A node that runs again when its engines may have changed."""

    @classmethod
    def fingerprint_inputs(cls, when_missing: str, **_: object) -> str:
        for backend in backends().values():  # before any node of the prompt runs
            backend.get_ready()
        return building.generation(when_missing)


class TRTAccelerate(_BuildingNode):
    """MODEL, VAE and up to four ControlNets -> the same, run by engines where these serve; native computes the rest."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.accelerate()

    @classmethod
    def execute(cls, model: ModelPatcher, when_missing: str, vae: VAE | None = None, **settings: Any) -> io.NodeOutput:
        controls = {name: settings.pop(name, None) for name in CONTROL_INPUTS}
        if settings.pop("gpus", schemas.ONE_GPU) == schemas.ALL_GPUS:
            model = on_all_gpus(model)
        node_input = NodeInput(cls.hidden.dynprompt, cls.hidden.unique_id, "model")
        network = NativeNetwork.of_model(model, node_input.label("UNet"))
        node_input, settings = for_its_pictures(network, node_input, when_missing, settings)
        handles, refusals = {"model": find(network, node_input, settings)}, []
        model = patch_model(model, handles["model"])
        for name, control in controls.items():
            if control is None:
                continue
            its_input = replace(node_input, input_name=name)
            label = its_input.label("ControlNet")
            if (refusal := why_without_engine(control, its_input)) is not None:
                refusals.append(f"{label}: {refusal.sentence()}")
                controls[name] = count_control_as_native(control, label, node_input.node_id, refusal)
                continue
            native = native_controlnet(control)
            handles[name] = find(NativeNetwork.of_controlnet(native, label), its_input, settings)
            controls[name] = back_with_engine(native, handles[name])
        vae = None if vae is None else native_vae(vae)
        vae_handles = {} if vae is None else find_vae(vae, replace(node_input, input_name="vae"), settings)
        handles |= {role.value: handle for role, handle in vae_handles.items()}
        lines = _lines(list(handles.values()), when_missing, node_input) + refusals
        vae = vae and vae_with_engines(vae, vae_handles)
        return io.NodeOutput(model, vae, *controls.values(), ui=ui.PreviewText("\n".join(lines)))


class TRTUNetEngine(_BuildingNode):
    """MODEL -> the engine of its UNet, for TRT Sampler Patch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.unet_engine()

    @classmethod
    def execute(cls, model: ModelPatcher, when_missing: str, **settings: int | str) -> io.NodeOutput:
        node_input = NodeInput(cls.hidden.dynprompt, cls.hidden.unique_id, "model")
        network = NativeNetwork.of_model(model, node_input.label("UNet"))
        node_input, settings = for_its_pictures(network, node_input, when_missing, settings)
        handle = find(network, node_input, settings)
        return io.NodeOutput(handle, ui=ui.PreviewText(*build([handle], when_missing, node_input.order)))


class TRTControlNetEngine(_BuildingNode):
    """CONTROL_NET -> the same CONTROL_NET, run by an engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.controlnet_engine()

    @classmethod
    def execute(cls, control_net: ControlBase, when_missing: str, **settings: int | str) -> io.NodeOutput:
        node_input = NodeInput(cls.hidden.dynprompt, cls.hidden.unique_id, "control_net")
        label = node_input.label("ControlNet")
        if (refusal := why_without_engine(control_net, node_input)) is not None:
            counted = count_control_as_native(control_net, label, node_input.node_id, refusal)
            return io.NodeOutput(counted, ui=ui.PreviewText(refusal.sentence()))
        native = native_controlnet(control_net)
        network = NativeNetwork.of_controlnet(native, label)
        node_input, settings = for_its_pictures(network, node_input, when_missing, settings)
        handle = find(network, node_input, settings)
        backed = back_with_engine(native, handle)
        return io.NodeOutput(backed, ui=ui.PreviewText(*build([handle], when_missing, node_input.order)))


class TRTVAEEngine(_BuildingNode):
    """VAE -> the same VAE, run by engines: one to decode, and one to encode where the graph does."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.vae_engine()

    @classmethod
    def execute(cls, vae: VAE, when_missing: str, **settings: int | str) -> io.NodeOutput:
        node_input = NodeInput(cls.hidden.dynprompt, cls.hidden.unique_id, "vae")
        vae = native_vae(vae)
        handles = find_vae(vae, node_input, settings, when_missing)
        lines = _lines(list(handles.values()), when_missing, node_input)
        return io.NodeOutput(vae_with_engines(vae, handles), ui=ui.PreviewText("\n".join(lines)))


def _lines(handles: list[EngineHandle], when_missing: str, node_input: NodeInput) -> list[str]:
    """Order the builds of several handles, and return a line for each."""
    texts = build(handles, when_missing, node_input.order)
    return [f"{handle.network.label}: {text}" for handle, text in zip(handles, texts, strict=True)]


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
        fallback = refusal or engine.why_not_patched_so(model)  # each call checks again
        text = status(engine) if fallback is None else fallback.sentence()
        log.info("Hybrid TRT: %s", text.replace("\n", ": "))
        native = fallback is not None or lacks_pictures(engine)
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
