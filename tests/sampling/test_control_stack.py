"""A stack of engine-backed ControlNets computed as one gives what ComfyUI's chain gives, and steps aside otherwise."""

from __future__ import annotations

import logging
import types
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.controlnet
import comfy.model_sampling
import comfy.samplers
import pytest
import torch
from comfy.controlnet import ControlBase, ControlNet, StrengthType
from control_stacks import Stacks, call, same, step_of_comfyui
from fake_recorder import Recorder
from hybrid_trt.comfy_model import comfyui_internals
from hybrid_trt.comfy_model.comfyui_internals import Feature
from hybrid_trt.sampling import call_stats, control_stack
from hybrid_trt.sampling.call_stats import CallStats
from hybrid_trt.sampling.control_stack import ControlStack
from hybrid_trt.sampling.report import report_text
from newer_comfyui import emulate
from small_networks import CPU, network


@pytest.fixture(params=["as it is", "hint map"])
def stacks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stacks:
    emulate(request.param, monkeypatch)
    return Stacks(tmp_path, monkeypatch)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_stack_gives_what_the_chain_gives(stacks: Stacks, count: int) -> None:
    native, stack = stacks.chain(False, count), ControlStack(stacks.chain(True, count))
    for step in range(5):
        assert same(call(stack, step), call(native, step))
    for step in range(3):
        assert same(call(stack, step, batch=1), call(native, step, batch=1))
    assert stacks.runs == 7, "all calls but the first, which opens engines"


def test_results_of_one_step_are_not_touched_by_the_next(stacks: Stacks) -> None:
    stack = ControlStack(stacks.chain(True))
    for step in range(4):
        kept = call(stack, step)
        copies = [t.clone() for t in kept["output"]]
        call(stack, step + 1)
        assert all(torch.equal(a, b) for a, b in zip(kept["output"], copies, strict=True))


def test_ranges_switch_controlnets_on_and_off(stacks: Stacks) -> None:
    native, backed = stacks.chain(False), stacks.chain(True)
    stack = ControlStack(backed)
    call(stack), call(native)
    for chain in (native, backed):
        chain.timestep_range, chain.previous_controlnet.timestep_range = (8.0, 2.0), (4.0, 0.0)
    for sigma in (9.0, 8.0, 5.0, 3.0, 2.0, 1.0):
        value, reference = call(stack, 1, sigma=sigma), call(native, 1, sigma=sigma)
        assert (value is None) == (reference is None) == (sigma == 9.0)
        assert value is None or same(value, reference)
    assert stacks.runs >= 5


def test_a_native_controlnet_in_the_chain_takes_the_whole_chain_comfyuis_way(stacks: Stacks) -> None:
    native, backed = stacks.chain(False), stacks.chain(True)
    backed.previous_controlnet = native.previous_controlnet
    for step in range(3):
        assert same(call(ControlStack(backed), step), call(native, step))
    assert stacks.runs == 0


@pytest.mark.parametrize("name", ["get_control", "control_merge"])
@pytest.mark.parametrize("on", ["object", "class"])
def test_a_controlnet_with_a_method_of_another_packs_is_not_joined(
    stacks: Stacks, monkeypatch: pytest.MonkeyPatch, name: str, on: str
) -> None:
    backed, calls = stacks.chain(True), []
    call(backed)
    own = getattr(ControlNet, name)

    def replaced(self: ControlNet, *args: object, **options: object) -> object:
        calls.append(self)
        return own(self, *args, **options)

    if on == "class":
        monkeypatch.setattr(ControlNet, name, replaced)
    else:
        setattr(backed, name, replaced.__get__(backed))
    native = stacks.chain(False)
    reference = call(native, 2)
    calls.clear()
    assert same(call(ControlStack(backed), 2), reference)
    assert backed in calls
    assert stacks.runs == 0


def test_controlnets_of_unlike_layouts_merge_as_in_comfyui(stacks: Stacks) -> None:
    nets = [stacks.nets[0], stacks._native("inpainting_channels")]
    nets[1].control_model = network("controlnet", "unlike_levels").module
    native, stack = stacks.chain(False, 2, nets), ControlStack(stacks.chain(True, 2, nets))
    for step in range(3):
        assert same(call(stack, step), call(native, step))


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "unlike"])
@pytest.mark.parametrize("count", [2, 3])
def test_what_a_stack_gives_lies_in_no_buffer_of_its_sessions(stacks: Stacks, count: int, alike: bool) -> None:
    """Sessions that run side by side lend theirs, and write to them in the next call."""
    controls = [stacks.chain(False, 1) for _ in range(count)]
    for control in controls:
        control.strength = 0.5
    buffers = [{"output": [torch.full((2, 3), 4.0 + i)] * (1 if alike else i + 1), "middle": [torch.full((2,), 2.0)]}
               for i in range(count)]  # fmt: skip
    lent = {t.data_ptr() for result in buffers for places in result.values() for t in places}
    merged = control_stack._merged(controls, buffers)
    given = [t for places in merged.values() for t in places]
    assert not lent & {t.data_ptr() for t in given}
    assert torch.equal(merged["middle"][0], torch.full((2,), float(count)))
    assert torch.equal(merged["output"][0], torch.full((2, 3), sum(4.0 + i for i in range(count)) / 2))


