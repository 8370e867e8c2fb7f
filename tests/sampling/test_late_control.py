"""A UNet starts beside its ControlNets: whoever looks at their residuals waits, and the compiled UNet where it must."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from control_stacks import CHOICE, step_of_comfyui
from fake_recorder import Recorder
from hybrid_trt.architectures.calls import AsyncInputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.engine_library import Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling import control_stack
from hybrid_trt.sampling.control_stack import LateControl
from hybrid_trt.sampling.controlnet import EngineControlModel
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.model_wrapper import BackboneRouter
from hybrid_trt.sessions import cuda_graphs
from hybrid_trt.sessions.cuda_capture import WaitPoint, wait_at_point, with_wait_point
from hybrid_trt.sessions.cuda_graphs import GraphCache
from live_sessions import given_for
from small_networks import CPU, ONE_LEVEL, native_call, network


class Network(torch.nn.Module):
    """An encoder, a decoder, and residuals that the decoder alone takes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, waits: bool = False
    ) -> tuple[torch.Tensor]:
        encoded = torch.relu(self.encoder(x))
        if waits:
            wait_at_point()
        return (self.decoder(encoded + first) * second,)


def inputs(seed: int = 0) -> list[torch.Tensor]:
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed + i)) for i in range(3)]


@pytest.fixture
def built() -> tuple[Network, Callable]:
    """A network, and the same where it waits for what comes late."""
    made = Network().requires_grad_(False)
    return made, partial(made, waits=True)


class Arrival(WaitPoint):
    """A wait in which late inputs get their values."""

    def __init__(self, late: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(None)
        self.late, self.values, self.waits = late, values, 0

    def wait(self) -> None:
        self.waits, self.passed = self.waits + 1, True
        for name, value in self.values.items():
            self.late[name].copy_(value)


@pytest.mark.parametrize("layout", [ONE_LEVEL, "unlike_levels"])
def test_a_unet_waits_once_and_reads_residuals_only_behind_that(layout: str) -> None:
    net = network("unet", layout)
    session, given = LiveSession(net, backends()["torch"], "float32"), given_for(net)
    late = {name: tensor for name, tensor in given.items() if name.startswith(("control_output", "control_middle"))}
    values = {name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))
              for name, tensor in late.items()}  # fmt: skip
    expected = native_call(net, {**given, **values})
    assert max(map(relative_error, native_call(net, given), expected)) > 1e-2, "they act"
    arrival = Arrival(late, values)
    with torch.inference_mode(), with_wait_point(arrival):
        results = session.run(given).values()
    assert arrival.waits == 1
    assert max(map(relative_error, results, expected)) <= 1e-5


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
