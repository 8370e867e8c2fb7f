"""torch: native's own live weights, compiled by Inductor and replayed as CUDA graphs. No TensorRT, no ONNX.

Without an engine it replays the uncompiled network as a CUDA graph, at once. An engine adds compiled files for some
sizes, and one for more sizes stands beside it; it holds no weights, so it serves every checkpoint of the same layout,
LoRAs included.
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

from ...architectures import architectures
from ...architectures.calls import RequestedCalls, calls_to_compile
from ...architectures.shapes import Profile
from ...architectures.user_attention import calling_exact
from ...engine_library import Engine, Fallback, Manifest, Reason, Unavailable, trust
from ...sessions.session import refusal_of
from .. import BuildSizes, LiveCompiler, LiveTask, Progress
from . import compiled, opened_files

if TYPE_CHECKING:
    from ...comfy_model.network import NativeNetwork
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
        if device.type == "cpu" and manifest.parity.get("cpu", compiled.cpu_kind()) != compiled.cpu_kind():
            return Fallback(Reason.STALE_ENGINE, "it was compiled for a CPU with other instructions")
        return None

    def writes(self, name: str) -> bool:
        return compiled.is_file_name(name)

    def weights(self, network: NativeNetwork, check: Callable[[], None] | None = None) -> str:
        """No weights are compiled in."""
        return network.live_layout

    def compile(self, function: torch.nn.Module, task: LiveTask, progress: Progress) -> dict:
        if getattr(function, "blocks", None):
            from .compile_blocks import compile_blocks

            with calling_exact() if task.calls_attention else nullcontext():
                return compile_blocks(function, task, progress)
        from .compile_step import compile_network

        return compile_network(function, task, progress)

    def known(self, engines: Sequence[Engine], device: torch.device) -> list[bytes]:
        """Contents of the engines' files with kinds of blocks for a device, which other networks may share."""
        found = []
        for engine in engines:
            manifest = engine.manifest
            ours = manifest.identity.backend == self.name and self.cannot_use(manifest, device) is None
            if ours and trust.why_unusable(engine) is None:
                names = [name for name in manifest.files if not compiled.sizes_of(name)]
                try:
                    found += map(engine.read_checked, names)
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

    def sizes(self, engine: Engine) -> list[dict[str, int]]:
        return [compiled.sizes_of(name) for name in engine.manifest.files]

    def in_use(self, engines: Sequence[Engine]) -> list[Engine]:
        return list(engines)

    def to_build(
        self, network: NativeNetwork, calls: RequestedCalls, engines: Sequence[Engine], rebuild: Collection[Engine] = ()
    ) -> list[BuildSizes]:
        """Engines to rebuild have all their files built again. Other calls get an engine beside them."""
        found = [BuildSizes(e.manifest.identity.profile, self._calls(e), again=True) for e in rebuild]
        if self.cannot_build(network.device) is not None:
            return found
        known = [call for engine in engines if refusal_of(engine) is None for call in self.sizes(engine)]
        again = [call for sizes in found for call in sizes.calls]
        for own in calls_to_compile(network.architecture(), calls, self._symbols(network), known):
            if not all(call in again for call in own):
                found.append(BuildSizes(Profile.around(own), tuple(own)))
        return found

    def _calls(self, engine: Engine) -> tuple[dict[str, int], ...]:
        """The calls that an engine was compiled with."""
        identity = engine.manifest.identity
        free = {s: served.opt for s, served in architectures()[identity.architecture].free.items()
                if s in identity.profile.ranges}  # fmt: skip
        return tuple({**free, **sizes} for sizes in self.sizes(engine))

    @staticmethod
    def _symbols(network: NativeNetwork) -> set[str]:
        """The symbols of a network's inputs; its precision does not matter for them."""
        inputs = network.architecture().engine_inputs(network.module, network.precision)
        return {dim.symbol for spec in inputs for dim in spec.dims if not isinstance(dim, int)}

    def open_live(self, engine: Engine, sizes: dict[str, int], device: torch.device) -> compiled.Compiled:
        """Open an engine's compiled file for some sizes, without the free ones, on a device.

        Raises:
            Unavailable: the files were not made on this machine, or have changed.
        """
        if (refusal := trust.why_unusable(engine)) is not None:
            raise Unavailable(refusal.reason, refusal.detail)
        name = next(name for name in engine.manifest.files if compiled.sizes_of(name) == sizes)
        return opened_files.open_contents(engine.read_checked(name), device)
