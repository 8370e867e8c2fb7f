"""A UNet starts beside its ControlNets: whoever looks at their residuals waits, and the compiled UNet where it must."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from control_stacks import CHOICE, step_of_comfyui
from fake_recorder import Recorder
from hybrid_trt.architectures.calls import AsyncInputs
from hybrid_trt.architectures.shapes import TensorSpec
from hybrid_trt.backends.torch_inductor import compiled, graph_passes, opened_files
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.engine_builder.worker_tasks import _spec_json
from hybrid_trt.engine_library import Library
from hybrid_trt.sampling import control_stack
from hybrid_trt.sampling.control_stack import LateControl
from hybrid_trt.sampling.controlnet import EngineControlModel
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.model_wrapper import BackboneRouter
from hybrid_trt.sessions import cuda_graphs
from hybrid_trt.sessions.cuda_capture import WaitPoint, with_wait_point
from hybrid_trt.sessions.cuda_graphs import GraphCache
from small_networks import CPU, network
from torch.fx.experimental.proxy_tensor import make_fx

ARRIVED = torch.ops.hybrid_trt.arrived.default


class Network(torch.nn.Module):
    """An encoder, a decoder, and residuals that the decoder alone takes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.decoder(torch.relu(self.encoder(x)) + first) * second,)


def inputs(seed: int = 0) -> list[torch.Tensor]:
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed + i)) for i in range(3)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Network, Callable]]:
    """A network, and what its compiled file computes."""
    made = Network().requires_grad_(False)
    file = tmp_path_factory.mktemp("late") / "network.bin"
    names = sorted(name for name, _ in made.named_parameters())
    weights = [made.get_parameter(name).data for name in names]
    compiled.compile_to_file(made, weights, names, inputs(), file, late=[1, 2])
    run = opened_files.open_file(file)
    with torch.no_grad():
        yield made, lambda *given: run(*weights, *given)


class CountedWaitPoint(WaitPoint):
    def __init__(self) -> None:
        super().__init__(None)
        self.waits = 0

    def wait(self) -> None:
        self.waits, self.passed = self.waits + 1, True


def traced(function: Callable, late: list[int]) -> torch.fx.GraphModule:
    graph = make_fx(function)(*inputs())
    placeholders = graph.graph.find_nodes(op="placeholder")
    graph_passes.wait_where_needed(graph, [placeholders[i] for i in late])
    return graph


def test_a_network_waits_behind_all_that_needs_no_late_input() -> None:
    made = Network().requires_grad_(False)
    graph = traced(made, [1, 2])
    (waits,) = graph.graph.find_nodes(op="call_function", target=ARRIVED)
    meets, late = waits.args
    assert meets.target == torch.ops.aten.relu.default
    assert [node.op for node in late] == ["placeholder", "placeholder"]
    assert all(user is waits or waits < user for node in late for user in node.users), "nothing reads them before"
    assert torch.equal(graph(*inputs(7))[0], made(*inputs(7))[0])


@pytest.mark.parametrize(
    "function",
    [lambda x, first, second: x + first + second, lambda x, first, second: x * 2, lambda x, first, second: first * 2],
    ids=["needed at once", "not needed", "alone"],
)
def test_a_network_that_has_nothing_to_do_meanwhile_does_not_wait(function: Callable) -> None:
    assert not traced(function, [1, 2]).graph.find_nodes(op="call_function", target=ARRIVED)


