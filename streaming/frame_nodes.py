"""Nodes that run again for each frame: from TRT Frame to the images of a stream's ControlNets.

At first ComfyUI runs them as usual, with the example of TRT Frame. The stream gets their inputs and their images; the
images show which ControlNet belongs to which node. For each frame ComfyUI's own code calls the nodes again, with the
frame in place of the example.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

import torch
from comfy.controlnet import ControlBase

from ..comfy_model.comfyui_internals import Feature, switched_off
from ..node_names import APPLY_CONTROLNET, FRAME

if TYPE_CHECKING:
    from comfy_execution.graph import DynamicPrompt

APPLY = frozenset(("ControlNetApply", "ControlNetApplyAdvanced", "ControlNetApplySD3",
                   "ControlNetInpaintingAliMamaApply", APPLY_CONTROLNET))  # fmt: skip
"""Nodes that ignore an image whose strength is 0."""
Link = tuple[str, int]
"""A node's id, and the number of one of its outputs."""
_NOT_FOR_EACH = "TRT Stream cannot run it for each frame. Take it out of the way from TRT Frame to the ControlNet."


def values_needed(graph: DynamicPrompt, stream: str) -> set[Link]:
    """Return the outputs whose values a stream needs to run nodes for each frame; none without a TRT Frame.

    Args:
        stream: the id of its node.
    """
    nodes = (name for name in _depending(graph, stream) if not _is_frame(graph, name))
    return {link for name in nodes for link in _links(graph, name).values()}


def _depending(graph: DynamicPrompt, stream: str) -> list[str]:
    """Return the nodes before a stream that depend on a TRT Frame, each after the nodes that it depends on."""
    before: dict[str, set[str]] = {}
    waiting = [stream]
    while waiting:
        if (name := waiting.pop()) not in before:
            before[name] = {source for source, _ in _links(graph, name).values()}
            waiting.extend(before[name])
    found: dict[str, None] = {}
    for name in TopologicalSorter(before).static_order():
        if name != stream and (_is_frame(graph, name) or not before[name].isdisjoint(found)):
            found[name] = None
    return list(found)


def _links(graph: DynamicPrompt, name: str) -> dict[str, Link]:
    from comfy_execution.graph_utils import is_link

    inputs = graph.get_node(name)["inputs"]
    return {key: (value[0], int(value[1])) for key, value in inputs.items() if is_link(value)}


def _is_frame(graph: DynamicPrompt, name: str) -> bool:
    return graph.get_node(name)["class_type"] == FRAME


@dataclass(frozen=True)
class _Node:
    """A node that runs for each frame.

    Attributes:
        inputs: all inputs, as ComfyUI's code takes them.
        fresh: inputs that depend on the frame, and their links.
        dynamic: ComfyUI's data on inputs that depend on other inputs.
    """

    name: str
    title: str
    instance: Any
    inputs: dict[str, list]
    fresh: dict[str, Link]
    dynamic: Any


