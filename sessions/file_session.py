"""A session of an engine's files: checks calls against the manifest, adds absent inputs, returns fresh tensors."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from comfy import model_management

from ..architectures import profile_words, symbols_of
from ..architectures.calls import AsyncInputs
from ..architectures.shapes import Profile, Shape, ShapeMismatch, bind, outside
from ..comfy_model.changed_layers import structure_of
from ..comfy_model.module_copy import ReplacedForward
from ..engine_library import Engine, Fallback, Reason, Unavailable, trust
from ..engine_library.disk import gigabytes
from .cuda_capture import Capture
from .cuda_graphs import GraphCache
from .gpu_memory import is_out_of_memory, tried_again, with_room
from .made_inputs import LivePerImagePasses, Zeros
from .refit import EngineWeights
from .session import Runner, first_line, misfit, shared

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from ..comfy_model.network import NativeNetwork

log = logging.getLogger(__name__)

MAX_PLANS = 32
"""Number of sets of shapes that a session keeps plans for."""

Load = Callable[[Engine, torch.device], Runner]
"""Opens an engine for running on a device; see ``Backend.load``."""


@dataclass(frozen=True)
class _Plan:
    """Zeros and outputs for a set of input shapes, computed once."""

    zeros: dict[str, torch.Tensor]
    outputs: Mapping[str, tuple[Shape, torch.dtype]]

    def run(self, runner: Runner, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make a call of a runner, into new tensors."""
        outputs = {
            name: torch.empty(shape, dtype=dtype, device=runner.device) for name, (shape, dtype) in self.outputs.items()
        }
        runner.run(inputs, outputs)
        return outputs


