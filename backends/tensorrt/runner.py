"""A loaded TensorRT engine, of any version or RTX."""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...engine_library import Engine, Reason, Unavailable, trust
from ...engine_library.gpu import gpu_of
from ...engine_library.safe_files import read_bytes, write_file
from .build import ENGINE_NAME, collected_errors, last_errors, shared_logger

log = logging.getLogger(__name__)

MOST_KERNELS = 1 << 30
"""Bytes of a file of kernels."""


class JitCache:
    """The runtime cache of one execution context and its file.

    The file is no part of the engine: it is in no manifest, and whatever is wrong with it costs time only. It holds
    programs, so one that this machine did not sign is not used.
    """

    def __init__(self, config: Any, path: Path, engine: str):
        """Attach a cache to an IRuntimeConfig, filled from ``path`` when the file is there and fits this GPU.

        Args:
            engine: digest of the manifest of the engine whose kernels they are.
        """
        self._path, self._what = path, f"kernels of {engine}"
        self._cache = config.create_runtime_cache()
        self._saved = self._load()
        config.set_runtime_cache(self._cache)

    def _load(self) -> bytes:
        try:
            contents = trust.unseal(read_bytes(self._path, MOST_KERNELS), self._what)
            if contents is not None and self._cache.deserialize(contents):
                return contents
            why = "it is of another machine, GPU, driver or version"
        except Exception as error:
            why = str(error)
        log.debug("%s is not used (%s): kernels are compiled anew", self._path, why)
        return b""

    def save(self) -> None:
        """Write the file when there are kernels that it has not; a library that cannot be written to is no failure."""
        try:
            contents = bytes(self._cache.serialize())
            if contents and contents != self._saved:
                write_file(self._path, trust.seal(contents, self._what))
                self._saved = contents
        except Exception as error:
            log.debug("%s was not saved (%s): kernels are compiled again at the next start", self._path, error)


SAVE_AFTER_CALLS = 20
"""Calls after a new shape until its kernels are saved: about a prompt, since they are compiled in the background."""


