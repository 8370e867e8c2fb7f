"""The Build button and the status on the engine nodes, with real clicks, in both kinds of nodes.

Pictures of every step are kept in the folder that HYBRID_TRT_SHOTS names.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from browser import TOAST
from build_page import NET_1, NET_2, load, no_engines, opened_anew, workflow
from builds import paused
from comfy_process import ComfyProcess
from engine_page import EnginePage, choose, reload
from node_boxes import close_up
from playwright.sync_api import expect
from workflow_to_prompt import set_widget

pytestmark = pytest.mark.browser
#: Whether the engine node inside the only subgraph says that it is ready.
INSIDE = """() => app.graph.nodes.find(n => n.isSubgraphNode?.())?.subgraph.nodes
    .find(n => n.type === 'TRTControlNetEngine').widgets.find(w => w.name === 'engine_status')
    .element.dataset.state === 'ready'"""
SIZES = ("min_size", "opt_size", "max_size", "max_images", "max_tokens")
LARGEST = "id => app.graph.getNodeById(id).widgets.find(w => w.name === 'max_size').value"


def test_build_cancel_build_and_run(page: EnginePage) -> None:
    """Build, progress, Cancel, Build, reload in the middle, ready, run."""
    no_engines(page.comfy)
    size = 384 if page.page.vue else 512  # profiles of their own, so that neither mode finds the other's engines
    raw = page.page.page
    made = workflow(page.info, max_size=size)
    load(page, made)
    net = page.node(NET_1)
    assert page.status(net)["state"] in ("unknown", "none")
    assert page.status(net)["shown"]

    page.click(net)
    page.wait_for(net, "building", timeout=60)
    first = page.wait_until(net, lambda s: (s["width"] or 0) > 1, "progress")
    page.shot("building")
    assert "Building" in first["title"]
    assert first["button"] == "Cancel build"
    page.wait_until(net, lambda s: (s["width"] or 0) > first["width"], "further progress")
    assert page.status(page.node(NET_2))["state"] != "building"

    page.click(net)
    cancelled = page.wait_for(net, "none", timeout=60)
    page.shot("cancelled")
    assert "cancelled" in cancelled["text"]
    assert cancelled["button"] == "Build engine"
    page.toast("Build cancelled")

    page.click(net)
    page.wait_for(net, "building", timeout=60)
    with paused(page.comfy.pid):
        reload(page)
        load(page, made)
        page.wait_for(net, "building", timeout=60)
        page.shot("reloaded")

        # a copy of the node, and the node in a subgraph, say the same
        raw.evaluate("""id => { const node = app.graph.getNodeById(id), copy = LiteGraph.createNode(node.type);
            copy.pos = [node.pos[0], node.pos[1] + 1400]; app.graph.add(copy);
            copy.configure({ ...node.serialize(), id: copy.id, pos: copy.pos, inputs: undefined, outputs: undefined });
            copy.title = 'copy'; node.getInputNode(0).connect(0, copy, 0); }""", net)
        page.wait_for(page.node("copy"), "building", timeout=60)

    ready = page.wait_for(net, "ready", "failed")
    page.shot("ready")
    assert ready["state"] == "ready", ready
    assert ready["button"] == "Build again"
    assert "onnxruntime, float32" in ready["text"]
    assert "same picture as without (checked, differs by" in page.toast("Engine built").inner_text()
    assert page.wait_for(page.node("copy"), "ready", timeout=60)["state"] == "ready"

    load(page, made)
    raw.evaluate("id => { app.graph.convertToSubgraph(new Set([app.graph.getNodeById(id)])); }", net)
    raw.wait_for_function(INSIDE)
    page.shot("subgraph")
    load(page, made)
    page.comfy.free()
    raw.get_by_test_id("queue-button").click()
    # other tests may have run this ControlNet before
    page.wait_until(net, lambda s: "Last run: 4 of 4 calls accelerated" in s["text"], "run")
    page.page.settle()
    page.shot("ran")
    native = page.wait_until(
        page.node("TRTUNetEngine"), lambda s: "Last run: not accelerated" in s["text"], "run")
    assert "4 × no engine" in native["text"]
    assert native["tone"] == "warn"
    assert page.page.problems() == []

    # cached nodes and a new page know it too
    load(page, made)
    assert "4 of 4 calls" in page.wait_until(net, lambda s: "Last run" in s["text"], "run", 60)["text"]

    raw.get_by_role("button", name="TRT engines").click()
    choose(page, raw.get_by_role("region", name="tiny_sd15_a.safetensors"), "Build again")
    page.toast("is built again on its node")
    page.wait_for(net, "asked", "building", timeout=60)
    page.wait_for(net, "building", timeout=60)
    assert "of about" in page.wait_until(net, lambda s: "of about" in s["text"], "expected time", 60)["text"]
    page.shot("rebuilding")
    raw.locator(".hybrid-trt-panel-builds").get_by_role("button", name="Cancel build").click()
    assert page.wait_for(net, "ready", timeout=60)["state"] == "ready", "the old engine serves on"
    raw.get_by_role("button", name="TRT engines").click()


def test_a_size_that_will_not_fit_is_told_before_the_run_and_built_for(page: EnginePage) -> None:
    made = workflow(page.info, min_size=64, max_size=256)
    set_widget(made, "EmptyLatentImage", "width", 256, page.info)
    set_widget(made, "EmptyLatentImage", "height", 256, page.info)
    net = opened_anew(page, made)
    assert "does not fit" not in page.status(net)["text"]

    set_widget(made, "EmptyLatentImage", "height", 320, page.info)
    load(page, made)
    told = page.wait_until(net, lambda s: "256×320 does not fit" in s["text"], "warning", 60)
    assert told["tone"] == "warn"
    page.shot("told")
    page.click_in_status(net, ".hybrid-trt-offer")
    page.wait_for(net, "building", timeout=60)
    sizes = page.page.page.evaluate("""id => Object.fromEntries(app.graph.getNodeById(id).widgets
        .filter(w => w.name.endsWith('_size')).map(w => [w.name, w.value]))""", net)
    assert (sizes["min_size"], sizes["max_size"]) == (64, 320)
    page.click(net)
    page.wait_for(net, "none", timeout=60)
    assert "does not fit" not in page.status(net)["text"]
    assert "does not fit" in page.status(page.node(NET_2))["text"], "the others are as they were"


@pytest.mark.fault("Build is clicked on a node with Auto for a picture that its model's usual sizes do not hold",
                   see="the build is for that picture, and its node shows it")
def test_the_first_build_with_auto_is_for_the_graphs_picture_and_stays_on_its_node(page: EnginePage) -> None:
    """Auto's numbers change once the build has loaded the model: what is usual for it is known only then."""
    if page.page.vue:
        pytest.skip("The server and the numbers are the same in both modes.")
    nets = page.comfy.base / "models" / "controlnet"
    unknown = "tiny_of_no_other_test.safetensors"
    shutil.copy(nets / "tiny_sd15_a.safetensors", nets / unknown)
    made, raw = workflow(page.info, **dict.fromkeys(SIZES, 0)), page.page.page
    set_widget(made, "Load ControlNet 1 (edges)", "control_net_name", unknown, page.info)
    set_widget(made, "KSampler", "steps", 1, page.info)
    for side, size in (("width", 1088), ("height", 512)):
        set_widget(made, "EmptyLatentImage", side, size, page.info)
    net = opened_anew(page, made)
    assert raw.evaluate(LARGEST, net) == 0, "nobody knows the model yet"
    page.click(net)
    page.wait_for(net, "building", timeout=60)
    raw.wait_for_function(f"id => ({LARGEST})(id) === 1088", arg=net)
    raw.wait_for_timeout(1000)
    assert page.status(net)["state"] in ("building", "ready"), "the node keeps its build; a fast machine ends it here"
    assert page.wait_for(net, "ready", "failed", "none", "unknown")["state"] == "ready"
    assert "does not fit" not in page.status(net)["text"]
    (engine,) = page.comfy.get("/hybrid_trt/engines")["engines"]
    assert "1088" in engine["profile"]


