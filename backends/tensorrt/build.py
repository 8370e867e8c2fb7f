"""ONNX graph -> serialised engine, for both flavours, driven through polygraphy.

Polygraphy decides at its import which flavour it drives, for the whole process. So a process builds with one flavour;
builds that have a process each never notice.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...architectures.shapes import TensorSpec
from ...engine_library import BuildError, Unavailable, trust
from ...engine_library.safe_files import read_bytes, write_file
from .. import BuildRequest, Progress
from .flavour import Flavour, import_flavour

log = logging.getLogger(__name__)

@functools.cache
def shared_logger(trt: ModuleType) -> Any:
    """The logger of a flavour, one per process because TensorRT keeps the first that it is given.

    Messages go to ``logging`` at debug level, errors at info level: who meets an error raises it with its text. The
    lists in ``listeners`` get the text of each error.
    """

    class Messages(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.listeners: dict[int, list[str]] = {}

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                log.info("%s: %s", trt.__name__, text)
                for lines in list(self.listeners.values()):
                    lines.append(text)
            elif severity in (trt.ILogger.WARNING, trt.ILogger.INFO):  # verbose ones are tens of thousands
                log.debug("%s: %s", trt.__name__, text)

    return Messages()


@contextlib.contextmanager
def collected_errors(logger: Any) -> Iterator[list[str]]:
    """The errors that TensorRT logs meanwhile, in order."""
    lines: list[str] = []
    logger.listeners[id(lines)] = lines
    try:
        yield lines
    finally:
        del logger.listeners[id(lines)]


def last_errors(lines: list[str], count: int = 2) -> str:
    """The last few errors as one short line for a message."""
    frames = ("--- Begin node ---", "--- End node ---")  # the parser's dump of a node it cannot read
    telling = (" ".join(line.split()) for line in lines if not any(frame in line for frame in frames))
    unique = list(dict.fromkeys(telling))
    return "; ".join(line if len(line) <= 400 else f"{line[:397]}..." for line in unique[-count:])


ENGINE_NAME = "engine.trt"

RTX_SWITCH = "POLYGRAPHY_USE_TENSORRT_RTX"
RTX_MODULE = "tensorrt_rtx"

MOST_TIMINGS = 1 << 28
"""Bytes of a file of measured tactics."""

REPORT_SECONDS = 0.1
"""TensorRT reports thousands of steps; this often one is passed on, and a cancel noticed."""


class BuildSteps:
    """The steps of a build in which versions of TensorRT may differ.

    Attributes:
        strongly_typed: True if the engine computes in the dtypes of the graph.
    """

    strongly_typed = True

    def graph(self, request: BuildRequest) -> Path:
        """The graph to read: the request's, or one beside it, which is deleted when it was read."""
        return request.onnx

    def monitor(self, trt: ModuleType, progress: Progress) -> Any:
        """TensorRT's progress as calls of ``progress``.

        ``stopped_by`` is what ``progress`` raised, after which the build stops at its next step.
        """
        return _monitor(trt, progress)

    def options(self, trt: ModuleType, request: BuildRequest, network: Any, monitor: Any) -> dict[str, Any]:
        """Return further options of polygraphy's ``CreateConfig``, when the network is read."""
        return {"progress_monitor": monitor}


STEPS = BuildSteps()
"""Those of TensorRT 10, 11 and RTX."""