class TensorRTRunner:
    """An engine and an execution context of its own.

    Every call sets all shapes and all addresses anew, so nothing of an earlier call can be left in the bindings. Work
    is ordered on torch's current stream and never waited for. Scratch memory is torch's, taken anew for each call: as
    its allocator reuses memory in the stream's order, engines that run one after the other share the same bytes, and
    what is recorded takes that of the recording.

    Attributes:
        device: where inputs and outputs have to be.
        scratch_bytes: what the largest call of the profile needs beside the weights.
        bytes: weights and scratch of the largest call.
        capturable: TensorRT has all kernels ready; RTX still compiles some while calls already run.
    """

    def __init__(self, title: str, opened: OpenedEngine):
        """
        Raises:
            Unavailable: there is no room for the context.
        """
        self.device = opened.device
        self.capturable = opened.jit_cache is None
        self.scratch_bytes: int = opened.scratch_bytes
        self.bytes = opened.weight_bytes + self.scratch_bytes
        self._title = title
        self._opened = opened
        self._logger = opened.logger
        with torch.cuda.device(self.device):
            self._native = _Context(title, opened)
            # a plain attribute would be dropped while the GPU may still be running the engine
            weakref.finalize(self, self._native.close)
            self._side_stream = torch.cuda.Stream(self.device)
        self._shapes: tuple | None = None
        self._calls_until_save = SAVE_AFTER_CALLS

    def new_context(self) -> TensorRTRunner:
        return TensorRTRunner(self._title, self._opened)

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        with torch.cuda.device(self.device), collected_errors(self._logger) as errors:
            if (why := self._opened.refit(weights, changed)) is not None:
                raise self._failure(f"took no other weights: {why}", errors)

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Enqueue one call into ``outputs``; see the protocol.

        Raises:
            RuntimeError: TensorRT refused a shape or could not enqueue; has its last errors.
        """
        with torch.cuda.device(self.device), collected_errors(self._logger) as errors:
            current = torch.cuda.current_stream(self.device)
            # on the default stream TensorRT synchronises, so there a side stream takes over and hands back
            stream = self._side_stream if current.cuda_stream == 0 else current
            scratch = self._bind(inputs, outputs, errors)
            if stream is not current:
                stream.wait_stream(current)
            if not self._native.context.execute_async_v3(stream.cuda_stream):
                raise self._failure("could not run", errors)
            if stream is not current:
                current.wait_stream(stream)
            del scratch  # not before here: what follows on the current stream may have these bytes
        self._save_new_kernels(inputs)

    def _bind(
        self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], errors: list[str]
    ) -> torch.Tensor:
        context = self._native.context
        if absent := self._opened.inputs - inputs.keys():
            raise self._failure(f"was not given {', '.join(sorted(absent))}", errors)  # an old address may be set
        for name, tensor in inputs.items():
            if name not in self._opened.inputs:
                continue  # nothing in the network depends on it
            shape = tuple(tensor.shape)
            if not (context.set_input_shape(name, shape) and context.set_tensor_address(name, tensor.data_ptr())):
                raise self._failure(f"refused {name} of shape {shape}", errors)
        if unknown := context.infer_shapes():
            raise self._failure(f"cannot tell its shapes for want of {', '.join(unknown)}", errors)
        for name, tensor in outputs.items():
            shape = tuple(context.get_tensor_shape(name))
            if shape != tuple(tensor.shape):  # it would write past the end
                raise self._failure(f"gives {name} of shape {shape}, not {tuple(tensor.shape)}", errors)
            if not context.set_tensor_address(name, tensor.data_ptr()):
                raise self._failure(f"refused {name}", errors)
        needed = context.update_device_memory_size_for_shapes()
        scratch = self._scratch(needed)
        context.set_device_memory(scratch.data_ptr(), needed)
        return scratch

    def _scratch(self, needed: int) -> torch.Tensor:
        """Memory for one call, 256-byte aligned as all that torch allocates. The one place that decides whose it is."""
        return torch.empty(max(needed, 1), dtype=torch.uint8, device=self.device)

    def _failure(self, what: str, errors: list[str]) -> RuntimeError:
        why = last_errors(errors)
        return RuntimeError(f"{self._title} {what}" + (f" ({why})" if why else ""))

    def _save_new_kernels(self, inputs: Mapping[str, torch.Tensor]) -> None:
        if self._opened.jit_cache is None:
            return
        shapes = tuple(tensor.shape for tensor in inputs.values())
        if shapes != self._shapes:
            self._shapes, self._calls_until_save = shapes, SAVE_AFTER_CALLS
        self._calls_until_save -= 1
        if self._calls_until_save == 0:
            self._opened.jit_cache.save()


class OpenedEngine:
    """An engine as TensorRT has it on a GPU; whoever runs it has a context of it.

    Attributes:
        inputs: names of the inputs that it really has.
        scratch_bytes: what the largest call needs beside the weights, ``weight_bytes``.
        jit_cache: with RTX alone: full TensorRT compiles all kernels when it builds.
    """

    def __init__(self, trt: ModuleType, title: str, engine: Engine, device: torch.device):
        """
        Raises:
            Unavailable: TensorRT refuses the file, or its tensors differ from the manifest's.
        """
        self._trt, self.device, self.logger = trt, device, shared_logger(trt)
        self.weight_bytes = engine.manifest.device_bytes
        self.jit_cache: JitCache | None = None
        with collected_errors(self.logger) as errors:
            self._runtime = trt.Runtime(self.logger)
            self._engine = deserialise(self._runtime, title, engine, errors)
            self.inputs = _check_tensors(trt, engine, self._engine)
        self.scratch_bytes = self._prepare(engine)

    def _prepare(self, engine: Engine) -> int:
        """Set contexts up to take scratch memory of ours, and return ``scratch_bytes``."""
        self._strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if hasattr(self._trt, "IRuntimeCache"):
            self._config = self._engine.create_runtime_config()
            self._config.set_execution_context_allocation_strategy(self._strategy)
            self.jit_cache = JitCache(self._config, _jit_cache_path(engine, self.device), engine.manifest.digest)
        return self._engine.device_memory_size_v2

    def new_context(self) -> Any:
        """A context whose scratch memory is ours to give, or None where there is no room for it."""
        if self.jit_cache is not None:
            return self._engine.create_execution_context(runtime_config=self._config)
        return self._engine.create_execution_context(self._strategy)

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> str | None:
        """Replace the weights that have changed. Return why that is impossible, or None when it is done."""
        refitter = self._trt.Refitter(self._engine, self.logger)
        if strange := sorted(set(changed) - set(refitter.get_all_weights())):
            return f"it has no weight {strange[0]}"
        given: dict[str, torch.Tensor] = {}  # TensorRT reads them when all are there
        wanted = list(changed)
        while wanted:
            for name in wanted:
                given[name] = tensor = weights[name]
                if not refitter.set_named_weights(name, self._as_weights(tensor)):
                    return f"it refused {name}"
            wanted = refitter.get_missing_weights()  # weights that it has fused with ours
            if strange := sorted(name for name in wanted if name in given or name not in weights):
                return f"it wants a weight {strange[0]}, which no model has"
        return None if refitter.refit_cuda_engine() else "refitting failed"

    def _as_weights(self, tensor: torch.Tensor) -> Any:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return self._trt.Weights(getattr(self._trt, dtype), tensor.data_ptr(), tensor.numel())

    def __del__(self) -> None:
        """The engine goes before its runtime."""
        self.jit_cache = self._config = self._engine = None
        self._runtime = None


class _Context:
    """TensorRT's execution context, which has to go before its engine and not while the GPU uses it."""

    def __init__(self, title: str, opened: OpenedEngine):
        self._opened: OpenedEngine | None = opened
        with collected_errors(opened.logger) as errors:
            self.context = opened.new_context()
            if self.context is None:
                raise Unavailable(Reason.ENGINE_FAILED, f"{title} has no room for the engine ({last_errors(errors)})")

    def close(self) -> None:
        """Wait for the GPU, save what was compiled, and let go."""
        with contextlib.suppress(Exception):  # at the interpreter's end there may be no driver any more
            torch.cuda.synchronize(self._opened.device)
            if self._opened.jit_cache is not None:
                self._opened.jit_cache.save()
        self.context = None
        self._opened = None


