"""The graph component's promises, with a capture that needs no GPU: it runs the captured function again on demand."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
import torch
from comfy import model_management
from fake_recorder import Recorder
from hybrid_trt.architectures.calls import ResidualLayout
from hybrid_trt.architectures.user_attention import calling_users
from hybrid_trt.sessions import cuda_capture, cuda_graphs
from hybrid_trt.sessions.cuda_graphs import GraphCache
from small_networks import CPU

Tensors = Mapping[str, torch.Tensor]


def double_and_sum(inputs: Tensors) -> Tensors:
    total = sum(t.float().sum() for t in inputs.values())
    return {"double": inputs["x"] * 2, "sum": total.reshape(1)}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def check(cache: GraphCache, token: object = None, **inputs: torch.Tensor) -> None:
    results = cache.run(double_and_sum, inputs, token)
    expected = double_and_sum(inputs)
    for name, value in expected.items():
        assert torch.equal(results[name], value), name
        assert results[name].stride() == value.stride()


def test_plain_first_captured_at_the_second_call_and_replayed_after() -> None:
    recorder = Recorder()
    cache = GraphCache(CPU, capture=recorder)
    counts = []
    for _ in range(4):
        check(cache, x=random(2, 3), y=random(4))
        counts.append((recorder.captured, recorder.replayed))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]


def test_graphs_hold_no_more_bytes_together_than_they_may_but_for_one() -> None:
    x = {size: random(size) for size in (1000, 1001, 1002, 5000)}
    cache = GraphCache(CPU, capture=Recorder(), most_bytes=20_000)  # two of about 8 kB, none of 40 kB
    for size in (1000, 1000, 1001, 1001):
        check(cache, x=x[size])
    assert len(cache) == 2
    for _ in range(6):
        check(cache, x=x[1002])
    assert len(cache) == 2
    assert cache.bytes <= 20_000
    for _ in range(12):
        check(cache, x=x[5000])
    assert len(cache) == 1, "one alone may hold more"
    for _ in range(2):
        check(cache, x=x[1000])
    assert cache.bytes > 20_000, "what comes as often does not make it go"


def test_graphs_know_from_their_first_replays_what_the_next_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [0]
    monkeypatch.setattr(cuda_graphs, "graph_memory", lambda _device: kept[-1])
    cache = GraphCache(CPU, capture=Recorder())
    assert cache.taken is None
    for size, taken in ((2, 5), (3, 3)):
        kept.append(taken)
        for _ in range(3):
            check(cache, x=random(size))
    kept.append(0)
    assert cache.taken == 5, "the most of all graphs"
    kept.append(4)
    assert cache.taken == 1, "they have the rest already"
    kept.append(0)
    cache.clear()
    assert cache.taken == 5, "others like them will come"


@pytest.mark.parametrize(("allocator", "graphs"), [("cudaMallocAsync", 0), ("native", 1)])
def test_attention_that_a_user_chose_is_in_no_graph_where_its_kernels_would_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allocator: str, graphs: int
) -> None:
    """SageAttention's ask for a tensor's address, which ended ComfyUI's process. Nobody is asked to report that."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    cache = GraphCache(CPU, capture=Recorder())
    with calling_users({}, True):
        for _ in range(3):
            check(cache, x=random(2))
    assert len(cache) == graphs
    assert cache.plain is None, "it is no failure"
    assert not caplog.records
    cache.clear()
    for _ in range(3):
        check(cache, x=random(2))
    assert len(cache) == 1


def test_results_belong_to_the_caller() -> None:
    cache = GraphCache(CPU, capture=Recorder())
    x = random(2, 3)
    first = [cache.run(double_and_sum, {"x": x})["double"] for _ in range(3)]
    for result in first:
        result *= 100  # as ComfyUI does with a strength
    assert torch.equal(cache.run(double_and_sum, {"x": x})["double"], x * 2)
    assert torch.equal(first[1], first[2])
    assert first[1].data_ptr() != first[2].data_ptr()


def test_results_are_lent_on_the_caches_own_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, here = Recorder(), []
    recorder.stream = object()
    cache = GraphCache(CPU, capture=recorder)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: here[-1])
    places: dict[bool, set[int]] = {False: set(), True: set()}
    kept = []
    for call in range(8):
        own = call % 2 == 1
        here.append(recorder.stream if own else object())
        x = random(2, 3)
        result = cache.run(double_and_sum, {"x": x})["double"]
        assert torch.equal(result, x * 2)
        if call > 1:
            places[own].add(result.data_ptr())
        kept.append(result)  # no place comes again because it was given back
    assert len(places[True]) == 1
    assert len(places[False]) == 3
    assert not places[True] & places[False]


