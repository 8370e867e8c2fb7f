"""TensorRT engines run for real. On a machine with an RTX card, or with full TensorRT and any NVIDIA GPU:

    pytest -m gpu tests/backends/test_tensorrt_gpu.py

Without one, each test is skipped with the reason that the node would show.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import networks
import pytest
import torch
from builds import main_file
from comfy import model_management
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.backends import backends, onnxruntime
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_library import Engine, Library, Reason, Unavailable, trust
from hybrid_trt.engine_library.disk import Settings, write_settings
from hybrid_trt.engine_library.engine import LIMITS, describe_files, relative_error
from hybrid_trt.engine_library.gpu import gpu_of
from hybrid_trt.sampling.engine_patcher import EnginePatcher
from hybrid_trt.sessions.file_session import FileSession

pytestmark = [pytest.mark.gpu, pytest.mark.tensorrt]

GPU = torch.device("cuda", 0)
CALLS = [{"B": 2, "H": 32, "W": 32, "T": 77, "HB": 1}, {"B": 1, "H": 37, "W": 96, "T": 154, "HB": 1},
         {"B": 4, "H": 64, "W": 33, "T": 231, "HB": 4}, {"B": 2, "H": 32, "W": 32, "T": 77, "HB": 1}]


@pytest.fixture(scope="module", params=["tensorrt", "tensorrt_rtx"])
def backend(request: pytest.FixtureRequest) -> object:
    chosen = backends()[request.param]
    if (refusal := chosen.cannot_run(GPU)) is not None:
        pytest.skip(str(refusal))
    return chosen


@pytest.fixture(scope="module", params=["float16", "float32"])
def pair(backend: object, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Kind -> an engine of this backend, and the same network's engine for ONNX Runtime on the CPU."""
    made = {}
    for kind in ("unet", "controlnet"):
        folder = tmp_path_factory.mktemp(kind)
        here = networks.random_network(kind, networks.TINY["sd15"], device=GPU)
        there = networks.random_network(kind, networks.TINY["sd15"])
        engine = build(here, request.param, backend, folder)
        made[kind] = engine, build(there, "float32", backends()["onnxruntime"], folder)
    return made


def build(network: object, precision: str, backend: object, folder: Path) -> Engine:
    order = builder.BuildOrder(network, precision, networks.PROFILE, backend)
    write_settings(folder, Settings(tensorrt_level=1))  # quick builds: it is not speed that is shown here
    return builder.build_engine(order, Library([folder]), lambda _phase, _fraction: None)


