"""One network of an engine node in the running prompt: what the graph says of it, and how the page knows it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from comfy_execution.graph import DynamicPrompt

from ..architectures.shapes import Picture
from ..sampling.run_context import executing
from .build_orders import Order, order_of
from .graph_pictures import asked_pictures
from .workflow_graph import (
    BadPrompt,
    all_nodes,
    drawn_id,
    for_one_network,
    loras_before,
    model_name,
    node_key,
    vae_calls,
    whole_prompt,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeInput:
    """One network of an engine node: the running prompt, the node's id, and the input with the network.

    Attributes:
        sizes: numbers that replace the prompt's in the key; see ``nodes.engines.for_its_pictures``.
    """

    prompt: DynamicPrompt
    node_id: str
    input_name: str
    sizes: Mapping[str, int] = field(default_factory=dict)

    def label(self, default: str) -> str:
        """Return the file that the network was loaded from, or ``default``."""
        return model_name(self.prompt, self.node_id, self.input_name, default)

    @property
    def loras(self) -> str:
        """Return the LoRAs before the network, in words; ``""`` without LoRAs."""
        return loras_before(self.prompt, self.node_id, self.input_name)

    @property
    def drawn(self) -> str:
        """Return the node of the user's graph behind the node; a loop makes copies of it."""
        return drawn_id(self.prompt, self.node_id)

    @property
    def key(self) -> str:
        """Return its key on the page: in a loop the key of the node in the user's graph."""
        prompt, node_id = self.prompt, self.node_id
        original, drawn = prompt.get_original_prompt(), self.drawn
        if drawn in original and original[drawn]["class_type"] == prompt.get_node(node_id)["class_type"]:
            prompt, node_id = DynamicPrompt(original), drawn
        try:
            graph = for_one_network(whole_prompt(prompt, node_id), node_id, self.input_name)
            if self.sizes:
                sent = graph[node_id]["inputs"]
                inputs = {name: self.sizes.get(name, value) for name, value in sent.items()}
                graph = {**graph, node_id: {**graph[node_id], "inputs": inputs}}
            return node_key(graph, node_id)
        except BadPrompt as error:  # for example nodes that expand while they run
            log.debug("Hybrid TRT: node %s has no key (%s)", node_id, error)
            return ""

    @property
    def order(self) -> Order | None:
        """Return the order that the running prompt carries for the node, or for the node of the user's graph."""
        context = executing()
        order = order_of(context.prompt_id) if context is not None else None
        return order if order is not None and {self.node_id, self.drawn} & order.nodes else None

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Return the pictures that the network is called with, as far as the graph shows."""
        order, name = self.order, self.input_name
        found = asked_pictures(order.graph, self.drawn, name) if order is not None else ()
        return found or asked_pictures(all_nodes(self.prompt), self.node_id, name)

    @property
    def sampled_pictures(self) -> tuple[Picture, ...]:
        """Return the pictures that the workflow samples with the node's networks: the order's workflow, if any."""
        graph = all_nodes(self.prompt) if (order := self.order) is None else order.graph
        return asked_pictures(graph, self.drawn, "model")

    @property
    def vae_networks(self) -> list[str]:
        """Return which networks of a VAE the graph calls behind the node; see ``vae_calls``."""
        order, drawn = self.order, self.drawn
        if order is not None and drawn in order.graph:
            return vae_calls(order.graph, drawn)
        return vae_calls(all_nodes(self.prompt), self.node_id)
