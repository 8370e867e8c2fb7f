"""The torch backend on a GPU, where its CUDA graphs and streams are real. On a machine with an NVIDIA GPU:

    pytest -m gpu tests/backends/test_torch_gpu.py

Without one each test is skipped. What holds on a CPU too is in ``test_live_torch.py`` and ``test_cuda_graphs.py``.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import networks
import pytest
import torch
from any_weights import lora, patched
from comfy.conds import CONDCrossAttn, CONDRegular
from comfy.controlnet import ControlNet
from comfy.model_management import cast_to_device
from comfy.samplers import cond_cat
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor import attention
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.weight_hash import look_for_edits
from hybrid_trt.comfy_model.weight_values import current_weights
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_builder.worker import helpers
from hybrid_trt.engine_library import Library, Unavailable, trust
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling import hint_cache
from hybrid_trt.sampling.controlnet import EngineControlModel
from hybrid_trt.sampling.run_inputs import RUN, RunInputs, call_on_device
from hybrid_trt.sessions.cuda_graphs import GraphCache
from small_networks import control_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")]

GPU = torch.device("cuda", 0)
TORCH = backends()["torch"]
HALF = torch.float16
LIMIT = 1e-2
SIZES = {"B": 2, "H": 64, "W": 64, "T": 77, "HB": 1}
"""The opt sizes of ``networks.PROFILE``, which is what a build compiles."""


def tiny(kind: str, seed: int = 1) -> NativeNetwork:
    return networks.random_network(kind, networks.TINY["sd15"], HALF, seed, GPU)


def given_for(net: NativeNetwork, seed: int, **sizes: int) -> dict[str, torch.Tensor]:
    specs = net.architecture().inputs(net.module, "float16")
    given = {name: tensor.to(GPU) for name, tensor in sample_inputs(specs, SIZES | sizes, seed).items()}
    given["timesteps"] = given["timesteps"].to(HALF).float()  # a ControlNet gets them in half precision from ComfyUI
    return given


def native(net: NativeNetwork, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The native module's own forward on the GPU, with the weights that its patcher gives it."""
    net.patcher.patch_model(networks.CPU)
    module = copy.deepcopy(net.module).to(GPU)
    net.patcher.unpatch_model(networks.CPU)
    given = {name: tensor.clone() for name, tensor in given.items()}
    given["timesteps"] = given["timesteps"].to(HALF) if net.role is Role.CONTROLNET else given["timesteps"]
    if net.role is Role.CONTROLNET:
        result = module(**given)
        return [*result["output"], *result["middle"]]
    control = control_of(net, given)
    return [module(**given, control=control, transformer_options={})]


def error(session: LiveSession, net: NativeNetwork, given: dict[str, torch.Tensor]) -> float:
    with torch.inference_mode():
        return max(relative_error(r, n) for r, n in zip(session.run(given).values(), native(net, given), strict=True))


@pytest.fixture(autouse=True)
def key_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_graphs_and_compiled_files_compute_what_native_does_in_any_order_of_shapes(
    kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "room_for_helpers", lambda _device: count)
    net = tiny(kind)
    session = LiveSession(net, TORCH, "float16")
    long = {"H": 33, "T": 154}
    calls = [{}, {"B": 1}, {}, {"B": 1}, {}, {"B": 1}, long, {}, long, long]
    for i, sizes in enumerate(calls):
        assert error(session, net, given_for(net, i, **sizes)) <= LIMIT
    assert session.graphs.failure is None
    assert len(session.graphs) == 3
    engine = build_engine(BuildOrder(net, "float16", networks.PROFILE, TORCH), Library([tmp_path]), lambda *_: None)
    session.use([engine])
    for i, sizes in enumerate(calls):
        assert error(session, net, given_for(net, i, **sizes)) <= LIMIT
    assert (session.refusal, session.graphs.failure, len(session.graphs)) == (None, None, 3)
    assert session.serving == [engine]


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_compiled_files_take_weights_of_our_own_and_ComfyUIs(kind: str, images: int, tmp_path: Path) -> None:
    """By the layout of a kernel of one pixel torch tells which layout a convolution of one image gives."""
    net = tiny(kind)
    engine = build_engine(BuildOrder(net, "float16", networks.PROFILE, TORCH), Library([tmp_path]), lambda *_: None)
    for loaded in (False, True):
        if loaded:
            net.patcher.patch_model(GPU)
        session = LiveSession(net, TORCH, "float16")
        session.use([engine])
        given = given_for(net, 1, B=images)
        with torch.inference_mode():
            expected = [result.clone() for result in LiveSession(net, TORCH, "float16").run(given).values()]
            for _ in range(3):
                results = session.run(given).values()
        assert session.uncovered is None
        assert session.refusal is None
        assert bool(session.live.weights.bytes) == (not loaded or kind == "controlnet")
        assert max(relative_error(r, e) for r, e in zip(results, expected, strict=True)) <= LIMIT


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_attention_is_chosen_by_timing_and_computes_what_native_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "KNOWN", {})
    engine = build_engine(BuildOrder(tiny(kind), "float16", networks.PROFILE, TORCH), Library([tmp_path]),
                          lambda *_: None, run=run_here)  # fmt: skip
    timed = [case for case in engine.manifest.parity["cases"] if "attention" in case]
    assert timed
    for case in timed:
        assert case["attention"] in case["attention_ms"]
        assert len(case["attention_ms"]) >= 2
        assert case["rel_err"] <= LIMIT