def test_every_shape_dtype_and_set_of_inputs_has_a_graph_of_its_own() -> None:
    recorder = Recorder()
    cache = GraphCache(CPU, capture=recorder)
    calls: list[dict[str, torch.Tensor]] = [
        {"x": random(2, 3)}, {"x": random(1, 3)}, {"x": random(3, 2)}, {"x": random(2, 3, dtype=torch.float64)},
        {"x": random(2, 3), "residual": random(2, 3)}, {"x": random(2, 3), "residual": random(2, 4)},
    ]
    for _ in range(3):
        for call in calls:
            check(cache, **{name: torch.randn_like(t) for name, t in call.items()})
    assert recorder.captured == len(cache) == len(calls)


def test_the_least_recently_used_graph_goes_first() -> None:
    recorder = Recorder()
    cache = GraphCache(CPU, limit=2, capture=recorder)
    for size in (1, 1, 2, 2, 1, 3, 3):
        check(cache, x=random(size))
    assert (recorder.captured, len(cache)) == (3, 2)
    check(cache, x=random(1))
    assert recorder.captured == 3, "1 was used after 2, so 2 went"
    for _ in range(2):
        check(cache, x=random(2))
    assert (recorder.captured, len(cache)) == (4, 2)


@pytest.mark.parametrize("sets", [9, 12, 40, 100])
def test_more_sets_of_shapes_in_each_step_than_graphs_are_not_captured_anew_in_each_step(sets: int) -> None:
    recorder = Recorder()
    cache = GraphCache(CPU, capture=recorder)
    for _ in range(6):
        for size in range(1, sets + 1):
            check(cache, x=random(size))
    assert recorder.captured == len(cache) == (8 if sets <= 64 else 0)
    assert recorder.replayed == 5 * len(cache), "the graphs that there is room for serve in every step"


def test_other_shapes_take_the_place_of_those_that_are_no_longer_called() -> None:
    recorder = Recorder()
    cache = GraphCache(CPU, capture=recorder)
    for sizes in (range(1, 13), range(20, 24)):
        for _ in range(8):
            for size in sizes:
                check(cache, x=random(size))
    assert (recorder.captured, len(cache)) == (12, 8)
    before = recorder.replayed
    for size in range(20, 24):
        check(cache, x=random(size))
    assert recorder.replayed == before + 4


def test_graphs_are_replayed_outside_of_inference_mode_too() -> None:
    """ComfyUI's threads for several GPUs are outside of it."""
    cache = GraphCache(CPU, capture=Recorder())
    with torch.inference_mode():
        for _ in range(2):
            check(cache, x=random(2))
    with torch.no_grad():
        check(cache, x=random(2))
    assert len(cache) == 1


def test_another_token_drops_all_graphs() -> None:
    recorder = Recorder()
    cache = GraphCache(CPU, capture=recorder)
    for token in (1, 1, 1, 2, 2):
        check(cache, token, x=random(2))
    assert recorder.captured == 2


@pytest.mark.fault("a CUDA graph cannot be recorded, for memory or else",
                   see="the engine runs unrecorded; the log and *TRT Report* say why")
@pytest.mark.parametrize("error", [RuntimeError("operation not permitted when stream is capturing\nmore"),
                                   torch.OutOfMemoryError("CUDA out of memory")])
def test_a_capture_that_fails_runs_plainly_and_says_why(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    recorder.error = error
    cache = GraphCache(CPU, capture=recorder)
    for _ in range(4):
        check(cache, x=random(2))
    assert len(cache) == 0
    assert str(error).splitlines()[0] in cache.failure
    assert sum("no CUDA graph" in r.message for r in caplog.records) == 1, "tried once, told once"
    recorder.error = None
    check(cache, x=random(3))
    check(cache, x=random(3))
    assert recorder.captured == 1, "other shapes are not concerned"


class Network:
    """Makes a tensor and keeps another, as a captured network does; ``fail`` is called before it returns."""

    def __init__(self) -> None:
        self.weight, self.fail = random(2), lambda: None
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, inputs: Tensors) -> Tensors:
        activation = [inputs["x"] * self.weight]
        self.made.append(weakref.ref(activation[0]))
        self.fail()
        return {"out": activation[0] + 0}


