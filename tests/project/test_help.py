"""Help pages and translations: each name has one, and they reach the page."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from comfy_process import ComfyProcess

ROOT = Path(__file__).resolve().parents[2]
NODES = ("TRTAccelerate", "TRTUNetEngine", "TRTControlNetEngine", "TRTVAEEngine", "TRTApplyControlNet",
         "TRTSamplerPatch", "TRTReport", "TRTCompare", "TRTStream", "TRTFrame")
PICTURED = {"accelerate.png": {"TRTAccelerate"}, "compare.png": {"TRTCompare", "TRTAccelerate"},
            "wiring.png": {"TRTUNetEngine", "TRTControlNetEngine", "TRTSamplerPatch"}}
"""Picture -> the nodes of ours in it, as tools/make_screenshots.py draws them."""


def help_page(node: str, language: str) -> str:
    """Return the path of a help page. English has no folder: pictures then resolve here as in ComfyUI's page.

    ComfyUI's page takes it for each language that has no page of its own, too.
    """
    return f"js/docs/{node}.md" if language == "en" else f"js/docs/{node}/{language}.md"


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("node", NODES)
def test_help_pages_are_served(comfy: ComfyProcess, node: str, language: str) -> None:
    path = help_page(node, language).removeprefix("js/")
    with urllib.request.urlopen(f"{comfy.url}/extensions/hybrid-trt/{path}") as answer:
        text = answer.read().decode()
    assert text.startswith("# TRT ")
    steps = text.split("\n\n")[1]
    assert re.findall(r"^(\d)\. ", steps, re.M) == ["1", "2", "3"], "three steps come first"
    for file in re.findall(r"!\[.+?\]\((.+?)\)", text):
        assert node in PICTURED[file], "the node is in its picture"
        # ComfyUI's page looks for pictures of a help page in the folder of all help pages
        with urllib.request.urlopen(f"{comfy.url}/extensions/hybrid-trt/docs/{file}") as answer:
            assert answer.headers["Content-Type"] == "image/png"


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("node", NODES)
def test_help_names_settings_by_the_labels_that_the_node_shows(comfy: ComfyProcess, node: str, language: str) -> None:
    text = (ROOT / help_page(node, language)).read_text(encoding="utf-8")
    table = re.search(r"^\| (?:setting|设置) \|.+?\n\n", text + "\n\n", re.M | re.S)
    named = re.findall(r"^\| \*(.+?)\*", table[0], re.M) if table else []
    code = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "js" / "lib").glob("*.mjs")))
    own = re.findall(r'\b(?:presetLabel|row_\w+): "(.+?)"', code)
    shown = {label.replace("{number}", "1") for label in own}
    inputs = comfy.object_info()[node]["input"]
    for name, (_, options) in {**inputs.get("required", {}), **inputs.get("optional", {})}.items():
        chinese = comfy.get("/i18n")["zh"]["nodeDefs"][node]["inputs"][name]["name"]
        shown.add(chinese if language == "zh" else options.get("display_name", name))
    assert set(named) <= shown, set(named) - shown
    if node.endswith("Engine") or node == "TRTAccelerate":
        assert len(named) == {"TRTVAEEngine": 6, "TRTAccelerate": 11}.get(node, 10)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("node", ["TRTAccelerate", "TRTUNetEngine"])
def test_help_names_each_family_of_models_that_has_engines(node: str, language: str) -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "architectures").rglob("*.py"))
    families = set(re.findall(r'\bSizes\("([^"]+)"', code)) - {"VAE"}
    assert len(families) >= 7
    (line,) = re.findall(r"^(?:These models have engines: |以下模型有引擎：)(.+)", (
        ROOT / help_page(node, language)).read_text(encoding="utf-8"), re.M)
    assert {family for family in families if family not in line} == set()


def test_chinese_names_cover_every_node_and_input(comfy: ComfyProcess) -> None:
    served = comfy.get("/i18n")["zh"]["nodeDefs"]
    info = comfy.object_info()
    for node in NODES:
        texts = served[node]
        assert texts["display_name"].startswith("TRT ")
        assert texts["description"]
        inputs = {**info[node]["input"].get("required", {}), **info[node]["input"].get("optional", {})}
        assert set(texts["inputs"]) == set(inputs)
        for name, (_, options) in inputs.items():
            assert bool(options.get("tooltip")) <= bool(texts["inputs"][name].get("tooltip")), (node, name)
        assert len(texts["outputs"]) == len(info[node]["output"])


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_setting_has_a_name(language: str) -> None:
    code = (ROOT / "js" / "lib" / "settings.mjs").read_text(encoding="utf-8")
    ids = {f"HybridTRT_{name}" for name in re.findall(r'[sS]etting\("(\w+)"', code)}
    texts = json.loads((ROOT / "locales" / language / "settings.json").read_text(encoding="utf-8"))
    assert ids == set(texts)
