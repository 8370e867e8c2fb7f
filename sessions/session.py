"""Sessions: they serve a network's calls from an engine's files or live weights. Callers need not know which."""

from __future__ import annotations

import errno
import math
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..architectures.calls import AsyncInputs, UncoveredCall
from ..architectures.shapes import Profile, ShapeMismatch
from ..engine_library import Engine, Fallback, Reason, Unavailable

if TYPE_CHECKING:
    import torch
    from comfy.model_patcher import ModelPatcher

    from ..comfy_model.network import NativeNetwork


class Runner(Protocol):
    """A loaded engine.

    Attributes:
        device: where inputs and outputs have to be.
        bytes: memory that it holds, estimated.
        capturable: True if its runs may be captured as CUDA graphs.
    """

    device: torch.device
    bytes: int
    capturable: bool

    def new_context(self) -> Runner:
        """Return a runner of the same loaded engine for calls of a single set of shapes.

        Runs of other runners leave its buffers alone, so these stay valid for a CUDA graph. Only where runs are
        capturable.

        Raises:
            Unavailable: memory is short.
        """
        ...

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        """Compute with other weights from now on; nothing of this engine may be running.

        Only for engines that take any weights, and before their first run. All contexts take the weights.

        Args:
            weights: initialiser of the graph -> contiguous tensor in main memory, in the engine's precision; computed
                when it is asked for.
            changed: the initialisers whose values differ from the engine's.

        Raises:
            RuntimeError: a weight that the engine needs was not given, or was refused.
        """
        ...

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Compute into ``outputs``. All tensors contiguous, on ``device``, with the dtypes and shapes of the engine."""
        ...


class Active(Protocol):
    """The session that served a call, for reports.

    Attributes:
        backend_name: its backend.
        name: the engine's folder, or words.
        serving: the engines that had a part in the call.
        uncovered: the call, where live weights ran it without a compiled file although their backend compiles.
        plain: why the call ran without a CUDA graph although such calls are captured, or None.
    """

    backend_name: str
    name: str
    serving: Sequence[Engine]
    uncovered: UncoveredCall | None
    plain: str | None

    def state(self) -> Hashable | None:
        """Return a value that changes with all that calls read. A larger CUDA graph of calls is valid until then.

        None if no larger graph may hold its calls, or if the weights are not loaded.

        Raises:
            Unavailable: memory is short.
        """


class Session(Protocol):
    """Serves the calls of a network on a device; shared by all who use the same engine or the same live weights.

    Attributes:
        engines: the engines of the library that it uses; a folder that was built again is another engine.
        refusal: why an engine was not opened although calls are served, or None.
        active: the session that served the last call.
        follows_patches: True if it computes with whatever weights ComfyUI samples with, so that LoRAs need no engine
            of their own. It then lives as long as the native module, and else as long as prompts use it.
        loaded: True while it holds its memory.
        bytes: memory that it holds beside ComfyUI's own weights, or will hold once it has run.
        parts: the sessions that hold that memory: itself, or the sessions that it consists of.
        joins_stacks: True if it may run now in a stack of ControlNets, on ``stream``.
        stream: a CUDA stream that no other session uses, or None. Results of a call on it are lent: the next call of
            this session, or of one with a part in common, writes to them.
        takes_late: True if ``run`` takes inputs that another stream still computes.
        calls_attention: True if it computes with the attention that its user chose, see ``attention.choice_for``.
        remark: a sentence on what is streamed, without its full stop; mostly empty.
    """

    engines: Sequence[Engine]
    refusal: str | None
    active: Active
    follows_patches: bool
    loaded: bool
    bytes: int
    parts: frozenset[Session]
    joins_stacks: bool
    stream: torch.cuda.Stream | None
    takes_late: bool
    calls_attention: bool
    remark: str

    def load(self, most: float = math.inf) -> None:
        """Take the memory that is needed.

        Args:
            most: bytes that weights may take, where some can be streamed.

        Raises:
            Unavailable: there is not enough, or the engine cannot be opened.
        """
        ...

    def unload(self) -> None:
        """Give the memory back; the next call takes it again."""
        ...

    def close(self) -> None:
        """Give back the memory on the GPU, and main memory of weights that are streamed; the next call takes both."""
        ...

    def give_back(self, size: int, planning: bool = False) -> int:
        """Give back at least so many bytes where weights can be streamed, else all; return the bytes.

        Args:
            planning: whether ComfyUI makes room for a run of this session.
        """
        ...

    def owns_weights(self, patcher: ModelPatcher) -> bool:
        """Tell whether native weights that ComfyUI loads for a patcher would lie unused beside the session's own."""
        ...

    def begin_run(self, patcher: ModelPatcher) -> None:
        """Start a sampling run with a patcher: ComfyUI may have moved weights."""
        ...

    def sync_from(self, network: NativeNetwork, patcher: ModelPatcher) -> None:
        """Serve this network with a patcher's weights from the next call on. Called before every call, so it is cheap.

        Raises:
            Unavailable: another node replaced a part of the network.
        """
        ...

    def serves(self, sizes: Mapping[str, int]) -> Fallback | None:
        """Return why calls of these sizes are not served, or None."""
        ...

    def run(
        self,
        given: Mapping[str, torch.Tensor],
        extras: Mapping[str, Hashable] | None = None,
        late: AsyncInputs | None = None,
    ) -> dict[str, torch.Tensor]:
        """Compute a call.

        Args:
            given: input name -> tensor of any float dtype on any device. Inputs of a per-image pass are passed on
                unchanged. Absent optional inputs count as zeros.
            extras: see ``EngineCall``.
            late: inputs that another stream still computes; only where ``takes_late``.

        Returns:
            Output name -> fresh tensor on the session's device, which the caller owns.

        Raises:
            Unavailable: the call does not fit this engine, or the engine failed.
        """
        ...

    def status(self, wanted: Profile, beyond: str = "run at normal speed") -> str:
        """Describe the session in one sentence for the node, which wants a profile.

        Args:
            beyond: the verb for larger pictures, which it does not serve.
        """
        ...


