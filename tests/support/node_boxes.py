"""Made-up states of engine nodes, and how their boxes look on the screen."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

from build_page import NAME, NET_1
from engine_page import EnginePage
from playwright.sync_api import Route

ENGINE = {
    "name": "e", "label": "m", "backend": "onnxruntime", "precision": "float16", "bytes": 1.7e9, "covers": True,
    "profile": "up to 4 images, 64 to 512 px, 616 tokens",
    "rel_err": 1e-3,
}  # fmt: skip
JOB = {"id": "j", "state": "running", "phase": "exporting", "percent": 35, "seconds": 12, "expected": 40.3,
       "message": "", "keys": []}  # fmt: skip
WHY = [
    {"reason": "shape", "count": 3, "advice": "Widen the sizes and press Build engine.",
     "text": "size the engine was not built for: width 768 px is outside the engine's 64 to 512 px"},
    {"reason": "other", "count": 5, "advice": "Move it.",
     "text": "a LoRA stands between the engine node and the sampler"},
]  # fmt: skip
LONG = (
    "The engine differs from the normal model by 0.3 of its largest value, which is more than an image bears, so it "
    "was not kept; build it in float32, or tell its makers. "
) * 2
RUN = {"engine": 8, "native": 0, "backend": "onnxruntime", "reasons": []}
STATES: dict[str, dict[str, Any]] = {
    "none": {"state": "none", "build_helps": True,
             "outlook": {"why": "lora", "seconds": 231, "certain": True, "live": False}},
    "building": {"state": "building", "job": JOB},
    "ready": {"state": "ready", "engine": ENGINE, "run": RUN},
    "native": {"state": "ready", "engine": ENGINE, "run": {**RUN, "native": 8, "reasons": WHY}},
    "failed": {"state": "failed", "build_helps": True, "text": LONG,
               "job": {**JOB, "state": "failed", "message": LONG}},
    "unavailable": {"state": "unavailable", "text": f"{LONG} {LONG}"},  # more than a box of any page holds
}
"""States that the server may tell of a node."""

#: Whether two Chinese characters are drawn as two pictures: without a font every one is the same box.
DRAWS_CHINESE = """() => { const drawn = character => { const c = document.createElement('canvas').getContext('2d');
    c.font = '20px sans-serif'; c.fillText(character, 5, 25); return c.canvas.toDataURL(); };
    return drawn('构') !== drawn('引'); }"""
MEASURED = """([id, name]) => {
    const node = app.canvas.graph.getNodeById(id), e = node.widgets.find(w => w.name === name).element;
    const box = e.getBoundingClientRect(), scale = app.canvas.ds.scale;
    const at = app.canvasPosToClientPos([node.pos[0], node.pos[1]]);
    const outer = LiteGraph.vueNodesMode ? document.querySelector(`[data-node-id='${id}']`).getBoundingClientRect()
        : { left: at[0], top: at[1], right: at[0] + node.size[0] * scale, bottom: at[1] + node.size[1] * scale };
    const colour = (part, pseudo) => getComputedStyle(part, pseudo).color;
    const title = e.querySelector('.hybrid-trt-title');
    const isCut = p => p.clientHeight && (p.scrollHeight > p.clientHeight + 1 || p.scrollWidth > p.clientWidth + 1);
    return { inside: box.left >= outer.left && box.right <= outer.right && box.top >= outer.top
            && box.bottom <= outer.bottom,
        box: [box.left, box.top, box.right, box.bottom], outer: [outer.left, outer.top, outer.right, outer.bottom],
        height: e.offsetHeight, width: e.offsetWidth, drawn: box.height > 10,
        cut: [e, ...e.querySelectorAll('.hybrid-trt-lines, .hybrid-trt-title')].filter(isCut).map(p => p.className),
        ground: getComputedStyle(e).backgroundColor, symbol: getComputedStyle(title, '::before').content,
        colours: [colour(title), colour(title, '::before'), colour(e.querySelector('.hybrid-trt-lines'))] }; }"""


def server_says(page: EnginePage, state: dict[str, Any]) -> None:
    """Every engine node has this state from the next question on."""
    raw = page.page.page
    raw.unroute_all(behavior="ignoreErrors")

    def answer(route: Route) -> None:
        whole = {"key": "k", "text": "", "engine": None, "job": None, "run": None, **state}
        route.fulfill(json={"nodes": dict.fromkeys(chain(*route.request.post_data_json["nodes"]), whole)})

    raw.route("**/hybrid_trt/nodes", answer)


def drawn(page: EnginePage, tiny: dict[str, Any], state: dict[str, Any]) -> int:
    """A node in this state, drawn in its real size."""
    server_says(page, state)
    page.page.load(copy.deepcopy(tiny), NAME)
    net = page.node(NET_1)
    close_up(page, net)
    page.wait_for(net, state["state"], timeout=60)
    page.page.until_still()
    return net


def measured(page: EnginePage, node: int, widget: str = "engine_status") -> dict[str, Any]:
    """Return the places of a box and its node on the screen, texts that are cut, and the colours."""
    return page.page.page.evaluate(MEASURED, [node, widget])


def whole(page: EnginePage, node: int, widget: str = "engine_status") -> dict[str, Any]:
    """A node's box, which has to be drawn inside the node with all of its text."""
    box = measured(page, node, widget)
    assert box["drawn"]
    assert box["inside"], box
    assert box["cut"] == [], box
    return box


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as browsers write them, by the formula of WCAG."""

    def light(colour: str) -> float:
        parts = [int(p) / 255 for p in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def close_up(page: EnginePage, node: int) -> None:
    """One node in its real size."""
    page.page.page.evaluate("""id => { const node = app.graph.getNodeById(id); app.canvas.ds.scale = 1;
        app.canvas.ds.offset = [500 - node.pos[0], 200 - node.pos[1]]; app.canvas.setDirty(true, true); }""", node)
    page.page.until_still()


def overlaps(boxes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of nodes that cover one another."""
    return [
        (a["type"], b["type"])
        for i, a in enumerate(boxes)
        for b in boxes[i + 1 :]
        if a["x"] < b["x"] + b["width"] and b["x"] < a["x"] + a["width"]
        and a["y"] < b["y"] + b["height"] and b["y"] < a["y"] + a["height"]
    ]