def build_engine_file(
    flavour: Flavour,
    request: BuildRequest,
    progress: Progress,
    compute_capabilities: list[tuple[int, int]] | None = None,
    timing_cache: Path | None = None,
    steps: BuildSteps = STEPS,
) -> list[str]:
    """Build ``engine.trt`` in the request's folder and return its name in a list.

    Args:
        compute_capabilities: the GPUs to build for, with TensorRT-RTX only; None leaves the choice to the flavour.
        timing_cache: measured tactics are read from this file and added to it; a bad or missing one is no failure.

    Raises:
        BuildError: the graph could not be read or compiled, or the package is missing; has TensorRT's last errors.
    """
    try:
        trt = import_flavour(flavour)
    except Unavailable as missing:
        raise BuildError(f"nothing was built: {missing.fallback.detail}") from None
    logger, monitor = shared_logger(trt), steps.monitor(trt, progress)
    partial, to_file = request.folder / f".{ENGINE_NAME}", None
    with _polygraphy(flavour, logger) as loaders, collected_errors(logger) as errors:
        from polygraphy.exception import PolygraphyException

        phase = "preparing"
        try:
            progress(phase, 0.0)
            # the parser owns the weights: it stays until the build is over
            graph = steps.graph(request)
            builder, network, _parser = loaders.network_from_onnx_path(str(graph), strongly_typed=steps.strongly_typed)
            if graph is not request.onnx:
                graph.unlink()
            inputs = _check_tensors(trt, request, network)
            options = {
                "profiles": [_profile(loaders, request, inputs)],
                "profiling_verbosity": trt.ProfilingVerbosity.LAYER_NAMES_ONLY,
                "refittable": request.any_weights,
                "builder_optimization_level": request.options.get("level") or None,
            }
            phase = "compiling"
            options |= steps.options(trt, request, network, monitor)
            make_config = functools.partial(_create_config, flavour, compute_capabilities)
            to_file = _FileBuilder(trt, builder, partial)
            _compile(loaders, to_file, network, make_config, options, timing_cache)
        except PolygraphyException as error:
            if to_file is not None and to_file.failed is not None:
                raise to_file.failed from None
            if monitor.stopped_by is None:
                raise BuildError(_why(flavour, phase, last_errors(errors) or str(error))) from error
        finally:
            monitor.progress = None  # TensorRT may keep the monitor; it must not keep the caller alive
            if to_file is None or not to_file.done or monitor.stopped_by is not None:
                partial.unlink(missing_ok=True)
    if monitor.stopped_by is not None:  # also when that was too late to stop the build
        raise monitor.stopped_by
    os.replace(partial, request.folder / ENGINE_NAME)
    return [ENGINE_NAME]


class _FileBuilder:
    """A TensorRT builder whose engine goes straight to a file; where TensorRT has no stream, by way of memory.

    Attributes:
        done: the whole engine is in the file.
        failed: why the file could not be written.
    """

    def __init__(self, trt: ModuleType, builder: Any, path: Path):
        self._trt, self._builder, self._path = trt, builder, path
        self.done = False
        self.failed: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def build_serialized_network(self, network: Any, config: Any) -> bool:
        """Called by polygraphy, which asks of the result only that it is true."""
        if hasattr(self._builder, "build_serialized_network_to_stream"):
            with self._path.open("wb") as file:
                writer = self._writer(file)
                self.done = self._builder.build_serialized_network_to_stream(network, config, writer)
        else:
            engine = self._builder.build_serialized_network(network, config)
            if engine is not None:
                self._path.write_bytes(engine)
            self.done = engine is not None
        self.done = self.done and self.failed is None
        return self.done

    def _writer(self, file: Any) -> Any:
        builder = self

        class Writer(self._trt.IStreamWriter):
            def write(self, data: bytes) -> int:
                try:
                    return file.write(data)
                except OSError as error:  # it may not pass through TensorRT's C++
                    builder.failed = error
                    return 0

        return Writer()


def _compile(
    loaders: ModuleType,
    builder: Any,
    network: Any,
    make_config: Callable[[dict[str, Any]], Any],
    options: dict[str, Any],
    timing_cache: Path | None,
) -> None:
    """Let the builder build; what is learnt about tactics goes to ``timing_cache``."""
    if timing_cache is None:
        loaders.engine_bytes_from_network((builder, network), make_config(options))
        return
    # files of ours and not its path: polygraphy would leave a lock file beside it, and may write half
    with tempfile.TemporaryFile() as known, tempfile.TemporaryFile() as learnt:
        known.write(_timings(builder, timing_cache))
        config = make_config({**options, "load_timing_cache": known})
        loaders.engine_bytes_from_network((builder, network), config, save_timing_cache=learnt)
        learnt.seek(0)
        _save_timings(timing_cache, learnt.read())


def _profile(loaders: ModuleType, request: BuildRequest, inputs: Sequence[TensorSpec]) -> Any:
    sizes = [request.profile.sizes(which) for which in ("min", "opt", "max")]
    profile = loaders.Profile()
    for spec in inputs:
        low, best, high = (spec.shape(symbols) for symbols in sizes)
        profile.add(spec.name, min=low, opt=best, max=high)
    return profile


def _create_config(flavour: Flavour, capabilities: list[tuple[int, int]] | None, options: dict[str, Any]) -> Any:
    if flavour.module == RTX_MODULE:
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        return CreateConfigRTX(use_gpu=False, compute_capabilities=capabilities, **options)
    from polygraphy.backend.trt import CreateConfig

    return CreateConfig(**options)


def _timings(builder: Any, path: Path) -> bytes:
    """Contents of a timing cache, or none when TensorRT cannot read it or there is no such file."""
    try:
        contents = trust.unseal(read_bytes(path, MOST_TIMINGS), path.name)
        if contents is None:
            log.debug("%s was not signed here: tactics are measured anew", path)
            return b""
        if builder.create_builder_config().create_timing_cache(contents) is not None:
            return contents
        why = "it is damaged or another version's"
    except Exception as error:
        why = str(error)
    log.debug("%s is not used (%s): tactics are measured anew", path, why)
    return b""