def test_residuals_that_come_and_go_leave_nothing_behind() -> None:
    net = tiny("unet")
    session = LiveSession(net, TORCH, "float16")
    full = given_for(net, 1)
    residuals = [name for name in full if name.startswith("control_")]
    for absent in ([], residuals, [], residuals, residuals[:1], [], residuals):
        given = {name: tensor for name, tensor in full.items() if name not in absent}
        zeroed = {name: torch.zeros_like(t) if name in absent else t for name, t in full.items()}
        with torch.inference_mode():
            assert relative_error(session.run(given)["out"], native(net, zeroed)[0]) <= LIMIT


def test_loras_come_and_go_without_a_new_recording() -> None:
    plain = tiny("unet")
    patches = {name: ("diff", (torch.randn_like(p) * p.std(),)) for name, p in plain.patcher.model.named_parameters()
               if name.endswith("to_k.weight")}
    patcher = plain.patcher.clone()
    patcher.add_patches(patches, 0.8)
    patched = NativeNetwork(patcher, plain.module, plain.prefix, plain.dtype, plain.label, plain.role)
    session, given = LiveSession(plain, TORCH, "float16"), given_for(plain, 3)
    for net in (plain, plain, patched, patched, plain, patched):
        session.begin_run(net.patcher)
        assert error(session, net, given) <= LIMIT
    assert relative_error(native(patched, given)[0], native(plain, given)[0]) > 10 * LIMIT
    assert len(session.graphs) == 1


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_patched_fp8_weights_are_to_the_bit_what_comfyui_puts_in_their_place_on_the_gpu(stored: torch.dtype) -> None:
    net = tiny("unet")
    net.module.to(stored)
    patcher = patched(net, (lora(net, 5), 0.8))
    ours = {name: weight.clone() for name, weight in current_weights(patcher, net.prefix)}
    patcher.patch_model(GPU)
    its = {name: weight.to("cpu", copy=True) for name, weight in net.module.state_dict().items()}
    patcher.unpatch_model(GPU)
    assert ours.keys() == its.keys()
    different = [name for name, weight in its.items() if not torch.equal(ours[name].float(), weight.float())]
    assert not different


def test_weights_that_are_written_to_on_the_gpu_are_noticed_in_each_layout_of_memory() -> None:
    net = tiny("unet")
    first = look_for_edits(net.patcher)
    for parameter in net.module.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    assert look_for_edits(net.patcher) == first, "the same values in another order"
    moved = next(p for p in net.module.parameters() if p.ndim == 1)
    moved.data = moved.data.cpu()
    assert look_for_edits(net.patcher) == first, "the same values in another place"
    with torch.inference_mode():
        next(p for p in net.module.parameters() if p.ndim == 4).mul_(0.5)
    assert look_for_edits(net.patcher) == first + 1


