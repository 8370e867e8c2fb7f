"""Promises of the project about itself: dependencies that agree, nodes that keep their names, a whole package."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pack
import pytest
from comfy_process import ComfyProcess

ROOT: Path = pack.ROOT
NODES = {
    "TRTUNetEngine": "TRT UNet Engine",
    "TRTControlNetEngine": "TRT ControlNet Engine",
    "TRTApplyControlNet": "TRT Apply ControlNet",
    "TRTSamplerPatch": "TRT Sampler Patch",
    "TRTReport": "TRT Report",
}


def names_and_specifiers(lines: list[str]) -> dict[str, str]:
    found = (re.match(r"\s*\"?([A-Za-z0-9_-]+)([^\",;#]*)", line) for line in lines)
    return {m[1].lower(): m[2].strip() for m in found if m}


def test_requirements_agree_with_the_project_and_leave_torch_alone() -> None:
    requirements = (ROOT / "requirements.txt").read_text().splitlines()
    light = names_and_specifiers([line for line in requirements if line.strip() and not line.startswith("#")])
    block = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0]
    declared = names_and_specifiers([line for line in block.splitlines() if '"' in line])
    assert {"onnx", "polygraphy"} == set(light), "onnxruntime would write over onnxruntime-gpu: install.py brings it"
    assert {name: declared[name] for name in light} == light
    assert {"torch", "numpy", "safetensors", "comfyui-frontend-package"} <= set(declared)


def test_pack_version_is_the_same_everywhere() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert f'PACK_VERSION = "{version}"' in (ROOT / "engine_library" / "manifest.py").read_text()


def test_nodes_keep_their_ids_and_category(comfy: ComfyProcess) -> None:
    info = comfy.object_info()
    for node, name in NODES.items():
        assert info[node]["display_name"] == name
        assert info[node]["category"] == "Hybrid TRT"
        assert info[node]["description"]


def test_apply_node_offers_at_least_eight_rows(comfy: ComfyProcess) -> None:
    _, options = comfy.object_info()["TRTApplyControlNet"]["input"]["required"]["rows"]
    assert [option["key"] for option in options["options"]][:8] == [str(n) for n in range(1, 9)]


@pytest.fixture(scope="module")
def packed() -> list[str]:
    """Files that the registry's package gets: git's, less those that .comfyignore names by folder or by name."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], stdout=subprocess.PIPE, text=True, check=True)
    ignored = [line for line in (ROOT / ".comfyignore").read_text().split() if line]
    return [file for file in listed.stdout.splitlines() if not any(_matches(file, rule) for rule in ignored)]


def _matches(file: str, rule: str) -> bool:
    return file.startswith(rule) if rule.endswith("/") else fnmatch.fnmatch(Path(file).name, rule)


def test_the_registrys_package_has_what_users_need_and_nothing_else(packed: list[str]) -> None:
    tops = {file.split("/")[0] for file in packed}
    assert tops >= {"__init__.py", "install.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE"}
    assert tops & {"tests", "tools", "build", ".ci", ".gitignore", ".comfyignore", "Makefile"} == set()
    code = [path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*.py")]
    assert sorted(code) == sorted(file for file in packed if file.endswith(".py") and "/" in file)
    for node in NODES:
        assert {f"js/docs/{node}/{language}.md" for language in ("en", "zh")} | {"js/docs/wiring.png"} <= set(packed)
    for folder, pattern in (("js", "*.js"), ("js", "*.css"), ("js/lib", "*.mjs"), ("locales/en", "*.json"),
                            ("locales/zh", "*.json"), ("workflows", "*.json"), ("workflows", "*.jpg")):  # fmt: skip
        there = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob(pattern)}
        assert there
        assert there <= set(packed), there - set(packed)


def test_the_registrys_own_checks_pass() -> None:
    """Check as ``comfy node validate`` does: pyproject.toml, and ruff's rules against exec, eval and ``;``."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^name = "[a-z][a-z0-9-]+"$', project, re.M)
    assert re.search(r'^version = "\d+\.\d+\.\d+"$', project, re.M)
    assert re.search(r'^license = \{ file = "LICENSE" \}$', project, re.M)
    assert re.search(r'^PublisherId = "[\w-]+"$', project, re.M)
    assert re.search(r'^DisplayName = ".+"$', project, re.M)
    assert re.search(r'^requires-comfyui = ">=\d+\.\d+\.\d+"$', project, re.M)  # fewer parts are dropped
    assert re.search(r'^Repository = "https://github\.com/.+"$', project, re.M)
    assert not re.search(r"^web\s*=", project, re.M)  # scripts would be loaded twice
    command = [sys.executable, "-m", "ruff", "check", ".", "-q", "--isolated", "--exclude", "build"]
    found = subprocess.run(
        [*command, "--select", "S102,S307,E702"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert found.returncode == 0, found.stdout
