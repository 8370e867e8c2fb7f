"""TensorRT-RTX engines built for real, without a GPU; and all of both backends that can be held to account without one.

An engine cannot be opened here, so that it computes what native does is proved of the graph it is built from (by ONNX
Runtime) and, on a machine with a GPU, by test_tensorrt_gpu.py.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import pickle
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import networks
import pytest
import tensorrt_rtx as trt
import torch
from hybrid_trt.architectures.tensors import Profile, Range, TensorSpec
from hybrid_trt.backends import BuildError, BuildRequest, backends, trt_build, trt_common, trt_jit_cache, trt_runner
from hybrid_trt.backends import tensorrt as tensorrt_backend
from hybrid_trt.backends import tensorrt_rtx as rtx_backend
from hybrid_trt.backends.trt_common import Flavour, Gpu
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder import parity
from hybrid_trt.engine_builder.onnx_export import export_onnx
from hybrid_trt.engine_builder.steps import TRACED
from hybrid_trt.engine_library import EngineIdentity, Library, Manifest, Reason, Unavailable
from networks import CPU, PROFILE
from pack import ROOT

pytestmark = pytest.mark.tensorrt

CUDA = torch.device("cuda", 0)
RTX, FULL = rtx_backend.BACKEND, tensorrt_backend.BACKEND
ADA = Gpu("NVIDIA GeForce RTX 4090", (8, 9))
TURING = Gpu("NVIDIA GeForce RTX 2080", (7, 5))
HOPPER = Gpu("NVIDIA H200", (9, 0))
PASCAL = Gpu("NVIDIA GeForce GTX 1080", (6, 1))
SMALL = networks.TINY["sd15"] | {"model_channels": 64, "context_dim": 64}


def ignore(_phase: str, _fraction: float) -> None:
    pass


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def small_request(precision: str, folder: Path) -> BuildRequest:
    """A request for a small SD1.5 UNet, its graph in the folder."""
    network = networks.random_network("unet", SMALL, getattr(torch, precision))
    architecture = network.architecture()
    inputs = tuple(architecture.inputs(network.module, precision))
    outputs = tuple(architecture.outputs(network.module, precision))
    graph = export_onnx(architecture.function(network.module), inputs, outputs, TRACED, folder)
    return BuildRequest(graph, inputs, outputs, PROFILE, folder, "portable")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> BuildRequest:
    return small_request("float32", tmp_path_factory.mktemp("small"))


@pytest.fixture
def request_here(small: BuildRequest, tmp_path: Path) -> BuildRequest:
    """The same request with a folder of its own."""
    return replace(small, folder=tmp_path)


# Building


@pytest.mark.parametrize("precision", ["float16", "float32"])
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_an_engine_is_built_from_the_very_graph_that_was_proved(
    family: str, kind: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved, built = [], []

    def check(graph: Path, *args: Any) -> Any:
        record = check_parity(graph, *args)
        proved.append(sha256(graph))
        return record

    def build(backend: Any, request: BuildRequest, progress: Any) -> list[str]:
        built.append(sha256(request.onnx))
        return build_as_always(backend, request, progress)

    check_parity, build_as_always = parity.check_parity, type(RTX).build
    monkeypatch.setattr(parity, "check_parity", check)
    monkeypatch.setattr(type(RTX), "build", build)
    fractions = []
    network = networks.random_network(kind, networks.TINY[family])
    order = builder.BuildOrder(network, precision, PROFILE, RTX)
    engine = builder.build_engine(
        order, Library([tmp_path]), lambda _phase, fraction: fractions.append(fraction), run=builder.run_here
    )

    assert proved == built
    assert len(proved) == 1
    assert fractions == sorted(fractions)
    assert fractions[-1] >= 0.99
    manifest = engine.manifest
    identity = manifest.identity
    assert identity.architecture == f"{family}_{kind}"
    assert (identity.backend, identity.device) == ("tensorrt_rtx", "portable")
    assert identity.backend_version == trt.__version__
    assert identity.profile.ranges["B"] == Range(1, 2, 4)
    assert manifest.parity["rel_err"] <= manifest.parity["limit"]
    assert list(manifest.files) == ["engine.trt", "parameters.json"], "the first one is what the backend opens"
    weights = sum(p.numel() for p in network.module.parameters()) * (2 if precision == "float16" else 4)
    assert weights <= engine.main_file.stat().st_size <= 1.2 * weights + 20e6
    residuals = [s for s in (*manifest.inputs, *manifest.outputs) if "output_" in s.name or "middle_" in s.name]
    assert len(residuals) == len(network.module.input_blocks) + 1


def test_what_was_built_is_an_engine_in_the_eyes_of_the_runtime(request_here: BuildRequest) -> None:
    (name,) = RTX.build(request_here, ignore)
    engine = (request_here.folder / name).read_bytes()
    runtime = trt.Runtime(trt_common.shared_logger(trt))
    bad_file = runtime.get_engine_validity(b"no engine at all" * 1000)[1]
    assert bad_file == int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    _validity, diagnostics = runtime.get_engine_validity(engine)
    assert not diagnostics & bad_file  # without a GPU it can be asked no more


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_120"])
def test_it_builds_for_gpus_that_are_not_here(request_here: BuildRequest, target: str) -> None:
    assert RTX.build(replace(request_here, target=target), ignore) == ["engine.trt"]


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_turing_computes_in_half_precision_and_says_so_of_others(precision: str, tmp_path: Path) -> None:
    request = replace(small_request(precision, tmp_path), target="sm_75")
    if precision == "float16":
        assert RTX.build(request, ignore) == ["engine.trt"]
        return
    with pytest.raises(BuildError, match="set precision to float16, all that TensorRT-RTX computes in on Turing"):
        RTX.build(request, ignore)


def test_brain_floats_build(tmp_path: Path) -> None:
    assert RTX.build(small_request("bfloat16", tmp_path), ignore) == ["engine.trt"]


def test_a_build_needs_nothing_but_its_request(request_here: BuildRequest) -> None:
    """In a process of its own, without ComfyUI, from a request that came as bytes."""
    (request_here.folder / "request").write_bytes(pickle.dumps(request_here))
    script = f"""
