"""TensorRT-RTX engines built for real, without a GPU.

An engine cannot be opened here, so that it computes what native does is proved of the graph it is built from (by ONNX
Runtime) and, on a machine with a GPU, by test_tensorrt_gpu.py.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import comfy.sd
import comfy.utils
import networks
import pytest
import slow
import tensorrt_rtx as trt
from builds import main_file
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import Profile, Range, RequestedSizes, TensorSpec
from hybrid_trt.backends import BuildRequest
from hybrid_trt.backends.tensorrt import build as messages
from hybrid_trt.backends.tensorrt import build as trt_build
from hybrid_trt.backends.tensorrt import flavour as trt_flavour
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder.worker import parity
from hybrid_trt.engine_library import BuildError, Library
from networks import PROFILE
from pack import ROOT
from trt_backends import FULL, RTX, ignore, small_request

pytestmark = pytest.mark.tensorrt


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> BuildRequest:
    return small_request("float32", tmp_path_factory.mktemp("small"))


@pytest.fixture
def request_here(small: BuildRequest, tmp_path: Path) -> BuildRequest:
    """The same request with a folder of its own."""
    return replace(small, folder=tmp_path)


BUILT = {f"{family}-{kind}-{precision}": (family, kind, precision) for family in ("sd15", "sdxl")
         for kind in ("unet", "controlnet") for precision in ("float16", "float32")}
SLOW = [name for name in BUILT if name != "sd15-controlnet-float16"]


@pytest.mark.parametrize(("family", "kind", "precision"), slow.cases(BUILT, SLOW))
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
    assert weights <= main_file(engine).stat().st_size <= 1.2 * weights + 20e6
    residuals = [s for s in (*manifest.inputs, *manifest.outputs) if "output_" in s.name or "middle_" in s.name]
    assert len(residuals) == len(network.module.input_blocks) + 1


VAES = {f"{name}-{role.value}-{precision}": (name, role, precision) for name in ("tiny_kl", "tiny_sdxl_taesd")
        for role in (Role.VAE_DECODER, Role.VAE_ENCODER) for precision in ("float16", "bfloat16", "float32")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "role", "precision"), VAES.values(), ids=VAES)
def test_a_vaes_engine_is_built_from_a_graph_that_computes_what_native_does(
    name: str, role: Role, precision: str, models: dict[str, Path], tmp_path: Path
) -> None:
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(models[name])))
    network = NativeNetwork.of_vae(vae, role, name)
    profile = network.architecture().profile(RequestedSizes(min_size=64, opt_size=64, max_size=128))
    order = builder.BuildOrder(network, precision, profile, RTX)
    engine = builder.build_engine(order, Library([tmp_path]), ignore, run=builder.run_here)
    assert engine.manifest.identity.backend == "tensorrt_rtx"
    assert 0 < engine.manifest.parity["rel_err"] <= (1e-3 if precision == "float16" else 1e-5)
    assert list(engine.manifest.files) == ["engine.trt", "parameters.json"]


@pytest.mark.slow
def test_a_tensorrt_that_cannot_stream_builds_by_way_of_memory(
    request_here: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(trt.Builder, "build_serialized_network_to_stream")
    (name,) = RTX.build(request_here, ignore)
    weights = request_here.onnx.with_name("model.onnx.data").stat().st_size
    assert weights <= (request_here.folder / name).stat().st_size <= 1.2 * weights + 20e6


class Enough(Exception):
    """Ends a build before TensorRT's part of it."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options that builds give to TensorRT; no build goes further."""
    options: list[dict[str, Any]] = []

    def config(_flavour: Any, _capabilities: Any, given: dict[str, Any]) -> None:
        options.append(given)
        raise Enough

    monkeypatch.setattr(trt_build, "_create_config", config)
    return options


def test_what_a_request_asks_for_reaches_the_builder(request_here: BuildRequest, asked: list[dict[str, Any]]) -> None:
    for changes in ({}, {"options": {"level": 2}, "any_weights": True}):
        with pytest.raises(Enough):
            RTX.build(replace(request_here, **changes), ignore)
    found = [(options["builder_optimization_level"], options["refittable"]) for options in asked]
    assert found == [(None, False), (2, True)]


def test_a_version_may_read_a_graph_of_its_own_which_is_gone_afterwards(
    request_here: BuildRequest, asked: list[dict[str, Any]]
) -> None:
    class Steps(trt_build.BuildSteps):
        def graph(self, request: BuildRequest) -> Path:
            return Path(shutil.copy(request.onnx, request.onnx.with_name("own.onnx")))

        def options(self, trt: Any, request: BuildRequest, network: Any, monitor: Any) -> dict[str, Any]:
            return super().options(trt, request, network, monitor) | {"own": network.num_layers}

    with pytest.raises(Enough):
        trt_build.build_engine_file(RTX.flavour, request_here, ignore, steps=Steps())
    assert asked[0]["own"] > 0
    assert asked[0]["progress_monitor"] is not None
    assert request_here.onnx.exists()
    assert not request_here.onnx.with_name("own.onnx").exists()