class FileSession:
    """A ``Session`` of an engine on a device. It loads at its first call, and again after it was unloaded.

    An engine has weights of its own, for any patcher that ComfyUI samples with. The weights of an engine that takes any
    weights follow the patcher. Per-image passes, which no engine holds, always follow it.
    """

    refusal = None
    uncovered = None
    takes_late = False
    calls_attention = False

    def __init__(
        self,
        engine: Engine,
        load: Load,
        device: torch.device,
        recorder: Capture | None = None,
        weights: EngineWeights | None = None,
    ):
        """``weights``: weights for an engine that takes any."""
        self.engine = engine
        self.device = device
        self._load = load
        self._runner: Runner | None = None
        self._recorder = recorder
        self.graphs: GraphCache | None = None
        self._dtypes = _dtypes(engine)
        self._plans: dict[tuple, _Plan] = {}
        self._zeros = Zeros(self.device)
        self._passes: weakref.WeakKeyDictionary[object, _Passes] = weakref.WeakKeyDictionary()  # by structures
        self._current: LivePerImagePasses | None = None
        self._steady: list[str] = []
        self._weights = weights

    @property
    def backend_name(self) -> str:
        return self.engine.manifest.identity.backend

    @property
    def name(self) -> str:
        return self.engine.folder.name

    @property
    def active(self) -> FileSession:
        return self

    @property
    def engines(self) -> list[Engine]:
        return [self.engine]

    @property
    def serving(self) -> list[Engine]:
        return [self.engine]

    @property
    def follows_patches(self) -> bool:
        return self._weights is not None

    def serves_module(self, module: torch.nn.Module) -> bool:
        """Tell whether it can serve a native module: its weights are the engine's own, or follow that module."""
        return self._weights is None or self._weights.belong_to(module)

    def begin_run(self, patcher: ModelPatcher) -> None:
        """Nothing to do: its weights stay where they are."""

    def owns_weights(self, patcher: ModelPatcher) -> bool:
        return True

    def sync_from(self, network: NativeNetwork, patcher: ModelPatcher) -> None:
        layers = structure_of(network.module) or network.module
        if layers not in self._passes:
            self._passes[layers] = _live_passes(network, self.engine)
            specs = network.architecture().engine_inputs(network.module, self.engine.manifest.identity.precision)
            self._steady = [spec.name for spec in specs if spec.steady]
        found = self._passes[layers]
        if isinstance(found, Fallback):
            raise Unavailable(found.reason, found.detail)
        if found is not None:
            found.sync_from(patcher)
        self._current = found
        if self._weights is not None:
            self._weights.sync_from(patcher)

    @property
    def loaded(self) -> bool:
        return self._runner is not None

    @property
    def bytes(self) -> int:
        """Memory that it holds, or will hold when loaded; an estimate."""
        if self._runner is None:
            return self.engine.manifest.device_bytes
        return self._runner.bytes + (0 if self.graphs is None else self.graphs.bytes)

    remark = ""

    @property
    def parts(self) -> frozenset[FileSession]:
        return frozenset([self])

    @property
    def plain(self) -> str | None:
        return None if self.graphs is None else self.graphs.plain

    def state(self) -> None:
        """Return None: each graph has an execution context of its own, so no larger graph can hold its calls."""

    @property
    def joins_stacks(self) -> bool:
        return self.graphs is not None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return None if self.graphs is None else self.graphs.stream

    def load(self, most: float = math.inf) -> None:
        """Open the engine if it is not open.

        Raises:
            Unavailable: its files are damaged, or the backend cannot open it.
        """
        if self._runner is not None:
            return
        self._check()
        started = time.perf_counter()
        try:
            self._runner = with_room(self.bytes, self.device, lambda: self._load(self.engine, self.device))
        except Unavailable:
            raise
        except Exception as error:
            log.exception("Hybrid TRT: %s could not be opened", self.engine.folder.name)
            why = f"it could not be opened ({first_line(error)}); build it again, unless the log names another cause"
            raise Unavailable(Reason.ENGINE_FAILED, why) from error
        seconds = time.perf_counter() - started
        log.info("Hybrid TRT: opened %s on %s in %.1f s", self.engine.folder.name, self.device, seconds)

    def give_back(self, size: int, planning: bool = False) -> int:
        """Close the engine, and return its bytes."""
        freed = self.bytes
        self.unload()
        return freed

    def renew(self, engine: Engine) -> None:
        """Serve with this engine from now on: it has replaced the opened engine in the same folder."""
        if engine.manifest != self.engine.manifest:
            self.unload()
            self.engine = engine
            self._dtypes = _dtypes(engine)

    def close(self) -> None:
        self.unload()

    def unload(self) -> None:
        """Give its memory back; the next call loads it again."""
        self.graphs = None
        self._runner = None
        self._plans.clear()
        self._zeros.clear()
        if self._weights is not None:
            self._weights.forget()
        for found in list(self._passes.values()):
            if isinstance(found, LivePerImagePasses):
                found.release()

    def serves(self, sizes: Mapping[str, int]) -> Fallback | None:
        identity = self.engine.manifest.identity
        why = outside(identity.profile, sizes, symbols_of(identity.architecture))
        return None if why is None else Fallback(Reason.SHAPE_OUTSIDE_PROFILE, why, dict(sizes))

    def fits(self, given: Mapping[str, torch.Tensor]) -> bool:
        """Tell, without opening the engine, whether it takes tensors of these shapes.

        Outputs of per-image passes are unknown before these have run, so they are not looked at.
        """
        made = () if self._current is None else self._current.passes.steady
        specs = [spec for spec in self.engine.manifest.inputs if spec.name not in made]
        try:
            sizes = bind(specs, {spec.name: tuple(given[spec.name].shape) for spec in specs if spec.name in given})
        except ShapeMismatch:
            return False
        return self.serves(sizes) is None

    def status(self, wanted: Profile, beyond: str = "run at normal speed") -> str:
        manifest = self.engine.manifest
        identity = manifest.identity
        words = profile_words(identity.architecture, identity.profile)
        text = f"{identity.backend} {identity.precision}, {words}, {manifest.bytes / 1e6:.0f} MB"
        if identity.any_weights:
            text += ", takes any LoRA"
        if not identity.profile.contains(wanted.only(identity.profile.ranges)):
            words = profile_words(identity.architecture, wanted)
            text += f". It is smaller than this node's profile ({words}): larger pictures {beyond}"
        return text

    def run(
        self,
        given: Mapping[str, torch.Tensor],
        extras: Mapping[str, Hashable] | None = None,
        late: AsyncInputs | None = None,
    ) -> dict[str, torch.Tensor]:
        self.load()
        if self._weights is not None and self._weights.changed:
            self._take_weights()
        if self._current is not None:
            given = self._current.run(given, extras or {})
        return tried_again(lambda: self._explained(given), self.device, after=self.unload)

    def _explained(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make a call; raise Unavailable for errors other than a lack of memory."""
        try:
            return self._call(given)
        except Exception as error:
            if isinstance(error, Unavailable) or is_out_of_memory(error):
                raise
            raise self._failed(error) from error

    def _call(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plan, runner = self._plan({name: tuple(tensor.shape) for name, tensor in given.items()}), self._runner

        def prepared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            """Return the engine's inputs with its device, dtype and layout, and zeros for absent inputs."""
            given = {name: t.to(self.device, self._dtypes[name]).contiguous() for name, t in tensors.items()}
            return plan.zeros | given

        def on(runner: Runner) -> Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]:
            return lambda inputs: plan.run(runner, inputs)

        if not runner.capturable:
            return plan.run(runner, prepared(given))
        if self.graphs is None:
            made = () if self._current is None else self._current.passes.steady
            self.graphs = GraphCache(self.device, capture=self._recorder, steady=[*self._steady, *made])
        return dict(self.graphs.run(on(runner), given, prepare=prepared, own=lambda: on(runner.new_context())))

    def _take_weights(self) -> None:
        """Have the engine compute with the weights that ComfyUI samples with.

        Raises:
            Unavailable: it does not take them.
        """
        self.graphs = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        try:
            self._weights.refit(self._runner)
        except Exception as error:
            self.unload()
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> Unavailable:
        log.error("Hybrid TRT: %s failed", self.engine.folder.name, exc_info=error)
        return Unavailable(Reason.ENGINE_FAILED, first_line(error))

    def _plan(self, shapes: Mapping[str, Shape]) -> _Plan:
        key = tuple(shapes.items())
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
                self._zeros.clear()
            plan = self._plans[key] = self._new_plan(shapes)
        return plan

    def _new_plan(self, shapes: Mapping[str, Shape]) -> _Plan:
        manifest = self.engine.manifest
        specs = {s.name: s for s in manifest.inputs}
        try:
            symbols = bind(manifest.inputs, shapes)
        except ShapeMismatch as error:
            raise misfit(error) from None
        if unknown := shapes.keys() - specs.keys():
            raise Unavailable(Reason.UNSUPPORTED_INPUT, f"the engine has no input {sorted(unknown)[0]}")
        if (refusal := self.serves(symbols)) is not None:
            raise Unavailable(refusal.reason, refusal.detail, sizes=refusal.sizes)
        zeros = self._zeros.of([specs[name] for name in specs.keys() - shapes.keys()], symbols)
        outputs = {s.name: (s.shape(symbols), getattr(torch, s.dtype)) for s in manifest.outputs}
        return _Plan(zeros, outputs)

    def _check(self) -> None:
        """Raise Unavailable where the engine must not be opened here, or there is no memory to read its files."""
        self.engine.check_sizes()
        refusal = trust.why_unusable(self.engine)
        if not self.engine.folder.is_dir():  # deleted since it was looked up, and its record with it
            raise Unavailable(Reason.BROKEN_ENGINE, f"{self.name} is missing")
        if refusal is not None:
            raise Unavailable.of(refusal)
        needed, free = self.engine.manifest.bytes, model_management.get_free_memory(torch.device("cpu"))
        if free < needed:
            raise Unavailable(
                Reason.ENGINE_FAILED,
                f"opening {self.name} takes {gigabytes(needed)} of main memory, and {gigabytes(free)} are free",
                advice="close other programs, and run again",
            )


