"""A node's help in ComfyUI's page: English, which has no folder of its own, and its picture."""

from __future__ import annotations

import pytest
from browser import ComfyPage


@pytest.mark.browser
def test_english_help_is_shown_with_its_picture(one_page: ComfyPage) -> None:
    raw = one_page.page
    raw.evaluate("""() => { app.graph.clear(); const node = LiteGraph.createNode('TRTUNetEngine');
        node.pos = [300, 200]; app.graph.add(node); app.canvas.selectNode(node); }""")
    raw.get_by_test_id("info-button").click()
    picture = raw.locator("img[src*='wiring.png']").first
    picture.wait_for()
    raw.wait_for_function("image => image.naturalWidth > 1000", arg=picture.element_handle())
    assert raw.get_by_text("into the sampler.").first.is_visible()
