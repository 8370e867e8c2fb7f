"""A network in blocks is compiled once for each kind of block, and serves every size."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import token_networks
import torch
from compiling import COMPILES
from fake_engine import publish_engine
from fake_recorder import Recorder
from flux_networks import network as flux_network
from hybrid_trt.architectures import Architecture, architectures
from hybrid_trt.architectures.blocks import in_blocks, put_together, take_apart, words_of
from hybrid_trt.architectures.calls import RequestedCalls, is_compiled
from hybrid_trt.architectures.shapes import Picture, Profile, RequestedSizes, sample_inputs, symbols_in
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor import compile_kinds, opened_files, wiring
from hybrid_trt.backends.torch_inductor.kinds import InBlocks, Kinds
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import resources
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import BuildError, Engine, Library, measurements, trust
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.page_api import picture_fit
from hybrid_trt.sessions import session as session_module
from hybrid_trt.sessions.weight_ring import WeightRing
from tiny_transformers import let_comfyui_load_zimage
from zimage import network as zimage_network

LIMIT = 1e-5
NO_RING = WeightRing([], [], torch.device("cpu"))
TORCH = backends()["torch"]
CALL = {"B": 1, "R": 4, "C": 3, "T": 9, "L": 0}
SIZES = {"B": (1, 2, 3), "F": (1, 2, 5), "R": (1, 4, 7, 12), "C": (5, 3, 8), "N": (1, 3, 6, 2), "T": (9, 1, 2, 30, 77),
         "L": (0, 6, 17), "G": (0, 11), "I": (257, 0, 25), "V": (1, 2),
         "A": (8, 1, 25), "K": (0, 13, 6)}  # fmt: skip
KINDS = {"flux": 2, "klein": 2, "zimage": 1, "tiny_qwen_image": 2, "tiny_krea2": 2, "tiny_anima": 1, "tiny_wan": 1,
         "tiny_wan_i2v": 1, "tiny_wan_vace": 3, "tiny_hunyuan_video15": 2, "tiny_hunyuan_video": 2,
         "tiny_minimax_h3": 1, "tiny_minimax_h3_pruned": 1, "tiny_ltx2": 2, "tiny_ltx23": 2}  # fmt: skip
"""Networks -> the kinds of their blocks."""
IN_CI = ("flux",)


@pytest.mark.parametrize("name", sorted(architectures()))
def test_each_family_says_all_that_is_asked_of_it(name: str) -> None:
    assert [asked for asked in Architecture.__annotations__ if not hasattr(architectures()[name], asked)] == []


@pytest.mark.parametrize("name", sorted(architectures()))
def test_each_family_names_the_sizes_that_compiled_blocks_serve(name: str) -> None:
    free = architectures()[name].free
    usual = {symbol: served.opt for symbol, served in free.items()}
    assert is_compiled(architectures()[name], usual)
    for symbol, served in free.items():
        assert is_compiled(architectures()[name], usual | {symbol: served.max})
        assert not is_compiled(architectures()[name], usual | {symbol: served.max + 1}), symbol
    assert not is_compiled(architectures()[name], usual | {"ZZ": 1}), "a size that no block was tried with"


@pytest.fixture
def qwen(models: dict[str, Path]) -> NativeNetwork:
    return network_of("tiny_qwen_image", models)


def network_of(name: str, models: dict[str, Path]) -> NativeNetwork:
    made = {"flux": lambda: flux_network("dev"), "klein": lambda: flux_network("klein"), "zimage": zimage_network}
    if name in made:
        return made[name]()
    let_comfyui_load_zimage()
    return NativeNetwork.of_model(token_networks.load(str(models[name])), name)


def profile_of(network: NativeNetwork) -> Profile:
    return network.architecture().profile(RequestedSizes(32, 64, 256))


def order_for(network: NativeNetwork) -> BuildOrder:
    (part,) = TORCH.to_build(network, RequestedCalls(profile_of(network)), [])
    return BuildOrder(network, "float32", part.profile, TORCH)


def test_a_file_that_could_not_be_opened_ahead_says_so_to_the_first_call(caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    with caplog.at_level("INFO"):
        opened_files.ahead(lambda: opened_files.open_contents(b"no file", cpu), cpu).join(60)
    assert "was not opened ahead" in caplog.text
    with pytest.raises(ValueError, match="no kinds of blocks"):
        opened_files.open_contents(b"no file", cpu)


def engine_for(network: NativeNetwork, folder: Path) -> Engine:
    return build_engine(order_for(network), Library([folder / "library"]), lambda *_: None)


@pytest.fixture(scope="module")
def flux_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_for(flux_network("dev"), tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def qwen_engine(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine_for(network_of("tiny_qwen_image", models), tmp_path_factory.mktemp("qwen"))


def in_use(session: LiveSession) -> InBlocks:
    assert session.live.compiled is not None
    return session.live.compiled


def calls(symbols: set[str]) -> list[dict[str, int]]:
    """24 calls in which every size of ``SIZES`` comes, in ever other company. Guides come with two tokens or more."""
    own = {symbol: list(itertools.islice(itertools.cycle(sizes), 24))
           for symbol, sizes in SIZES.items() if symbol in symbols}  # fmt: skip
    for symbol, sizes in own.items():
        random.Random(symbol).shuffle(sizes)
    found = [dict(zip(own, sizes, strict=True)) for sizes in zip(*own.values(), strict=True)]
    for call in found:
        if {"N", "C"} <= symbols:
            call["C"] = 32 * call["N"] - 1
        if {"N", "G"} <= symbols:
            call["N"] = max(2, call["N"]) + call["G"]
    return found


@COMPILES
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.slow]) for name in KINDS])  # fmt: skip
def test_one_build_serves_every_size_and_compiles_each_kind_of_block_once(
    models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    network = network_of(name, models)
    engine = request.getfixturevalue("flux_engine") if name == "flux" else engine_for(network, tmp_path)
    architecture = network.architecture()
    session = LiveSession(network, TORCH, "float32", Recorder())
    session.use([engine])
    specs = session.live.inputs
    symbols = symbols_in(specs)
    fewest = {s: served.min for s, served in architecture.free.items()}
    for call in calls(symbols):
        call = {symbol: max(size, fewest[symbol]) for symbol, size in call.items()}
        given = sample_inputs(specs, call, seed=sum(call.values()))
        with torch.inference_mode():
            for _ in range(3):  # plainly, recorded, replayed
                results = session.run(given).values()
            expected = session.live.function(*(given[spec.name] for spec in specs))
        assert max(itertools.starmap(relative_error, zip(results, expected, strict=True))) <= LIMIT, call
        assert session.serving == [engine]
        assert session.uncovered is None
        assert TORCH.to_build(network, RequestedCalls(profile_of(network), seen=[call]), [engine]) == []
    blocks = in_use(session)
    assert len(blocks.kinds) == KINDS[name]
    assert blocks.plain == 0, "each block of each call ran compiled"
    assert "compiled for every size" in session.status(profile_of(network))


@COMPILES
def test_the_first_call_of_a_machine_shows_whether_each_block_has_its_own_weights(
    qwen: NativeNetwork, qwen_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plainly = qwen_engine, []
    assert wiring.FIGURE not in measurements.figures(engine)

    def called(own: Any) -> tuple[torch.Tensor, LiveSession]:
        session = LiveSession(qwen, TORCH, "float32")
        weights, forward = session.live._weights_of_blocks, session.live.function.forward
        monkeypatch.setattr(session.live, "_weights_of_blocks", lambda: own(weights()))
        monkeypatch.setattr(session.live.function, "forward", lambda *given: plainly.append(1) or forward(*given))
        session.use([engine])
        with torch.inference_mode():
            result = session.run(sample_inputs(session.live.inputs, CALL, seed=1))["out"]
        return result, session

    swapped, broken = called(lambda given: (given[0][::-1], given[1]))
    assert "blocks together differ from the normal model" in broken.refusal
    assert wiring.FIGURE not in measurements.figures(engine)
    session_module._refused.clear()  # as in another process
    right, whole = called(tuple)
    assert torch.equal(swapped, whole.live.function(*sample_inputs(whole.live.inputs, CALL, seed=1).values())[0])
    assert relative_error(right, swapped) <= LIMIT
    assert (whole.refusal, in_use(whole).judge) == (None, None)
    assert measurements.figures(engine)[wiring.FIGURE] <= LIMIT
    plainly.clear()
    assert relative_error(called(tuple)[0], swapped) <= LIMIT
    assert len(plainly) == 1, "it is not compared again"


@pytest.mark.parametrize(("precision", "error", "kept", "refused"), [
    ("bfloat16", 0.25, True, False), ("bfloat16", 1.2, False, True), ("float32", 2e-3, False, True),
    ("float16", float("inf"), False, False)])  # fmt: skip
def test_rounding_in_half_precision_refuses_no_engine_and_values_that_are_no_numbers_say_nothing(
    tmp_path: Path, precision: str, error: float, kept: bool, refused: bool
) -> None:
    like = publish_engine(tmp_path / "like").manifest
    manifest = replace(like, identity=replace(like.identity, precision=precision))
    library = Library([tmp_path])
    with library.building_folder() as folder:
        engine = library.publish(folder, manifest, record=trust.BUILT_HERE)
    with pytest.raises(wiring.Miswired) if refused else nullcontext():
        wiring.judge_of(engine)(error)
    assert (measurements.figures(engine).get(wiring.FIGURE) == error) is kept


@COMPILES
def test_the_page_misses_no_engine_for_another_picture_and_a_rebuild_is_one_file(
    qwen: NativeNetwork, qwen_engine: Engine
) -> None:
    engine = qwen_engine
    assert list(engine.manifest.files) == ["B-C-L-R-T.bin"]
    opened: list[Any] = []
    opened_files.ahead(lambda: opened.append(TORCH.open_live(engine, qwen.device)), qwen.device).join(120)
    assert TORCH.open_live(engine, qwen.device) is opened[0], "the first call finds it open"
    pictures = [Picture(48, 64, (1,), 1), Picture(640, 480, (1,), 1)]
    assert picture_fit._not_served([engine], "torch", True, pictures) == (None, None)
    (again,) = TORCH.to_build(qwen, RequestedCalls(profile_of(qwen), seen=[]), [engine], rebuild=[engine])
    assert again.profile == engine.manifest.identity.profile


@COMPILES
def test_what_was_compiled_for_a_model_serves_others_with_the_same_blocks(
    flux_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:

    def compiled(*_: object) -> None:
        raise RuntimeError("compiled again")

    monkeypatch.setattr(compile_kinds, "compiled", compiled)
    other, library = flux_network("fill"), Library([flux_engine.folder.parent])
    engine = build_engine(order_for(other), library, lambda *_: None, run=run_here)
    assert engine.folder != flux_engine.folder
    session = LiveSession(other, TORCH, "float32")
    session.use([engine])
    given = sample_inputs(session.live.inputs, {"B": 1, "N": 35, "C": 12, "T": 9}, seed=1)
    with torch.inference_mode():
        result, expected = session.run(given)["out"], session.live.function(*given.values())[0]
    assert relative_error(result, expected) <= LIMIT
    assert in_use(session).plain == 0
    with pytest.raises(BuildError, match="compiled again"):  # others have other blocks
        build_engine(order_for(flux_network("klein")), library, lambda *_: None, run=run_here)


@pytest.mark.parametrize(("free", "asked"), [(8e9, 0), (1e9, 1)])
def test_blocks_are_compiled_beside_what_is_loaded_where_there_is_room(
    qwen: NativeNetwork, monkeypatch: pytest.MonkeyPatch, free: float, asked: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (int(free), int(80e9)))
    asks: list[torch.device] = []
    order = replace(order_for(qwen), device=torch.device("cuda", 0))
    run = resources.with_room(lambda *_: {}, order, lambda device, _tell: asks.append(device))
    run({"step": "compile"}, lambda *_: None, lambda _line: None, {})
    assert len(asks) == asked


def test_a_build_that_a_prompt_left_no_room_has_the_gpu_to_itself(
    qwen: NativeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (int(8e9), int(80e9)))
    did: list[str] = []

    def run(*_: object) -> dict:
        did.append("built")
        if len(did) == 1:
            raise BuildError("out of memory")
        return {}

    order = replace(order_for(qwen), device=torch.device("cuda", 0))
    with_room = resources.with_room(run, order, lambda *_: did.append("asked"))
    with_room({"step": "compile"}, lambda *_: None, did.append, {})
    assert did[0] == "built"
    assert "out of memory" in did[1]
    assert did[2:] == ["asked", "built"]


def test_a_build_that_fails_for_another_reason_is_not_done_twice(
    qwen: NativeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (int(8e9), int(80e9)))
    did: list[str] = []

    def run(*_: object) -> dict:
        did.append("built")
        raise BuildError("torch could not compile this model")

    order = replace(order_for(qwen), device=torch.device("cuda", 0))
    again = resources.with_room(run, order, lambda *_: did.append("asked"))
    with pytest.raises(BuildError, match="could not compile"):
        again({"step": "compile"}, lambda *_: None, did.append, {})
    assert did == ["built"]


class Summed(torch.nn.Module):
    """Has Inductor choose a kernel that holds up to a length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * self.weight, 1).var(1)