def test_a_disk_that_is_full_while_the_engine_is_written_is_told_as_such(request_here: BuildRequest) -> None:
    (request_here.folder / ".engine.trt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        RTX.build(request_here, ignore)
    assert list(request_here.folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("refused", "target", "built"), [
    ("float32", "sm_75", "float16"), ("bfloat16", "portable", "bfloat16")])
def test_turing_computes_in_half_precision_alone(refused: str, target: str, built: str, tmp_path: Path) -> None:
    request = small_request(refused, tmp_path)
    with pytest.raises(BuildError, match="set precision to float16, all that TensorRT-RTX computes in on Turing"):
        RTX.build(replace(request, target="sm_75"), ignore)
    (tmp_path / "half").mkdir()
    request = request if built == refused else small_request(built, tmp_path / "half")
    assert RTX.build(replace(request, target=target), ignore) == ["engine.trt"]


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
    engine, runtime = (request_here.folder / "engine.trt").read_bytes(), trt.Runtime(messages.shared_logger(trt))
    bad_file = runtime.get_engine_validity(b"no engine at all" * 1000)[1]
    assert bad_file == int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    assert not runtime.get_engine_validity(engine)[1] & bad_file  # without a GPU it can be asked no more


@pytest.mark.parametrize("after", [2, *(pytest.param(n, marks=slow.SLOW) for n in (0, 1, 50))])
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
    (junk, "cannot read this model (out is missing)"),  # the parser takes it for a graph without nodes
    (truncated, "failed while preparing ("), (unknown_operator, "[Convolute ->")])
def test_a_bad_graph_is_a_build_error_with_one_sentence(
    request_here: BuildRequest, spoil: Any, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    graph = request_here.folder / "bad.onnx"
    spoil(graph, request_here)
    with pytest.raises(BuildError) as failed:
        RTX.build(replace(request_here, onnx=graph), ignore)
    sentence = str(failed.value)
    assert told in sentence
    assert "the normal model keeps running; " in sentence
    assert "\n" not in sentence
    assert "Begin node" not in sentence
    assert not (request_here.folder / "engine.trt").exists()
    assert capfd.readouterr().out == ""


def test_a_graph_of_another_dtype_than_the_manifest_will_say_is_refused(request_here: BuildRequest) -> None:
    halves = tuple(replace(spec, dtype="float16") for spec in request_here.outputs)
    with pytest.raises(BuildError, match="out is DataType.FLOAT and not float16"):
        RTX.build(replace(request_here, outputs=halves), ignore)
    more = (*request_here.outputs, TensorSpec("depth", "float32", (1,)))
    with pytest.raises(BuildError, match="depth is missing"):
        RTX.build(replace(request_here, outputs=more), ignore)


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


@pytest.mark.slow
def test_a_bad_timing_cache_is_replaced_and_an_input_that_the_exporter_dropped_is_no_obstacle(
    request_here: BuildRequest, tmp_path: Path
) -> None:
    """RTX takes the same path here as TensorRT does, though to it the cache is nothing."""
    path = tmp_path / "library" / ".timing-x.cache"
    path.parent.mkdir()
    path.write_bytes(b"no timings")
    request = replace(request_here, inputs=(*request_here.inputs, TensorSpec("unused", "float32", (1,))))
    trt_build.build_engine_file(RTX.flavour, request, ignore, timing_cache=path)
    assert path.read_bytes() != b"no timings"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.fault("TensorRT's timing cache is a stranger's", see="nothing: it is made anew")
def test_timings_that_this_machine_did_not_sign_are_not_read(tmp_path: Path) -> None:
    path, builder = tmp_path / ".timing-x.cache", Mock()
    path.write_bytes(b"timings")
    assert trt_build._timings(builder, path) == b""
    builder.create_builder_config.assert_not_called()
    trt_build._save_timings(path, b"timings")
    assert trt_build._timings(builder, path) == b"timings"
    assert trt_build._timings(builder, path.rename(tmp_path / ".timing-y.cache")) == b""


@pytest.mark.slow
def test_timings_that_cannot_be_kept_fail_no_build_for_a_gpu_that_is_not_here(
    request_here: BuildRequest, tmp_path: Path
) -> None:
    gone, request = tmp_path / "gone" / ".timing-x.cache", replace(request_here, target="sm_120")
    assert trt_build.build_engine_file(RTX.flavour, request, ignore, timing_cache=gone) == ["engine.trt"]


def test_timings_are_kept_per_gpu_and_version(request_here: BuildRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_flavour, "_import", lambda _flavour: SimpleNamespace(__version__="11.4.0.106"))
    path = FULL._timing_cache(replace(request_here, target="sm_90 NVIDIA H200"))
    assert path == request_here.folder.parent / ".timing-11-4-0-106-sm-90-nvidia-h200.cache"


def test_a_build_for_a_gpu_that_is_not_here_names_both(request_here: BuildRequest) -> None:
    with pytest.raises(BuildError, match="that is sm_90 NVIDIA H200, and here is"):
        FULL.build(replace(request_here, target="sm_90 NVIDIA H200"), ignore)
