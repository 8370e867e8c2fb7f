"""Nodes from image to image that cannot run again by themselves: one waits, one becomes others, one gives two."""

from __future__ import annotations

import asyncio

from comfy_api.latest import io
from comfy_execution.graph_utils import GraphBuilder


class _ImageNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id=cls.__name__, category="tests", inputs=[io.Image.Input("image")],
                         outputs=[io.Image.Output()], enable_expand=True)  # fmt: skip


class TestWaits(_ImageNode):
    """An image -> itself, a little later."""

    @classmethod
    async def execute(cls, image: object) -> io.NodeOutput:
        await asyncio.sleep(0.01)
        return io.NodeOutput(image)


class TestExpands(_ImageNode):
    """An image -> what another node makes of it, in this one's place."""

    @classmethod
    def execute(cls, image: object) -> io.NodeOutput:
        graph = GraphBuilder()
        return io.NodeOutput(graph.node("ImageInvert", image=image).out(0), expand=graph.finalize())


class TestTwoImages(_ImageNode):
    """An image -> itself twice."""

    @classmethod
    def execute(cls, image: object) -> io.NodeOutput:
        return io.NodeOutput(image.repeat(2, 1, 1, 1))


NODES = [TestWaits, TestExpands, TestTwoImages]
