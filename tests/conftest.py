"""Shared fixtures: one real ComfyUI server per session, with tiny models and the test nodes.

The repository's root must never be on sys.path: the pack's `nodes` package and ComfyUI's `nodes.py` share a name.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
for folder in (TOOLS, ROOT / "tests" / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# what the tests build is signed by a secret of their own, not by the user's
if "HYBRID_TRT_KEY_FOLDER" not in os.environ:
    os.environ["HYBRID_TRT_KEY_FOLDER"] = tempfile.mkdtemp(prefix="hybrid-trt-key-")
    atexit.register(shutil.rmtree, os.environ["HYBRID_TRT_KEY_FOLDER"], ignore_errors=True)
if "PYTEST_XDIST_WORKER" in os.environ:  # with more threads the suite took three minutes longer
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor else starts Python with torch for each kind of vector instruction in every process that compiles, and its
# vectorized code takes g++ twice as long; only tests compile for a CPU
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import slow
import tiny_models
import versions
from comfy_process import ComfyProcess
from scenarios import A, B, Control, Scenario, latent_of, prompt
from setup_downloads import COMFYUI_VERSION


@dataclass(frozen=True)
class Environment:
    """Folder of ComfyUI, and the base directory (models, custom_nodes, input, output) that the tests use."""

    comfyui: Path
    base: Path


def pytest_report_header() -> list[str]:
    """Name what differs here from what the project is tested with."""
    comfyui = os.environ.get("HYBRID_TRT_COMFYUI")
    pins = (TOOLS / "pins.txt").read_text(encoding="utf-8").splitlines()
    return versions.header(Path(comfyui) if comfyui else None, COMFYUI_VERSION, pins)


def pytest_collection(session: pytest.Session) -> None:
    """Make ``comfy`` and ``hybrid_trt`` importable for the tests, but not where others run them."""
    if getattr(session.config.option, "numprocesses", None):
        return
    import pack

    if "HYBRID_TRT_COMFYUI" in os.environ:
        pack.import_comfy()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Modules that say so try what they promise of files under Windows' rules too."""
    if getattr(metafunc.module, "UNDER_WINDOWS_RULES_TOO", False) and "tmp_path" in metafunc.fixturenames:
        metafunc.parametrize("system", ["posix", "windows"], indirect=True)


