"""Engines of the nodes: looked up, built where the user wants that, and reported to the page."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from comfy.controlnet import ControlNet

from ..architectures import ANY, Role
from ..architectures.shapes import SIZE_NAMES, VAE_SETTINGS, RequestedSizes
from ..backends import AUTO
from ..backends.lookup import EngineChoice
from ..comfy_model.network import NativeNetwork
from ..engine_library import Fallback, Reason, Unavailable
from ..node_names import USE_NATIVE
from ..page_api.build_orders import Order
from ..page_api.builds import library, node_states, pending_orders
from ..page_api.node_input import NodeInput
from ..page_api.picture_fit import auto
from ..page_api.workflow_graph import DECODE, ENCODE
from ..sampling.call_stats import executing
from ..sampling.engine_handle import EngineHandle
from ..sampling.engine_status import lacks_engine, status
from . import building
from .schemas import BUILT_IN, REPLACEABLE

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase
    from comfy.sd import VAE

log = logging.getLogger(__name__)

WITHOUT_ENGINE = {
    "T2IAdapter": "a T2I-adapter computes once per picture, and the UNet's engine takes what it gives",
    "QwenFunControlNet": "it computes with layers of the model",
    "ControlLora": "a Control-LoRA takes the model's own weights each time that sampling starts",
}
"""Classes of controls that no engine is built for, and why."""

VAE_ROLES = {DECODE: (Role.VAE_DECODER, "VAE decode"), ENCODE: (Role.VAE_ENCODER, "VAE encode")}
"""Name of a VAE's network -> its role, and words for it."""


def _engine_choice(
    network: NativeNetwork, precision: str, backend: str, weights: str = BUILT_IN, **sizes: int
) -> EngineChoice:
    """Return the engine node's settings as a profile in latent elements, a precision, a backend and a kind of weights.

    Args:
        weights: ``"built in"`` or ``"replaceable"``.
        sizes: fields of ``RequestedSizes``; 0 is the default of the network's family.
    """
    try:
        family = network.architecture()
    except Unavailable:  # it gets no engine, and the handle says why
        family = ANY
    return EngineChoice(family.profile(RequestedSizes(**sizes)), precision, backend, weights == REPLACEABLE)


def for_its_pictures(
    network: NativeNetwork, node_input: NodeInput, when_missing: str, settings: Mapping[str, Any]
) -> tuple[NodeInput, dict[str, Any]]:
    """Return a node's input and settings, with Auto's numbers if it builds and pictures need them.

    The page sends zeros for Auto until it knows the model's family. Once the build has loaded the model, it sends
    Auto's numbers. So the build is for these numbers, and the node gets both keys.
    """
    numbers = [name for name in SIZE_NAMES if name in settings]
    meaning = building.meaning(when_missing, network, str(settings.get("backend", AUTO)))
    builds = node_input.order is not None or meaning != USE_NATIVE
    if not builds or any(settings[name] for name in numbers if name != "opt_size"):
        return node_input, dict(settings)
    pictures = node_input.sampled_pictures
    try:
        wanted = auto(pictures, network.architecture().sizes, 0) if pictures else {}
    except Unavailable:  # it gets no engine, and the handle says why
        wanted = {}
    sizes = {name: wanted[name] for name in numbers if name in wanted}
    if not any(size for name, size in sizes.items() if name != "opt_size"):  # another best size is no other engine
        return node_input, dict(settings)
    return replace(node_input, sizes=sizes), {**settings, **sizes}


def find(network: NativeNetwork, node_input: NodeInput, settings: Mapping[str, Any]) -> EngineHandle:
    """Return the handle for a network's engine with a node's settings, and register it with the page.

    Raises:
        ValueError: sizes in the wrong order; the text is for the user.
    """
    choice, key = _engine_choice(network, **settings), node_input.key
    choice = replace(choice, pictures=node_input.pictures, loras=node_input.loras)
    handle = EngineHandle.look_up(network, choice, library(), node_input.node_id, key)
    if node_input.sizes:
        node_states.alias(key, replace(node_input, sizes={}).key)
    node_states.learn(key, handle)
    return handle


def build(handles: Sequence[EngineHandle], when_missing: str, order: Order | None) -> list[str]:
    """Order or do the builds that a node's handles need, where the user wants that; return each handle's status.

    A press on Build rebuilds engines only if no engine is missing. The node reports a build that fails,
    and native serves.
    """
    again = order is not None and not order.missing_only
    if again and len(handles) > 1:
        again = not any(map(lacks_engine, handles))
    texts = []
    for handle in handles:
        wanted = None
        if order is None:
            wanted = building.meaning(when_missing, handle.network, handle.choice.backend)
        if wanted != USE_NATIVE:
            building.build(handle, wanted, again)
        node_states.learn(handle.node_key, handle)
        _order_given(handle.node_key)
        building.remember(handle)
        texts.append(status(handle))
        log.info("Hybrid TRT: %s: %s", handle.network.label, texts[-1])
    return texts


def why_without_engine(control_net: ControlBase, node_input: NodeInput) -> Fallback | None:
    """Return why a CONTROL_NET of a kind can have no engine, which the page gets too; None if it can."""
    if type(control_net) is ControlNet:
        return None
    kinds, label = [kind.__name__ for kind in type(control_net).__mro__], node_input.label("ControlNet")
    why = next((words for kind, words in WITHOUT_ENGINE.items() if kind in kinds), f"it is a {kinds[0]}")
    refusal = Fallback(Reason.UNSUPPORTED_MODEL, why, advice="nothing to do: it runs at normal speed")
    node_states.refused(node_input.key, label, refusal)
    _order_given(node_input.key)
    log.info("Hybrid TRT: %s: %s", label, refusal.sentence())
    return refusal


def find_vae(
    vae: VAE, node_input: NodeInput, settings: Mapping[str, Any], when_missing: str | None = None
) -> dict[Role, EngineHandle]:
    """Return the handles for the networks of a native VAE that the graph calls behind a node.

    Args:
        settings: the engine node's settings; a VAE follows its sizes and its backend.
        when_missing: the choice of a node whose sizes are only for the VAE.
    """
    given = {name: settings[name] for name in VAE_SETTINGS if name in settings}
    handles = {}
    for name in node_input.vae_networks:
        role, words = VAE_ROLES[name]
        network = NativeNetwork.of_vae(vae, role, f"{words}: {node_input.label('VAE')}")
        if when_missing is not None and not handles:
            node_input, given = for_its_pictures(network, node_input, when_missing, given)
        handles[role] = find(network, replace(node_input, input_name=name), {"precision": AUTO, **given})
    return handles


def _order_given(key: str) -> None:
    """Note that the running prompt has ordered a network's build, or that there is nothing to build."""
    if (context := executing()) is not None:
        for known in node_states.keys_like(key):
            pending_orders.forget(context.prompt_id, known)
