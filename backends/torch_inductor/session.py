"""A session of the torch backend: a live network with CUDA graphs, per-image passes and compiled blocks."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from ...architectures.calls import ANY_SIZE, EVERY_SIZE, AsyncInputs, UncoveredCall, is_compiled, serves_every_size
from ...architectures.shapes import Profile
from ...architectures.user_attention import called, calling_exact, calling_users, gathers
from ...comfy_model.changed_layers import structure_of
from ...comfy_model.module_copy import ReplacedForward
from ...comfy_model.network import NativeNetwork
from ...comfy_model.torch_kernels import laid_out, strides_laid_out
from ...engine_library import Engine, Fallback, Reason, Unavailable
from ...sessions.cuda_capture import Capture
from ...sessions.cuda_graphs import GraphCache
from ...sessions.gpu_memory import is_out_of_memory, room_to_compute, tried_again
from ...sessions.made_inputs import Zeros
from ...sessions.session import first_line, refusal_of, refuse, shared
from . import opened_files
from .kinds import Kinds
from .network import LiveNetwork
from .plans import Plan, Plans
from .weight_places import WeightPlaces

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Compiler(Protocol):
    """The part of the backend that a session uses."""

    name: str

    def cannot_build(self, device: torch.device) -> Fallback | None: ...

    def open_live(self, engine: Engine, device: torch.device) -> Kinds: ...


class LiveSession:
    """Serves calls from a network's live weights, see ``Session``; without an engine too: one makes them faster.

    It does not keep the network's model: whoever calls does.

    Attributes:
        label: the network's.
        engines: the engines that were found; it uses one.
        graphs: the CUDA graphs.
        refusal: why an engine was not opened, or None.
        uncovered: the last call, where an engine would have served it, or None.
        pace: seconds of a call beside native's in words, where weights are streamed and both are known.
    """

    follows_patches = True

    def __init__(self, network: NativeNetwork, backend: Compiler, precision: str, recorder: Capture | None = None):
        self.label = network.label
        self.backend = backend
        self.backend_name = backend.name
        self.device = network.device
        self.engines: list[Engine] = []
        self._precision = precision
        self._architecture = network.architecture()
        self._live = LiveNetwork(network, self._architecture, precision)
        self._places = WeightPlaces(self._live)
        self._module, self._structure = weakref.ref(network.module), structure_of(network.module)
        weakref.finalize(network.module, _close, weakref.ref(self)).atexit = False  # being collected is too late
        self._sampled_with = weakref.ref(network.patcher)
        self._specs = {spec.name: spec for spec in self._live.inputs}
        self.calls_attention = bool(self._live.blocks) and network.calls_attention
        self._exact = self.calls_attention and not network.chose_attention
        steady = [spec.name for spec in self._live.inputs if spec.steady]
        self.graphs = GraphCache(self.device, capture=recorder, steady=[*steady, *self._live.passes.steady])
        self._zeros = Zeros(self.device, partial(strides_laid_out, device=self.device))
        self._plans = Plans(self._architecture, self._live.inputs, self.device)
        self._engine: Engine | None = None  # opened at the first call
        self._served = False  # the last call, by the engine
        self.uncovered: UncoveredCall | None = None
        self._new_run = True
        self.pace = ""
        self.refusal: str | None = None
        self.passed_over: Fallback | None = None

    @property
    def active(self) -> LiveSession:
        return self

    @property
    def live(self) -> LiveNetwork:
        return self._live

    @property
    def name(self) -> str:
        return self.serving[0].folder.name if self._served else "live weights, CUDA graph"

    @property
    def serving(self) -> list[Engine]:
        return [self._engine] if self._served else []

    @property
    def loaded(self) -> bool:
        return self._live.weights.loaded

    def state(self) -> Hashable | None:
        if not self.loaded or self.calls_attention:  # a larger graph would not see another choice of attention
            return None
        self._follow()
        self._new_run = False
        weights = self._live.weights
        return id(self), weights.generation, weights.version, id(self._live.compiled)

    @property
    def remark(self) -> str:
        words = self._places.words()
        return f"{words}: {self.pace}" if words and self.pace else words

    @property
    def parts(self) -> frozenset[LiveSession]:
        return frozenset([self])

    @property
    def joins_stacks(self) -> bool:
        return self.loaded  # weights are not taken beside calls that run: ComfyUI may free what these use

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self.graphs.stream

    @property
    def plain(self) -> str | None:
        return self.graphs.plain

    @property
    def takes_late(self) -> bool:
        return self.graphs.takes_late

    @property
    def bytes(self) -> int:
        """GPU memory that this session holds beside ComfyUI's own weights, or will hold once it has run."""
        if self.loaded:
            return self._live.bytes + self.graphs.bytes
        patcher = self._sampled_with()
        return self._live.weights.most_bytes if patcher is not None and self.owns_weights(patcher) else 0

    def use(self, engines: Sequence[Engine], passed_over: Fallback | None = None) -> None:
        """Take the compiled blocks of one of these engines; or go without.

        An engine that was built again in its folder is another engine. One that stays is not opened again.

        Args:
            passed_over: why an engine that is there is none of these.
        """
        self.passed_over = None if passed_over is None or passed_over.reason is Reason.NO_ENGINE else passed_over
        if list(engines) == self.engines:
            return
        self.engines = list(engines)
        self.refusal = next(filter(None, map(refusal_of, self.engines)), None)
        if self._engine not in self.engines:
            self._forget_engine()
            self._engine = next((engine for engine in self.engines if refusal_of(engine) is None), None)
        self.graphs.clear()
        if self.device.type == "cuda" and self._engine is not None and not self._opened:
            opened_files.ahead(partial(self.backend.open_live, self._engine, self.device), self.device)

    def serves(self, sizes: Mapping[str, int]) -> Fallback | None:
        if self._architecture.per_step or self._engine is not None and is_compiled(self._architecture, sizes):
            return None
        return self._not_compiled(sizes)

    @property
    def _opened(self) -> bool:
        return self._live.compiled is not None

    def begin_run(self, patcher: ModelPatcher) -> None:
        """A sampling run starts: look at every weight's place again at the next call."""
        self._new_run = True
        self._sampled_with = weakref.ref(patcher)

    def sync_from(self, network: NativeNetwork, patcher: ModelPatcher) -> None:
        """Compute with a patcher's weights from the next call on; as good as free when it is that of the last."""
        if patcher is not self._sampled_with():
            self.begin_run(patcher)

    def runs(self, module: torch.nn.Module) -> bool:
        """Tell whether it is this module's session, and of the layers that the module has now."""
        return self._module() is module and self._structure is structure_of(module)

    def owns_weights(self, patcher: ModelPatcher) -> bool:
        """Tell whether native weights that ComfyUI loads for a patcher would lie unused beside this session's."""
        return not self._live.shares or patcher.is_dynamic()

    def load(self, most: float = math.inf) -> None:
        """Take the memory of weights of its own, if it has some and it is known whose they are.

        Raises:
            Unavailable: there is not enough.
        """
        patcher = self._sampled_with()  # a guider's second model is loaded unplanned: here may be one that is gone
        if patcher is not None and self.owns_weights(patcher):
            self._places.limit(most, self._unused_room())
            self._with_memory(self._follow)

    def give_back(self, size: int, planning: bool = False) -> int:
        size, before = size - (max(0, self._unused_room()) if planning else 0), self.bytes
        if size <= 0:
            return 0
        self.graphs.clear()
        if not self._places.give_back(size):
            self.unload()
            return before
        return before - self.bytes

    def _unused_room(self) -> float:
        """Return the bytes that graphs leave of those that ComfyUI keeps free to compute in; below 0 they take more."""
        taken = self.graphs.taken if self.remark else None
        return 0 if taken is None else room_to_compute(self.device) - taken

    def unload(self) -> None:
        """Give the memory back; the next call starts anew."""
        self.graphs.clear()
        self._live.passes.clear()
        self._zeros.clear()
        self._live.release()

    def close(self) -> None:
        """Give all memory back, also what waits in main memory."""
        self.unload()
        self._live.move_out(())

    def run(
        self, given: Mapping[str, torch.Tensor], extras: Mapping[str, Hashable] | None = None,
        late: AsyncInputs | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        with calling_exact() if self._exact else calling_users(extras or {}, self.calls_attention):
            return self._with_memory(lambda: self._call(given, extras or {}, late))

    def _with_memory(self, start: Callable[[], Result]) -> Result:
        """Return ``start()``; where memory lacks, once more when all is closed and ComfyUI has freed its share."""
        if gathers():  # other GPUs wait
            return self._explained(start)
        return tried_again(lambda: self._explained(start), self.device, self._with_less, self.unload)

    def _explained(self, start: Callable[[], Result]) -> Result:
        try:
            return start()
        except Exception as error:
            if isinstance(error, Unavailable) or is_out_of_memory(error):
                raise
            log.exception("Hybrid TRT: %s failed on its live weights", self.label)
            raise Unavailable(Reason.ENGINE_FAILED, first_line(error)) from error

    def _follow(self) -> None:
        patcher = self._sampled_with()
        self._places.follow(patcher, self.owns_weights(patcher), self._new_run, self._open_engine)

    def _with_less(self) -> None:
        """Hold less: no graphs, and fewer weights where some are streamed or there are no graphs."""
        if not len(self.graphs) or self.remark:
            self._places.leave_more_free()
            self.unload()
        self.graphs.clear()

    def _call(
        self, given: Mapping[str, torch.Tensor], extras: Mapping[str, Hashable], late: AsyncInputs | None
    ) -> dict[str, torch.Tensor]:
        self._follow()
        if self._new_run:
            self.graphs.make_room()
        self._new_run = False
        given = self._live.passes.run(given, extras, (self._live.weights.version, called()))
        plan = self._plans.of(given)
        if plan.compiled:
            self._open_engine()
        self._served = plan.compiled and self._opened
        if not self._architecture.per_step and not self._served:
            raise Unavailable.of(self._not_compiled(plan.symbols))
        try:
            results = self._computed(given, plan, late)
        except (Unavailable, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not self._served or is_out_of_memory(error) or gathers():
                raise
            self._refuse(error)
            self._follow()
            results = self._computed(given, plan, late)
        self.uncovered = None if self._served else plan.uncovered
        return dict(results)

    def _not_compiled(self, sizes: Mapping[str, int]) -> Fallback:
        """The reason for a call that live weights do not serve without compiled blocks."""
        if not is_compiled(self._architecture, sizes):
            detail = f"torch compiles nothing for {self._architecture.call_words(sizes)}"
            return Fallback(Reason.SHAPE_OUTSIDE_PROFILE, detail, advice="choose another size if you want the engine")
        uncovered = UncoveredCall(frozenset(sizes.items()), ANY_SIZE, "native")
        return Fallback(Reason.SHAPE_OUTSIDE_PROFILE, f"nothing is compiled for {ANY_SIZE}", uncovered=uncovered,
                        advice=f"build again for {ANY_SIZE}")  # fmt: skip

    def _computed(
        self, given: Mapping[str, torch.Tensor], plan: Plan, late: AsyncInputs | None
    ) -> dict[str, torch.Tensor]:
        if not self._architecture.per_step or gathers():
            return self._live.run(self._prepared(given, plan.symbols), plan.compiled)
        return self.graphs.run(
            lambda tensors: self._live.run(tensors, plan.compiled),
            given,
            token=(self._live.weights.generation, called()),
            prepare=lambda tensors: self._prepared(tensors, plan.symbols),
            late=late,
        )

    def _prepared(self, given: Mapping[str, torch.Tensor], symbols: dict[str, int]) -> dict[str, torch.Tensor]:
        """The network's inputs: device, dtype and layout as it computes in, zeros for what is absent."""
        absent = [spec for name, spec in self._specs.items() if name not in given]
        inputs = self._zeros.of(absent, symbols)
        for name, tensor in given.items():
            if name in self._live.passes.steady:
                inputs[name] = tensor  # as it has to be
            else:
                inputs[name] = laid_out(tensor.to(self.device, getattr(torch, self._specs[name].dtype)))
        return inputs

    def _open_engine(self) -> None:
        """Open the engine's compiled blocks, if there is one; where that fails the network runs uncompiled."""
        engine = self._engine
        if engine is None or self._opened:
            return
        started = time.perf_counter()
        try:
            self._live.use_compiled(self.backend.open_live(engine, self.device), engine)
        except Exception as error:
            self._refuse(error)
            return
        took = time.perf_counter() - started
        log.info("Hybrid TRT: opened %s on %s in %.1f s", engine.folder.name, self.device, took)

    def _refuse(self, error: Exception) -> None:
        """Go on without the engine, which cannot be opened, or not run; until it is built again."""
        self.refusal = str(error) if isinstance(error, Unavailable) else first_line(error)
        refuse(self._engine, self.refusal)
        self._forget_engine()
        if not self._live.streams:
            self._live.move_out(())
        self.graphs.clear()
        log.warning("Hybrid TRT: %s runs uncompiled (%s)", self.label, first_line(error))

    def _forget_engine(self) -> None:
        self._live.forget_compiled()
        self._engine, self._served = None, False

    def status(self, wanted: Profile, beyond: str = "run at normal speed") -> str:
        start = f"torch {self._precision} on live weights"
        if self.refusal is not None:
            return f"{start}, not compiled: {self.refusal}; build it again"
        if not self.engines:
            already = ": already faster" if self.device.type == "cuda" else ""
            builds = serves_every_size(self._architecture) and self.backend.cannot_build(self.device) is None
            more = "; build for full speed" if builds else ""
            why = f". The engine that is there is not used: {self.passed_over}" if self.passed_over else ""
            return f"{start}, not compiled{already}{more}{why}"
        size = self._engine.manifest.bytes / 1e6
        return f"{start}, compiled for {EVERY_SIZE}, {size:.0f} MB{'; ' * bool(self.remark)}{self.remark}"


def live_session(network: NativeNetwork, backend: Compiler, precision: str) -> LiveSession:
    """The session for a native module, shared by all who use it: its weights are on the GPU once.

    Raises:
        Unavailable: another node replaced a part of the module.
    """
    key = (id(network.module), network.architecture().name, network.role, precision, network.device,
           network.live_layout, network.chose_attention)  # fmt: skip
    try:  # ids come again
        return shared(key, lambda found: found.runs(network.module), lambda: LiveSession(network, backend, precision))
    except ReplacedForward as error:
        raise Unavailable(Reason.MODEL_PATCHED, str(error)) from error


def _close(session: weakref.ref[LiveSession]) -> None:
    if (found := session()) is not None:
        found.close()
