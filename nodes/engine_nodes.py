"""The two engine nodes: each finds or builds the engine of a network and says so on the node."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui
from comfy_execution.graph import DynamicPrompt

from ..architectures.image_latent import ANY
from ..architectures.shapes import RequestedSizes
from ..backends.lookup import EngineChoice
from ..comfy_model.network import NativeNetwork
from ..engine_library import Fallback, Reason, Unavailable
from ..page_api.build_orders import Order, order_of
from ..page_api.builds import node_states, pending_orders
from ..page_api.library_folder import library
from ..page_api.workflow_graph import (
    BadPrompt,
    all_nodes,
    asked_pictures,
    drawn_id,
    model_name,
    node_key,
    whole_prompt,
)
from ..sampling.call_stats import executing
from ..sampling.controlnet import back_with_engine, native_controlnet
from ..sampling.engine_handle import EngineHandle
from ..sampling.engine_status import status
from . import building, schemas
from .schemas import BUILT_IN, REPLACEABLE, USE_NATIVE

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase

log = logging.getLogger(__name__)

WITHOUT_ENGINE = {
    "T2IAdapter": "a T2I-adapter computes once per picture, and the UNet's engine takes what it gives",
    "ControlLora": "a Control-LoRA takes the model's own weights each time that sampling starts",
}
"""Classes of controls that no engine is built for, and why."""


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
        choice = engine_choice(network, **settings)
        handle = find_or_build(network, choice, when_missing, node_id, cls.hidden.dynprompt)
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
        node_id = cls.hidden.unique_id
        label = model_name(cls.hidden.dynprompt, node_id, "control_net", "ControlNet")
        if type(control_net) is not ControlNet:
            kinds = [kind.__name__ for kind in type(control_net).__mro__]
            why = next((words for kind, words in WITHOUT_ENGINE.items() if kind in kinds), f"it is a {kinds[0]}")
            refusal = Fallback(Reason.UNSUPPORTED_MODEL, f"{label} runs without one: {why}")
            text = refuse(refusal, label, node_id, cls.hidden.dynprompt)
            return io.NodeOutput(control_net, ui=ui.PreviewText(text))
        native = native_controlnet(control_net)
        network = NativeNetwork.of_controlnet(native, label)
        choice = engine_choice(network, **settings)
        handle = find_or_build(network, choice, when_missing, node_id, cls.hidden.dynprompt)
        return io.NodeOutput(back_with_engine(native, handle), ui=ui.PreviewText(status(handle)))


def engine_choice(
    network: NativeNetwork, precision: str, backend: str, weights: str = BUILT_IN, **sizes: int
) -> EngineChoice:
    """Return the engine node's settings as a profile in latent elements, a precision, a backend and whose weights.

    Args:
        weights: ``"built in"`` or ``"replaceable"``.
        sizes: those of ``RequestedSizes``; 0 is what fits the network's family.

    Raises:
        ValueError: sizes in the wrong order; the text is for the user.
    """
    try:
        family = network.architecture()
    except Unavailable:  # it gets no engine, and the handle says why
        family = ANY
    return EngineChoice(family.profile(RequestedSizes(**sizes)), precision, backend, weights == REPLACEABLE)


def find_or_build(
    network: NativeNetwork, choice: EngineChoice, when_missing: str, node_id: str, prompt: DynamicPrompt
) -> EngineHandle:
    """Return the handle for a network's engine, with a build ordered or done when there is none and the user wants one.

    A build that fails is told on the node and leaves native to serve.
    """
    key = _key(prompt, node_id)
    order, drawn = _order(prompt, node_id), drawn_id(prompt, node_id)
    pictures = asked_pictures(order.graph, drawn) if order is not None else ()
    pictures = pictures or asked_pictures(all_nodes(prompt), node_id)
    handle = EngineHandle(network, replace(choice, pictures=pictures), library(), node_id, key)
    node_states.learn(key, handle)  # before a build is told to the page
    if order is not None:
        building.build_as_requested(handle, again=not order.missing_only)
    elif when_missing != USE_NATIVE:
        building.build_if_missing(handle, when_missing)
    node_states.learn(key, handle)
    _order_given(key)
    building.remember(handle)
    log.info("Hybrid TRT: %s: %s", network.label, status(handle))
    return handle


def refuse(fallback: Fallback, label: str, node_id: str, prompt: DynamicPrompt) -> str:
    """Say on the node that it can have no engine, and return the sentence."""
    key = _key(prompt, node_id)
    node_states.refused(key, label, fallback)
    _order_given(key)
    log.info("Hybrid TRT: %s", fallback.sentence())
    return fallback.sentence()


def _order(prompt: DynamicPrompt, node_id: str) -> Order | None:
    """Return the order that the running prompt carries for a node, or for the node of the user's graph behind it."""
    context = executing()
    order = order_of(context.prompt_id) if context is not None else None
    return order if order is not None and {node_id, drawn_id(prompt, node_id)} & order.nodes else None


def _order_given(key: str) -> None:
    """Note that the running prompt has ordered this node's build, or that there is nothing to build."""
    if (context := executing()) is not None:
        pending_orders.given(context.prompt_id, key)


def _key(prompt: DynamicPrompt, node_id: str) -> str:
    """Return the key under which the page knows a node: in a loop that of the node in the user's graph."""
    original, drawn = prompt.get_original_prompt(), drawn_id(prompt, node_id)
    if drawn in original and original[drawn]["class_type"] == prompt.get_node(node_id)["class_type"]:
        prompt, node_id = DynamicPrompt(original), drawn
    try:
        return node_key(whole_prompt(prompt, node_id), node_id)
    except BadPrompt as error:  # for example nodes that expand while they run
        log.debug("Hybrid TRT: node %s has no key (%s)", node_id, error)
        return ""