Found = TypeVar("Found", bound=Session)

_open: weakref.WeakValueDictionary[tuple, Session] = weakref.WeakValueDictionary()


def shared(key: tuple, fits: Callable[[Found], bool], make: Callable[[], Found]) -> Found:
    """Return the open session with a key, if it still fits, or a new session. It closes when nobody uses it."""
    found = _open.get(key)
    if found is None or not fits(found):
        found = _open[key] = make()
    return found


def open_sessions() -> list[Session]:
    """Return the sessions that somebody holds, except sessions that consist of several."""
    return [session for session in list(_open.values()) if session.parts == {session}]


_refused: dict[str, tuple[object, str]] = {}


def refuse(engine: Engine, why: str) -> None:
    """Note that an engine could not be opened, or run, in this process. If it is built again, it is tried again."""
    _refused[str(engine.folder)] = (engine.manifest, why)


def refusal_of(engine: Engine) -> str | None:
    """Return why an engine could not be opened in this process, or None."""
    manifest, why = _refused.get(str(engine.folder), (None, None))
    return why if manifest == engine.manifest else None


def misfit(error: ShapeMismatch) -> Unavailable:
    """Return the error for a call whose tensors fit the network in no size."""
    return Unavailable(Reason.OTHER_KIND if error.other_kind else Reason.UNSUPPORTED_INPUT, str(error))


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_OUT_OF_MEMORY = (
    "out of memory", "outofmemory", "no room for the engine", "can't allocate memory", "cannot allocate memory",
    "failed to allocate memory", "bad_alloc", "bad allocation", "alloc_failed",
)  # fmt: skip
"""Words by which torch, ONNX Runtime, TensorRT and C++ say that memory was short."""


def says_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory was short; most libraries only say so in their message."""
    words = f"{type(error).__name__} {error}".lower()
    short = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return short or any(phrase in words for phrase in _OUT_OF_MEMORY)