def reference(engine: Engine, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the same graph in float32 in ONNX Runtime on the CPU."""
    with_cpu = {name: tensor.float().cpu() for name, tensor in given.items()}
    return FileSession(engine, onnxruntime.BACKEND.load, networks.CPU).run(with_cpu)


def inputs_of(engine: Engine, symbols: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
    given = sample_inputs(engine.manifest.inputs, symbols, seed)
    return {name: tensor.to(GPU) for name, tensor in given.items()}


def calls_of(engine: Engine) -> list[dict[str, int]]:
    """The calls that an engine is asked: of changing sizes where it takes more than one."""
    ranges = engine.manifest.identity.profile.ranges
    one = all(r.min == r.max for r in ranges.values())
    return [{**CALLS[0], **engine.manifest.identity.profile.sizes("opt")}] * len(CALLS) if one else CALLS


def worst(outputs: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(relative_error(outputs[name].cpu(), expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_it_computes_what_onnx_runtime_computes_at_changing_shapes(backend: object, pair: dict, kind: str) -> None:
    engine, same = pair[kind]
    session = FileSession(engine, backend.load, GPU)
    for seed, symbols in enumerate(calls_of(engine)):
        given = inputs_of(engine, symbols, seed)
        assert worst(session.run(given), reference(same, given)) <= LIMITS[engine.manifest.identity.precision], symbols


def test_residuals_that_are_switched_off_leave_nothing_behind(backend: object, pair: dict) -> None:
    engine, same = pair["unet"]
    session = FileSession(engine, backend.load, GPU)
    given = inputs_of(engine, calls_of(engine)[0], 5)
    plain = {name: tensor for name, tensor in given.items() if not name.startswith("control_")}
    for call in (given, plain, given, plain):
        assert worst(session.run(call), reference(same, call)) <= LIMITS[engine.manifest.identity.precision]


def test_outputs_are_the_callers_and_inputs_stay_as_they_are(backend: object, pair: dict) -> None:
    engine, _same = pair["controlnet"]
    session = FileSession(engine, backend.load, GPU)
    given = inputs_of(engine, calls_of(engine)[0], 6)
    before = {name: tensor.clone() for name, tensor in given.items()}
    first = session.run(given)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    session.run(inputs_of(engine, calls_of(engine)[0], 7))
    torch.cuda.synchronize()
    assert all(torch.equal(first[name], kept[name]) for name in first)
    assert all(torch.equal(given[name], before[name]) for name in given)


def test_a_thousand_calls_of_switching_shapes_replay_to_the_bit_what_plain_calls_give(
    backend: object, pair: dict
) -> None:
    engine, _same = pair["unet"]
    session, plain = FileSession(engine, backend.load, GPU), backend.load(engine, GPU)
    if not plain.capturable:
        pytest.skip("TensorRT-RTX compiles kernels while it runs, so its calls are not recorded")
    sizes = calls_of(engine)[:3]
    given = [inputs_of(engine, symbols, seed) for seed, symbols in enumerate(sizes)]
    expected = []
    for symbols, inputs in zip(sizes, given, strict=True):
        outputs = {
            s.name: torch.empty(s.shape(symbols), dtype=getattr(torch, s.dtype), device=GPU)
            for s in engine.manifest.outputs
        }
        plain.run(inputs, outputs)
        expected.append(outputs)
    order = torch.randint(3, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
    different = torch.zeros((), dtype=torch.int64, device=GPU)
    for which in order:
        for name, value in session.run(given[which]).items():
            different += (value != expected[which][name]).sum()
    assert len(session.graphs) == len({tuple(symbols.items()) for symbols in sizes})
    assert session.graphs.failure is None
    assert int(different) == 0


def test_an_engine_that_is_built_here_has_proven_itself_on_this_gpu(backend: object, pair: dict) -> None:
    for engine, _same in pair.values():
        record = trust.record_of(engine)
        assert record.gpu == gpu_of(GPU)
        assert 0 < record.parity["rel_err"] <= LIMITS[engine.manifest.identity.precision]
        assert {"native_ms", "engine_ms", "driver"} <= record.parity.keys()
        assert Library([engine.folder.parent]).why_unusable(engine, lambda _: None, gpu_of(GPU)) is None


@pytest.mark.parametrize("own_stream", [False, True])
def test_two_engines_in_turn_share_scratch_and_do_not_disturb_each_other(
    backend: object, pair: dict, own_stream: bool
) -> None:
    sessions = {kind: FileSession(pair[kind][0], backend.load, GPU) for kind in pair}
    given = {kind: inputs_of(pair[kind][0], calls_of(pair[kind][0])[0], 8) for kind in pair}
    expected = {kind: reference(pair[kind][1], given[kind]) for kind in pair}
    results = []
    with torch.cuda.stream(torch.cuda.Stream(GPU) if own_stream else torch.cuda.default_stream(GPU)):
        for tensors in given.values():
            for tensor in tensors.values():
                tensor.record_stream(torch.cuda.current_stream(GPU))
        torch.cuda.current_stream(GPU).wait_stream(torch.cuda.default_stream(GPU))
        for _ in range(10):
            results += [(kind, session.run(given[kind])) for kind, session in sessions.items()]
            torch.empty(64 << 20, dtype=torch.uint8, device=GPU).fill_(0xFF)  # falls where the scratch was
    torch.cuda.synchronize()
    for kind, outputs in results:
        assert worst(outputs, expected[kind]) <= LIMITS[pair[kind][0].manifest.identity.precision]


def test_unloading_while_the_gpu_works_is_safe(backend: object, pair: dict) -> None:
    engine, same = pair["unet"]
    session = FileSession(engine, backend.load, GPU)
    given = inputs_of(engine, calls_of(engine)[2], 9)
    outputs = [session.run(given) for _ in range(5)]
    session.unload()
    expected = reference(same, given)
    for results in (*outputs, session.run(given)):
        assert worst(results, expected) <= LIMITS[engine.manifest.identity.precision]


def test_memory_is_told_and_given_back(backend: object, pair: dict) -> None:
    engine, _same = pair["unet"]
    session = FileSession(engine, backend.load, GPU)
    torch.cuda.synchronize()
    free_before, _total = torch.cuda.mem_get_info(GPU)
    session.run(inputs_of(engine, calls_of(engine)[2], 10))
    runner = session._runner
    assert runner.scratch_bytes > 0
    assert runner.bytes == engine.manifest.bytes + runner.scratch_bytes
    del runner
    session.unload()
    torch.cuda.empty_cache()
    free_after, _total = torch.cuda.mem_get_info(GPU)
    assert free_before - free_after < 0.2 * engine.manifest.bytes


def test_a_shape_outside_the_profile_is_refused_by_the_runner_too(backend: object, pair: dict) -> None:
    engine, _same = pair["controlnet"]
    runner = backend.load(engine, GPU)
    symbols = {"B": 5, "H": 32, "W": 32, "T": 77, "HB": 1}
    outputs = {
        s.name: torch.empty(s.shape(symbols), dtype=getattr(torch, s.dtype), device=GPU)
        for s in engine.manifest.outputs
    }
    with pytest.raises(RuntimeError, match="refused"):
        runner.run(inputs_of(engine, symbols, 11), outputs)


@pytest.mark.parametrize("told", [False, True], ids=["its hash tells", "its hash was made anew"])
def test_a_damaged_plan_never_runs(backend: object, pair: dict, told: bool, tmp_path: Path) -> None:
    engine, _same = pair["unet"]
    folder = Path(shutil.copytree(engine.folder, tmp_path / engine.folder.name))
    plan = folder / main_file(engine).name
    plan.write_bytes(plan.read_bytes()[: plan.stat().st_size // 2])
    manifest = replace(engine.manifest, files=describe_files(folder, list(engine.manifest.files)))
    damaged = Engine(folder, manifest if told else engine.manifest)
    trust.keep(folder, damaged.manifest, trust.BUILT_HERE)
    session = FileSession(damaged, backend.load, GPU)
    with pytest.raises(Unavailable) as refused:
        session.run(inputs_of(engine, calls_of(engine)[0], 13))
    assert refused.value.fallback.reason in (Reason.BROKEN_ENGINE, Reason.ENGINE_FAILED)
    assert not session.loaded


def test_comfyui_evicts_it_and_the_next_call_opens_it_again(backend: object, pair: dict) -> None:
    engine, same = pair["unet"]
    session = FileSession(engine, backend.load, GPU)
    patcher = EnginePatcher.on(GPU)
    patcher.model.session, patcher.model.expected = session, True
    given = inputs_of(engine, calls_of(engine)[0], 14)
    first = {name: value.cpu() for name, value in session.run(given).items()}
    model_management.load_models_gpu([patcher])
    model_management.free_memory(1e30, GPU)
    assert not session.loaded
    again = session.run(given)
    assert session.loaded
    assert all(torch.equal(again[name].cpu(), value) for name, value in first.items())
    assert worst(again, reference(same, given)) <= LIMITS[engine.manifest.identity.precision]


@pytest.mark.fault("a real GPU is full when a TensorRT engine opens", see="normal speed: *engine failed*")
def test_without_memory_it_says_so_and_serves_when_there_is_some(backend: object, pair: dict) -> None:
    engine, _same = pair["unet"]
    session = FileSession(engine, backend.load, GPU)
    torch.cuda.empty_cache()
    free, _total = torch.cuda.mem_get_info(GPU)
    taken = torch.empty(free - (8 << 20), dtype=torch.uint8, device=GPU)
    given = inputs_of(engine, calls_of(engine)[0], 15)
    with pytest.raises((Unavailable, torch.OutOfMemoryError)) as refused:
        session.run(given)
    assert "memory" in str(refused.value)
    del taken
    torch.cuda.empty_cache()
    assert all(torch.isfinite(value).all() for value in session.run(given).values())


def test_rtx_keeps_the_kernels_that_it_compiled(backend: object, pair: dict) -> None:
    if backend.name != "tensorrt_rtx":
        pytest.skip("TensorRT compiles all kernels when it builds")
    engine, _same = pair["unet"]
    session = FileSession(engine, backend.load, GPU)
    session.run(inputs_of(engine, CALLS[0], 12))
    session.unload()
    (kept,) = engine.folder.glob("kernels-*.cache")
    assert kept.stat().st_size > 0
    engine.check_contents()


def test_one_engine_takes_the_weights_of_every_checkpoint_and_lora(backend: object, tmp_path: Path) -> None:
    if not backend.refits:
        pytest.skip("TensorRT-RTX builds engines with weights of their own only")
    first = networks.random_network("unet", networks.TINY["sd15"], torch.float16, device=GPU)
    order = builder.BuildOrder(first, "float16", networks.PROFILE, backend, replaceable=True)
    write_settings(tmp_path, Settings(tensorrt_level=1))
    engine = builder.build_engine(order, Library([tmp_path]), lambda *_: None)
    assert trust.record_of(engine).gpu == gpu_of(GPU), "proved with other weights than it was built with"
    other = networks.random_network("unet", networks.TINY["sd15"], torch.float16, device=GPU, seed=2)
    patches = {
        name: ("diff", (0.3 * torch.randn(p.shape) / p.shape[-1] ** 0.5,))
        for name, p in other.patcher.model.named_parameters()
        if name.endswith("to_k.weight")
    }
    lora, at_once = other.patcher.clone(), first.patcher.clone()
    assert lora.add_patches(patches, 0.8)
    assert at_once.add_patches(patches, 0.8)
    for network, patcher in ((first, at_once), (first, first.patcher), (other, other.patcher), (other, lora),
                             (other, other.patcher)):  # fmt: skip
        session = backend.session(network, [engine], "float16", None)
        for seed, symbols in enumerate(calls_of(engine)[:2]):
            given = inputs_of(engine, symbols, seed)
            session.sync_from(network, patcher)
            assert worst(session.run(given), by_native(network, patcher, engine, given)) <= LIMITS["float16"], symbols


def by_native(
    network: object, patcher: object, engine: Engine, given: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Call the network's function on the GPU with a patcher's weights."""
    patcher.patch_model(GPU)
    try:
        with torch.inference_mode():
            results = network.architecture().function(network.module)(*given.values())
            return {spec.name: result.cpu() for spec, result in zip(engine.manifest.outputs, results, strict=True)}
    finally:
        patcher.unpatch_model(networks.CPU)


def test_tensorrt_keeps_what_tactics_took(backend: object, pair: dict) -> None:
    if backend.name != "tensorrt":
        pytest.skip("TensorRT-RTX measures nothing when it builds")
    engine, _same = pair["unet"]
    (kept,) = engine.folder.parent.glob(".timing-*.cache")
    assert kept.stat().st_size > 0
