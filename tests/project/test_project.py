"""Promises of the project about itself: dependencies that agree, nodes that keep their names, a whole package."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import versions
from comfy_process import ComfyProcess
from other_versions import requirements
from pack import ROOT

NODES = {
    "TRTUNetEngine": "TRT UNet Engine",
    "TRTControlNetEngine": "TRT ControlNet Engine",
    "TRTVAEEngine": "TRT VAE Engine",
    "TRTApplyControlNet": "TRT Apply ControlNet",
    "TRTSamplerPatch": "TRT Sampler Patch",
    "TRTReport": "TRT Report",
    "TRTCompare": "TRT Compare",
    "TRTStream": "TRT Stream",
    "TRTFrame": "TRT Frame",
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


def test_the_farms_requirements_are_an_extra_of_their_own() -> None:
    lines = (ROOT / "farm" / "requirements.txt").read_text().splitlines()
    wanted = sorted(line for line in lines if line and not line.startswith("#"))
    block = re.search(r"^farm = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert sorted(re.findall(r'"([^"]+)"', block)) == wanted


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
    code = [file for file in code if not file.startswith("benchmarks/workshop/")]
    assert sorted(code) == sorted(file for file in packed if file.endswith(".py") and "/" in file)
    for node in NODES:
        assert {f"js/docs/{node}.md", f"js/docs/{node}/zh.md", "js/docs/wiring.png"} <= set(packed)
    for folder, pattern in (("js", "*.js"), ("js", "*.css"), ("js/lib", "*.mjs"), ("locales/en", "*.json"),
                            ("locales/zh", "*.json"), ("workflows", "*.json"), ("workflows", "*.jpg"),
                            ("subgraphs", "*.json")):  # fmt: skip
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


# The header of a test run names its versions; `make test-newest` installs the newest

PINS = """# a comment

torch==2.11.0
numpy==2.2.6 ; python_version < "3"
numpy==2.4.6 ; python_version >= "3"
ruff==0.17.6
""".splitlines()


def installed(**found: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    return version


def test_versions_as_pinned_are_not_named() -> None:
    assert versions.differing_packages(PINS, installed(torch="2.11.0+cu130", numpy="2.4.6", ruff="0.17.6")) == []


def test_other_versions_and_missing_packages_are_named_with_their_pins() -> None:
    assert versions.differing_packages(PINS, installed(torch="2.7.1", numpy="2.4.6")) == [
        "torch 2.7.1 (pinned 2.11.0)", "ruff missing (pinned 0.17.6)"]  # fmt: skip


def test_another_comfyui_is_named_with_the_version_that_the_project_is_tested_with(tmp_path: Path) -> None:
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.38.1"\n')
    (line,) = versions.header(tmp_path, "0.30.0", [])
    assert "ComfyUI 0.38.1" in line
    assert "0.30.0" in line
    assert versions.header(tmp_path, "0.38.1", []) == ["ComfyUI 0.38.1 and packages are the pinned ones"]


def test_a_comfyui_that_does_not_say_its_version_is_named(tmp_path: Path) -> None:
    assert "of unknown version" in versions.header(tmp_path, "0.30.0", [])[0]


def test_the_newest_packages_are_asked_for_by_name_and_torch_by_its_pin() -> None:
    asked = requirements("newest", [*PINS, "nvidia-nccl-cu13==2.28.9", "triton==3.6.0"])
    assert asked == ['numpy ; python_version < "3"', 'numpy ; python_version >= "3"', "ruff", "torch==2.11.0"]


def test_another_torch_comes_with_the_other_pins_and_without_the_pinned_torchs_libraries() -> None:
    asked = requirements("torch==2.7.1", [*PINS, "torchvision==0.26.0", "nvidia-nccl-cu13==2.28.9", "triton==3.6.0"])
    assert asked == [*PINS[3:], "torch==2.7.1", "torchvision", "torchaudio<=2.7.1"]


# Parts of the benchmarks that need no GPU: times of prompts and steps, and the parts of TensorRT 8.6

sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "workshop")]

import prompts
import tensorrt86


def test_tensorrts_package_is_freed_of_parsers_that_were_not_compiled() -> None:
    kept = "    Builder.__enter__ = common_enter\n"
    code = f"{kept}    UffParser.__enter__ = common_enter\n    CaffeParser.__exit__ = common_exit\n"
    assert tensorrt86.without_old_parsers(code) == kept


def test_a_missing_library_gets_what_is_wanted_of_it_and_nothing_of_the_others() -> None:
    symbols = ["  U cublasCreate_v2@libcublas.so.12", "  U cublasLtCreate@libcublasLt.so.12",
               "  U cudnnCreate@libcudnn.so.8", "  w __cxa_finalize", ""]  # fmt: skip
    found = {library: tensorrt86.wanted_of(symbols, library) for library in tensorrt86.STUBS}
    assert found == {"libcudnn.so.8": ["cudnnCreate"], "libcublasLt.so.12": ["cublasLtCreate"],
                     "libcublas.so.12": ["cublasCreate_v2"]}  # fmt: skip


class FixedClock:
    """A server that takes 70 ms a prompt, 10 ms a step, and 100 ms to decode and save a picture."""

    def __init__(self, latent: Path):
        self.latent = latent

    def queue(self, prompt: prompts.Prompt, timeout: float = 60.0) -> SimpleNamespace:
        taken = 0.07 + 0.01 * prompt["sampler"]["inputs"]["steps"] + 0.1 * ("image" in prompt)
        return SimpleNamespace(ok=True, error=None, seconds=taken, output=lambda *_: (self.latent, None))


def test_a_prompts_time_is_told_apart_from_that_of_its_steps(tmp_path: Path) -> None:
    numpy.save(tmp_path / "latent.npy", numpy.zeros(1))
    memory = contextlib.nullcontext()
    memory.peak = 5.0
    run = prompts.measure(FixedClock(tmp_path / "latent.npy"), memory, 2, None, "native", runs=3)
    assert (run.median_ms, run.sampling_ms, run.step_ms) == (370.0, 270.0, 10.0)
    assert run.to_json()["step_ms"] == 10.0
