"""The page's pure logic, by Node's own test runner, and what its files have to keep to."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JS = ROOT / "js"


def test_page_logic() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed, so the page's pure logic was not tested; the browser tests still drive it.")
    files = sorted(str(path) for path in (ROOT / "tests" / "js").glob("*.test.mjs"))
    assert files
    done = subprocess.run([node, "--test", *files], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def test_only_extensions_are_js_files() -> None:
    """ComfyUI imports every .js below js/ as an extension, so helpers are .mjs."""
    for path in JS.rglob("*.js"):
        assert "registerExtension" in path.read_text(encoding="utf-8"), path
        assert path.parent == JS


@pytest.mark.parametrize("path", sorted([*JS.rglob("*.js"), *JS.rglob("*.mjs")]), ids=lambda path: path.name)
def test_files_import_only_the_page_and_one_another(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "http" not in re.sub(r"//.*", "", text)
    for source in re.findall(r'from "([^"]+)"', text):
        if source.startswith("../../scripts/"):
            assert source in ("../../scripts/app.js", "../../scripts/api.js")
        else:
            assert (path.parent / source).is_file(), source


def test_new_nodes_have_the_sizes_of_the_first_preset() -> None:
    from hybrid_trt.architectures.shapes import SIZE_NAMES

    text = (JS / "lib" / "presets.mjs").read_text(encoding="utf-8")
    first = re.search(r"PRESETS = \{\s+(\w+): \{(.*?)\}", text)
    found = re.findall(r"(\w+): (\d+)", first[2])
    assert first[1] == "presetFit"
    assert found == [(name, "0") for name in SIZE_NAMES]
