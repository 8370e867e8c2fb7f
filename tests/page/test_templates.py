"""The shipped blueprints, and the shipped workflows as templates, opened in a small window in both kinds of nodes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import slow
from browser import ComfyPage
from comfy_process import ComfyProcess
from engine_page import EnginePage
from make_workflows import build_blueprint
from PIL import Image
from shipped_workflows import FOLDER, NAMES, TITLES, shipped
from workflow_blueprints import BLUEPRINTS
from workflow_recipes import RECIPES
from workflow_thumbnails import thumbnail

BOTH_KINDS_OF_NODES = True
WIDTH, HEIGHT = 1366, 768
#: What of the window the page's own furniture leaves: sidebar, tabs.
LEFT, TOP = 58, 38
#: Scale, the least size of type that nodes are drawn with, and where nodes lie on the screen, titles included.
VIEW = """() => { const { scale, offset } = app.canvas.ds;
    const at = node => { const b = node.getBounding();
        return [(b[0] + offset[0]) * scale, (b[1] + offset[1]) * scale, b[2] * scale, b[3] * scale]; };
    return { scale, type: LiteGraph.NODE_TEXT_SIZE * scale,
             least: app.extensionManager.setting.get('LiteGraph.Canvas.MinFontSizeForLOD'),
             nodes: app.graph.nodes.map(n => ({ type: n.type, title: n.title, at: at(n) })),
             dom: [...document.querySelectorAll('.lg-node')].map(e => e.getBoundingClientRect())
                 .map(r => [r.x, r.y, r.width, r.height]) }; }"""


@pytest.fixture
def small(opened: ComfyPage) -> ComfyPage:
    opened.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    return opened


OPENED_SMALL = ("wan22_image_to_video", "sd15_depth_and_pose")
"""The largest ones."""


@pytest.mark.browser
@slow.when("vue", but=["wan22_image_to_video"])
@pytest.mark.parametrize("name", slow.cases({name: name for name in NAMES}, set(NAMES) - set(OPENED_SMALL)))
def test_a_template_opens_readable_in_a_small_window(small: ComfyPage, name: str) -> None:
    """Its card has a name and a picture; its nodes can be read, start in the corner, and none covers another."""
    page = EnginePage(small, f"template-{name}")
    raw, title = small.page, TITLES[name]
    raw.keyboard.press("Escape")  # what a failure before left open
    raw.evaluate("() => { app.extensionManager.command.execute('Comfy.BrowseTemplates') }")
    dialog = raw.get_by_role("dialog").last
    dialog.get_by_text("hybrid-trt", exact=True).first.click()
    card = raw.get_by_test_id(f"template-workflow-{title}")
    assert title in card.inner_text()
    card.scroll_into_view_if_needed()
    picture = card.locator("img").first
    raw.wait_for_function("e => e.complete", arg=picture.element_handle())
    assert picture.evaluate("e => e.naturalWidth") == 600, "its thumbnail is there"
    page.shot("card")
    card.click()
    raw.wait_for_function("count => app.graph.nodes.length === count", arg=len(shipped(name)["nodes"]))
    dialog.wait_for(state="detached")
    small.until_still()
    raw.wait_for_timeout(700)
    page.shot("open")
    view = raw.evaluate(VIEW)
    assert view["type"] >= view["least"], "ComfyUI draws smaller text not at all"
    assert view["scale"] <= 1
    places = view["dom"] if small.vue else [node["at"] for node in view["nodes"]]
    assert overlaps(places) == []
    first = {node["title"]: node["at"] for node in view["nodes"]}["How to use this workflow"]
    assert first[0] >= LEFT
    assert first[1] >= TOP
    models = [node for node in view["nodes"] if "Loader" in node["type"]]
    engines = [node for node in view["nodes"] if node["type"] in ("TRTAccelerate", "TRTUNetEngine")]
    for node in (*models, *engines):
        x, y, width, height = node["at"]
        assert x + width <= WIDTH, node
        assert y + height <= HEIGHT, node
    ours = [socket["type"] for node in shipped(name)["nodes"] if engines_of(node) for socket in node["inputs"]
            if socket["link"] is not None]  # fmt: skip
    encoders = ("VAEEncode", "InpaintModelConditioning", "TRTStream", "WanImageToVideo")
    encodes = "VAE" in ours and any(node["type"] in encoders for node in shipped(name)["nodes"])
    engines = sum(map(engines_of, shipped(name)["nodes"])) + encodes
    missing = f"{engines} of {engines} engines are missing" if engines > 1 else "The engine is missing"
    raw.get_by_text(missing).first.wait_for(state="attached")
    assert not small.errors


def engines_of(node: dict[str, Any]) -> int:
    """Count the engines that a node asks for: one for each linked model."""
    asked = ("TRTAccelerate", "TRTUNetEngine", "TRTControlNetEngine", "TRTVAEEngine")
    models = ("MODEL", "CONTROL_NET", "VAE") if node["type"] in asked else ()
    return sum(socket["type"] in models and socket["link"] is not None for socket in node["inputs"])


def overlaps(places: list[list[float]]) -> list[tuple[int, int]]:
    """Pairs of boxes that cover one another by more than a pixel."""
    def cover(a: list[float], b: list[float]) -> bool:
        return all(a[i] + 1 < b[i] + b[i + 2] and b[i] + 1 < a[i] + a[i + 2] for i in (0, 1))

    return [(i, j) for i, a in enumerate(places) for j, b in enumerate(places[:i]) if cover(a, b)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_names_say_what_a_template_is_and_every_system_takes_them(recipe: Any) -> None:
    assert re.fullmatch(r"(SD 1\.5|SDXL|Flux\.[12]|Z-Image|Krea 2|Qwen-Image|Wan 2\.2|MiniMax H3|LTX-2\.3) - "
                        r"[A-Za-z][A-Za-z ]+[A-Za-z8]", recipe.title)
    assert "_" not in recipe.title
    assert len(recipe.title) < 40
    assert not set(recipe.title) & set('<>:"/\\|?*%#')


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_thumbnails_are_what_the_tool_draws(recipe: Any) -> None:
    drawn = thumbnail(recipe)
    with Image.open(FOLDER / f"{recipe.title}.jpg") as shipped_one:
        assert shipped_one.size == drawn.size
        small = [image.convert("L").resize((16, 16)).tobytes() for image in (shipped_one, drawn)]
    assert max(abs(a - b) for a, b in zip(*small, strict=True)) < 12, "run tools/make_workflows.py"


@pytest.mark.parametrize("name", NAMES)
def test_notes_name_what_is_visible_in_the_workflow(name: str) -> None:
    """Words in bold or italics are titles of nodes or groups, names of widgets, or buttons of the page."""
    workflow = shipped(name)
    (note,) = (node["widgets_values"][0] for node in workflow["nodes"] if node["type"] == "MarkdownNote")
    seen = {node.get("title") or node["type"] for node in workflow["nodes"]} | {g["title"] for g in workflow["groups"]}
    seen |= {PAGE.get(node["type"], "") for node in workflow["nodes"]}
    seen |= WIDGETS | {"Run", "TRT Accelerate", "TRT live", "Start with webcam", "Stop"}
    told = [word for pair in re.findall(r"\*\*(.+?)\*\*|\*(.+?)\*", note) for word in pair if word]
    assert len(told) > 3
    no_names = r"\d|More .*|Other .*|.*/.*|.*tensors"
    known = [word for word in told if re.fullmatch(no_names, word) or any(one.startswith(word) for one in seen)]
    assert [word for word in told if word not in known] == []


PAGE = {"TRTReport": "TRT Report", "TRTApplyControlNet": "TRT Apply ControlNet", "SaveImage": "Save Image",
        "KSampler": "KSampler", "TRTUNetEngine": "TRT UNet Engine", "TRTAccelerate": "TRT Accelerate",
        "TRTSamplerPatch": "TRT Sampler Patch", "LatentUpscaleBy": "Upscale Latent By",
        "TRTCompare": "TRT Compare", "TRTStream": "TRT Stream", "SaveVideo": "Save Video", "TRTFrame": "TRT Frame",
        "LoadDA3Model": "Load Depth Anything 3", "VAEEncode": "VAE Encode"}  # fmt: skip
"""Names of nodes without a title of their own on the page."""
WIDGETS = {"strength", "start", "end", "rows", "denoise", "strength_model", "scale_by", "seed", "steps", "frames",
           "guidance", "weight_dtype", "default", "cfg", "length", "frames_number", "first_frame", "last_frame"}


# Blueprints: subgraphs that ComfyUI lists

SUBGRAPHS = FOLDER.with_name("subgraphs")


def in_short(blueprint: dict[str, Any]) -> Any:
    """A blueprint without where things stand and which versions made it."""
    (inside,) = blueprint["definitions"]["subgraphs"]
    return [blueprint["extra"], [node["widgets_values"] for node in blueprint["nodes"]], inside["links"],
            [(node["id"], node["type"], node.get("widgets_values") or []) for node in inside["nodes"]],
            [(one["name"], one["type"], one["linkIds"]) for one in inside["inputs"] + inside["outputs"]]]


def test_comfyui_lists_the_blueprints_of_this_pack(comfy: ComfyProcess) -> None:
    listed = {key: entry for key, entry in comfy.get("/global_subgraphs").items()
              if entry["info"]["node_pack"] == "custom_nodes.hybrid-trt"}
    titles = {blueprint.recipe.title for blueprint in BLUEPRINTS}
    assert {entry["name"] for entry in listed.values()} == titles == {path.stem for path in SUBGRAPHS.iterdir()}
    for key in listed:
        data = json.loads(comfy.get(f"/global_subgraphs/{key}")["data"])
        assert len(data["nodes"]) == len(data["definitions"]["subgraphs"]) == 1
        assert data["nodes"][0]["type"] == data["definitions"]["subgraphs"][0]["id"]
        assert "TRTAccelerate" in {node["type"] for node in data["definitions"]["subgraphs"][0]["nodes"]}


@pytest.mark.browser
@pytest.mark.parametrize("blueprint", BLUEPRINTS, ids=lambda one: one.recipe.name)
def test_files_are_what_the_recipes_make(one_page: ComfyPage, blueprint: Any) -> None:
    made = build_blueprint(one_page, blueprint, {"hybrid-trt": "0.0.0", "comfy-core": "0.0.0"})
    shipped = json.loads((SUBGRAPHS / f"{blueprint.recipe.title}.json").read_text(encoding="utf-8"))
    assert in_short(made) == in_short(shipped), "run tools/make_workflows.py"