def file_session(
    engine: Engine, load: Load, device: torch.device, network: NativeNetwork | None = None, keeps_weights: bool = False
) -> FileSession:
    """Return the session for an engine on a device. All who use it share it; it closes when nobody uses it any more.

    An engine that takes any weights is opened once for each model, whose weights it then has.

    Args:
        network: the network whose weights such an engine takes.
        keeps_weights: True if such an engine has the weights that it was built with when it is opened.
    """
    key = (str(engine.folder), engine.manifest.identity.key, str(device))
    if not engine.manifest.identity.any_weights:
        found = shared(key, lambda _: True, lambda: FileSession(engine, load, device))
    else:
        key, module = (*key, id(network.module)), network.module

        def make() -> FileSession:
            return FileSession(engine, load, device, weights=EngineWeights(network, engine, keeps_weights))

        # an id may be that of an earlier object
        found = shared(key, lambda found: found.serves_module(module), make)
    found.renew(engine)
    return found


_Passes = LivePerImagePasses | Fallback | None
"""Per-image passes of a network; None where its engine takes native's inputs; or why there are no passes."""


def _live_passes(network: NativeNetwork, engine: Engine) -> _Passes:
    architecture, precision = network.architecture(), engine.manifest.identity.precision
    if architecture.engine_inputs(network.module, precision) == architecture.inputs(network.module, precision):
        return None
    try:
        return LivePerImagePasses(network, precision)
    except ReplacedForward as error:
        return Fallback(Reason.MODEL_PATCHED, str(error))


def _dtypes(engine: Engine) -> dict[str, torch.dtype]:
    return {spec.name: getattr(torch, spec.dtype) for spec in engine.manifest.inputs}