BUILD_FOR_MINUTES = ("test_tensorrt.py", "test_live_torch.py", "test_cli.py", "test_export.py", "test_one_size.py",
                     "test_several_one_size_engines.py", "test_any_weights.py", "test_kept_weights.py",
                     "test_parallel.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that take long come first: at the end no process is left alone.

    Those with a server of ComfyUI come after those that build, so that the processes do not all wait for its engines.
    """
    serving = {item.path for item in items if {"comfy", "own_server"} & set(getattr(item, "fixturenames", ()))}
    items.sort(key=lambda item: (item.path.name not in BUILD_FOR_MINUTES, item.path not in serving))
    slow.mark(items)


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects_are_searched() -> None:
    """Keep what is imported out of later garbage collections: with torch in it, one took a second after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def system(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose the rules for files that hold: ``"posix"``, or ``"windows"`` where a test is parametrised so."""
    name = getattr(request, "param", "posix")
    if name == "posix":
        yield name
        return
    from windows_rules import windows_rules

    with windows_rules():
        yield name


@pytest.fixture(scope="session")
def environment() -> Environment:
    """The working environment that `make test` prepares. Missing is a failure: a skipped test proves nothing."""
    paths = {}
    for variable in ("HYBRID_TRT_COMFYUI", "HYBRID_TRT_BASE"):
        value = os.environ.get(variable)
        if not value:
            pytest.fail(f"{variable} is not set: run the tests with 'make test', which prepares ComfyUI and sets it.")
        paths[variable] = Path(value).resolve()
    comfyui, base = paths["HYBRID_TRT_COMFYUI"], _base_of_this_process(paths["HYBRID_TRT_BASE"])
    if not (comfyui / "main.py").is_file():
        pytest.fail(f"HYBRID_TRT_COMFYUI={comfyui} holds no ComfyUI (no main.py): run 'make test'.")
    if not base.is_dir():
        pytest.fail(f"HYBRID_TRT_BASE={base} is no directory: run 'make test'.")
    return Environment(comfyui, base)


def _base_of_this_process(base: Path) -> Path:
    """A base directory of this process's own where several run tests at once; they build and delete engines."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return base
    own = base.with_name(f"{base.name}-{worker}")
    for folder in [path for path in base.iterdir() if path.is_dir()]:
        (own / folder.name).mkdir(parents=True, exist_ok=True)
    for link in (base / "custom_nodes").iterdir():
        if link.is_symlink() and not (own / "custom_nodes" / link.name).exists():
            (own / "custom_nodes" / link.name).symlink_to(link.resolve(), target_is_directory=True)
    return own


@pytest.fixture(scope="session")
def models(environment: Environment) -> dict[str, Path]:
    """All tiny models by name, in the base's models directory; control images and a video in its input directory.

    A process of its own makes them once for all, so that this one imports none of ComfyUI's top-level modules.
    """
    shared, base = Path(os.environ["HYBRID_TRT_BASE"]).resolve(), environment.base
    with FileLock(shared / "tiny_models.lock"):
        made = subprocess.run(
            [sys.executable, str(TOOLS / "tiny_models.py"), "--comfyui", str(environment.comfyui),
             "--models", str(shared / "models"), "--input", str(shared / "input")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode:
        pytest.fail(f"the tiny models could not be made:\n{made.stdout}")
    files = [f"models/{recipe.file}" for recipe in tiny_models.RECIPES.values()]
    inputs = [*(shared / "input").glob("control_?.png"), shared / "input" / "tiny_video.mp4"]
    for file in [*files, *(path.relative_to(shared) for path in inputs)]:
        if not (base / file).exists() or not (base / file).samefile(shared / file):
            (base / file).parent.mkdir(parents=True, exist_ok=True)
            (base / file).unlink(missing_ok=True)
            os.link(shared / file, base / file)
    return {name: base / "models" / recipe.file for name, recipe in tiny_models.RECIPES.items()}


@pytest.fixture(scope="session")
def comfy(environment: Environment, models: dict[str, Path]) -> Iterator[ComfyProcess]:
    """One running ComfyUI per session, with the test nodes beside the pack, and an empty engine library."""
    shutil.rmtree(environment.base / "models" / "trt_engines", ignore_errors=True)
    link = environment.base / "custom_nodes" / "comfy_test_nodes"
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(ROOT / "tests" / "comfy_test_nodes", target_is_directory=True)
    try:
        with ComfyProcess(environment.comfyui, environment.base) as process:
            yield process
    finally:
        link.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def object_info(comfy: ComfyProcess) -> dict[str, Any]:
    """All that a running ComfyUI says about its nodes."""
    return comfy.object_info()


def build(comfy: ComfyProcess, *scenarios: Scenario) -> None:
    """Build the engines of scenarios by running each once with ``build now``."""
    for scenario in scenarios:
        history = comfy.queue(prompt(scenario.but(settings={"when_missing": "build now"}), True, "build"), timeout=300)
        latent_of(history)
        report = history.output("report", "report")[0]
        assert all(row["engine"] > 0 and row["native"] == 0 for row in report["rows"]), report


def put_back(kept: Path, library: Path, *more: Path) -> None:
    """Make kept engines the library's only ones, as they were: other modules build, damage and delete theirs."""
    for folder in library.glob("[!.]*"):
        shutil.rmtree(folder)
    library.mkdir(parents=True, exist_ok=True)
    for folder in [folder for part in (kept, *more) for folder in part.iterdir()]:
        shutil.copytree(folder, library / folder.name, copy_function=shutil.copy2)


def built_engines(comfy: ComfyProcess, factory: pytest.TempPathFactory, name: str, scenario: Scenario) -> Path:
    """Return a folder with the engines of a scenario, built by a real server of the first process that wants them."""
    root = factory.getbasetemp()
    kept = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"engines_of_{name}"
    with FileLock(f"{kept}.lock"):
        if kept.exists():
            return kept
        library = comfy.base / "models" / "trt_engines"
        for folder in library.glob("[!.]*"):
            shutil.rmtree(folder)
        build(comfy, scenario)
        shutil.copytree(library, kept, copy_function=shutil.copy2, ignore=shutil.ignore_patterns(".*"))
    return kept


@pytest.fixture(scope="session")
def sd15_engines(comfy: ComfyProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engines of the tiny SD1.5 UNet and two ControlNets, built once."""
    return built_engines(comfy, tmp_path_factory, "sd15", Scenario(controls=(A, B)))


@pytest.fixture(scope="session")
def sdxl_engines(comfy: ComfyProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engines of the tiny SDXL UNet and one ControlNet, built once."""
    return built_engines(comfy, tmp_path_factory, "sdxl", Scenario("sdxl", controls=(Control("tiny_sdxl_a"),)))


@pytest.fixture(scope="module")
def sd15(comfy: ComfyProcess, sd15_engines: Path) -> ComfyProcess:
    """A server whose library has the tiny engines of SD1.5 and no others at the start of each module."""
    put_back(sd15_engines, comfy.base / "models" / "trt_engines")
    comfy.free()
    return comfy


@pytest.fixture(scope="module")
def sdxl(sd15: ComfyProcess, sd15_engines: Path, sdxl_engines: Path) -> ComfyProcess:
    """The same server, its library with the engines of both families."""
    put_back(sdxl_engines, sd15.base / "models" / "trt_engines", sd15_engines)
    sd15.free()
    return sd15