def test_controlnets_run_side_by_side_only_where_no_session_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session has one set of buffers: its second call writes to what the first one lent."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(record_event=lambda: "start"))
    gpu, cpu = SimpleNamespace(is_cuda=True, device=None), SimpleNamespace(is_cuda=False, device=CPU)
    a, b, c = (SimpleNamespace(parts=frozenset([name])) for name in "abc")
    a_or_c = SimpleNamespace(parts=a.parts | c.parts)
    starts = {"two": [a, b], "three": [a, b, c], "one": [a], "twice": [a, b, a], "as a part": [a_or_c, b, c]}
    found = {name: control_stack._start(sessions, gpu) for name, sessions in starts.items()}
    assert found == {"two": "start", "three": "start", "one": None, "twice": None, "as a part": None}
    assert control_stack._start([a, b], cpu) is None


def test_conditionings_that_share_a_control_still_share_it(stacks: Stacks) -> None:
    control, other = stacks.chain(True), stacks.chain(True, 1)
    conds = [[{"control": control, "a": 1}], [{"control": control}, {"control": other}, {"b": 2}], None]
    seen = []

    def step(_model: object, conds: list, *_: object) -> str:
        seen.extend(conds)
        return "done"

    assert step_of_comfyui(step)(None, conds, torch.zeros(1), torch.zeros(1), {}) == "done"
    positive, negative, nothing = seen
    assert positive[0]["control"] is negative[0]["control"]
    assert negative[1]["control"] is not negative[0]["control"]
    assert positive[0]["a"] == 1
    assert "control" not in negative[2]
    assert nothing is None
    assert conds[0][0]["control"] is control, "the caller's own stay as they were"
    assert positive[0]["control"].strength == control.strength


def test_ranges_end_in_the_very_step_in_which_comfyui_ends_them() -> None:
    """Bounds are Python's doubles and sigmas are float32: on a bound it decides how they are compared."""
    on_a_bound = 0
    sampling = comfy.model_sampling.ModelSamplingContinuousEDM()
    sampling.set_parameters(0.002, 120.0, 1.0)
    for steps in range(20, 42):
        for sigma in comfy.samplers.calculate_sigmas(sampling, "normal", steps)[:-1]:
            for percent in (0.2, 0.25, 0.4, 0.5, 0.6, 0.75, 0.8):
                bounds = (999999999.9, sampling.percent_to_sigma(percent))
                natively = not (sigma > bounds[0] or sigma < bounds[1])
                assert bool(control_stack._active([SimpleNamespace(timestep_range=bounds)], sigma[None])) is natively
                on_a_bound += natively and float(sigma) < bounds[1]
    assert on_a_bound > 0


# What makes it slow is said once


STEPS = 4


@pytest.fixture(autouse=True)
def new_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_stats, "_logged", set())
    monkeypatch.setattr(call_stats, "_prompts", OrderedDict())


@pytest.fixture
def plain_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stacks:
    return Stacks(tmp_path, monkeypatch)


def sampled(stacks: Stacks, prepare: Callable = lambda control: None) -> list[CallStats]:
    """Return the stats of a chain of two after some steps; each step has native's values."""
    native, backed = stacks.chain(False), stacks.chain(True)
    for chain in (native, backed):
        prepare(chain)
    for step in range(STEPS):
        assert same(call(ControlStack(backed), step), call(native, step))
    return [control.control_model.handle.begin_run() for control in (backed.previous_controlnet, backed)]


@pytest.fixture
def hints_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ComfyUI that keeps a control's hint where nobody here looks."""
    get_control = ControlNet.get_control

    def get(self: ControlNet, *args: object) -> object:
        self.cond_hint = vars(self).get("_somewhere")
        result = get_control(self, *args)
        self._somewhere, self.cond_hint = self.cond_hint, None
        return result

    get.__code__ = get.__code__.replace(co_filename=get_control.__code__.co_filename)
    monkeypatch.setattr(ControlNet, "get_control", get)


def moved_to(file: str) -> types.FunctionType:
    """ComfyUI's own method, in another file."""
    method = ControlNet.get_control
    return types.FunctionType(method.__code__.replace(co_filename=file), method.__globals__, method.__name__)


def test_a_comfyui_whose_code_lies_in_another_file_of_its_own_is_said(
    plain_stacks: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlNet, "get_control", moved_to(str(Path(comfy.controlnet.__file__).with_name("new.py"))))
    counted = sampled(plain_stacks)
    assert plain_stacks.runs == 0
    assert [row.apart for row in counted] == [STEPS, STEPS]
    assert "The picture is right" in call_stats.slow_sentences(counted)[-1]


