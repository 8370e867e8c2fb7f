"""An engine that stops giving numbers in the middle of a run: the image is native's, and the node says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.sampling import nan_guard
from memory_fixtures import file, library
from patched import LIMIT, Patched, load, sampling_node

from sampling import STEPS, error, sample

__all__ = ["file", "library"]  # fixtures: pytest finds them by name


def spoil(patched: Patched, call: int, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From this call on the engine's result has one value of this kind."""
    session, calls = patched.handle.session, []
    run = session.run

    def broken(*args: Any) -> dict[str, torch.Tensor]:
        results = run(*args)
        calls.append(1)
        if len(calls) >= call:
            next(iter(results.values())).view(-1)[7] = value
        return results

    monkeypatch.setattr(session, "run", broken)


@pytest.mark.fault("an engine gives values that are no numbers (NaN)",
                   see="normal speed: *engine failed*; the whole run is done again")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral"])
def test_native_does_a_run_again_in_which_an_engine_gave_no_numbers(
    file: Path, library: Library, value: float, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = sample(load(file), sampler=sampler)
    patched = Patched(load(file), library)
    spoil(patched, 2, value, monkeypatch)
    latent = patched.sample(sampler=sampler)
    assert latent.isfinite().all()
    assert error(latent, reference) <= LIMIT
    assert patched.counts == (STEPS, STEPS)
    stats = patched.handle.stats
    assert stats.reasons == {Reason.ENGINE_FAILED.value: STEPS}
    assert "no numbers (NaN), so the whole run was done again" in stats.details[Reason.ENGINE_FAILED.value]
    monkeypatch.undo()
    assert error(patched.sample(), sample(load(file))) <= LIMIT
    assert patched.counts == (STEPS, 0), "the next run tries the engine again"


@pytest.mark.fault("the normal model gives values that are no numbers (NaN)",
                   see="normal speed: *engine failed*; the whole run is done again, and the report blames no engine")
def test_no_engine_is_blamed_where_the_normal_model_gives_no_numbers_either(file: Path, library: Library) -> None:
    patched = Patched(load(file), library)
    patched.model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * float("nan"))
    assert patched.sample().isnan().all()
    why = patched.handle.stats.details[Reason.ENGINE_FAILED.value]
    assert why == nan_guard.NATIVE_TOO
    assert "engine" not in why
    assert "engine" not in patched.handle.stats.advice(Reason.ENGINE_FAILED)


def test_a_run_of_numbers_is_done_once_and_nothing_is_asked_of_the_gpu_before_its_end(
    file: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched, asked, seen = Patched(load(file), library), [], []
    original, see = nan_guard.Watch.finite, nan_guard.Watch.see
    monkeypatch.setattr(nan_guard.Watch, "finite", lambda self: asked.append(len(seen)) or original(self))
    monkeypatch.setattr(nan_guard.Watch, "see", lambda self, result: seen.append(1) or see(self, result))
    patched.sample()
    assert patched.counts == (STEPS, 0)
    assert asked == [STEPS], "once, after the last call"


def test_while_native_does_a_run_again_no_engine_of_any_network_serves(file: Path, library: Library) -> None:
    patched = Patched(load(file), library)
    token = nan_guard._again.set(nan_guard.NOT_FINITE)
    try:
        with sampling_node():
            served, _result = patched.handle.serve(None, lambda: pytest.fail("not bound"))
    finally:
        nan_guard._again.reset(token)
    assert not served


def test_large_half_precision_numbers_are_numbers() -> None:
    run = nan_guard.Watch()
    for _ in range(100):
        run.see(torch.full((4, 4, 128, 128), 65504.0, dtype=torch.float16))
    assert run.finite()
    run.see(torch.tensor([float("nan")]))
    run.see(torch.ones(3))
    assert not run.finite(), "a later number does not hide it"