class FrameNodes:
    """Makes the images of a stream's ControlNets from its frames."""

    def __init__(self, graph: DynamicPrompt, stream: str, values: Mapping[Link, Any], controls: Sequence[ControlBase]):
        """
        Args:
            stream: the id of its node.
            values: the values of ``values_needed``.
            controls: its ControlNets, with the images that the nodes made from the example.

        Raises:
            ValueError: a node cannot run for each frame; the text is for the user.
        """
        if why := switched_off([Feature.FRAME_NODES]):
            raise ValueError(f"{why[0]} Use 'control_images' of TRT Stream instead.")
        self._graph, self._values = graph, values
        names = _depending(graph, stream)
        self._frames = [(name, 0) for name in names if _is_frame(graph, name)]
        self._images = {place: link for place, control in enumerate(controls)
                        if (link := self._link_of(control.cond_hint_original, names)) is not None}  # fmt: skip
        self._check_the_rest(stream, names)
        self._nodes = [self._node(name, names) for name in self._needed(names)]

    def _link_of(self, hint: torch.Tensor | None, names: Sequence[str]) -> Link | None:
        """Return the output that gave a ControlNet's image: the last with the very same pixels."""
        if hint is None:
            return None
        for name in reversed(names):
            for link in sorted(link for link in self._values if link[0] == name):
                if _is_image(image := self._values[link]) and image.movedim(-1, 1).shape[2:] == hint.shape[2:] \
                        and image.data_ptr() == hint.data_ptr():  # fmt: skip
                    return link
        return None

    def _check_the_rest(self, stream: str, names: Sequence[str]) -> None:
        """Raise ValueError where the stream depends on a frame otherwise than through a ControlNet's image."""
        known = set(self._images.values())
        waiting, seen = [(stream, "")], set()
        while waiting:
            name, taker = waiting.pop()
            if _is_frame(self._graph, name):
                raise ValueError(
                    f"TRT Frame's image reaches {taker or 'TRT Stream'}, which is no ControlNet's image, so TRT Stream "
                    "cannot follow it from frame to frame. Wire it to the images of ControlNets alone."
                )
            links = [link for key, link in _links(self._graph, name).items() if not self._is_left_out(name, key)]
            applies = any(isinstance(self._values.get(link), ControlBase) for link in links)
            for link in links:
                if link[0] in names and not (applies and link in known) and (link, taker) not in seen:
                    seen.add((link, taker))
                    waiting.append((link[0], taker or (self._title(name) if _is_image(self._values.get(link)) else "")))

    def _is_left_out(self, name: str, key: str) -> bool:
        """Tell whether an input is the image of a ControlNet that has no strength."""
        given = self._graph.get_node(name)
        if given["class_type"] not in APPLY or "image" not in key:
            return False
        place = key.replace("image", "strength")
        strength = _links(self._graph, name).get(place)
        return (given["inputs"].get(place) if strength is None else self._values.get(strength)) == 0

    def _needed(self, names: Sequence[str]) -> Iterator[str]:
        """Return the nodes that make the images, in order."""
        waiting, needed = [name for name, _ in self._images.values()], set()
        while waiting:
            if (name := waiting.pop()) in names and name not in needed and not _is_frame(self._graph, name):
                needed.add(name)
                waiting.extend(source for source, _ in _links(self._graph, name).values())
        return (name for name in names if name in needed)

    def _node(self, name: str, names: Sequence[str]) -> _Node:
        import execution

        import nodes

        given, links = self._graph.get_node(name), _links(self._graph, name)
        kind = nodes.NODE_CLASS_MAPPINGS[given["class_type"]]
        inputs, _, dynamic = execution.get_input_data(given["inputs"], kind, name, dynprompt=self._graph)
        inputs |= {key: [self._values[link]] for key, link in links.items()}
        fresh = {key: link for key, link in links.items() if link[0] in names}
        return _Node(name, self._title(name), kind(), inputs, fresh, dynamic)

    def _title(self, name: str) -> str:
        given = self._graph.get_node(name)
        return given.get("_meta", {}).get("title") or given["class_type"]

    def images(self, frame: torch.Tensor) -> dict[int, torch.Tensor]:
        """Run the nodes for a frame (1, H, W, 3), and return images (1, H, W, C) by the number of their ControlNet.

        Raises:
            ValueError: a node gives no image now; the text is for the user. Errors of nodes pass through.
        """
        known: dict[Link, list] = {link: [frame] for link in self._frames}
        for node in self._nodes:
            inputs = node.inputs | {key: known[link] for key, link in node.fresh.items()}
            for slot, made in enumerate(self._run(node, inputs)):
                known[node.name, slot] = made
        images = {place: known[link][0] for place, link in self._images.items()}
        for place, image in images.items():
            if not _is_image(image) or image.shape[0] != 1:
                raise ValueError(
                    f"The image of ControlNet {place + 1} is not one image for a frame, so TRT Stream stops. "
                    f"Look at {self._title(self._images[place][0])}."
                )
        return images

    def _run(self, node: _Node, inputs: dict[str, list]) -> list[list]:
        import execution

        running = execution.get_output_data("", node.name, node.instance, inputs, v3_data=node.dynamic)
        outputs, _, expands, _ = _at_once(running, node.title)
        if expands:
            raise ValueError(f"{node.title} becomes other nodes when it runs, so {_NOT_FOR_EACH}")
        return outputs


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 4


def _at_once(running: Coroutine, title: str) -> Any:
    """Return what a coroutine returns without ever waiting.

    Raises:
        ValueError: it waits.
    """
    try:
        running.send(None)
    except StopIteration as end:
        return end.value
    running.close()
    raise ValueError(f"{title} waits for something else while it runs, so {_NOT_FOR_EACH}")
