"""For tests of builds: a network that exports fast, the slow backend, processes that must be gone, small disks."""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import comfy.model_patcher
import comfy.ops
import psutil
import pytest
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from hybrid_trt import backends
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.comfy_model.network import UNET_PREFIX, NativeNetwork
from hybrid_trt.engine_builder.jobs import BuildQueue
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine
from pack import ROOT

CPU = torch.device("cpu")
PROFILE = Profile({"B": Range(1, 2, 4), "H": Range(4, 16, 40), "W": Range(4, 16, 40), "T": Range(77, 77, 154)})


def main_file(engine: Engine) -> Path:
    """Return the file that the backend opens."""
    return engine.folder / next(iter(engine.manifest.files))


def small_network(seed: int = 1, **changes: Any) -> NativeNetwork:
    """A random UNet of the SD1.5 family with 4 million parameters inside a real ComfyUI patcher."""
    config = {"model_channels": 64, "legacy": False, "image_size": 32, "in_channels": 4, "out_channels": 4,
              "use_spatial_transformer": True, "context_dim": 64, "num_heads": 4, "channel_mult": [1, 2],
              "num_res_blocks": [1, 1], "transformer_depth": [1, 1], "transformer_depth_output": [1] * 4,
              "transformer_depth_middle": 1, "dtype": torch.float32, "device": CPU} | changes
    module = UNetModel(operations=comfy.ops.disable_weight_init, **config)
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        fan_in = p[0].numel() if p.ndim > 1 else 100
        p.data = torch.randn(p.shape, generator=generator) / fan_in**0.5
    model = torch.nn.Module()
    model.diffusion_model = module.eval().requires_grad_(False)
    patcher = comfy.model_patcher.ModelPatcher(model, CPU, CPU)
    return NativeNetwork(patcher, module, UNET_PREFIX, torch.float32, f"small_{seed}.safetensors", Role.BACKBONE)


@contextmanager
def slow_backend(name: str = "slow") -> Iterator[Any]:
    """The slow backend, or another one for tests, as one of the pack's, for as long as the block lasts."""
    paths = list(backends.__path__)
    backends.__path__ = [*paths, str(ROOT / "tests" / "support" / "backends")]
    try:
        yield importlib.import_module(f"{backends.__name__}.{name}_backend").BACKEND
    finally:
        backends.__path__ = paths


@pytest.fixture
def queue() -> Iterator[BuildQueue]:
    made = BuildQueue()
    yield made
    made.close()


@pytest.fixture(scope="module")
def network() -> NativeNetwork:
    return small_network()


@pytest.fixture
def backend() -> Iterator[Any]:
    with slow_backend() as slow:
        yield slow


def pretend(task: dict, *_: Any) -> dict:
    """Both steps without their work."""
    folder = Path(task["folder"])
    if task["step"] == "export":
        (folder / "parameters.json").write_text("{}")
        return {"onnx": "model.onnx", "parity": {"rel_err": 0.0}, "seconds": {}}
    (folder / "engine.slow").write_bytes(b"slow")
    return {"files": ["engine.slow"], "seconds": {}}


def order(network: NativeNetwork, backend: Any, profile: Profile = PROFILE) -> BuildOrder:
    """Return the order that the tests build."""
    return BuildOrder(network, "float32", profile, backend)


def children(pid: int | None = None) -> list[psutil.Process]:
    """The builders that a process (this one by default) has running, with their helpers."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "engine_builder.worker.main" in child.cmdline():
                found += [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            pass
    return found


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Have the builders of a process stand still: they are quicker than what a test does meanwhile."""
    assert until(lambda: children(pid), 60)
    stopped = children(pid)
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


PROMPTLY = 15.0
"""Seconds in which a cancel has taken effect on a machine that is busy; an idle one takes less than two."""


def gone(processes: list[psutil.Process], timeout: float = PROMPTLY) -> bool:
    """Return whether all processes end within some time; zombies have ended."""
    return until(lambda: all(not p.is_running() or _is_zombie(p) for p in processes), timeout)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], object], timeout: float) -> bool:
    """Return whether a condition comes true within some time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def contents(folder: Path) -> list[str]:
    """List a library's folder without what is only remembered there: weights hashes, states of nodes."""
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".json"))


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A folder on a disk of its own with few kilobytes; where we may not mount, files can only get a part as large."""
    folder.mkdir(exist_ok=True)
    mounted = os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 600, limits[1]))
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """A folder that cannot be written, not even by root."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        folder.chmod(0o555)
        try:
            yield folder
        finally:
            folder.chmod(0o755)
        return
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