def deserialise(runtime: Any, title: str, engine: Engine, errors: list[str]) -> Any:
    """The ICudaEngine in an engine's file, read into memory: TensorRT sees the very bytes that were checked.

    Raises:
        Unavailable: the file is not the one that was built, or no engine of this version, or this machine cannot run
            it; has TensorRT's errors.
    """
    native = runtime.deserialize_cuda_engine(engine.read_checked(ENGINE_NAME))
    if native is None:
        why = last_errors(errors)
        if "Serialization" in why:
            raise Unavailable(
                Reason.BROKEN_ENGINE, f"{engine.folder.name}/{ENGINE_NAME} is not an engine of this {title} ({why})"
            )
        # the lists of GPUs in our backends may be older than the library: its own word counts too
        reason = Reason.WRONG_GPU if "compute capability" in why else Reason.ENGINE_FAILED
        raise Unavailable(reason, f"{title} cannot open {engine.folder.name} here ({why})")
    return native


def _check_tensors(trt: ModuleType, engine: Engine, native: Any) -> frozenset[str]:
    """Names of the inputs that the engine really has.

    Raises:
        Unavailable: a tensor that is not in the manifest, or has another dtype there, or an output that is missing.
    """
    dtypes = {name: getattr(trt, name, None) for name in ("float32", "float16", "bfloat16")}
    manifest = engine.manifest
    names = [native.get_tensor_name(i) for i in range(native.num_io_tensors)]
    expected = {spec.name: dtypes[spec.dtype] for spec in (*manifest.inputs, *manifest.outputs)}
    wrong = [name for name in names if expected.get(name) != native.get_tensor_dtype(name)]
    wrong += [spec.name for spec in manifest.outputs if spec.name not in names]
    if wrong:
        raise Unavailable(Reason.BROKEN_ENGINE, f"{engine.folder.name} differs from its manifest in {wrong[0]}")
    return frozenset(name for name in names if native.get_tensor_mode(name) == trt.TensorIOMode.INPUT)


def _jit_cache_path(engine: Engine, device: torch.device) -> Path:
    """One file per GPU: a library may be shared, and TensorRT-RTX refuses another GPU's kernels."""
    words = re.sub(r"[^a-z0-9]+", "-", gpu_of(device).lower()).strip("-")
    return engine.folder / f"kernels-{words}.cache"