def test_four_controlnets_on_streams_of_their_own_compute_what_one_after_the_other_does() -> None:
    nets = [tiny("controlnet", seed) for seed in range(1, 5)]
    sessions = [LiveSession(net, TORCH, "float16") for net in nets]
    streams = [torch.cuda.Stream(GPU) for _ in nets]
    given = [given_for(net, 10 + i) for i, net in enumerate(nets)]
    with torch.inference_mode():
        for _ in range(3):
            alone = [list(session.run(g).values()) for session, g in zip(sessions, given, strict=True)]
        torch.cuda.synchronize()
        for _ in range(100):
            together = []
            for session, g, stream in zip(sessions, given, streams, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    together.append(list(session.run(g).values()))
            torch.cuda.synchronize()
            for one, other in zip(alone, together, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_cannot_be_recorded_runs_plainly_and_says_why() -> None:
    graphs = GraphCache(GPU)

    def waits_for_the_gpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"out": tensors["x"] * float(tensors["x"].sum())}

    for i in range(1, 5):
        x = torch.full((8,), float(i), device=GPU)
        assert torch.equal(graphs.run(waits_for_the_gpu, {"x": x})["out"], x * 8 * i)
    assert graphs.failure is not None
    assert len(graphs) == 0
    assert torch.equal(graphs.run(lambda t: {"out": t["x"] + 1}, {"x": torch.zeros(3, device=GPU)})["out"].cpu(),
                       torch.ones(3)), "CUDA is usable after it"
    assert torch.randn(3, device=GPU).isfinite().all(), "and its random numbers"


ALLOCATORS = pytest.mark.parametrize("allocator", ["native", "cudaMallocAsync"])


def said_by(script: str, allocator: str, *arguments: str) -> list[str]:
    """Run a script in a process of its own: the allocator is chosen once, and a wrong free ends the process."""
    path = Path(__file__).parents[1] / "support" / f"{script}_on_gpu.py"
    ended = subprocess.run([sys.executable, "-P", str(path), *arguments], capture_output=True, text=True, check=False,
                           env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": f"backend:{allocator}"})
    assert ended.returncode == 0, ended.stderr[:1000] + ended.stderr[-2000:]
    return ended.stdout.split()


@pytest.mark.fault("recording fails on a real GPU", see="the engine runs unrecorded")
@ALLOCATORS
def test_a_failed_recording_gives_its_memory_back(allocator: str) -> None:
    said = said_by("failed_capture", allocator)
    backend, *later, gone = said
    assert (backend, gone) == (allocator, "True"), said
    # cudaMallocAsync gives a later recording the very addresses of the failed one, which torch refuses: it runs plainly
    assert later == ["captured"] or (allocator == "cudaMallocAsync" and "ptr_info" in " ".join(said)), said


@pytest.mark.fault("a recording is interrupted on a real GPU", see="the prompt ends; the next one is recorded")
@ALLOCATORS
def test_an_interrupted_recording_leaves_nothing_behind_and_the_next_one_is_made(allocator: str) -> None:
    assert said_by("failed_capture", allocator, "interrupt") == [allocator, "captured"]


@ALLOCATORS
def test_controlnets_side_by_side_take_no_more_memory_with_each_step(allocator: str) -> None:
    """One of a step's 32 MiB used to stay behind."""
    backend, more = said_by("side_by_side", allocator)[-2:]
    assert (backend, int(more) <= 64) == (allocator, True)


@pytest.mark.parametrize(("allocator", "at_least"), [("native", 0), ("cudaMallocAsync", 128)])
def test_memory_of_graphs_is_given_back_between_runs_and_they_compute_the_same_afterwards(
    allocator: str, at_least: int
) -> None:
    """``native`` keeps such memory in pools of torch's."""
    backend, given_back, left, equal = said_by("graph_memory", allocator)[-4:]
    assert (backend, left, equal) == (allocator, "0", "True")
    assert int(given_back) >= at_least


def test_recording_while_another_thread_uses_the_gpu() -> None:
    net, stop = tiny("unet"), threading.Event()
    square = torch.randn(256, 256, device=GPU)
    rounds = []

    def busy() -> None:
        while not stop.is_set():
            rounds.append((square @ square).sum().item())

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for seed in range(3):
            session = LiveSession(net, TORCH, "float16")
            for _ in range(3):
                assert error(session, net, given_for(net, seed)) <= LIMIT
            assert (session.graphs.failure, len(session.graphs)) == (None, 1)
        assert thread.is_alive()
    finally:
        stop.set()
        thread.join()
    assert len(set(rounds)) == 1


@pytest.mark.fault("a real GPU is full during a call",
                   see="normal speed: *engine failed*; the next run with memory is served")
def test_without_memory_the_call_is_refused_and_the_next_one_with_memory_is_served() -> None:
    net = tiny("unet")
    session, given = LiveSession(net, TORCH, "float16"), given_for(net, 4)
    assert error(session, net, given) <= LIMIT
    session.unload()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
    taken = []
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(1 << 20, dtype=torch.uint8, device=GPU))
        with pytest.raises(Unavailable, match="not enough GPU memory"), torch.inference_mode():
            session.run(given)
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    for _ in range(3):
        assert error(session, net, given) <= LIMIT


def test_unloading_gives_the_memory_back_and_many_sessions_take_no_more_than_one() -> None:
    net = tiny("controlnet")
    given = given_for(net, 5)

    def use() -> None:
        session = LiveSession(net, TORCH, "float16")
        before = torch.cuda.memory_allocated()
        with torch.inference_mode():
            for _ in range(3):
                session.run(given)
        assert torch.cuda.memory_allocated() > before
        session.unload()

    use()  # the stream's work space stays, for the next session
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        use()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < 1 << 20


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_prompts_that_stay_on_the_gpu_reach_the_network_bit_for_bit_as_those_copied_in_each_step(
    stored: torch.dtype, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    scales = 10.0 ** torch.randint(-45, 39, (77, 1), generator=generator)  # some that a dtype rounds to 0 or infinity
    prompts = [(torch.randn(1, 77 * n, 64, generator=generator) * scales.repeat(n, 1)).to(stored) for n in (1, 2)]
    conds = [[{"model_conds": {"c_crossattn": CONDCrossAttn(prompt), "y": CONDRegular(prompt[:, 0])}}]
             for prompt in prompts]

    def given_to_network(run_conds: list, name: str) -> torch.Tensor:
        batched = [{name: cond["model_conds"][name].process_cond(batch_size=2, area=None)} for (cond,) in run_conds]
        return cast_to_device(cond_cat(batched)[name], GPU, dtype)

    run = RunInputs()
    as_numbers = torch.int32 if dtype is torch.float32 else torch.int16
    for _step in range(2):
        moved = run.on_device(conds, GPU)
        assert all(value.cond.device == GPU for (cond,) in moved for value in cond["model_conds"].values())
        for name in ("c_crossattn", "y"):
            natively, ours = (given_to_network(each, name) for each in (conds, moved))
            assert (ours.dtype, ours.shape, ours.stride()) == (natively.dtype, natively.shape, natively.stride())
            assert torch.equal(ours.view(as_numbers), natively.view(as_numbers))
            assert natively.isfinite().any()
    assert all(prompt.device.type == "cpu" for prompt in prompts)
    del moved
    allocated = torch.cuda.memory_allocated()
    run.release()
    assert torch.cuda.memory_allocated() < allocated, "the run's copies are gone"


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_hints_made_for_the_first_call_are_comfyuis_own_on_the_gpu(stored: torch.dtype, dtype: torch.dtype) -> None:
    image = torch.rand(1, 512, 768, 3, generator=torch.Generator().manual_seed(1)).to(stored).movedim(-1, 1)
    network = torch.nn.Module()
    network.dtype, network.forward = dtype, lambda **_: {"output": []}
    native = ControlNet(network, load_device=GPU)
    native.set_cond_hint(image)
    backed = native.copy()
    backed.control_model = object.__new__(EngineControlModel)
    backed.control_model.native, backed.control_model.hints = network, hint_cache.KeptHints()
    x, t = torch.zeros(1, 4, 64, 96, device=GPU), torch.ones(1, device=GPU)
    for control in (native, backed):
        control.timestep_range = (999999999.9, 0.0)
        control.model_sampling_current = SimpleNamespace(timestep=lambda t: t, calculate_input=lambda _, x: x)
    assert hint_cache.make_hints([backed], x) == [backed]
    native.get_control(x, t, {"c_crossattn": torch.zeros(1, 77, 8)}, 1, {})
    expected, made = native.cond_hint, backed.cond_hint
    assert (made.device, made.dtype, made.stride()) == (expected.device, expected.dtype, expected.stride())
    assert torch.equal(made, expected)
    assert made.device == GPU


def test_the_host_is_one_call_ahead_of_the_gpu_and_no_more_and_the_gpu_always_has_one_to_do() -> None:
    run, ends, ahead = RunInputs(), [], []
    x = torch.zeros(1, device=GPU)

    def executor(*_: object) -> None:
        torch.cuda._sleep(40_000_000)  # cycles: some 20 ms
        ends.append(torch.cuda.current_stream(GPU).record_event())

    for _ in range(8):
        call_on_device(executor, None, [], x, None, {RUN: run})
        ahead.append(sum(not end.query() for end in ends))
    torch.cuda.synchronize()
    assert ahead == [1] * 8
    run.release()
    for _ in range(3):  # without a run, and so without a wait
        call_on_device(executor, None, [], x, None, {})
    assert not ends[-2].query(), "these calls take the GPU longer than the host"
    torch.cuda.synchronize()


def test_a_call_inside_of_a_recording_waits_for_nothing() -> None:
    run, x, graph = RunInputs(), torch.zeros(4, device=GPU), torch.cuda.CUDAGraph()
    call_on_device(lambda *_: x.add_(1), None, [], x, None, {RUN: run})
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(2):
            call_on_device(lambda *_: x.add_(1), None, [], x, None, {RUN: run})
    graph.replay()
    assert x.tolist() == [3.0] * 4
