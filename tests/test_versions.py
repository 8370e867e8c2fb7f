"""The header of a test run names its versions; `make test-newest` installs the newest."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import versions
from other_versions import requirements

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
