"""torch: native's own live weights, compiled by Inductor and replayed as CUDA graphs. No TensorRT, no ONNX.

Without an engine it replays the uncompiled network as a CUDA graph, at once. An engine has the network's blocks
compiled, for every size; it holds no weights, so it serves every checkpoint of the same layout, LoRAs included.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from ...architectures.calls import RequestedCalls, serves_every_size
from ...architectures.shapes import Profile, symbols_in
from ...architectures.user_attention import calling_exact
from ...engine_library import Engine, Fallback, Manifest, Reason, Unavailable, trust
from ...sessions.session import refusal_of
from .. import BuildSizes, LiveCompiler, LiveTask, Progress
from . import compiled, opened_files

if TYPE_CHECKING:
    from ...comfy_model.network import NativeNetwork
    from .kinds import Kinds
    from .session import LiveSession


log = logging.getLogger(__name__)


class TorchBackend(LiveCompiler):
    """Runs and compiles live networks. On a CPU it runs them eagerly, for tests, and only when chosen by name."""

    name = "torch"
    preference = 10
    measured_on = ("cuda",)
    builds_on_gpu = True

    def version(self) -> str:
        return f"{torch.__version__} format {compiled.FORMAT}"

    def target(self, device: torch.device) -> str:
        if device.type != "cuda":
            return str(device.type)
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, {major}.{minor}"

    def get_ready(self) -> None:
        if torch.cuda.is_available():
            opened_files.import_ahead()

    def cannot_run(self, device: torch.device) -> Fallback | None:
        if device.type not in ("cuda", "cpu"):
            return Fallback(Reason.BACKEND_MISSING, f"the torch backend has not been tried on {device.type}")
        return None

    def cannot_build(self, device: torch.device) -> Fallback | None:
        """Return why nothing can be compiled for a device here; running without an engine needs none of it."""
        if not compiled.can_compile():
            oldest = ".".join(map(str, compiled.OLDEST_TORCH))
            return Fallback(Reason.BACKEND_MISSING, f"compiling needs torch {oldest} or newer")
        if device.type == "cuda" and importlib.util.find_spec("triton") is None:
            name = "triton-windows" if os.name == "nt" else "triton"
            return Fallback(Reason.BACKEND_MISSING, f"compiling needs Triton: pip install {name}")
        if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++", "cl"))):
            return Fallback(Reason.BACKEND_MISSING, "compiling for the CPU needs a C++ compiler")
        return None

    def cannot_use(self, manifest: Manifest, device: torch.device) -> Fallback | None:
        identity = manifest.identity
        if identity.device != self.target(device):
            return Fallback(Reason.WRONG_GPU, f"it was compiled for {identity.device}")
        if identity.backend_version != self.version():
            return Fallback(Reason.STALE_ENGINE, f"it was compiled by torch {identity.backend_version}")
        if any(map(compiled.is_for_one_size, manifest.files)):
            return Fallback(Reason.STALE_ENGINE, "it was compiled for one size, and engines are for every size now")
        if device.type == "cpu" and manifest.parity.get("cpu", compiled.cpu_kind()) != compiled.cpu_kind():
            return Fallback(Reason.STALE_ENGINE, "it was compiled for a CPU with other instructions")
        return None

    def writes(self, name: str) -> bool:
        return compiled.is_file_name(name)

    def weights(self, network: NativeNetwork, check: Callable[[], None] | None = None) -> str:
        """No weights are compiled in."""
        return network.live_layout

    def compile(self, function: torch.nn.Module, task: LiveTask, progress: Progress) -> dict:
        from .compile_blocks import compile_blocks

        with calling_exact() if task.calls_attention else nullcontext():
            return compile_blocks(function, task, progress)

    def known(self, engines: Sequence[Engine], device: torch.device) -> list[bytes]:
        """Contents of the engines' files for a device: other networks may share kinds of blocks."""
        found = []
        for engine in engines:
            manifest = engine.manifest
            ours = manifest.identity.backend == self.name and self.cannot_use(manifest, device) is None
            if ours and trust.why_unusable(engine) is None:
                try:
                    found += map(engine.read_checked, manifest.files)
                except Unavailable as broken:
                    log.info("Hybrid TRT: nothing is taken from %s (%s)", engine.folder.name, broken)
        return found

    def session(
        self, network: NativeNetwork, engines: Sequence[Engine], precision: str, passed_over: Fallback | None
    ) -> LiveSession:
        from .session import live_session  # which needs ComfyUI

        found = live_session(network, self, precision)
        found.use(engines, passed_over)
        return found

    def in_use(self, engines: Sequence[Engine]) -> list[Engine]:
        return list(engines)

    def to_build(
        self, network: NativeNetwork, calls: RequestedCalls, engines: Sequence[Engine], rebuild: Collection[Engine] = ()
    ) -> list[BuildSizes]:
        """An engine serves all calls, and is compiled with the same ones whatever is requested."""
        found = [BuildSizes(engine.manifest.identity.profile, again=True) for engine in rebuild]
        architecture = network.architecture()
        served = found or any(refusal_of(engine) is None for engine in engines)
        if served or not serves_every_size(architecture) or self.cannot_build(network.device) is not None:
            return found
        symbols = symbols_in(architecture.engine_inputs(network.module, network.precision))
        usual = {symbol: served.opt for symbol, served in architecture.free.items() if symbol in symbols}
        wanted = calls.wanted(architecture)
        return [BuildSizes(Profile.around([usual]), wanted)] if wanted else []

    def open_live(self, engine: Engine, device: torch.device) -> Kinds:
        """Open an engine's compiled blocks on a device.

        Raises:
            Unavailable: the files were not made on this machine, or have changed.
        """
        if (refusal := trust.why_unusable(engine)) is not None:
            raise Unavailable(refusal.reason, refusal.detail)
        return opened_files.open_contents(engine.read_checked(next(iter(engine.manifest.files))), device)
