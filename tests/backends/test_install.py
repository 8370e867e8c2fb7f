"""install.py brings ONNX Runtime where there is none, and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pack import ROOT


@pytest.fixture(scope="module")
def install() -> ModuleType:
    """install.py as a module; it is a script at the root, which is not on sys.path."""
    spec = importlib.util.spec_from_file_location("hybrid_trt_install", ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_installation_of_the_pack_never_fails(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], check: bool) -> None:
        assert (command[-1], check) == ("onnxruntime>=1.20.0", True)
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(install, "provider", lambda: None)
    monkeypatch.setattr(install.subprocess, "run", run)
    assert install.main() == 0


def test_it_runs_as_a_script_says_one_sentence_and_installs_no_tensorrt() -> None:
    done = subprocess.run([sys.executable, "install.py"], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0
    (told,) = done.stdout.splitlines()
    assert told == "[hybrid-trt] ONNX Runtime (onnxruntime) is installed already and stays as it is."


def _bare(folder: Path) -> subprocess.CompletedProcess[str]:
    """install.py with no packages but those in a folder, and a pip there that writes down what it is asked for."""
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    asked = f"open({str(folder / 'asked')!r}, 'a')"
    (folder / "pip" / "__main__.py").write_text(f"import sys; {asked}.write(' '.join(sys.argv[1:]))")
    return subprocess.run(
        [sys.executable, "-S", "install.py"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, env={"PATH": "", "PYTHONPATH": str(folder)},
    )


@pytest.mark.parametrize("distribution", ["onnxruntime_gpu", "onnxruntime_directml", "onnxruntime_openvino", None])
def test_whatever_brings_onnx_runtime_stays(distribution: str | None, tmp_path: Path) -> None:
    package = tmp_path / "onnxruntime"
    package.mkdir()
    (package / "__init__.py").touch()
    if distribution is not None:
        info = tmp_path / f"{distribution}-1.22.0.dist-info"
        info.mkdir()
        name = distribution.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.22.0\n")
        (info / "top_level.txt").write_text("onnxruntime\n")
    done = _bare(tmp_path)
    assert done.returncode == 0
    name = distribution.replace("_", "-") if distribution else "another source"
    assert f"ONNX Runtime ({name}) is installed already and stays as it is." in done.stdout
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("leftover", [False, True])
def test_onnx_runtime_is_installed_where_there_is_none(leftover: bool, tmp_path: Path) -> None:
    if leftover:
        (tmp_path / "onnxruntime").mkdir()  # uninstalling may leave an empty folder
    done = _bare(tmp_path)
    assert done.returncode == 0
    assert "ONNX Runtime was installed." in done.stdout
    assert (tmp_path / "asked").read_text() == "install onnxruntime>=1.20.0"


def test_without_onnx_runtime_the_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from hybrid_trt.backends import backends, onnxruntime
    from hybrid_trt.engine_library import Unavailable

    cpu = torch.device("cpu")
    backend = backends()["onnxruntime"]
    assert backend.cannot_run(cpu) is None
    monkeypatch.setattr(onnxruntime, "OLDEST", (99, 0))
    assert "is too old, 99.0 or newer is needed" in backend.cannot_run(cpu).detail
    monkeypatch.setattr(onnxruntime, "find_spec", lambda name: None)
    assert "python install.py in the pack's folder, or pip install onnxruntime" in backend.cannot_run(cpu).sentence()
    with pytest.raises(Unavailable, match="onnxruntime is not installed"):  # the check of a graph against native, too
        onnxruntime.OnnxRuntimeRunner(Path("model.onnx"), cpu, 0)


def test_the_install_and_the_backend_want_the_same_onnx_runtime(install: ModuleType) -> None:
    from hybrid_trt.backends.onnxruntime import OLDEST

    assert install.ONNXRUNTIME == f"onnxruntime>={OLDEST[0]}.{OLDEST[1]}.0"
    assert f'"{install.ONNXRUNTIME}"' in (ROOT / "pyproject.toml").read_text()
