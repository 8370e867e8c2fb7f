"""The engines panel with a full library, with an empty one and with builds: real clicks and keys in ComfyUI's page."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import ComfyPage
from builds import until
from comfy_process import ComfyProcess
from engine_page import EnginePage, choose
from fake_engine import publish, publish_engine
from hybrid_trt.engine_library.manifest import USE_NAME
from playwright.sync_api import Locator, Route, expect

pytestmark = pytest.mark.browser

ENGINES, MODELS = 30, 11
LORA = "LoRA add_detail_of_a_long_name_v2 x 0.8"
#: The lowest contrast of a text in the panel with what lies behind it, and that text.
CONTRAST = """selector => {
    const canvas = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d');
    const over = (colour, below) => {
        for (const fill of [below, colour]) { canvas.fillStyle = fill; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
    const hex = rgb => `rgb(${rgb.join(' ')})`;
    const light = rgb => rgb.map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const chain = e => e ? [...chain(e.parentElement), e] : [];
    const found = [...document.querySelectorAll(`${selector} *`)].filter(e => e.offsetHeight
        && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()));
    return found.map(e => {
        const styles = chain(e).map(part => getComputedStyle(part)), own = styles.at(-1).color;
        const back = styles.reduce((below, style) => over(style.backgroundColor, hex(below)), [0, 0, 0]);
        const opacity = styles.reduce((all, style) => all * style.opacity, 1);
        const seen = over(own, hex(back)).map((c, i) => c * opacity + back[i] * (1 - opacity));
        const [a, b] = [light(seen), light(back)].sort((x, y) => y - x);
        return [(a + 0.05) / (b + 0.05), e.textContent];
    }).sort((a, b) => a[0] - b[0])[0]; }"""
HIDE = """hidden => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
    document.dispatchEvent(new Event('visibilitychange')); }"""
HAPPEN = """event => app.api.dispatchEvent(new CustomEvent(event, { detail: {} }))"""
JOBS: list[dict[str, Any]] = [
    {"id": name, "label": f"{name}.safetensors", "kind": "unet", "wanted": "64-512 px", "state": state,
     "phase": "exporting", "percent": 40, "seconds": 12.0, "expected": 60.0, "message": "", "created": 1.0,
     "engine": None}
    for name, state in (("first", "done"), ("second", "running"), ("third", "queued"), ("fourth", "queued"))
]


@pytest.fixture
def page(one_page: ComfyPage) -> Iterator[EnginePage]:
    """A small window; the panel is the same whatever draws the nodes."""
    one_page.errors.clear()
    one_page.page.set_viewport_size({"width": 1366, "height": 768})
    yield EnginePage(one_page, "panel")
    one_page.page.unroute_all()
    if one_page.page.locator(".hybrid-trt-panel").count():
        toggle(EnginePage(one_page, "panel"))
    assert not one_page.errors


@pytest.fixture
def library(comfy: ComfyProcess) -> Iterator[Path]:
    """Folder of the engines; empty before and after."""
    root = comfy.base / "models" / "trt_engines"
    shutil.rmtree(root, ignore_errors=True)
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def full(library: Path) -> Path:
    """Thirty engines of eleven models, some of them used, one with a LoRA; one is damaged."""
    for i in range(ENGINES):
        name = publish(library, b"engine" * (i + 1), f"{i:064x}", f"control_v11p_sd15_net{i % MODELS}_fp16.safetensors",
                       f"2026-{1 + i % 11:02d}-10T00:00:00+00:00", largest=2 + i // MODELS,
                       changes=LORA if i == MODELS + 1 else "")  # fmt: skip
        if i % 3 == 0:
            used = library / name / USE_NAME
            used.touch()
            os.utime(used, times=(time.time(), time.time() - 86400 * i))
        if i == ENGINES - 1:
            (library / name / "manifest.json").write_text("{")
    return library


def toggle(page: EnginePage) -> Locator:
    """Open or close the panel."""
    page.page.page.get_by_role("button", name="TRT engines").click()
    return page.page.page.locator(".hybrid-trt-panel")


def stay(button: Locator) -> None:
    """Wait until a button keeps its place for a second: what stands above it may still be on its way."""
    before, now = None, button.bounding_box()
    while before != now:
        button.page.wait_for_timeout(1000)
        before, now = now, button.bounding_box()


def shown(panel: Locator) -> list[str]:
    return panel.locator(".hybrid-trt-engine").evaluate_all("cards => cards.map(card => card.dataset.engine)")


def groups(panel: Locator) -> list[str]:
    return panel.locator(".hybrid-trt-group").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")


def test_thirty_engines_are_two_lines_each_by_model_below_a_head_that_stays(page: EnginePage, full: Path) -> None:
    panel = toggle(page)
    panel.locator(".hybrid-trt-engine").nth(ENGINES - 1).wait_for()
    page.shot("thirty")
    assert len(groups(panel)) == MODELS + 1
    rows = panel.locator(".hybrid-trt-group").nth(1).locator(".hybrid-trt-engine strong").all_inner_texts()
    assert [row.startswith(LORA) for row in rows].count(True) == 1, "engines of one model do not look the same"
    heights = panel.locator(".hybrid-trt-engine").evaluate_all("cards => cards.map(card => card.offsetHeight)")
    assert max(heights) <= 50, "two lines"
    assert panel.evaluate("p => p.scrollWidth <= p.clientWidth"), "nothing sticks out"
    head = panel.locator("header")
    before, first = head.bounding_box(), panel.locator(".hybrid-trt-engine").first
    above = first.bounding_box()["y"]
    page.page.page.mouse.move(before["x"] + 50, page.page.page.viewport_size["height"] - 40)
    page.page.page.mouse.wheel(0, 700)
    assert until(lambda: abs(first.bounding_box()["y"] - (above - 700)) <= 60, 60)
    assert head.bounding_box() == before
    page.shot("scrolled")
    panel.get_by_placeholder("Filter").fill("net10")
    assert groups(panel) == ["control_v11p_sd15_net10_fp16.safetensors"]
    panel.get_by_placeholder("Filter").fill("")
    for order, first in (("Largest", 28), ("Newest", 10), ("Last used", 0)):
        panel.get_by_label("Sort by").select_option(order)
        assert groups(panel)[0] == f"control_v11p_sd15_net{first % MODELS}_fp16.safetensors", order
        assert groups(panel)[-1] == "Damaged"
    assert len(set(shown(panel))) == ENGINES


def test_a_damaged_engine_says_so_and_what_to_do_with_the_details_for_who_asks(page: EnginePage, full: Path) -> None:
    panel = toggle(page)
    damaged = panel.get_by_role("region", name="Damaged")
    damaged.get_by_text("Damaged; delete it").wait_for()
    assert "manifest" not in damaged.inner_text()
    assert "manifest" in damaged.locator(".hybrid-trt-engine").get_attribute("title")
    choose(page, damaged, "Details …")
    dialog = page.page.page.get_by_role("dialog").last
    expect(dialog).to_contain_text("manifest")
    page.shot("damaged")
    dialog.get_by_role("button", name="Close").click()
    choose(page, panel.locator(".hybrid-trt-engine").first, "Verify")
    page.toast("files are intact")
    choose(page, damaged, "Delete …")
    dialog = page.page.page.get_by_role("dialog", name="Delete engine?")
    expect(dialog).to_contain_text("is damaged and is not used")
    dialog.get_by_role("button", name="Delete").click()
    damaged.wait_for(state="detached")


def test_the_report_for_support_is_shown_from_its_beginning_and_copied(
    page: EnginePage, full: Path, comfy: ComfyProcess
) -> None:
    panel, raw = toggle(page), page.page.page
    panel.get_by_role("button", name="Report for support").click()
    dialog = raw.get_by_role("dialog", name="Report for support")
    dialog.get_by_text("last errors").wait_for()
    page.shot("report-for-support")
    above, longer = dialog.locator("pre").evaluate("text => [text.scrollTop, text.scrollHeight > text.clientHeight]")
    assert (above, longer) == (0, True)
    raw.context.grant_permissions(["clipboard-read", "clipboard-write"])
    dialog.get_by_role("button", name="Copy").click()
    dialog.get_by_role("button", name="Copied").wait_for()
    copied = raw.evaluate("() => navigator.clipboard.readText()")
    report = json.loads(copied)
    assert len(report["library"]["contents"]) == ENGINES
    assert report["backends"]["onnxruntime"].startswith("serves")
    assert str(comfy.base / "models" / "trt_engines") not in copied
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="detached")


def test_several_engines_are_deleted_at_once_and_by_keys_alone(page: EnginePage, full: Path) -> None:
    panel, raw = toggle(page), page.page.page
    panel.locator(".hybrid-trt-engine").nth(ENGINES - 1).wait_for()
    panel.get_by_placeholder("Filter").fill("net4_ ready")
    names = shown(panel)
    assert len(names) == 3
    panel.get_by_role("checkbox", name="Select all shown").check()
    panel.get_by_text("3 selected").wait_for()
    panel.locator(".hybrid-trt-engine").nth(1).get_by_role("checkbox").uncheck()
    panel.get_by_text("2 selected").wait_for()
    page.shot("selected")
    panel.get_by_role("button", name="Delete selected").click()
    dialog = raw.get_by_role("dialog", name="Delete 2 engines?")
    dialog.wait_for()
    page.shot("delete-two")
    assert raw.evaluate("() => document.activeElement.textContent") == "Cancel", "the harmless one has the focus"
    focused = []
    for _ in range(4):
        raw.keyboard.press("Tab")
        focused.append(raw.evaluate("() => document.activeElement.textContent"))
    assert focused == ["Delete", "Cancel"] * 2, "the focus stays inside"
    red = dialog.get_by_role("button", name="Delete").evaluate("b => getComputedStyle(b).backgroundColor")
    assert red == "rgb(179, 38, 30)"
    raw.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert all((full / name).is_dir() for name in names)
    assert raw.evaluate("() => document.activeElement.textContent").startswith("Delete selected")
    raw.keyboard.press("Enter")
    raw.keyboard.press("Tab")
    raw.keyboard.press("Enter")
    page.toast("Deleted: 2 engines")
    panel.get_by_text("Select all shown").wait_for()
    assert [(full / name).is_dir() for name in names] == [False, True, False]

    more = panel.locator(".hybrid-trt-engine").first.get_by_role("button")
    more.focus()
    raw.keyboard.press("Enter")
    menu = raw.get_by_role("menu")
    assert more.get_attribute("aria-expanded") == "true"
    page.shot("menu")
    raw.keyboard.press("ArrowDown")
    assert raw.evaluate("() => document.activeElement.textContent") == "Verify"
    raw.keyboard.press("Escape")
    menu.wait_for(state="detached")
    assert more.get_attribute("aria-expanded") == "false"
    more.click()
    menu.wait_for()
    more.click()
    menu.wait_for(state="detached")
    more.click()
    menu.wait_for()
    panel.get_by_placeholder("Filter").click()
    menu.wait_for(state="detached")


@pytest.mark.parametrize("palette", ["dark", "light"])
def test_everything_in_the_panel_can_be_read(page: EnginePage, full: Path, palette: str) -> None:
    raw = page.page.page
    raw.route("**/hybrid_trt/builds", lambda route: route.fulfill(json=JOBS))
    raw.evaluate("palette => app.extensionManager.setting.set('Comfy.ColorPalette', palette)", palette)
    try:
        panel = toggle(page)
        panel.locator(".hybrid-trt-engine").nth(ENGINES - 1).wait_for()  # with more to come, all would be some soon
        panel.get_by_placeholder("Filter").fill("net4_")
        panel.get_by_role("checkbox", name="Select all shown").check()
        raw.wait_for_timeout(500)
        page.shot(palette)
        assert raw.evaluate(CONTRAST, ".hybrid-trt-panel")[0] >= 4.5, raw.evaluate(CONTRAST, ".hybrid-trt-panel")
        panel.get_by_role("button", name="Delete selected").click()
        page.shot(f"{palette}-dialog")
        assert raw.evaluate(CONTRAST, ".hybrid-trt-dialog")[0] >= 4.5, raw.evaluate(CONTRAST, ".hybrid-trt-dialog")
        raw.keyboard.press("Escape")
    finally:
        raw.evaluate("() => app.extensionManager.setting.set('Comfy.ColorPalette', 'dark')")


def test_an_empty_panel_says_how_to_begin(page: EnginePage, library: Path) -> None:
    panel = toggle(page)
    panel.get_by_text("No engines yet.").wait_for()
    expect(panel).to_contain_text("Press Build engine on a node")
    expect(panel).to_contain_text("Press Accelerate this workflow")
    assert not panel.get_by_placeholder("Filter").is_visible()
    page.shot("empty")
    panel.get_by_role("button", name="Open the templates").click()
    dialog = page.page.page.get_by_role("dialog").last
    dialog.get_by_text("hybrid-trt", exact=True).first.wait_for()
    page.page.page.keyboard.press("Escape")
    dialog.wait_for(state="detached")


def test_builds_that_wait_are_listed_and_those_that_ended_are_cleared_away(page: EnginePage, library: Path) -> None:
    raw, jobs = page.page.page, list(JOBS)

    def clear(route: Route) -> None:
        jobs[:] = [job for job in jobs if job["state"] != "done"]
        route.continue_()

    raw.route("**/hybrid_trt/builds", lambda route: route.fulfill(json=jobs))
    raw.route("**/hybrid_trt/builds/clear", clear)
    panel = toggle(page)
    cards = panel.locator(".hybrid-trt-panel-builds .hybrid-trt-card")
    cards.nth(3).wait_for()
    page.shot("builds")
    told = cards.all_inner_texts()
    assert "▶ Running 40 %" in told[0]
    assert "waits for 1 before it" in told[1]
    assert "waits for 2 before it" in told[2]
    assert told[3].split("\n") == ["first · ✓ Done", "Show log"]
    assert cards.nth(3).bounding_box()["height"] <= 32, "one line"
    panel.get_by_role("button", name="Clear finished").click()
    cards.nth(3).wait_for(state="detached")
    expect(cards).to_have_count(3)
    assert panel.get_by_role("button", name="Clear finished").count() == 0

    # progress comes with the event, and is drawn without a question
    asked: list[str] = []
    raw.on("request", lambda request: asked.append(request.url))
    raw.evaluate("""job => app.api.dispatchEvent(new CustomEvent('hybrid_trt.build',
        { detail: { ...job, percent: 73, keys: [] } }))""", JOBS[1])
    panel.get_by_text("Running 73 %").wait_for()
    raw.wait_for_timeout(600)
    assert [url for url in asked if url.endswith(("/engines", "/builds"))] == []


def test_engines_stay_on_the_screen_below_many_builds_and_ticks_go_with_the_workflow(
    page: EnginePage, full: Path
) -> None:
    raw = page.page.page
    many = [{**job, "id": f"{job['id']}{i}"} for i in range(4) for job in JOBS]
    raw.route("**/hybrid_trt/builds", lambda route: route.fulfill(json=many))
    panel = toggle(page)
    panel.locator(".hybrid-trt-engine").nth(ENGINES - 1).wait_for()
    page.shot("many-builds")
    third = panel.locator(".hybrid-trt-engine").nth(2).bounding_box()
    assert third["y"] + third["height"] < raw.viewport_size["height"]
    ticks = panel.locator(".hybrid-trt-engine input:checked")
    panel.locator(".hybrid-trt-engine input").first.check()
    raw.evaluate("async () => app.loadGraphData(app.graph.serialize())")  # as undo does
    expect(ticks).to_have_count(1)
    raw.evaluate("() => app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    ticks.first.wait_for(state="detached")
    assert not panel.get_by_role("button", name="Delete selected").is_visible()


def test_a_press_counts_whatever_is_drawn_while_the_mouse_is_down(page: EnginePage, full: Path) -> None:
    raw = page.page.page
    raw.route("**/hybrid_trt/builds", lambda route: route.fulfill(json=JOBS))
    raw.route("**/hybrid_trt/builds/second/cancel", lambda route: route.fulfill(json=JOBS[1]))
    panel = toggle(page)

    def press(button: Locator) -> None:
        stay(button)
        button.hover()
        raw.mouse.down()
        raw.evaluate("""job => app.api.dispatchEvent(new CustomEvent('hybrid_trt.build',
            { detail: { ...job, percent: job.percent + 1, seconds: job.seconds + 1, keys: [] } }))""", JOBS[1])
        with raw.expect_response("**/hybrid_trt/engines"):
            raw.evaluate(HAPPEN, "hybrid_trt.library")
        raw.wait_for_timeout(50)
        raw.mouse.up()

    with raw.expect_request("**/hybrid_trt/builds/second/cancel"):
        press(panel.locator(".hybrid-trt-panel-builds").get_by_role("button", name="Cancel build").first)
    press(panel.locator(".hybrid-trt-engine").first.get_by_role("button", name="More for"))
    raw.get_by_role("menu").wait_for()
    raw.keyboard.press("Escape")


def test_a_build_that_moves_up_the_list_keeps_the_focus_on_its_button(page: EnginePage, library: Path) -> None:
    raw = page.page.page
    raw.route("**/hybrid_trt/builds", lambda route: route.fulfill(json=JOBS))
    panel = toggle(page)
    cards = panel.locator(".hybrid-trt-panel-builds .hybrid-trt-card")
    cards.filter(has_text="third").get_by_role("button", name="Cancel build").focus()
    for job, state in ((JOBS[1], "queued"), (JOBS[2], "running")):
        raw.evaluate("""job => app.api.dispatchEvent(new CustomEvent('hybrid_trt.build', { detail: job }))""",
                     {**job, "state": state, "keys": []})
    expect(cards.first).to_contain_text("third")
    focused = cards.first.get_by_role("button", name="Cancel build")
    assert focused.evaluate("button => button === document.activeElement")


def test_what_the_server_said_before_a_build_went_on_does_not_set_it_back(page: EnginePage, library: Path) -> None:
    raw, held = page.page.page, []
    raw.route("**/hybrid_trt/builds", lambda route: route.fulfill(json=JOBS))
    panel = toggle(page)
    cards = panel.locator(".hybrid-trt-panel-builds .hybrid-trt-card")
    expect(cards.first).to_contain_text("second")
    raw.route("**/hybrid_trt/builds", lambda route: held.append(route))
    with raw.expect_request("**/hybrid_trt/builds"):
        raw.evaluate(HAPPEN, "hybrid_trt.library")
    for job, state in ((JOBS[1], "queued"), (JOBS[2], "running")):
        raw.evaluate("""job => app.api.dispatchEvent(new CustomEvent('hybrid_trt.build', { detail: job }))""",
                     {**job, "state": state, "keys": []})
    expect(cards.first).to_contain_text("third")
    with raw.expect_response("**/hybrid_trt/builds"):
        held[0].fulfill(json=JOBS)
    raw.wait_for_timeout(500)
    expect(cards.first).to_contain_text("third")


def test_a_build_that_waits_for_its_model_is_listed_too(page: EnginePage, library: Path) -> None:
    raw = page.page.page
    held: list[Route] = []
    raw.route("**/api/prompt", lambda route: held.append(route))
    raw.evaluate("""() => { app.graph.clear();
        const [loader, engine] = ['CheckpointLoaderSimple', 'TRTUNetEngine'].map(type => LiteGraph.createNode(type));
        for (const node of [loader, engine]) app.graph.add(node);
        loader.pos = [500, 150]; engine.pos = [850, 150]; loader.connect(0, engine, 0);
        app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]; app.canvas.setDirty(true, true); }""")
    page.page.settle()
    panel = toggle(page)
    panel.get_by_text("No engines yet.").wait_for()
    expect(panel.get_by_role("button", name="Accelerate this workflow")).to_be_hidden()
    expect(panel).not_to_contain_text("Press Accelerate")  # the button is not there
    with raw.expect_request("**/api/prompt"):
        page.click(page.node("TRTUNetEngine"))
    raw.evaluate(HAPPEN, "status")  # as the server does when its queue changes
    panel.get_by_text("TRT UNet Engine · … Loading the model").wait_for()
    page.shot("asked")
    held[0].fulfill(status=500, json={"error": {"message": "it was only a test"}})
    assert "it was only a test" in page.wait_for(page.node("TRTUNetEngine"), "failed", timeout=60)["text"]
    raw.evaluate(HAPPEN, "status")
    panel.get_by_text("Loading the model").wait_for(state="detached")


def test_engines_of_an_earlier_version_are_offered_for_deletion_with_their_size(
    page: EnginePage, library: Path
) -> None:
    for device, weights in (("cpu", "a" * 64), ("cpu", "b" * 64), ("NVIDIA H200, 9.0", "c" * 64)):
        publish_engine(library, b"x" * 1_000_000, "B1-H8.bin", backend="torch", backend_version="2.11.0 format 1",
                       device=device, weights=weights)  # fmt: skip
    publish(library)
    panel = toggle(page)
    offer = panel.get_by_text("Of an earlier version, no longer used: 2, 2")  # and some kB
    offer.wait_for()
    page.shot("outdated")
    offer.locator("..").get_by_role("button", name="Delete").click()
    page.page.page.get_by_role("dialog", name="Delete 2 engines?").get_by_role("button", name="Delete").click()
    offer.wait_for(state="hidden")
    assert len(list(library.glob("*/manifest.json"))) == 2, "another GPU's, which may share the folder, and a good one"


def test_the_panel_asks_nothing_while_nothing_happens_or_nobody_sees_it(page: EnginePage, library: Path) -> None:
    publish(library)
    raw, asked = page.page.page, []
    raw.on("request", lambda request: asked.append(request.url) if "/hybrid_trt/" in request.url else None)
    panel = toggle(page)
    panel.get_by_role("region", name="routes.safetensors").wait_for()
    for _ in range(20):  # what opening the panel asks may come late
        asked.clear()
        raw.wait_for_timeout(1000)
        if not asked:
            break
    raw.wait_for_timeout(2000)
    assert asked == [], "idle"
    with raw.expect_response("**/hybrid_trt/builds"):
        raw.evaluate(f"() => {{ for (let i = 0; i < 5; i++) ({HAPPEN})('hybrid_trt.library') }}")  # within a moment
    raw.wait_for_timeout(500)
    looks = [url.rpartition("/")[2] for url in asked]
    assert {"engines", "builds"} <= set(looks), looks
    assert len(looks) == len(set(looks)), f"five events are one look: {looks}"
    asked.clear()
    raw.evaluate(HIDE, True)
    for event in ("hybrid_trt.library", "status", "reconnected"):
        raw.evaluate(HAPPEN, event)
    raw.wait_for_timeout(1000)
    assert asked == [], "hidden"
    with raw.expect_response("**/hybrid_trt/engines"):
        raw.evaluate(HIDE, False)
    assert sum(url.endswith("/engines") for url in asked) == 1, "seen again"
    toggle(page)
    asked.clear()
    raw.evaluate(HAPPEN, "hybrid_trt.library")
    raw.wait_for_timeout(800)
    assert [url for url in asked if "/engines" in url] == [], "closed"