@COMPILES
def test_blocks_that_inductor_has_in_its_caches_hold_for_the_same_sizes() -> None:
    found = []
    for _ in range(2):
        net = torch.nn.Sequential(Summed())
        net.blocks = in_blocks(net)
        sizes = (2, 50, 64), (1, 1, 64), (3, 60, 64)
        ((alike,), _) = compile_kinds.kinds_of(net, [[torch.randn(size)] for size in sizes])
        block = compile_kinds.BlockFunction(alike.block, alike.calls[0].form)
        inputs = [torch.randn(t.shape) for t in alike.calls[0].inputs]
        found.append({str(one) for one in compile_kinds.compiled(alike, block, inputs, None).conditions})
    assert found[0] == found[1]
    assert any("<=" in condition for condition in found[0]), "else nothing could be lost"


class Block(torch.nn.Module):
    """Computes something else for a length, or from a length on, with in-place writes as ComfyUI's blocks have."""

    def __init__(self, special: int) -> None:
        super().__init__()
        self.layer, self.special = torch.nn.Linear(4, 4), special

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        x += self.layer(x) * (2 if x.shape[1] == self.special else 1)
        if x.shape[1] > 100:
            x *= 3
        return x if places is None else x * places


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(11), Block(11), Block(7)])
        self.blocks = in_blocks(self.layers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = x * 1
        for number, block in enumerate(self.blocks):
            x = block(x, x.new_ones(x.shape[1], 1) if number == 2 else None)
        return (x,)


@pytest.fixture(scope="module")
def compiled() -> tuple[Network, InBlocks]:
    torch.manual_seed(1)
    net = Network().requires_grad_(False)
    found, of = compile_kinds.kinds_of(net, [[torch.randn(size)] for size in ((2, 50, 4), (1, 1, 4), (3, 60, 4))])
    kinds = []
    for alike in found:
        block = compile_kinds.BlockFunction(alike.block, alike.calls[0].form)
        kinds.append(compile_kinds.compiled(alike, block, [torch.randn(t.shape) for t in alike.calls[0].inputs], None))
    opened = opened_files.open_contents(compile_kinds.contents_of(of, kinds), torch.device("cpu"))
    weights = [list(compile_kinds.lifted(block).values()) for block in net.blocks]
    return net, InBlocks(net, opened, lambda: (weights, NO_RING))


@COMPILES
@pytest.mark.parametrize(("size", "plain"), [((2, 50, 4), 0), ((1, 1, 4), 0), ((5, 3, 4), 0), ((2, 11, 4), 2),
                                             ((2, 7, 4), 1), ((1, 101, 4), 3)])  # fmt: skip
def test_a_block_of_a_size_that_its_kind_does_not_hold_for_runs_plainly(
    compiled: tuple[Network, InBlocks], size: tuple[int, ...], plain: int
) -> None:
    net, blocks = compiled
    assert len(blocks.kinds) == 2, "the first two are of one kind"
    x, before = torch.randn(size), blocks.plain
    with torch.inference_mode():
        (result,), (expected,) = blocks(x), net(x)
    assert relative_error(result, expected) <= LIMIT
    assert blocks.plain - before == plain


@COMPILES
def test_a_block_that_is_called_otherwise_runs_plainly_and_inputs_are_not_written_to(
    compiled: tuple[Network, InBlocks]
) -> None:
    net, blocks = compiled
    x = torch.randn(2, 50, 4, dtype=torch.float64)
    given, before = x.clone(), blocks.plain
    net.double()
    try:
        with torch.inference_mode():
            assert relative_error(blocks(x)[0], net(x)[0]) == 0
    finally:
        net.float()
    assert blocks.plain - before == 3
    assert torch.equal(x, given)


def test_sizes_in_which_blocks_of_a_kind_differ_are_left_free() -> None:
    class Shorter(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            for block in self:
                x = block(x.clone())[:, 1:]
            return (x,)

    net = Shorter(Block(0), Block(0), Block(0))
    net.blocks = in_blocks(net)
    ((alike,), _) = compile_kinds.kinds_of(net, [[torch.randn(size, 50, 4)] for size in (2, 1, 3)])
    assert compile_kinds.FreeDimensions([call.inputs for call in alike.calls]).fixed == {(0, 2): 4}


@COMPILES
def test_closed_blocks_compute_as_they_are() -> None:
    net = Network().requires_grad_(False)
    own = [block.forward for block in net.blocks]
    blocks = InBlocks(net, Kinds([()] * 3, [], []), lambda: ([[]] * 3, NO_RING))
    x = torch.randn(1, 3, 4)
    with torch.inference_mode():
        assert torch.equal(blocks(x)[0], net(x)[0])
    blocks.close()
    assert [block.forward for block in net.blocks] == own


def test_a_call_is_put_together_as_it_was() -> None:
    tensors: list[torch.Tensor] = []
    x, y = torch.ones(2), torch.ones(3)
    value = (x, [None, {"a": y, "n": 3}], {"optimized_attention_override": (x,), "block_index": 7})
    form = take_apart(value, tensors)
    assert [t.shape for t in tensors] == [(2,), (3,), (2,)]
    made = put_together(form, iter(tensors))
    assert made[0] is x
    assert made[1] == [None, {"a": y, "n": 3}]
    assert made[2] == {"optimized_attention_override": (x,)}, "the number of a block is nothing that it computes with"
    assert words_of(form) == words_of(take_apart(value, []))
    assert words_of(form) != words_of(take_apart((x, [None, {"a": y, "n": 4}], {}), []))
