"""One compiled file serves prompts of any length, where a family leaves that free, and nothing more is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import token_networks
import torch
from compiling import COMPILES
from fake_recorder import Recorder
from hybrid_trt.architectures import Architecture, architectures
from hybrid_trt.architectures.calls import RequestedCalls, calls_to_compile, example_of, file_sizes
from hybrid_trt.architectures.shapes import Dim, Picture, Profile, Range, RequestedSizes, TensorSpec, sample_inputs
from hybrid_trt.backends import LiveTask, backends
from hybrid_trt.backends.torch_inductor import compiled, opened_files, parts
from hybrid_trt.backends.torch_inductor.additions_in_place import take_out_writes
from hybrid_trt.backends.torch_inductor.compile_step import compile_network
from hybrid_trt.backends.torch_inductor.compiled import file_name, sizes_of
from hybrid_trt.backends.torch_inductor.free_sizes import FreeSizes, told
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import BuildError, Engine, Library, trust
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.page_api import picture_fit

LIMIT = 1e-5
TORCH = backends()["torch"]
ANY_PROMPT = SimpleNamespace(free={"T": Range(2, 97, 900), "L": Range(2, 1009, 5000)})
CALL = {"B": 1, "R": 4, "C": 3, "T": 9, "L": 0}


@pytest.mark.parametrize("name", sorted(architectures()))
def test_each_family_says_all_that_is_asked_of_it(name: str) -> None:
    assert [asked for asked in Architecture.__annotations__ if not hasattr(architectures()[name], asked)] == []


def test_a_file_is_for_all_sizes_of_what_its_family_leaves_free_and_no_others() -> None:
    own = {"B": 1, "R": 4, "C": 3}
    assert file_sizes(ANY_PROMPT, CALL) == own | {"L": 0}
    assert file_sizes(ANY_PROMPT, CALL | {"T": 900}) == own | {"L": 0}
    assert file_sizes(ANY_PROMPT, CALL | {"T": 901}) == own | {"T": 901, "L": 0}, "longer than it serves"
    assert file_sizes(ANY_PROMPT, CALL | {"T": 1, "L": 12}) == own | {"T": 1}
    assert example_of(ANY_PROMPT, CALL | {"L": 12}) == own | {"T": 97, "L": 1009}


@pytest.mark.parametrize(("free", "name"), [
    ((), "B1-C3-L0-R4-T9.bin"), (("T",), "B1-C3-L0-R4-T.bin"), (("T", "L"), "B1-C3-L-R4-T.bin")])  # fmt: skip
def test_the_name_of_a_file_tells_what_it_leaves_free(free: tuple[str, ...], name: str) -> None:
    assert file_name(CALL, free) == name
    assert sizes_of(name) == {symbol: size for symbol, size in CALL.items() if symbol not in free}


@pytest.fixture
def network(models: dict[str, Path]) -> NativeNetwork:
    model = token_networks.load(str(models["tiny_qwen_image"]))
    del model.model.diffusion_model.transformer_blocks[1]  # half the time to compile
    return NativeNetwork.of_model(model, "tiny_qwen_image")


def lacking(network: NativeNetwork, compiled: list[dict[str, int]], **asked: Any) -> list[list[dict[str, int]]]:
    architecture = network.architecture()
    requested = RequestedCalls(architecture.profile(RequestedSizes(32, 64, 256)), **asked)
    return calls_to_compile(architecture, requested, "BRCTL", compiled)


def test_calls_that_differ_in_the_length_of_their_prompt_want_one_file(network: NativeNetwork) -> None:
    seen = [CALL | {"T": words} for words in (9, 77, 130)]
    (engine,) = lacking(network, [], seen=seen)
    assert engine == [example_of(network.architecture(), CALL)]
    there = file_sizes(network.architecture(), CALL)
    assert lacking(network, [there], seen=seen) == []
    assert lacking(network, [there], pictures=[Picture(48, 64, (1,), 1)]) == []
    assert lacking(network, [there | {"R": 5}], seen=seen) == [engine], "another picture's file does not count"
    with_references = [call | {"L": 40 + i} for i, call in enumerate(seen)]
    (other,) = lacking(network, [there], seen=with_references)
    assert len(other) == 1
    assert other[0]["L"] > 2



@COMPILES
def test_one_file_serves_prompts_of_any_length(
    network: NativeNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    architecture = network.architecture()
    ((first,), (second,)) = lacking(network, [], seen=[CALL, CALL | {"L": 40}])
    engines = [engine_for(network, [first, second], tmp_path)]
    assert [name for engine in engines for name in engine.manifest.files] == ["B1-C3-L0-R4-T.bin", "B1-C3-L-R4-T.bin"]
    session = LiveSession(network, TORCH, "float32", Recorder())
    session.use(engines)
    opened = counted(monkeypatch)
    for references in (0, 5, 40):
        for words in (9, 77, 130, 2):
            call = CALL | {"T": words, "L": references}
            given = sample_inputs(architecture.inputs(network.module, "float32"), call, seed=words)
            with torch.inference_mode():
                plain = session.live.function(*given.values())[0] if session.loaded else None
                for _ in range(3):  # plainly, recorded, replayed
                    result = session.run(given)["out"]
                    plain = session.live.function(*given.values())[0] if plain is None else plain
                    assert relative_error(result, plain) <= LIMIT
            assert session.uncovered is None
            assert session.serves(call) is None
            requested = RequestedCalls(architecture.profile(RequestedSizes(32, 64, 256)), seen=[call])
            assert TORCH.to_build(network, requested, engines) == []
    assert opened == [{"B": 1, "C": 3, "L": 0, "R": 4}, {"B": 1, "C": 3, "R": 4}], "each once"
    assert "48x64, any prompt; 48x64, any prompt, any references" in session.status(first_profile(network))
    session.run(sample_inputs(architecture.inputs(network.module, "float32"), CALL | {"T": 1}, seed=1))
    assert session.uncovered.words == "48x64, 1 tokens"
    nothing = RequestedCalls(first_profile(network), seen=[])
    (again,) = TORCH.to_build(network, nothing, engines, rebuild=engines)
    assert again.calls == (first, second)
    misfit = picture_fit._not_served(engines, "torch", True, [Picture(48, 64, (1,), 1), Picture(64, 64, (1,), 1)])
    assert misfit == (None, Picture(64, 64, (1,), 1)), "the page misses a file for the other picture alone"


def first_profile(network: NativeNetwork) -> Profile:
    return network.architecture().profile(RequestedSizes(32, 64, 256))


def engine_for(network: NativeNetwork, calls: list[dict[str, int]], folder: Path) -> Engine:
    order = BuildOrder(network, "float32", Profile.around(calls), TORCH, calls=tuple(calls))
    return build_engine(order, Library([folder / "library"]), lambda *_: None)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Sizes of the files that are opened from now on."""
    found, open_live = [], type(TORCH).open_live

    def opens(self: Any, engine: Engine, sizes: dict[str, int], device: torch.device) -> Callable[..., Any]:
        found.append(sizes)
        return open_live(self, engine, sizes, device)

    monkeypatch.setattr(type(TORCH), "open_live", opens)
    return found