class Broken:
    """A double of a capture that CUDA breaks off, which ends in an error of its own."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def broken_off(body: Callable[[], None]) -> None:
    """Run a body as ``CudaCapture`` does when CUDA breaks the capture off."""
    cuda_capture.record(body, Broken(), Recorder.Replay(Recorder(), body), CPU, lambda: None)


broken_off.warm_up = lambda body: body()


def failed(network: Network, error: Exception, while_capturing: bool) -> GraphCache:
    """Return a cache whose capture of a network has failed with an error that has another for its cause."""
    def fail() -> None:
        calls.append(True)
        if len(calls) == (3 if while_capturing else 2):  # plainly, to warm up, while capturing
            try:
                raise ValueError("the cause")
            except ValueError as cause:
                raise error from cause

    calls: list[bool] = []
    network.fail = fail
    cache = GraphCache(CPU, capture=broken_off)
    for _ in range(2):
        cache.run(network, {"x": random(2)})
    network.fail = lambda: None
    assert cache.failure is not None
    return cache


@pytest.mark.parametrize("while_capturing", [False, True])
def test_what_a_failed_capture_held_goes_at_once(while_capturing: bool) -> None:
    network, error = Network(), RuntimeError("operation not permitted")
    weight, alive = weakref.ref(network.weight), weakref.ref(network)
    cache = failed(network, error, while_capturing)
    assert len(network.made) == (4 if while_capturing else 3)
    assert [made() for made in network.made] == [None] * len(network.made)
    del network
    assert error.__traceback__ is None
    assert (weight(), alive()) == (None, None)
    assert len(cache) == 0


def test_where_freeing_is_fatal_only_the_tensors_that_were_made_while_capturing_stay(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double of cudaMallocAsync's rule. What stays holds no memory there."""
    monkeypatch.setattr(cuda_capture, "_frees_are_fatal", lambda _device: True)
    monkeypatch.setattr(cuda_capture, "_never_freed", stayed := [])
    network = Network()
    weight, alive = weakref.ref(network.weight), weakref.ref(network)
    failed(network, RuntimeError("operation not permitted"), while_capturing=True)
    made = network.made
    assert [m() is not None for m in made] == [False, False, True, False]
    assert len(stayed) == 1
    assert stayed[0] is made[2]()
    assert gc.isenabled()
    del network
    assert (weight(), alive()) == (None, None)


@pytest.mark.fault("a capture breaks off between layers that share a result", see="the engine runs unrecorded")
@pytest.mark.parametrize("fatal", [True, False])
def test_results_that_a_broken_capture_left_in_a_network_are_never_freed_where_that_is_fatal(
    fatal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_capture, "_frees_are_fatal", lambda _device: fatal)
    monkeypatch.setattr(cuda_capture, "_never_freed", [])
    layer = torch.nn.Linear(4, 4).requires_grad_(False)

    def keep() -> None:
        layer.result = layer(torch.ones(1, 4))

    with pytest.raises(RuntimeError, match="a previous error"):
        broken_off(keep)
    left = weakref.ref(layer.result)
    keep()
    assert (left() is not None) == fatal
    kept = {id(tensor) for tensor in cuda_capture._never_freed}
    assert kept.isdisjoint(map(id, layer.parameters()))


@pytest.mark.parametrize("runs", [True, False])
def test_what_was_captured_up_to_an_interrupt_runs_once_and_then_can_be_freed(
    runs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_capture, "_frees_are_fatal", lambda _device: True)
    monkeypatch.setattr(cuda_capture, "_never_freed", stayed := [])
    made, replays, left = [], [], []

    def body() -> None:
        made.append(torch.ones(3))
        raise model_management.InterruptProcessingException

    def replay() -> None:
        replays.append(len(made))
        if not runs:
            raise RuntimeError("out of memory")

    with pytest.raises(model_management.InterruptProcessingException):
        cuda_capture.record(body, contextlib.nullcontext(), SimpleNamespace(replay=replay), CPU,
                              lambda: left.append(True))  # fmt: skip
    assert replays == [1], "once, while its tensors are there"
    assert [tensor is made[0] for tensor in stayed] == ([] if runs else [True])
    assert ("calls are slower" in caplog.text) is not runs
    assert left == [], "the graph leaves the pool itself"
    assert gc.isenabled()