import pickle, sys, types
package = types.ModuleType("hybrid_trt")
package.__path__ = [{str(ROOT)!r}]
sys.modules["hybrid_trt"] = package
from hybrid_trt.backends import backends
request = pickle.loads(open("request", "rb").read())
backends()["tensorrt_rtx"].build(request, lambda phase, fraction: None)
assert not [name for name in sys.modules if name.split(".")[0] == "comfy"]
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=request_here.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "a library does not print"
    assert (request_here.folder / "engine.trt").stat().st_size > 1e6


def test_progress_rises_and_names_what_is_done(request_here: BuildRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_build, "REPORT_SECONDS", 0)
    seen: list[tuple[str, float]] = []
    RTX.build(request_here, lambda phase, fraction: seen.append((phase, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0
    assert 0.5 < fractions[-1] <= 1
    assert {"reading the graph", "building engine"} <= {phase for phase, _ in seen}


@pytest.mark.parametrize("after", [0, 1, 2, 50])
def test_progress_that_raises_cancels_the_build(
    request_here: BuildRequest, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cancelled(BaseException):  # as ComfyUI's own interrupt is no ordinary error
        pass

    cancelled = Cancelled()
    left = after

    def progress(_phase: str, _fraction: float) -> None:
        nonlocal left
        if left == 0:
            raise cancelled
        left -= 1

    monkeypatch.setattr(trt_build, "REPORT_SECONDS", 0)
    with pytest.raises(Cancelled) as raised:
        RTX.build(request_here, progress)
    assert raised.value is cancelled
    assert list(request_here.folder.iterdir()) == []
    assert RTX.build(request_here, ignore) == ["engine.trt"], "a cancelled build leaves nothing behind"


def junk(path: Path, _small: BuildRequest) -> None:
    path.write_bytes(b"this is no graph" * 1000)


def truncated(path: Path, small: BuildRequest) -> None:
    path.write_bytes(small.onnx.read_bytes()[:100_000])


def unknown_operator(path: Path, small: BuildRequest) -> None:
    import onnx

    model = onnx.load(str(small.onnx))
    next(n for n in model.graph.node if n.op_type == "Conv").op_type = "Convolute"
    onnx.save(model, str(path))


@pytest.mark.parametrize(("spoil", "told"), [
    (junk, "a float32 tensor out, and in it that does not exist"),  # the parser takes it for a graph without nodes
    (truncated, "failed while reading the graph ("), (unknown_operator, "[Convolute ->")])
def test_a_bad_graph_is_a_build_error_with_one_sentence(
    request_here: BuildRequest, spoil: Any, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    graph = request_here.folder / "bad.onnx"
    spoil(graph, request_here)
    with pytest.raises(BuildError) as failed:
        RTX.build(replace(request_here, onnx=graph), ignore)
    sentence = str(failed.value)
    assert told in sentence
    assert "native keeps serving; " in sentence
    assert "\n" not in sentence
    assert "Begin node" not in sentence
    assert not (request_here.folder / "engine.trt").exists()
    assert capfd.readouterr().out == ""


def test_a_graph_of_another_dtype_than_the_manifest_will_say_is_refused(request_here: BuildRequest) -> None:
    halves = tuple(replace(spec, dtype="float16") for spec in request_here.outputs)
    with pytest.raises(BuildError, match="float16 tensor out, and in it that is DataType.FLOAT"):
        RTX.build(replace(request_here, outputs=halves), ignore)
    more = (*request_here.outputs, TensorSpec("depth", "float32", (1,)))
    with pytest.raises(BuildError, match="tensor depth, and in it that does not exist"):
        RTX.build(replace(request_here, outputs=more), ignore)


def test_an_input_that_the_exporter_dropped_is_no_obstacle(request_here: BuildRequest) -> None:
    more = (*request_here.inputs, TensorSpec("unused", "float32", (1,)))
    assert RTX.build(replace(request_here, inputs=more), ignore) == ["engine.trt"]


def test_a_graph_that_does_not_compile_is_a_build_error_with_tensorrts_own_words(request_here: BuildRequest) -> None:
    taller = tuple(
        replace(s, dims=(*s.dims[:2], s.dims[3], s.dims[2])) if s.name == "control_output_0" else s
        for s in request_here.inputs
    )
    wide = Profile({**PROFILE.ranges, "H": Range(32, 32, 32), "W": Range(64, 64, 64)})
    with pytest.raises(BuildError, match=r"failed while compiling \(.+\); nothing was built") as failed:
        RTX.build(replace(request_here, inputs=taller, profile=wide), ignore)
    assert "Invalid Engine" not in str(failed.value), "that is all that the loader says"


def test_polygraphy_bound_to_the_other_flavour_is_told(
    request_here: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    import polygraphy.config

    monkeypatch.setattr(polygraphy.config, "USE_TENSORRT_RTX", False)
    with pytest.raises(BuildError, match="cannot build in this process, because polygraphy"):
        RTX.build(request_here, ignore)


@pytest.mark.parametrize("before", [None, b"", b"no timings"])
def test_a_bad_timing_cache_is_replaced(request_here: BuildRequest, before: bytes | None, tmp_path: Path) -> None:
    """RTX takes the same path here as TensorRT does, though to it the cache is nothing."""
    path = tmp_path / "library" / ".timing-x.cache"
    path.parent.mkdir()
    if before is not None:
        path.write_bytes(before)
    trt_build.build_engine_file(RTX.flavour, request_here, ignore, timing_cache=path)
    assert path.read_bytes() != before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_timing_cache_that_cannot_be_written_fails_no_build(request_here: BuildRequest, tmp_path: Path) -> None:
    gone = tmp_path / "gone" / ".timing-x.cache"
    assert trt_build.build_engine_file(RTX.flavour, request_here, ignore, timing_cache=gone) == ["engine.trt"]


def test_timings_are_kept_per_gpu_and_version(request_here: BuildRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_common, "_import", lambda _flavour: SimpleNamespace(__version__="11.4.0.106"))
    path = FULL._timing_cache(replace(request_here, target="sm_90 NVIDIA H200"))
    assert path == request_here.folder.parent / ".timing-11-4-0-106-sm-90-nvidia-h200.cache"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_full_size_sd15_in_half_precision(kind: str, tmp_path: Path, record_property: Any) -> None:
    """Export and build within a minute of two cores (processor time: wall time has others' load in it) and 16 GB."""
    import resource

    network = networks.random_network(kind, networks.FULL_SD15, torch.float16)
    architecture = network.architecture()
    inputs = tuple(architecture.encoded_inputs(network.module, "float16"))
    outputs = tuple(architecture.outputs(network.module, "float16"))
    architecture.hint_encoder(network.module)
    started, used = time.monotonic(), time.process_time()
    graph = export_onnx(architecture.function(network.module), inputs, outputs, TRACED, tmp_path)
    exported = time.monotonic()
    profile = PROFILE.only({d.symbol for s in inputs for d in s.dims if not isinstance(d, int)})
    RTX.build(BuildRequest(graph, inputs, outputs, profile, tmp_path, "portable"), ignore)
    seconds = {"export": exported - started, "build": time.monotonic() - exported}
    seconds["processor"] = time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = 2 * sum(p.numel() for p in network.module.parameters())
    record_property("seconds", seconds)
    record_property("peak_bytes", peak)
    record_property("engine_bytes", (tmp_path / "engine.trt").stat().st_size)
    assert weights <= (tmp_path / "engine.trt").stat().st_size <= 1.05 * weights
    assert peak <= 16e9, f"{peak / 1e9:.1f} GB"
    assert seconds["processor"] <= 2 * 60, seconds


# Who can build and run what


def gpu(monkeypatch: pytest.MonkeyPatch, faked: Gpu | None) -> None:
    """Let both backends see this GPU on every device."""
    monkeypatch.setattr(Gpu, "of", classmethod(lambda _cls, _device: faked))


def manifest(backend: Any, version: str, device: str) -> Manifest:
    identity = EngineIdentity("sd15_unet", "0" * 64, "float16", PROFILE, backend.name, version, device)
    return Manifest(identity, "unet", "x", (), (), {})


def test_the_most_preferred_backend_comes_first() -> None:
    names = [name for name in backends() if name in ("tensorrt", "tensorrt_rtx", "onnxruntime")]
    assert names == ["tensorrt", "tensorrt_rtx", "onnxruntime"]


def test_without_a_gpu_rtx_builds_and_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, None)
    assert RTX.cannot_build(CPU) is None
    assert RTX.target(CPU) == "portable"
    refusal = RTX.unavailable(CPU)
    assert refusal.reason is Reason.WRONG_GPU
    assert refusal.detail == "TensorRT-RTX needs an NVIDIA GPU, the model runs on cpu"
    assert FULL.cannot_build(CPU).reason is Reason.WRONG_GPU


@pytest.mark.parametrize(("faked", "target"), [(ADA, "sm_89"), (TURING, "sm_75"), (HOPPER, "portable")])
def test_rtx_builds_for_the_gpu_at_hand_where_it_runs_there(
    faked: Gpu, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, faked)
    assert RTX.target(CUDA) == target
    assert FULL.target(CUDA) == f"{faked.sm} {faked.name}"


def test_rtx_refuses_gpus_that_are_not_rtx_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, HOPPER)
    for refusal in (RTX.unavailable(CUDA), RTX.refuses(manifest(RTX, trt.__version__, "portable"), CUDA)):
        assert refusal.reason is Reason.WRONG_GPU
        assert refusal.detail == (
            "TensorRT-RTX runs on GeForce and RTX cards only, this GPU is NVIDIA H200 (compute capability 9.0)"
        )
    gpu(monkeypatch, ADA)
    assert RTX.unavailable(CUDA) is None


def test_full_tensorrt_refuses_gpus_older_than_turing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, PASCAL)
    assert FULL.unavailable(CUDA).reason is Reason.WRONG_GPU
    assert "7.5 or newer" in FULL.unavailable(CUDA).detail


@pytest.mark.parametrize(("faked", "built_for", "reason"), [
    (ADA, "portable", None), (ADA, "sm_89", None), (ADA, "sm_86", Reason.WRONG_GPU),
    (TURING, "sm_75", None), (TURING, "portable", Reason.WRONG_GPU), (ADA, "sm_8", Reason.WRONG_GPU)])
def test_which_rtx_engines_run_on_which_gpu(
    faked: Gpu, built_for: str, reason: Reason | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, faked)
    refusal = RTX.refuses(manifest(RTX, trt.__version__, built_for), CUDA)
    assert (refusal and refusal.reason) == reason
    if refusal:
        assert built_for in refusal.detail
        assert str(faked) in refusal.detail


def test_full_tensorrt_engines_belong_to_one_model_of_gpu_and_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, HOPPER)
    monkeypatch.setattr(trt_common, "_import", lambda _flavour: SimpleNamespace(__version__="11.4.0.106"))
    assert FULL.refuses(manifest(FULL, "11.4.0.106", "sm_90 NVIDIA H200"), CUDA) is None
    assert FULL.refuses(manifest(FULL, "11.4.0.106", "sm_90 NVIDIA H100"), CUDA).reason is Reason.WRONG_GPU
    assert FULL.refuses(manifest(FULL, "11.4.0.105", "sm_90 NVIDIA H200"), CUDA).reason is Reason.STALE_ENGINE


def test_an_engine_of_another_version_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, ADA)
    refusal = RTX.refuses(manifest(RTX, "1.6.1.120", "portable"), CUDA)
    assert refusal.reason is Reason.STALE_ENGINE
    assert refusal.detail == f"it was built with TensorRT-RTX 1.6.1.120 and {trt.__version__} is installed"


def test_the_gpus_are_those_that_the_package_names() -> None:
    named = {name for name in trt.ComputeCapability.__members__ if name.startswith("SM")}
    assert named == {"SM{}{}".format(*capability) for capability in rtx_backend.SUPPORTED}


@pytest.mark.parametrize(("backend", "command"), [
    (RTX, 'pip install "tensorrt-rtx'), (FULL, 'pip install "tensorrt')])
def test_a_missing_package_is_told_with_the_command_that_installs_it(
    backend: Any, command: str, monkeypatch: pytest.MonkeyPatch, request_here: BuildRequest
) -> None:
    monkeypatch.setitem(sys.modules, backend.flavour.module, None)  # blocks the import
    gpu(monkeypatch, ADA)
    for refusal in (backend.unavailable(CUDA), backend.cannot_build(CUDA)):
        assert refusal.reason is Reason.BACKEND_MISSING
        assert command in refusal.detail
    with pytest.raises(BuildError, match="is not installed"):
        trt_build.build_engine_file(backend.flavour, request_here, ignore)
    with pytest.raises(Unavailable):
        backend.version()


def test_torch_for_cuda_12_wants_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert RTX.flavour.install == 'pip install "tensorrt-rtx-cu12>=1.7,<1.8"'
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert RTX.flavour.install == 'pip install "tensorrt-rtx>=1.7,<1.8"'


def test_a_missing_polygraphy_stops_builds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polygraphy", None)
    gpu(monkeypatch, ADA)
    assert RTX.unavailable(CUDA) is None
    assert "pip install polygraphy" in RTX.cannot_build(CUDA).detail


@pytest.mark.parametrize(("text", "told"), [
    ("raise OSError('libcudart.so.13: cannot open')", "cannot be loaded (OSError: libcudart.so.13"),
    ("__version__ = '1.4.0.76'", "1.4.0.76 is installed and does not serve"),
    ("", "cannot be loaded (AttributeError")])
def test_a_package_that_does_not_load_or_serve_is_no_crash(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    refusal = trt_common.missing(Flavour(name, "TensorRT-RTX", ((1, 7), (1, 8)), "tensorrt-rtx"))
    assert refusal.reason is Reason.BACKEND_MISSING
    assert told in refusal.detail
    assert "pip install" in refusal.detail


def test_amds_gpus_are_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Gpu.of(CUDA) is None


def test_a_build_for_a_gpu_that_is_not_here_names_both(request_here: BuildRequest) -> None:
    with pytest.raises(BuildError, match="that is sm_90 NVIDIA H200, and here is"):
        FULL.build(replace(request_here, target="sm_90 NVIDIA H200"), ignore)


# The runner


def test_a_file_that_is_no_engine_is_told(tmp_path: Path) -> None:
    path = tmp_path / "sd15_unet-x" / "engine.trt"
    path.parent.mkdir()
    path.write_bytes(b"this is no engine" * 1000)
    logger = trt_common.shared_logger(trt)
    with trt_common.collected_errors(logger) as errors, pytest.raises(Unavailable) as refused:
        trt_runner.deserialise(trt.Runtime(logger), "TensorRT-RTX", path, errors)
    assert refused.value.fallback.reason in (Reason.BROKEN_ENGINE, Reason.ENGINE_FAILED)
    assert "sd15_unet-x" in refused.value.fallback.detail
    assert "Serialization" in refused.value.fallback.detail


@pytest.mark.parametrize(("told", "reason"), [
    ("Error Code 6: API Usage Error (The engine cannot run on this GPU, which has compute capability 9.0)",
     Reason.WRONG_GPU),
    ("Error Code 1: Cuda Runtime (out of memory)", Reason.ENGINE_FAILED)])
def test_tensorrts_own_refusal_of_a_gpu_is_told_from_other_errors(told: str, reason: Reason, tmp_path: Path) -> None:
    path = tmp_path / "engine.trt"
    path.write_bytes(b"an engine")
    runtime = Mock(spec=trt.Runtime)
    runtime.deserialize_cuda_engine.return_value = None  # what an H200 gets, with that error
    with pytest.raises(Unavailable) as refused:
        trt_runner.deserialise(runtime, "TensorRT-RTX", path, [told])
    assert refused.value.fallback.reason is reason
    assert told in refused.value.fallback.detail


CLASSES = {
    "trt": trt, "self._logger": trt.ILogger, "logger": trt.ILogger,
    "runtime": trt.Runtime, "self._runtime": trt.Runtime,
    "opened": trt.ICudaEngine, "self.engine": trt.ICudaEngine, "self._native.engine": trt.ICudaEngine,
    "context": trt.IExecutionContext, "self.context": trt.IExecutionContext,
    "self._native.context": trt.IExecutionContext,
    "config": trt.IRuntimeConfig, "self._cache": trt.IRuntimeCache,
}


@pytest.mark.parametrize("module", [trt_runner, trt_jit_cache])
def test_all_that_the_runner_calls_exists_in_the_bindings(module: Any) -> None:
    used = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and (owner := CLASSES.get(ast.unparse(node.value))) is not None:
            used.add((owner, node.attr))
    assert len(used) >= (15 if module is trt_runner else 3), used
    assert [(owner, name) for owner, name in used if not hasattr(owner, name)] == []


def test_a_context_is_made_with_and_without_a_runtime_config() -> None:
    text = trt.ICudaEngine.create_execution_context.__doc__
    assert "strategy:" in text
    assert "runtime_config:" in text


SPECS_IN = (TensorSpec("x", "float32", (2, 4)), TensorSpec("residual", "float32", (2, 4), optional=True),
            TensorSpec("pruned", "float32", (2, 4)))


class FakeContext:
    """Stands for an IExecutionContext: remembers bindings by name, as the real one does between calls."""

    def __init__(self) -> None:
        self.bound: dict[str, tuple[tuple[int, ...] | None, int]] = {}
        self.memory: tuple[int, int] = (0, 0)
        self.out = (2, 4)
        self.mock = Mock(spec=trt.IExecutionContext, wraps=None)
        self.mock.set_input_shape.side_effect = self._shape
        self.mock.set_tensor_address.side_effect = self._address
        self.mock.infer_shapes.return_value = []
        self.mock.get_tensor_shape.side_effect = lambda _name: self.out
        self.mock.update_device_memory_size_for_shapes.return_value = 1000
        self.mock.set_device_memory.side_effect = lambda address, size: setattr(self, "memory", (address, size))

    def _shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.bound[name] = (shape, 0)
        return shape[0] <= 4

    def _address(self, name: str, address: int) -> bool:
        self.bound[name] = (self.bound.get(name, (None, 0))[0], address)
        return True


@pytest.fixture
def runner() -> tuple[Any, FakeContext]:
    """A runner on the CPU with a fake context: what it binds can be seen, nothing runs."""
    fake = FakeContext()
    made = trt_runner.TensorRTRunner.__new__(trt_runner.TensorRTRunner)
    made.device, made._title = CPU, "TensorRT-RTX"
    made._native = SimpleNamespace(context=fake.mock, inputs=frozenset({"x", "residual"}), jit_cache=None)
    return made, fake


def call(batch: int = 2) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {s.name: torch.randn(batch, 4) for s in SPECS_IN}, {"out": torch.empty(batch, 4)}


def test_every_call_binds_every_tensor_anew(runner: tuple[Any, FakeContext]) -> None:
    made, fake = runner
    for batch in (2, 2, 3, 2):
        inputs, outputs = call(batch)
        fake.out = (batch, 4)
        scratch = made._bind(inputs, outputs, [])
        assert fake.bound["x"] == ((batch, 4), inputs["x"].data_ptr())
        assert fake.bound["residual"] == ((batch, 4), inputs["residual"].data_ptr())
        assert fake.bound["out"] == (None, outputs["out"].data_ptr())
        assert fake.memory == (scratch.data_ptr(), 1000)
        assert scratch.numel() >= 1000
    assert "pruned" not in fake.bound


def test_scratch_memory_is_taken_for_one_call_and_kept_by_nobody(runner: tuple[Any, FakeContext]) -> None:
    """So engines that run one after the other get the same bytes from torch's allocator, and none while none runs."""
    made, _fake = runner
    scratch = made._bind(*call(), [])
    kept = weakref.ref(scratch)
    del scratch
    assert kept() is None


def test_an_input_left_out_is_an_error_and_not_the_last_calls_tensor(runner: tuple[Any, FakeContext]) -> None:
    made, _fake = runner
    made._bind(*call(), [])
    inputs, outputs = call()
    del inputs["residual"]
    with pytest.raises(RuntimeError, match="was not given residual"):
        made._bind(inputs, outputs, [])


def test_a_shape_outside_the_profile_is_an_error_with_tensorrts_words(runner: tuple[Any, FakeContext]) -> None:
    made, _fake = runner
    with pytest.raises(RuntimeError, match=r"TensorRT-RTX refused x of shape \(5, 4\) \(not in range\)"):
        made._bind(*call(5), ["not in  range"])


def test_an_output_of_another_shape_than_the_engines_is_an_error(runner: tuple[Any, FakeContext]) -> None:
    made, fake = runner
    fake.out = (2, 5)
    with pytest.raises(RuntimeError, match=r"gives out of shape \(2, 5\), not \(2, 4\)"):
        made._bind(*call(), [])


# Kernels that RTX compiles at run time


class FakeCache:
    """Stands for an IRuntimeCache: its contents are bytes, and it takes only those that begin with ``mine``."""

    def __init__(self) -> None:
        self.contents = b""

    def deserialize(self, blob: bytes) -> bool:
        fits = blob.startswith(b"mine")
        self.contents = blob if fits else self.contents
        return fits

    def serialize(self) -> bytes:
        return self.contents


def jit_cache(path: Path) -> tuple[Any, FakeCache]:
    fake = FakeCache()
    config = Mock(spec=trt.IRuntimeConfig)
    config.create_runtime_cache.return_value = fake
    made = trt_jit_cache.JitCache(config, path)
    config.set_runtime_cache.assert_called_once_with(fake)
    return made, fake


def test_kernels_are_kept_beside_the_engine_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "kernels.cache"
    made, fake = jit_cache(path)
    made.save()
    assert not path.exists(), "nothing was compiled yet"
    fake.contents = b"mine 1"
    made.save()
    assert [p.name for p in tmp_path.iterdir()] == ["kernels.cache"]
    stamp = path.stat().st_mtime_ns
    made.save()
    assert path.stat().st_mtime_ns == stamp, "the same again is not written"
    assert jit_cache(path)[1].contents == b"mine 1"


@pytest.mark.parametrize("contents", [b"", b"another GPU's", b"\0" * 1000])
def test_a_kernel_file_that_does_not_fit_is_replaced(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "kernels.cache"
    path.write_bytes(contents)
    made, fake = jit_cache(path)
    assert fake.contents == b""
    fake.contents = b"mine 2"
    made.save()
    assert path.read_bytes() == b"mine 2"


def test_a_library_that_cannot_be_written_to_is_no_failure(tmp_path: Path) -> None:
    made, fake = jit_cache(tmp_path / "gone" / "kernels.cache")
    fake.contents = b"mine 3"
    made.save()
    assert list(tmp_path.iterdir()) == []
