"""What the project promises about itself: dependencies that agree, nodes that keep their names, a README that knows."""

from __future__ import annotations

import re
from pathlib import Path

import pack
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
    assert {"onnx", "onnxruntime", "polygraphy"} == set(light)
    assert {name: declared[name] for name in light} == light
    assert {"torch", "numpy", "safetensors", "comfyui-frontend-package"} <= set(declared)


def test_pack_version_is_the_same_everywhere() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert f'PACK_VERSION = "{version}"' in (ROOT / "engine_builder" / "build.py").read_text()


def test_nodes_keep_their_ids_and_category(comfy: ComfyProcess) -> None:
    info = comfy.object_info()
    for node, name in NODES.items():
        assert info[node]["display_name"] == name
        assert info[node]["category"] == "Hybrid TRT"
        assert info[node]["description"]


def test_apply_node_offers_at_least_eight_rows(comfy: ComfyProcess) -> None:
    _, options = comfy.object_info()["TRTApplyControlNet"]["input"]["required"]["rows"]
    assert [option["key"] for option in options["options"]][:8] == [str(n) for n in range(1, 9)]


def test_readme_explains_every_reason_and_every_node() -> None:
    text = (ROOT / "README.md").read_text()
    from hybrid_trt.engine_library import Reason

    for word in [*NODES.values(), *(reason.value for reason in Reason)]:
        assert word in text, f"README.md does not mention {word!r}"