def test_a_compiled_file_reads_late_inputs_where_they_are_and_leaves_them_as_they_are(
    built: tuple[Network, Callable], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run = built
    given = inputs(5)
    monkeypatch.setattr(graph_passes, "wait_at_point", lambda: given[1].copy_(torch.ones(4, 8)))
    before = [tensor.clone() for tensor in given]
    (result,) = run(*given)
    assert torch.equal(given[1], torch.ones(4, 8)), "what comes while it runs"
    assert torch.equal(given[0], before[0])
    assert torch.equal(given[2], before[2])
    assert torch.allclose(result, made(given[0], torch.ones(4, 8), given[2])[0], atol=1e-6), "is what it takes"
    with torch.inference_mode():
        zeros = torch.zeros(4, 8)
        (result,) = run(inputs(6)[0], zeros, zeros)
    assert not result.any(), "one tensor for several late inputs"


def test_a_compiled_file_waits_once_and_computes_what_the_network_does(built: tuple[Network, Callable]) -> None:
    made, run = built
    for seed in range(3):
        wait_point = CountedWaitPoint()
        with with_wait_point(wait_point):
            (result,) = run(*inputs(seed))
        assert wait_point.waits == 1
        assert torch.allclose(result, made(*inputs(seed))[0], atol=1e-6)
    (result,) = run(*inputs())
    assert torch.allclose(result, made(*inputs())[0], atol=1e-6), "without a wait point nobody waits"


def test_a_unets_residuals_are_late_and_its_adapters_are_not() -> None:
    net = network("unet", "unlike_levels")
    specs = net.architecture().engine_inputs(net.module, "float32")
    late = {spec.name for spec in specs if spec.late}
    assert late == {spec.name for spec in specs if spec.name.startswith(("control_output", "control_middle"))}
    assert late
    assert [TensorSpec.from_json(_spec_json(spec)).late for spec in specs] == [spec.late for spec in specs]


class Stream:
    """In the place of a CUDA stream."""

    device = CPU

    def __init__(self, journal: list[str]) -> None:
        self.journal = journal

    def record_event(self) -> str:
        return "ready"

    def wait_stream(self, _other: object) -> None:
        self.journal.append("waits for the replay before")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of tensors of each wait."""
    found: list[int] = []
    monkeypatch.setattr(control_stack, "wait_for", lambda _ready, _stream, tensors: found.append(len(list(tensors))))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: "here")
    return found


def late_residuals() -> LateControl:
    places = {"input": [], "output": [torch.ones(1), None, torch.ones(2)], "middle": [torch.ones(3)]}
    return LateControl(places, Stream([]), reads=())


LOOKS = {
    "item": lambda c: c["output"], "get": lambda c: c.get("middle"), "items": lambda c: list(c.items()),
    "values": lambda c: list(c.values()), "dict": dict, "unpacked": lambda c: {**c}, "joined": lambda c: c | {},
    "keys": lambda c: [c.get(name) for name in c], "pop": lambda c: c.pop("middle"), "copy": lambda c: c.copy(),
    "copy.copy": copy.copy, "copy.deepcopy": copy.deepcopy, "updates another": lambda c: {}.update(c),
    "popitem": lambda c: c.popitem(), "setdefault": lambda c: c.setdefault("output"), "shown": repr,
    "reversed": lambda c: list(reversed(c)), "compared": lambda c: c == {}, "compared from there": lambda c: {} == c,
}  # fmt: skip


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_whoever_looks_at_residuals_waits_once_for_all(look: Callable, waits: list[int]) -> None:
    control = late_residuals()
    expected = {name: list(places) for name, places in control.unread().items()}
    assert isinstance(control, dict)
    assert "output" in control
    assert len(control) == 3
    assert bool(control)
    assert not waits, "what it has is said without waiting"
    found = look(control)
    assert waits == [3]
    if isinstance(found, dict):
        assert type(found) is dict
        assert str(found) == str(expected)
    look(late_residuals())
    assert waits == [3, 3]


def test_each_stream_that_looks_waits_for_itself(waits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    control = late_residuals()
    control["output"], control["middle"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: "elsewhere")
    control["output"]
    assert waits == [3, 3]


@pytest.mark.parametrize("takes_late", [True, False])
def test_a_session_is_told_of_late_residuals_if_it_takes_such_and_the_run_counts_it(
    takes_late: bool, waits: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network("unet", "unlike_levels")
    handle = EngineHandle.look_up(net, CHOICE, Library([tmp_path]), f"late {takes_late}")
    monkeypatch.setattr(LiveSession, "takes_late", takes_late)
    told = []

    def run(_self: LiveSession, given: Mapping, _extras: Mapping, late: AsyncInputs | None = None) -> dict:
        told.append((sorted(name for name in given if name.startswith("control")), late))
        return {"out": given["x"]}

    monkeypatch.setattr(LiveSession, "run", run)
    control = late_residuals()
    x = torch.ones(1, 4, 8, 8)
    given = {"x": x, "timesteps": torch.ones(1), "context": torch.ones(1, 77, 64), "control": control}
    router = BackboneRouter.__new__(BackboneRouter)
    router._handle = handle
    served, result = handle.serve(None, lambda: router._bound(given))
    assert served
    assert torch.equal(result, x)
    ((names, late),) = told
    assert len(names) == 3
    assert waits == ([] if takes_late else [3])
    assert late == (AsyncInputs(frozenset(names), control.stream, control.ready) if takes_late else None)
    assert (handle.stats.engine, handle.stats.beside) == (1, int(takes_late))


@pytest.mark.parametrize("fails", [False, True], ids=["in the end", "where a step fails"])
def test_what_was_read_is_kept_until_the_step_has_waited(fails: bool, waits: list[int]) -> None:
    control = late_residuals()

    def step(_model: Any, conds: list, *_: Any) -> None:
        conds[0][0]["control"]._late.append(control)
        if fails:
            raise RuntimeError

    given = [[{"control": SimpleNamespace()}]]
    given[0][0]["control"] = _control()
    try:
        step_of_comfyui(step, SimpleNamespace(session=SimpleNamespace(takes_late=True)))(None, given, None, None, {})
    except RuntimeError:
        assert fails
    assert waits == [0], "the current stream comes after it; nothing is read"


def test_residuals_are_waited_for_where_the_backbone_cannot_start_without_them(waits: list[int]) -> None:
    kept = []

    def step(_model: Any, conds: list, *_: Any) -> None:
        kept.append(conds[0][0]["control"]._late)

    for backbone in (None, SimpleNamespace(session=SimpleNamespace(takes_late=False))):
        step_of_comfyui(step, backbone)(None, [[{"control": _control()}]], None, None, {})
    assert kept == [None, None]


def _control() -> Any:
    from comfy.controlnet import ControlNet

    control = ControlNet(network("controlnet", "unlike_levels").module, load_device=CPU)
    control.control_model = EngineControlModel.__new__(EngineControlModel)
    return control


class Event:
    def __init__(self, journal: list[str]):
        self.journal = journal

    def record(self) -> None:
        self.journal.append("records the event")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> tuple[GraphCache, list[str]]:
    """A cache whose captures have wait points, and the events in order."""
    journal: list[str] = []

    class JournalWaitPoint(WaitPoint):
        def wait(self) -> None:
            self.passed = True
            journal.append("passes the wait point")

    recorder = Recorder()
    recorder.new_wait_point = lambda: JournalWaitPoint(Event(journal))
    monkeypatch.setattr(cuda_graphs, "wait_for", lambda *_: journal.append("waits for all"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: "here")
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: with_wait_point(None))  # any context
    return GraphCache(CPU, capture=recorder), journal


def late_call(journal: list[str]) -> AsyncInputs:
    return AsyncInputs(frozenset({"first", "second"}), Stream(journal), "ready")


def test_a_graph_waits_in_its_midst_and_one_that_cannot_before_it_starts(
    graphs: tuple[GraphCache, list[str]], built: tuple[Network, Callable]
) -> None:
    cache, journal = graphs
    made, run = built
    both = {"waits": run, "plain": made}
    for token, function in both.items():
        for seed in range(5):
            del journal[:]
            given = dict(zip(("x", "first", "second"), inputs(seed), strict=True))
            result = cache.run(lambda t: {"out": function(*t.values())[0]}, given, token, late=late_call(journal))  # noqa: B023
            assert torch.allclose(result["out"], made(*inputs(seed))[0], atol=1e-6)
            if seed < 2:
                assert journal[0] == "waits for all", "not captured yet"
            elif token == "waits":
                assert journal == ["waits for the replay before", "records the event"]
            else:
                assert journal == ["waits for all"]
        assert cache.takes_late is (token == "waits")


def test_buffers_of_a_replay_that_fails_are_nobodys_before_late_inputs_were_copied_there(
    graphs: tuple[GraphCache, list[str]], built: tuple[Network, Callable], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, journal = graphs
    _, run = built
    here, replays = SimpleNamespace(wait_stream=lambda _other: journal.append("the current stream waits")), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: here)

    def call(late: AsyncInputs | None) -> None:
        given = dict(zip(("x", "first", "second"), inputs(), strict=True))
        cache.run(lambda t: {"out": run(*t.values())[0]}, given, late=late)

    for _ in range(2):
        call(late_call(journal))
    monkeypatch.setattr(Recorder.Replay, "replay", lambda _self: replays.append(1) or [][0])
    for late in (late_call(journal), None):
        del journal[:]
        with pytest.raises(IndexError):
            call(late)
        expected = ["waits for the replay before", "records the event", "the current stream waits"]
        assert journal == (expected if late else [])
    assert len(replays) == 2


@pytest.mark.parametrize("wait_points", [True, False])
def test_networks_that_would_wait_are_captured_where_residuals_are_there(
    graphs: tuple[GraphCache, list[str]], built: tuple[Network, Callable], wait_points: bool
) -> None:
    made, run = built
    cache, journal = graphs if wait_points else (GraphCache(CPU, capture=Recorder()), [])
    for seed in range(6):
        given = dict(zip(("x", "first", "second"), inputs(seed), strict=True))
        late = late_call(journal) if wait_points and seed % 2 else None
        result = cache.run(lambda t: {"out": run(*t.values())[0]}, given, late=late)
        assert torch.allclose(result["out"], made(*inputs(seed))[0], atol=1e-6)
    assert cache.takes_late is wait_points
