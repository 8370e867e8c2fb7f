"""The record of pictures through engines against native's holds what it says, and its rows come out again."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from comfy_process import ComfyProcess
from pack import ROOT

for folder in ("tests/sampling", "benchmarks"):  # behind the tests' own modules, some of which have the same names
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))

import fidelity
import fidelity_cases
from fidelity import key

DATA: dict[str, Any] = json.loads(fidelity.RESULTS.read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = DATA["rows"]
AGAIN = (
    ("two stacked controlnets", "onnxruntime"),
    ("a LoRA hooked to a prompt", "onnxruntime"),
    ("behind the patch: unet_function_wrapper", "onnxruntime"),
)
"""Cases that CI runs again: all on engines, all native, and a patch that the engines stay with."""


def test_the_record_has_enough_cases_and_models_and_each_once() -> None:
    assert len(ROWS) >= 80
    assert len({row["model"] for row in ROWS}) >= 8
    assert {row["backend"] for row in ROWS} == {"onnxruntime", "torch"}
    assert len({key(row) for row in ROWS}) == len(ROWS)
    assert DATA["meta"]["command"] == "python benchmarks/fidelity.py"


def test_no_recorded_picture_is_wrong() -> None:
    assert fidelity.over_limit(ROWS) == []


def test_a_picture_over_its_limit_is_found() -> None:
    row = ROWS[0] | {"native_change": 3e-6}
    assert fidelity.over_limit([row | {"rel_err": 9e-6}]) == []
    for wrong in (2e-5, float("nan"), float("inf")):
        assert len(fidelity.over_limit([row | {"rel_err": wrong}])) == 1
    assert fidelity.over_limit([row | {"rel_err": 2e-5, "native_change": 3e-5}]) == []


def test_each_recorded_fallback_has_a_reason_that_is_known_and_nothing_else_has_one() -> None:
    from hybrid_trt.engine_library import Reason

    known = {reason.value for reason in Reason}
    for row in ROWS:
        assert row["outcome"] in ("served", "fallback")
        assert (row["reason"] is not None) == (row["outcome"] == "fallback"), row
        assert set((row["reason"] or next(iter(known))).split(", ")) <= known, row
        assert row["engine_calls"] > 0 or row["outcome"] == "fallback", row


def test_what_is_tried_changed_natives_picture() -> None:
    tried = [row["acts"] for row in ROWS if "acts" in row]
    assert len(tried) > 50
    assert min(tried) >= fidelity.ACTS


def test_the_pages_tables_are_those_that_the_command_makes() -> None:
    assert fidelity.tables(DATA) in fidelity.PAGE.read_text(encoding="utf-8")


def test_the_record_has_cases_that_the_command_runs_and_every_sampler(comfy: ComfyProcess) -> None:
    info = comfy.object_info()
    assert {case.key for case in fidelity_cases.cases(info)} == set(map(key, ROWS))
    samplers = fidelity_cases.options(info, "KSampler", "sampler_name")
    assert len(samplers) > 30
    assert {f"sampler {name}" for name in samplers} <= {row["case"] for row in ROWS}


def run_again(comfy: ComfyProcess, cases: list[fidelity_cases.Case]) -> None:
    """Run cases, and compare their rows with the recorded ones."""
    recorded = {key(row): row for row in ROWS}
    reference = fidelity.Native(comfy)
    for case in cases:
        row = fidelity.measure(comfy, reference, case)
        assert fidelity.over_limit([row]) == []
        same = recorded[key(row)]
        for name in ("outcome", "reason", "engine_calls", "native_calls", "precision"):
            assert row[name] == same[name], row


@pytest.mark.parametrize(("name", "backend"), AGAIN)
def test_a_recorded_row_comes_out_again(sd15: ComfyProcess, name: str, backend: str) -> None:
    every = fidelity_cases.cases(sd15.object_info())
    found = [case for case in every if (case.name, case.backend) == (name, backend)]
    run_again(sd15, [case for case in found if case.model == fidelity_cases.SD_NAME])


@pytest.mark.slow
@pytest.mark.parametrize("model", list(dict.fromkeys(row["model"] for row in ROWS)))
def test_all_recorded_rows_of_a_model_come_out_again(comfy: ComfyProcess, model: str) -> None:
    every = fidelity_cases.cases(comfy.object_info())
    run_again(comfy, [case for case in every if case.model == model])