def _save_timings(path: Path, contents: bytes) -> None:
    try:
        write_file(path, trust.seal(contents, path.name))
    except OSError as error:
        log.debug("%s was not saved (%s): the next build measures anew", path, error)


def _check_tensors(trt: ModuleType, request: BuildRequest, network: Any) -> list[TensorSpec]:
    """The inputs that the graph has: the exporter drops an input on which nothing depends.

    Raises:
        BuildError: an output is missing, or a tensor has another dtype than its manifest will say.
    """
    dtypes = {name: getattr(trt, name, None) for name in ("float32", "float16", "bfloat16")}
    read = {}
    for tensors, count in ((network.get_input, network.num_inputs), (network.get_output, network.num_outputs)):
        read.update({tensor.name: tensor.dtype for tensor in map(tensors, range(count))})
    inputs = [spec for spec in request.inputs if spec.name in read]
    for spec in (*inputs, *request.outputs):
        if read.get(spec.name) != dtypes[spec.dtype]:
            found = f"is {read[spec.name]} and not {spec.dtype}" if spec.name in read else "is missing"
            raise BuildError(
                f"TensorRT cannot read this model ({spec.name} {found}); nothing was built and "
                "the normal model keeps running; report this model"
            )
    return inputs


def _why(flavour: Flavour, phase: str, errors: str) -> str:
    what = f"{flavour.title} failed while {phase} ({errors})"
    text = errors.lower()
    if "turing" in text or "sm75" in text:
        do = "set precision to float16, all that TensorRT-RTX computes in on Turing cards, and build again"
    elif "out of memory" in text or "outofmemory" in text:
        do = "close other programs, or choose smaller sizes or fewer images on the engine node, and build again"
    else:
        do = "choose another backend, for example onnxruntime, and report this model"
    return f"{what}; nothing was built and the normal model keeps running; {do}"


@contextlib.contextmanager
def _polygraphy(flavour: Flavour, logger: Any) -> Iterator[ModuleType]:
    """Polygraphy's loaders, bound to a flavour and to our logger, silent on the console.

    Raises:
        BuildError: this process has already bound polygraphy to the other flavour.
    """
    rtx = flavour.module == RTX_MODULE
    if "polygraphy.config" not in sys.modules:
        before = os.environ.get(RTX_SWITCH)
        os.environ[RTX_SWITCH] = "1" if rtx else "0"
        try:
            import polygraphy.config
        finally:
            if before is None:
                del os.environ[RTX_SWITCH]
            else:
                os.environ[RTX_SWITCH] = before
    import polygraphy.config

    if polygraphy.config.USE_TENSORRT_RTX != rtx:
        raise BuildError(
            f"{flavour.title} cannot build in this process, because polygraphy already drives the other TensorRT in "
            "it; nothing was built and the normal model keeps running; restart ComfyUI and build again"
        )
    from polygraphy.backend import trt as loaders
    from polygraphy.backend.trt import util
    from polygraphy.logger import G_LOGGER

    before, util.TRT_LOGGER = util.TRT_LOGGER, logger
    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):  # critical messages come as exceptions anyway
            yield loaders
    finally:
        util.TRT_LOGGER = before


def _monitor(trt: ModuleType, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):
        def __init__(self, progress: Progress) -> None:
            trt.IProgressMonitor.__init__(self)
            self.progress: Progress | None = progress
            self.stopped_by: BaseException | None = None
            self._lock = threading.Lock()  # TensorRT calls from several threads
            self._phases: dict[str, list[int]] = {}  # name -> steps done, steps; the outermost first
            self._fraction = 0.0
            self._reported = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                self._phases[phase_name] = [0, max(1, num_steps)]
                self._report(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with self._lock:
                if phase_name in self._phases:
                    self._phases[phase_name][0] = step + 1
                self._report(phase_name)
                return self.stopped_by is None

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                self._phases.pop(phase_name, None)

        def _report(self, phase_name: str) -> None:
            now = time.monotonic()
            if self.stopped_by is not None or self.progress is None or now - self._reported < REPORT_SECONDS:
                return
            self._reported = now
            fraction, share = 0.0, 1.0
            for done, steps in self._phases.values():
                fraction += share * min(done, steps - 1) / steps
                share /= steps
            self._fraction = max(self._fraction, fraction)
            words = phase_name[:1].lower() + phase_name[1:]
            try:
                self.progress(words, self._fraction)
            except BaseException as error:  # it may not pass through TensorRT's C++
                self.stopped_by = error

    return Monitor(progress)
