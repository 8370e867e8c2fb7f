"""What the two engine nodes share: their settings, finding or building the engine, saying so on the node."""

from __future__ import annotations

import logging
from dataclasses import replace

from comfy_execution.graph import DynamicPrompt

from ..architectures.image_latent import ANY
from ..architectures.sizes import RequestedSizes
from ..comfy_model.network import NativeNetwork
from ..engine_library import Fallback, Unavailable
from ..page_api.asked_pictures import asked_pictures, requested_pictures
from ..page_api.build_prompts import forget_when_done
from ..page_api.builds import node_states, pending_orders
from ..page_api.library_folder import library
from ..page_api.node_key import BUILD_REQUEST, FROM_PAGE, MISSING_ONLY, BadPrompt, node_key
from ..page_api.workflow_graph import all_nodes, drawn_id, inputs_of, whole_prompt
from ..sampling.engine_handle import EngineChoice, EngineHandle
from ..sampling.run_context import executing
from . import building
from .schemas import BUILT_IN, REPLACEABLE, USE_NATIVE

log = logging.getLogger(__name__)

def engine_choice(
    network: NativeNetwork, precision: str, backend: str, weights: str = BUILT_IN, **sizes: int
) -> EngineChoice:
    """The engine node's settings as a profile in latent elements, a precision, a backend and whose weights.

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
    """The handle for a network's engine, with a build ordered or done when there is none and the user wants one.

    A build that fails is told on the node and leaves native to serve.
    """
    key = _key(prompt, node_id)
    request = inputs_of(prompt, node_id).get(BUILD_REQUEST)
    words = str(request).split() if request is not None else []
    pictures = requested_pictures(words) or asked_pictures(all_nodes(prompt), node_id)
    handle = EngineHandle(network, replace(choice, pictures=pictures), library(), node_id, key)
    node_states.learn(key, handle)  # before a build is told to the page
    if request is not None:
        if FROM_PAGE in words:
            forget_when_done(executing().prompt_id)
        building.build_as_requested(handle, again=MISSING_ONLY not in words)
    elif when_missing != USE_NATIVE:
        building.build_if_missing(handle, when_missing)
    node_states.learn(key, handle)
    _order_given(key)
    building.remember(handle)
    log.info("Hybrid TRT: %s: %s", network.label, handle.status())
    return handle


def refuse(fallback: Fallback, label: str, node_id: str, prompt: DynamicPrompt) -> str:
    """Say on the node that it can have no engine, and return the sentence."""
    key = _key(prompt, node_id)
    node_states.refused(key, label, fallback)
    _order_given(key)
    log.info("Hybrid TRT: %s", fallback.sentence())
    return fallback.sentence()


def _order_given(key: str) -> None:
    """The running prompt orders this node's build no more: it has, or there is nothing to build."""
    if (context := executing()) is not None:
        pending_orders.given(context.prompt_id, key)


def _key(prompt: DynamicPrompt, node_id: str) -> str:
    """The key under which the page knows a node: in a loop that of the node in the user's graph."""
    original, drawn = prompt.get_original_prompt(), drawn_id(prompt, node_id)
    if drawn in original and original[drawn]["class_type"] == prompt.get_node(node_id)["class_type"]:
        prompt, node_id = DynamicPrompt(original), drawn
    try:
        return node_key(whole_prompt(prompt, node_id), node_id)
    except BadPrompt as error:  # for example nodes that expand while they run
        log.debug("Hybrid TRT: node %s has no key (%s)", node_id, error)
        return ""


def log_text(text: str) -> None:
    """Put what a node says into the log, in one line."""
    log.info("Hybrid TRT: %s", text.replace("\n", ": "))