def test_values_that_a_comfyui_keeps_on_its_class_do_not_part_a_stack(
    plain_stacks: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlBase, "strength", 1.0, raising=False)
    monkeypatch.setattr(ControlBase, "cond_hint", None, raising=False)
    sampled(plain_stacks)
    assert plain_stacks.runs == STEPS - 1


@pytest.mark.usefixtures("hints_elsewhere")
def test_a_stack_that_this_comfyui_does_not_let_join_is_said_once_with_what_to_report(
    plain_stacks: Stacks, caplog: pytest.LogCaptureFixture
) -> None:
    counted = sampled(plain_stacks)
    assert plain_stacks.runs == 0
    assert [row.apart for row in counted] == [STEPS, STEPS]
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len([text for text in warnings if "side by side" in text]) == 1
    *told, report = call_stats.slow_sentences(counted)
    assert len(told) == 1, "both have one name"
    assert "The picture is right" in report
    assert "ComfyUI 0." in report
    assert "Hybrid TRT 0." in report
    assert report_text(counted).endswith(report)


def theirs(**attributes: Any) -> Callable[[ControlBase], None]:
    """A class of another pack's for a control."""
    return lambda control: setattr(control, "__class__", type("Theirs", (ControlNet,), attributes))


REASONS: dict[str, Callable[[ControlBase], None]] = {
    "another kind of strength": lambda control: setattr(control, "strength_type", StrengthType.LINEAR_UP),
    "pooling": lambda control: setattr(control, "global_average_pooling", True),
    "a method on the control": lambda control: setattr(control, "get_control", partial(control.get_control)),
    "not in this step": lambda control: setattr(control, "timestep_range", (1.0, 0.0)),
    "a subclass": theirs(__module__="custom_nodes.theirs"),
    "a class with a method": theirs(get_control=moved_to("/custom_nodes/theirs.py")),
}


@pytest.mark.parametrize("prepare", REASONS.values(), ids=REASONS)
def test_reasons_of_the_graph_or_of_another_pack_are_no_complaint(plain_stacks: Stacks, prepare: Callable) -> None:
    counted = sampled(plain_stacks, prepare)
    assert plain_stacks.runs == 0
    assert call_stats.slow_sentences(counted) == []


@pytest.mark.parametrize(("closed_before", "reopened"), [((), 0), ((2,), 1), ((1, 3), 2)])
def test_an_engine_that_is_opened_again_within_a_run_is_said_and_pictures_are_right(
    plain_stacks: Stacks, closed_before: tuple[int, ...], reopened: int, caplog: pytest.LogCaptureFixture
) -> None:
    native, backed = plain_stacks.chain(False, 1), plain_stacks.chain(True, 1)
    handle = backed.control_model.handle
    for step in range(STEPS):
        if step in closed_before:
            handle.session.unload()
        assert same(call(ControlStack(backed), step), call(native, step))
    assert handle.stats.reopened == reopened
    said = [text for text in call_stats.slow_sentences([handle.stats]) if "opened more than once" in text]
    assert len(said) == (reopened > 0)
    assert caplog.text.count("opened more than once") == (reopened > 0)


@pytest.mark.fault("the card is full while a CUDA graph is recorded",
                   see="the engine runs unrecorded; *TRT Report* says why")
@pytest.mark.parametrize("fails", [False, True])
def test_calls_that_could_not_be_captured_are_said_and_pictures_are_right(
    plain_stacks: Stacks, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    native, backed = plain_stacks.chain(False, 1), plain_stacks.chain(True, 1)
    handle, recorder = backed.control_model.handle, Recorder()
    recorder.error = torch.OutOfMemoryError("not while it captures") if fails else None
    handle.session.graphs._capture = recorder
    for step in range(STEPS):
        assert same(call(ControlStack(backed), step), call(native, step))
    assert handle.stats.plain == (STEPS - 1 if fails else 0), "the first call is for learning the shapes"
    said = [text for text in call_stats.slow_sentences([handle.stats]) if "could not be recorded" in text]
    assert len(said) == caplog.text.count("could not be recorded") == int(fails)
    assert all("not while it captures" in text for text in said)


@pytest.mark.parametrize(("late", "beside", "said"), [(3, 3, False), (3, 0, True), (0, 0, False)])
def test_a_unet_that_waits_for_its_controlnets_is_said(late: int, beside: int, said: bool) -> None:
    unet = CallStats("unet", "model", "1", "9", engine=3, beside=beside)
    net = CallStats("controlnet", "net", "2", "9", engine=3, late=late)
    assert any("waited for its ControlNets" in text for text in call_stats.slow_sentences([net, unet])) == said


def test_the_report_says_what_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfyui_internals, "_off", {Feature.STACKS: ["this ComfyUI has no such name"]})
    assert "this ComfyUI has no such name" in report_text([CallStats("unet", "model", "1", "9", engine=1)])