def test_layouts_of_inputs_and_results_are_kept() -> None:
    cache = GraphCache(CPU, capture=Recorder())
    for _ in range(3):
        check(cache, x=random(2, 4, 6, 6).contiguous(memory_format=torch.channels_last))
    check(cache, x=random(2, 4, 6, 6).contiguous(memory_format=torch.channels_last))


RESIDUALS = [f"residual_{i}" for i in range(57)]
ZERO = torch.zeros(64, 32)


def run_with(cache: GraphCache, **given: torch.Tensor) -> torch.Tensor:
    """Return what a network gives that adds each residual with a weight of its own; those that are absent are zeros."""

    def weighted(inputs: Tensors) -> Tensors:
        return {"out": sum((inputs[name] * (i + 1) for i, name in enumerate(RESIDUALS)), inputs["x"])}

    def prepare(tensors: Tensors) -> Tensors:
        return dict.fromkeys(RESIDUALS, ZERO) | dict(tensors)

    found = cache.run(weighted, given, prepare=prepare)["out"]
    assert torch.equal(found, weighted(prepare(given))["out"])
    return found


@pytest.mark.parametrize("unique", [0, 15, 57])
def test_a_graph_has_a_buffer_for_each_tensor_and_none_for_absent_residuals(unique: int) -> None:
    cache = GraphCache(CPU, capture=Recorder())
    for _ in range(4):
        tensors = [random(64, 32) for _ in range(unique)]
        given = {name: tensors[i * unique // 57] for i, name in enumerate(RESIDUALS)} if unique else {}
        run_with(cache, x=random(64, 32), **given)
    assert len(cache) == 1
    assert cache.bytes == (1 + unique + 1) * ZERO.nbytes, "the latent, the residuals, the result"
    assert not ZERO.any()


@pytest.mark.parametrize("batch", [1, 3])
def test_a_residual_in_several_places_stays_one_tensor(batch: int) -> None:
    """ComfyUI hands one that was made once to a whole batch."""
    layout = ResidualLayout({"output": ["first", "second", "third"]}, from_end=False)
    one, other = random(1, 5), random(1, 5)
    taken = layout.take({"output": [one, other, one]}, batch)
    assert taken["first"] is taken["third"]
    assert taken["first"] is not taken["second"]
    assert torch.equal(taken["third"], one.expand(batch, 5))


def test_calls_that_share_other_tensors_have_other_graphs() -> None:
    recorder = Recorder()
    cache = GraphCache(CPU, capture=recorder)
    for pattern in ("aab", "abb", "aab", "abb", "abc", "aab", "abc", "abb"):
        tensors = {letter: random(64, 32) for letter in "abc"}
        run_with(cache, x=random(64, 32), **dict(zip(RESIDUALS, map(tensors.get, pattern), strict=False)))
    assert (recorder.captured, recorder.replayed) == (3, 5)


def test_a_tensor_that_is_steady_under_one_name_is_copied_in_each_call_under_another() -> None:
    cache = GraphCache(CPU, capture=Recorder(), steady=["x"])
    tensor = random(64, 32)
    for _ in range(4):
        found = cache.run(double_and_sum, {"x": tensor, "y": tensor})["double"]
        assert torch.equal(found, 2 * tensor)
    before = tensor.clone()
    tensor += 1
    results = cache.run(double_and_sum, {"x": tensor, "y": tensor})
    assert torch.equal(results["double"], 2 * before)
    assert torch.equal(results["sum"][0], before.sum() + tensor.sum())


def test_a_capture_that_the_user_interrupts_is_cleaned_up_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[BaseException] = []
    monkeypatch.setattr(cuda_graphs, "release_failed_capture", lambda error, _device: released.append(error))
    interrupted, recorder = [True], Recorder()

    def record(body: Callable[[], None]) -> object:
        if interrupted.pop() if interrupted else False:
            raise model_management.InterruptProcessingException
        return recorder(body)

    graphs = GraphCache(CPU, capture=record)
    given = {"x": torch.ones(1, 64)}
    graphs.run(double_and_sum, given)
    with pytest.raises(model_management.InterruptProcessingException):
        graphs.run(double_and_sum, given)
    assert len(released) == 1
    assert torch.equal(graphs.run(double_and_sum, given)["double"], 2 * given["x"])
    assert len(graphs) == 1
