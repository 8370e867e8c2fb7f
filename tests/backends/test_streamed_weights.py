"""Weights of blocks in main memory: the same values to the bit, wherever they are and however that changes."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from pathlib import Path

import pytest
import token_networks
import torch
from comfy import model_management
from comfy.model_management import LoadedModel
from compiling import COMPILES
from fake_recorder import Recorder
from flux_networks import network as flux_network
from hybrid_trt.architectures.shapes import Profile, RequestedSizes, sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor import session as live_session
from hybrid_trt.backends.torch_inductor import weight_places
from hybrid_trt.backends.torch_inductor.kinds import Kind
from hybrid_trt.backends.torch_inductor.network import LiveNetwork
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, Unavailable, trust
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.engine_patcher import EnginePatcher
from hybrid_trt.sessions import cuda_graphs
from hybrid_trt.sessions import session as session_module
from hybrid_trt.sessions.cuda_graphs import GraphCache
from patched import with_lora

TORCH = backends()["torch"]
SIZES = [{"B": 1, "N": 35, "C": 12, "T": 9}, {"B": 2, "N": 24, "C": 12, "T": 30}]

PRECISIONS = {"cpu": "float32", "cuda": "bfloat16"}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")

pytestmark = COMPILES


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def network(request: pytest.FixtureRequest) -> NativeNetwork:
    dtype = getattr(torch, PRECISIONS[request.param])
    net = flux_network("dev", dtype, depth=4, depth_single_blocks=12)
    net.patcher.load_device = torch.device(request.param, 0 if request.param == "cuda" else None)
    return NativeNetwork(net.patcher, net.module, net.prefix, dtype, "dev", net.role)


@pytest.fixture(scope="module")
def engine(network: NativeNetwork, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("streamed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(trust.FOLDER_VARIABLE, str(folder / "keys"))
        return built(network, PRECISIONS[network.device.type], folder)


def built(network: NativeNetwork, precision: str, folder: Path) -> Engine:
    profile = network.architecture().profile(RequestedSizes(32, 64, 256))
    order = BuildOrder(network, precision, profile, TORCH)
    return build_engine(order, Library([folder / "library"]), lambda *_: None)


@pytest.fixture
def session(network: NativeNetwork, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> LiveSession:
    """A session on weights of its own; even the small weights of its blocks are streamed."""
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(engine.folder.parents[1] / "keys"))
    monkeypatch.setattr(weight_places, "STREAMED_FROM", 0)
    monkeypatch.setattr(session_module, "_refused", {})
    monkeypatch.setattr(model_management, "MAX_PINNED_MEMORY", 1 << 34)  # in tests ComfyUI itself is on the CPU
    monkeypatch.setattr(live_session, "room_to_compute", lambda _: 0)  # a GPU's is larger than all weights here
    monkeypatch.setattr(LiveSession, "owns_weights", lambda *_: True)
    return opened(network, engine)


def opened(network: NativeNetwork, engine: Engine) -> LiveSession:
    on_cpu = network.device.type == "cpu"
    session = LiveSession(network, TORCH, PRECISIONS[network.device.type], Recorder() if on_cpu else None)
    session.use([engine])
    return session


def results(session: LiveSession) -> list[torch.Tensor]:
    """Of each size plainly, recorded and replayed."""
    drawn = [sample_inputs(session.live.inputs, sizes, seed=1) for sizes in SIZES]
    inputs = [{name: tensor.to(session.device) for name, tensor in given.items()} for given in drawn]
    with torch.inference_mode():
        found = [session.run(given)["out"] for _ in range(3) for given in inputs]
    assert (len(session.graphs), session.graphs.failure) == (len(SIZES), None)
    return found


def near(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    limit = 1e-5 if found[0].dtype is torch.float32 else 5e-2
    return max(itertools.starmap(relative_error, zip(found, wanted, strict=True))) <= limit


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def outside(session: LiveSession) -> float:
    """The part of the weights in main memory."""
    weights = session.live.weights
    return weights.size_of(weights.outside) / weights.most_bytes


@pytest.mark.parametrize(("room", "least", "most"), [(1.2, 0, 0), (0.8, 0.2, 0.7), (0, 0.5, 1)])
def test_results_are_the_same_wherever_the_weights_are(
    session: LiveSession, network: NativeNetwork, engine: Engine, room: float, least: float, most: float
) -> None:
    whole = session.live.weights.most_bytes
    expected = results(opened(network, engine))
    session.load(room * whole)
    assert least <= outside(session) <= most
    assert session.bytes == session.live.bytes >= (1 - outside(session)) * whole - 1
    assert session.bytes <= room * whole or outside(session) > 0.5
    assert equal(results(session), expected)
    assert ("comes from main memory" in session.status(Profile({}))) == (least > 0)
    assert session.live.compiled.plain == 0


def test_blocks_are_opened_to_load_weights_only_where_memory_is_short(session: LiveSession) -> None:
    session.load(math.inf)
    assert session.live.compiled is None, "a thread may still read the file meanwhile"
    session.unload()
    session.load(0)
    assert session.live.compiled is not None


def test_weights_give_way_bit_by_bit_and_come_back_when_there_is_room(session: LiveSession) -> None:
    expected = results(session)
    assert outside(session) == 0
    for size in (1, session.live.bytes // 8, session.live.bytes // 4):
        before, part = session.bytes, outside(session)
        assert session.give_back(size) >= size or outside(session) > 0.5
        assert session.loaded
        assert (session.bytes < before, outside(session) > part) == (True, True)
        assert equal(results(session), expected)
    part = outside(session)
    held = session.live.bytes
    session.load(1.15 * held)
    assert outside(session) == part, "nothing comes back at once, to be given away again"
    session.load(1.005 * held)
    assert outside(session) == part, "no graph is lost for a few weights"
    session.load(1.15 * held)
    assert 0 < outside(session) < 0.9 * part
    session.load(math.inf)
    assert outside(session) == 0
    assert equal(results(session), expected)


def test_a_run_on_graphs_computes_in_their_memory_and_gives_none_of_its_weights_for_that(
    session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = session.live.weights.most_bytes / 4
    monkeypatch.setattr(live_session, "room_to_compute", lambda _: room)
    session.load(0.5 * session.live.weights.most_bytes)
    part = outside(session)
    assert session.give_back(int(room / 2), planning=True) > 0, "there are no graphs yet"
    expected = results(session)
    assert session.give_back(int(room), planning=True) == 0
    assert equal(results(session), expected)
    before = session.bytes
    session.load(0.5 * session.live.weights.most_bytes)
    session.load(0.5 * session.live.weights.most_bytes)
    assert session.bytes > before
    assert outside(session) < part
    assert equal(results(session), expected)
    assert session.give_back(int(room / 2)) >= room / 2, "another model gets it"


def test_weights_stay_where_they_are_while_the_free_memory_stays(
    session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = session.live.weights.most_bytes
    monkeypatch.setattr(live_session, "room_to_compute", lambda _: whole / 4)
    monkeypatch.setattr(weight_places, "free_room", lambda _: 0.5 * whole - session.live.bytes)
    generations = []
    for _ in range(4):
        session.begin_run(session._sampled_with())
        session.load(0.5 * whole)
        results(session)
        generations.append(session.live.weights.generation)
    assert generations[0] < generations[1] == generations[2] == generations[3], "weights come back once"


def test_weights_leave_what_graphs_take_while_they_run(session: LiveSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of MiniMax H3's they took 4 GB, given back at the end of each prompt: the second prompt lacked them."""
    whole = session.live.weights.most_bytes
    monkeypatch.setattr(live_session, "room_to_compute", lambda _: whole / 8)
    session.load(0.9 * whole)
    expected = results(session)
    monkeypatch.setattr(GraphCache, "taken", 3 / 8 * whole)
    monkeypatch.setattr(weight_places, "free_room", lambda _: 0.9 * whole - session.live.bytes)
    session.load(0.9 * whole)
    assert session.live.bytes <= (0.9 - 3 / 8 + 1 / 8) * whole
    assert equal(results(session), expected)


