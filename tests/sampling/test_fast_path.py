"""Runs stay fast on newer ComfyUIs; where they do not, the log and the report say so once."""

from __future__ import annotations

import logging
import types
from collections import OrderedDict
from pathlib import Path

import comfy.controlnet
import pytest
from comfy.controlnet import ControlBase, ControlNet, StrengthType
from comfy_process import ComfyProcess
from control_stacks import Stacks, call, same
from fake_recorder import Recorder
from hybrid_trt.comfy_model import comfyui_internals
from hybrid_trt.comfy_model.comfyui_internals import Feature
from hybrid_trt.sampling import call_stats
from hybrid_trt.sampling.call_stats import CallStats
from hybrid_trt.sampling.control_stack import ControlStack
from hybrid_trt.sampling.report import report_text
from newer_comfyui import NAMES, emulate
from scenarios import A, B, Scenario, latent_of, prompt

STEPS = 4


@pytest.fixture(autouse=True)
def new_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_stats, "_logged", set())
    monkeypatch.setattr(call_stats, "_prompts", OrderedDict())


@pytest.fixture
def stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stacks:
    return Stacks(tmp_path, monkeypatch)


def sampled(stacks: Stacks, prepare: object = lambda control: None) -> list[CallStats]:
    """Return the stats of a chain of two after some steps; each step has native's values."""
    native, backed = stacks.chain(False), stacks.chain(True)
    for chain in (native, backed):
        prepare(chain)
    for step in range(STEPS):
        assert same(call(ControlStack(backed), step), call(native, step))
    return [control.control_model.handle.begin_run() for control in (backed.previous_controlnet, backed)]


@pytest.mark.parametrize("newer", NAMES)
def test_a_stack_is_joined_from_the_second_step_on_and_nothing_is_said(
    newer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emulate(newer, monkeypatch)
    stacks = Stacks(tmp_path, monkeypatch)
    counted = sampled(stacks)
    assert stacks.runs == STEPS - 1
    assert [row.apart for row in counted] == [0, 0]
    assert call_stats.slow_sentences(counted) == []
    assert "slower" not in caplog.text


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
    stacks: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlNet, "get_control", moved_to(str(Path(comfy.controlnet.__file__).parent / "new.py")))
    counted = sampled(stacks)
    assert stacks.runs == 0
    assert [row.apart for row in counted] == [STEPS, STEPS]
    assert "The picture is right" in call_stats.slow_sentences(counted)[-1]


def test_values_that_a_comfyui_keeps_on_its_class_do_not_part_a_stack(
    stacks: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlBase, "strength", 1.0, raising=False)
    monkeypatch.setattr(ControlBase, "cond_hint", None, raising=False)
    sampled(stacks)
    assert stacks.runs == STEPS - 1


@pytest.mark.usefixtures("hints_elsewhere")
def test_a_stack_that_this_comfyui_does_not_let_join_is_said_once_with_what_to_report(
    stacks: Stacks, caplog: pytest.LogCaptureFixture
) -> None:
    counted = sampled(stacks)
    assert stacks.runs == 0
    assert [row.apart for row in counted] == [STEPS, STEPS]
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len([text for text in warnings if "side by side" in text]) == 1
    *told, report = call_stats.slow_sentences(counted)
    assert len(told) == 1, "both have one name"
    assert "The picture is right" in report
    assert "ComfyUI 0." in report
    assert "Hybrid TRT 0." in report
    assert report_text(counted).endswith(report)


def _varied(control: ControlBase) -> None:
    control.strength_type = StrengthType.LINEAR_UP


def _replaced(control: ControlBase) -> None:
    get_control = control.get_control
    control.get_control = lambda *args: get_control(*args)


def _later(control: ControlBase) -> None:
    control.timestep_range = (1.0, 0.0)


def _of_a_subclass(control: ControlBase) -> None:
    control.__class__ = type("Theirs", (ControlNet,), {"__module__": "custom_nodes.theirs"})


def _by_another_packs_class(control: ControlBase) -> None:
    control.__class__ = type("Theirs", (ControlNet,), {"get_control": moved_to("/custom_nodes/theirs.py")})


@pytest.mark.parametrize("prepare", [_varied, _replaced, _later, _of_a_subclass, _by_another_packs_class])
def test_reasons_of_the_graph_or_of_another_pack_are_no_complaint(stacks: Stacks, prepare: object) -> None:
    counted = sampled(stacks, prepare)
    assert stacks.runs == 0
    assert call_stats.slow_sentences(counted) == []


@pytest.mark.parametrize(("closed_before", "reopened"), [((), 0), ((2,), 1), ((1, 3), 2)])
def test_an_engine_that_is_opened_again_within_a_run_is_said_and_pictures_are_right(
    stacks: Stacks, closed_before: tuple[int, ...], reopened: int, caplog: pytest.LogCaptureFixture
) -> None:
    native, backed = stacks.chain(False, 1), stacks.chain(True, 1)
    handle = backed.control_model.handle
    for step in range(STEPS):
        if step in closed_before:
            handle.session.unload()
        assert same(call(ControlStack(backed), step), call(native, step))
    assert handle.stats.reopened == reopened
    said = [text for text in call_stats.slow_sentences([handle.stats]) if "opened more than once" in text]
    assert len(said) == (reopened > 0)
    assert caplog.text.count("opened more than once") == (reopened > 0)


@pytest.mark.parametrize("fails", [False, True])
def test_calls_that_could_not_be_captured_are_said_and_pictures_are_right(
    stacks: Stacks, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    native, backed = stacks.chain(False, 1), stacks.chain(True, 1)
    handle, recorder = backed.control_model.handle, Recorder()
    recorder.error = RuntimeError("not while it captures") if fails else None
    handle.session.graphs._capture = recorder
    for step in range(STEPS):
        assert same(call(ControlStack(backed), step), call(native, step))
    assert handle.stats.plain == (STEPS - 1 if fails else 0), "the first call is for learning the shapes"
    said = [text for text in call_stats.slow_sentences([handle.stats]) if "could not be captured" in text]
    assert len(said) == caplog.text.count("could not be captured") == int(fails)
    assert all("not while it captures" in text for text in said)


@pytest.mark.parametrize(("late", "beside", "said"), [(3, 3, False), (3, 0, True), (0, 0, False)])
def test_a_unet_that_waits_for_its_controlnets_is_said(late: int, beside: int, said: bool) -> None:
    unet = CallStats("unet", "model", "1", "9", engine=3, beside=beside)
    net = CallStats("controlnet", "net", "2", "9", engine=3, late=late)
    assert any("waited for its ControlNets" in text for text in call_stats.slow_sentences([net, unet])) == said


def test_the_report_says_what_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfyui_internals, "_off", {Feature.STACKS: ["this ComfyUI has no such name"]})
    assert "this ComfyUI has no such name" in report_text([CallStats("unet", "model", "1", "9", engine=1)])


def test_a_prompt_of_this_comfyui_has_no_complaint(sd15: ComfyProcess) -> None:
    history = sd15.queue(prompt(Scenario(controls=(A, B), steps=STEPS, seed=35, width=64, height=64), True, "fast"))
    latent_of(history)
    text = history.output("report", "text")[0]
    assert "Accelerated: 3 of 3 models" in text
    assert "slower" not in text
    assert "please report" not in sd15.log_text()