@pytest.mark.parametrize("name", ["tiny_qwen_image", "tiny_hunyuan_video15"])  # the second one adds in place
def test_a_network_is_cut_with_its_sizes_free_and_the_parts_compute_what_it_does(
    models: dict[str, Path], name: str
) -> None:
    network = NativeNetwork.of_model(token_networks.load(str(models[name])), name)
    architecture = network.architecture()
    specs, free = architecture.engine_inputs(network.module, "float32"), architecture.free
    function = architecture.function(network.module).eval().requires_grad_(False)
    tensors = compiled.lifted(function)
    call = {symbol: served.opt for symbol, served in (first_profile(network).ranges | free).items()}
    given = list(sample_inputs(specs, call, seed=1).values())
    sizes = FreeSizes(specs, free)
    graph, _ = compiled.traced(function, [*tensors.values()], [*tensors], given, [], free=sizes)
    take_out_writes(graph)
    cut, outputs = parts.in_parts(graph, 3, sizes.traced())
    opened = [parts.opened(part.contents) for part in cut]
    assert all({str(dim) for one in examples for dim in one.shape if not isinstance(dim, int)}
               for _, examples, _ in opened), "each part has free sizes"  # fmt: skip
    together = parts.InParts([part for part, *_ in opened], [(part.takes, part.gives) for part in cut], outputs)
    for lengths in ((9, 2), (300, 5), (2, 40)):
        given = sample_inputs(specs, call | dict(zip(free, lengths, strict=True)), seed=1).values()
        with torch.inference_mode():
            (result,) = together(*tensors.values(), *given)
            assert relative_error(result, function(*given)[0]) <= LIMIT, lengths