@pytest.mark.parametrize(("room", "times"), [(0, 1), (math.inf, 0)])
def test_comfyui_makes_room_for_the_buffers_where_it_keeps_weights_in_main_memory_itself(
    session: LiveSession, network: NativeNetwork, monkeypatch: pytest.MonkeyPatch, room: float, times: int
) -> None:
    expected, asked = results(session), []
    large = {name for block in session.live.blocks for name in session.live.weights.large(block, 0)}
    monkeypatch.setattr(LiveSession, "owns_weights", lambda *_: False)
    monkeypatch.setattr(session.live.weights, "native_outside", lambda: large)
    monkeypatch.setattr(network.patcher, "partially_unload", lambda _device, size: asked.append(size))
    monkeypatch.setattr(weight_places, "free_room", lambda _: room)
    for _ in range(2):
        session.begin_run(network.patcher)
        assert equal(results(session), expected)
    assert outside(session) > 0.5
    assert len(asked) == times
    assert all(0.9 < size / session.live._ring.bytes <= 1 for size in asked)


def test_memory_that_is_not_pinned_is_not_streamed_from(
    session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(session)
    monkeypatch.setattr(LiveNetwork, "pinned", property(lambda self: not self.weights.outside))
    session.give_back(session.bytes // 4)
    with pytest.raises(Unavailable, match="does not pin main memory"):
        results(session)
    assert (session.bytes, outside(session), session.loaded) == (session.live.weights.most_bytes, 0, False)
    session.load(math.inf)
    assert equal(results(session), expected)
    assert session.give_back(1) >= session.live.weights.most_bytes, "all or nothing from now on"
    with pytest.raises(Unavailable, match="does not pin main memory"):
        session.load(0)


@pytest.mark.parametrize("part", [0.5, 1.0], ids=["half", "all"])
def test_what_is_given_back_is_free(session: LiveSession, part: float) -> None:
    results(session)
    lent = [weakref.ref(tensor) for own in session.live._weights_of_blocks()[0] for tensor in own]
    own = [weakref.ref(parameter) for block in session.live.blocks for parameter in block.parameters()]
    session.give_back(int(part * session.bytes)) if part < 1 else session.unload()
    assert all(weight() is None for weight in lent)
    assert sum(weight() is None for weight in own) >= 0.4 * part * len(own)


def test_a_lora_comes_and_goes_in_streamed_weights(
    session: LiveSession, network: NativeNetwork, engine: Engine
) -> None:
    resident = opened(network, engine)
    session.load(0)
    first = results(session)
    for strength in (0.8, 0.3):
        patched = with_lora(network.patcher, strength, ends="weight")
        for one in (session, resident):
            one.begin_run(patched)
        assert equal(results(session), results(resident))
        assert not equal(results(session), first)
    session.begin_run(network.patcher)
    assert equal(results(session), first)


def test_blocks_that_run_plainly_have_their_streamed_weights_too(
    session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(session)
    session.load(0)
    session.live.compiled._chosen.clear()
    monkeypatch.setattr(Kind, "serves", lambda *_: False)
    found = results(session)
    assert session.live.compiled.plain > 0
    assert near(found, expected)


def test_a_call_without_memory_streams_more_the_second_time(
    session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_places, "LEAST_SPARE", session.live.weights.most_bytes // 3)
    expected = results(session)
    session.load(1.1 * session.live.weights.most_bytes)
    run = session.live.run

    def full(*given: object) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(session.live, "run", run)
        raise torch.OutOfMemoryError("CUDA out of memory")

    session.graphs.clear()
    monkeypatch.setattr(session.live, "run", full)
    assert equal(results(session), expected)
    assert outside(session) > 0.2


def test_each_run_begins_with_room_for_what_graphs_gave_back(
    session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, asked = [7], []
    monkeypatch.setattr(cuda_graphs, "graph_memory", lambda _device: kept[-1])
    monkeypatch.setattr(cuda_graphs, "make_room_for_graphs", lambda size, _device: asked.append(size))
    for _ in range(3):
        results(session)
    assert len(session.graphs)
    assert asked == []
    kept.append(2)
    for _ in range(2):
        session.begin_run(session._sampled_with())
        for _ in range(2):
            results(session)
    assert asked == [5, 5]


class Owner:
    """Opens the engine, as a handle does."""

    def __init__(self, session: LiveSession) -> None:
        self.open = session.load

    def models_beside(self, _patcher: object = None) -> list:
        return []


def test_comfyui_loads_and_frees_an_engine_in_part(session: LiveSession) -> None:
    """ComfyUI's own record of a loaded model asks; the device has no limits of its own here."""
    whole = session.live.weights.most_bytes
    owner = Owner(session)
    patcher = EnginePatcher.on(session.device, owner)
    patcher.model.session = session
    loaded = LoadedModel(patcher)
    loaded.model_load(0)
    assert outside(session) == 0
    assert loaded.model_loaded_memory() == loaded.model_memory() == session.bytes == whole
    expected = results(session)
    assert loaded.model_unload(whole // 4) is False, "it stays loaded"
    assert loaded.model_loaded_memory() <= 3 / 4 * whole
    assert equal(results(session), expected)
    kept = outside(session)
    assert loaded.model_unload() is True
    assert (session.loaded, loaded.model_loaded_memory()) == (False, 0)
    loaded.model_load(0.6 * whole)
    assert loaded.model_loaded_memory() <= 0.6 * whole
    assert outside(session) > kept
    assert equal(results(session), expected)


@pytest.mark.slow
def test_quantised_weights_are_streamed_as_they_are(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setattr(weight_places, "STREAMED_FROM", 0)
    monkeypatch.setattr(LiveSession, "owns_weights", lambda *_: True)
    file = "tiny_flux1_fp8_unet"
    network = NativeNetwork.of_model(token_networks.load(str(models[file])), file)
    engine = built(network, "float32", tmp_path)
    streamed, resident = opened(network, engine), opened(network, engine)
    streamed.load(0)
    assert outside(streamed) > 0.3
    given = sample_inputs(streamed.live.inputs, SIZES[0], seed=1)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(streamed.run(given)["out"], resident.run(given)["out"])
    assert streamed.uncovered is None


def test_where_main_memory_is_short_too_native_is_told_so(
    session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_places, "available_bytes", lambda: 1000)
    with pytest.raises(Unavailable, match="main memory"):
        session.load(0)


def test_an_engine_whose_file_is_gone_streams_nothing(
    session: LiveSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.load(0)
    expected = results(session)
    session._refuse(RuntimeError("broken"))
    assert outside(session) == 0
    found = results(session)
    assert near(found, expected)


def test_the_memory_of_a_model_that_is_gone_is_free_at_once(
    engine: Engine, network: NativeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI drops a model and loads the next one in the same breath, long before Python looks for cycles."""
    monkeypatch.setattr(weight_places, "STREAMED_FROM", 0)
    monkeypatch.setattr(LiveSession, "owns_weights", lambda *_: True)
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(engine.folder.parents[1] / "keys"))
    monkeypatch.setattr(model_management, "MAX_PINNED_MEMORY", 1 << 34)
    gc.collect()
    gc.disable()
    try:
        dtype = network.module.dtype
        net = flux_network("dev", dtype, depth=4, depth_single_blocks=12)
        net.patcher.load_device = network.device
        own = NativeNetwork(net.patcher, net.module, net.prefix, dtype, "dev", net.role)
        del net
        session = live_session.live_session(own, TORCH, PRECISIONS[network.device.type])
        if own.device.type == "cpu":
            session.graphs._capture = Recorder()
        session.live.weights._share = False  # as under dynamic VRAM
        session.use([engine])
        session.load(0.5 * session.live.weights.most_bytes)
        results(session)
        weights = [weakref.ref(weight.untyped_storage()) for _, weight in session.live.weights._parameters()]
        assert any(weight() is not None for weight in weights)
        main_memory = session.live.weights._main_memory._tensors
        assert main_memory
        del own, session
        assert not main_memory
        assert all(weight() is None for weight in weights)
    finally:
        gc.enable()
