"""Promises of README, docs and help: short, complete, with links that resolve and figures that were measured."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import onnx
import pack
import pytest
import torch
from hybrid_trt import backends
from hybrid_trt.engine_builder import doctor
from hybrid_trt.engine_builder.command_line import main
from hybrid_trt.nodes import schemas
from PIL import Image

ROOT: Path = pack.ROOT
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")]
PAGES += [ROOT / folder / "README.md" for folder in ("benchmarks", "farm")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
HELP = sorted((ROOT / "js" / "docs").rglob("*.md"))
PAGES += sorted((ROOT / "js" / "docs").glob("*.md"))
ROOMS = "|".join({"js", *(path.parent.name for path in ROOT.glob("[a-z]*/*.py"))})
EXAMPLES = {"backends/reference.py"}
"""A file that a reader is told to make."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table_tool() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("speed_table", ROOT / "benchmarks" / "table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    return table


def test_readme_is_read_in_two_minutes() -> None:
    text = read("README.md")
    assert len(text.splitlines()) <= 130
    assert len(words(text)) <= 1200
    assert "torch" in text.splitlines()[2], "the third line says what runs on which card"


def words(text: str) -> list[str]:
    """Return the words of a page without its markup and code."""
    text = re.sub(r"```.*?```", " ", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[|*`#]|^[-:| ]+$", " ", text, flags=re.M).split()


def test_each_kind_of_reader_finds_the_way_at_the_top_of_readme() -> None:
    text = read("README.md")
    top = " ".join(words(text)[:400])
    artist, serving, developer = (line for line in text.splitlines() if line.startswith("* **"))
    assert top.index("Z-Image") < top.index("does it fit") < top.index("POST /render") < top.index("make test")
    assert "(#install)" in artist
    assert "(#several-gpus-and-servers)" in serving
    assert "(docs/add_a_family.md)" in developer


def test_readme_names_every_node_and_every_page_of_docs() -> None:
    text = read("README.md")
    for node in ("UNet Engine", "ControlNet Engine", "Apply ControlNet", "Sampler Patch", "Report"):
        assert f"TRT {node}" in text
    linked = text + read("CONTRIBUTING.md")
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in linked, page.name


def test_security_is_one_page_that_readme_links() -> None:
    text = read("SECURITY.md")
    assert len(text.splitlines()) <= 70
    assert "(SECURITY.md)" in read("README.md")
    assert re.search(r"\(https://github\.com/[\w-]+/[\w-]+/security/advisories/new\)", text), "where to report"


def test_every_reason_is_explained() -> None:
    from hybrid_trt.engine_library import Reason

    text = read("docs/fallbacks.md")
    for reason in Reason:
        assert f"| {reason.value} |" in text, reason


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)", target.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}, link


def test_files_and_scripts_that_pages_name_exist() -> None:
    for page in PAGES:
        for path in re.findall(rf"`((?:{ROOMS})/[\w/*]+\.\w+)`", page.read_text(encoding="utf-8")):
            assert any(ROOT.glob(path)) or path in EXAMPLES, f"{page.name}: {path}"
    named = set(re.findall(r"`(\w+\.py)`", read("benchmarks/README.md")))
    assert named <= {path.name for path in (ROOT / "benchmarks").rglob("*.py")}


def test_the_tests_that_the_makefile_names_are_there() -> None:
    (names,) = re.findall(r"^TORCH_TESTS = .+\n((?:\t.+\n)+)", read("Makefile"), re.M)
    assert [name for name in re.findall(r"\w+", names) if not any(ROOT.glob(f"tests/*/test_{name}.py"))] == []


def test_pictures_are_small_and_shown() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in [*PAGES, *HELP, ROOT / "pyproject.toml"])
    for picture in [*(ROOT / "docs" / "images").iterdir(), *(ROOT / "js" / "docs").glob("*.png")]:
        assert picture.stat().st_size < 400_000, picture.name
        assert picture.name in pages, f"{picture.name} is shown nowhere"


def test_the_registrys_pictures_have_the_sizes_that_it_asks_for() -> None:
    named = dict(re.findall(r'^(Icon|Banner) = "https://.*/main/(docs/images/.+?)"', read("pyproject.toml"), re.M))
    sizes = {what: Image.open(ROOT / path).size for what, path in named.items()}
    assert sizes["Icon"] == (400, 400)
    assert sizes["Banner"][0] * 9 == sizes["Banner"][1] * 21


def test_the_table_of_speeds_is_the_one_that_its_tool_makes() -> None:
    table = table_tool()
    assert table.for_page(json.loads(read("benchmarks/results/h200.json"))) in read(table.PAGE)


def test_the_documented_backend_is_one_file_that_node_command_line_and_doctor_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", read("docs/add_a_backend.md"), re.S)
    (tmp_path / "reference.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    try:
        (widget,) = (one for one in schemas._settings() if one.id == "backend")
        assert widget.options == ["auto", *backends.backends()]
        assert widget.options[-1] == main._backend_name("reference") == "reference"
        assert doctor._backend(backends.backends()["reference"], torch.device("cpu")).startswith("serves, version ")
    finally:
        del sys.modules["hybrid_trt.backends.reference"], backends.reference


def test_the_documented_backend_runs_a_graph(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", read("docs/add_a_backend.md"), re.S)
    module = types.ModuleType("hybrid_trt.backends.reference")
    module.__package__ = "hybrid_trt.backends"
    exec(compile(code, "reference.py", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    (backend,) = module.BACKENDS
    assert backend.cannot_run(torch.device("cpu")) is None
    assert backend.cannot_run(torch.device("cuda")) is not None
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "y"], ["z"])], "sum",
                                   [value(name, 1, [2]) for name in "xy"], [value("z", 1, [2])])
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=10), path)
    request = types.SimpleNamespace(onnx=path)
    assert backend.build(request, lambda phase, done: None) == ["model.onnx"]
    manifest = types.SimpleNamespace(device_bytes=8)
    engine = types.SimpleNamespace(read_checked=lambda name: (tmp_path / name).read_bytes(), manifest=manifest)
    runner, out = backend.load(engine, torch.device("cpu")), torch.zeros(2)
    runner.run({"x": torch.ones(2), "y": torch.tensor([1.0, 2.0])}, {"z": out})
    assert out.tolist() == [2.0, 3.0]
    required = {name for name in vars(backends.Backend) if not name.startswith("_")}
    assert all(hasattr(backend, name) for name in required)
