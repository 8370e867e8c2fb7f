"""Help pages and translations: there is one for everything that has a name, and they reach the page."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from comfy_process import ComfyProcess

ROOT = Path(__file__).resolve().parent.parent
NODES = ("TRTUNetEngine", "TRTControlNetEngine", "TRTApplyControlNet", "TRTSamplerPatch", "TRTReport")


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("node", NODES)
def test_help_pages_are_served(comfy: ComfyProcess, node: str, language: str) -> None:
    with urllib.request.urlopen(f"{comfy.url}/extensions/hybrid-trt/docs/{node}/{language}.md") as answer:
        text = answer.read().decode()
    assert text.startswith("# TRT ")
    assert len(text) > 100


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