class Joined(torch.nn.Module):
    """Words before a picture of six tokens, and layers that see all of them as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, words: torch.Tensor, picture: torch.Tensor) -> tuple[torch.Tensor]:
        x = torch.cat((words, picture), 1)
        for layer in self.layers:
            x = x + torch.relu(layer(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        return (x[:, words.shape[1] :],)


@COMPILES
def test_parts_that_others_compile_serve_prompts_of_any_length(tmp_path: Path) -> None:
    function, served = Joined().requires_grad_(False), {"T": Range(2, 97, 900)}
    specs = [TensorSpec("words", "float32", (2, Dim("T"), 8)), TensorSpec("picture", "float32", (2, 6, 8))]
    tensors, path = compiled.lifted(function), tmp_path / "sizes.bin"
    given = [torch.randn(2, 97, 8), torch.randn(2, 6, 8)]
    with ThreadPoolExecutor(1) as other:
        compiled.compile_in_parts(other.submit, 2, function, [*tensors.values()], [*tensors], given, path,
                                  free=FreeSizes(specs, served))()  # fmt: skip
    made = opened_files.open_file(path)
    assert isinstance(made, parts.InParts)
    for words in (97, 2, 450):
        given[0] = torch.randn(2, words, 8)
        with torch.inference_mode():
            assert torch.allclose(made(*tensors.values(), *given)[0], function(*given)[0], atol=1e-6)


class Fixed(torch.nn.Module):
    """Computes something else where a prompt has just the length that it was traced with."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * 2 if x.shape[1] == 97 else x + 1,)


class Short(torch.nn.Module):
    """Computes something else for long prompts."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * 2 if x.shape[1] < 500 else x + 1,)


@COMPILES
@pytest.mark.parametrize(("network", "match"), [
    (Fixed(), r"Eq\(s\d+, 97\), which T 2 has not"), (Short(), r"s\d+ < 500, which T 899 has not")])  # fmt: skip
def test_what_is_right_for_some_lengths_alone_is_not_made_a_file(
    network: torch.nn.Module, match: str, tmp_path: Path
) -> None:
    """Nothing is asked when the file is called, whatever Inductor took for granted."""
    x, y = (TensorSpec(name, "float32", (Dim("B"), Dim("T"))) for name in "xy")
    task = LiveTask((x,), (y,), [{"B": 2, "T": 9}], "float32", torch.device("cpu"), tmp_path,
                    free={"T": Range(2, 97, 900)})  # fmt: skip
    with pytest.raises(BuildError, match=match):
        compile_network(network, task, lambda *_: None)


def test_a_size_that_is_no_sum_of_products_is_not_cut() -> None:
    sizes = FreeSizes([TensorSpec("x", "float32", (Dim("T"),))], {"T": Range(2, 97, 900)})
    (x,) = sizes.examples([], [torch.zeros(97)])
    assert [told(size) for size in (7, x.shape[0] * 3 + 7)] == [7, f"3*{x.shape[0]} + 7"]
    with pytest.raises(ValueError, match="a size is"):
        told(x.shape[0] // 2)


def test_two_free_sizes_that_cannot_be_told_apart_are_refused() -> None:
    specs = [TensorSpec(symbol, "float32", (Dim(symbol), 3)) for symbol in "TL"]
    free = FreeSizes(specs, {"T": Range(2, 97, 900), "L": Range(2, 97, 900)})
    free.examples([], [torch.zeros(97, 3)] * 2)
    with pytest.raises(BuildError, match="could not be left free"):
        free.check()