def test_a_build_that_fails_says_why(page: EnginePage) -> None:
    """Wrong settings and an unsupported model before the build; a model whose numbers are broken in it."""
    load(page, workflow(page.info, min_size=512, max_size=256))
    net = page.node(NET_1)
    raw = page.page.page
    page.click(net)
    refused = page.wait_until(net, lambda s: "is above" in s["text"], "word on the sizes", 60)
    page.shot("settings")
    labels = raw.evaluate(
        "id => Object.fromEntries(app.graph.getNodeById(id).widgets.map(w => [w.name, w.label ?? w.name]))", net)
    assert f"{labels['min_size']} 512 is above {labels['opt_size']} 128." in refused["text"]
    assert refused["tone"] == "bad"
    assert refused["button"] == "Build engine"
    words = re.compile("is above|must rise")
    told = raw.locator(f"{TOAST}, [data-testid=error-overlay]").filter(has_text=words)
    assert told.count() == 0, "one place tells it"

    made = workflow(page.info)
    set_widget(made, "Load ControlNet 1 (edges)", "control_net_name", "tiny_sd15_control_lora.safetensors", page.info)
    load(page, made)
    page.click(net)
    refused = page.wait_for(net, "unavailable", timeout=60)
    page.shot("unsupported")
    assert "unsupported model" in refused["text"]
    assert "there is nothing to do" in refused["text"]


def test_the_log_of_a_failed_build_is_shown(page: EnginePage, broken_net: str) -> None:
    if page.page.vue:
        pytest.skip("The same dialog in both modes; one build of half a minute is enough.")
    made = workflow(page.info)
    set_widget(made, "Load ControlNet 1 (edges)", "control_net_name", broken_net, page.info)
    load(page, made)
    net = page.node(NET_1)
    page.click(net)
    close_up(page, net)
    failed = page.wait_for(net, "failed", "ready")
    page.shot("failed")
    assert "differs from the normal model" in failed["text"]
    toasts = page.page.page.locator(TOAST).filter(has_text="differs from the normal model")
    assert toasts.count() == 0, "one place tells it: the node, which is in sight"
    page.page.page.locator(".hybrid-trt-log:visible").first.click()
    dialog = page.page.page.get_by_role("dialog", name="Log of the build")
    expect(dialog).to_contain_text("exporting")
    assert "pytorch version" not in dialog.inner_text()
    page.shot("log")
    page.page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    dialog.get_by_role("button", name="Copy").click()
    dialog.get_by_role("button", name="Copied").wait_for()
    assert "differs from the normal model" in page.page.page.evaluate("() => navigator.clipboard.readText()")
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="detached")
    reload(page)
    load(page, made)  # failed survives a new graph and a new page
    assert "differs" in page.wait_for(net, "failed", timeout=60)["text"]


@pytest.fixture
def broken_net(comfy: ComfyProcess) -> Iterator[str]:
    """A ControlNet with weights that are no numbers."""
    from safetensors.torch import load_file, save_file

    folder = comfy.base / "models" / "controlnet"
    path = folder / "tiny_sd15_broken.safetensors"
    weights = load_file(folder / "tiny_sd15_a.safetensors")
    name = next(name for name in weights if name.endswith("input_blocks.0.0.weight"))
    weights[name] = weights[name] * float("nan")
    save_file(weights, path)
    yield path.name
    path.unlink()
