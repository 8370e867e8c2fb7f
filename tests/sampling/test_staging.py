"""Under dynamic VRAM native weights are staged once for many runs on an engine, and anew whenever anything changed.

ComfyUI's own class on the CPU; what a GPU alone has is doubled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from dynamic_vram import DynamicOnCPU, on_cpu
from hybrid_trt.engine_library import Library, Reason, Unavailable
from memory_fixtures import device, file, library, nothing_loaded
from patched import LIMIT, Patched, gone, load

from sampling import STEPS, error, sample

# fixtures: pytest finds them by name
__all__ = ["device", "file", "library", "nothing_loaded"]

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def native(file: Path) -> DynamicOnCPU:
    return on_cpu(load(file))


@pytest.fixture
def patched(native: DynamicOnCPU, library: Library) -> Patched:
    found = Patched(native, library)
    found.sample()
    assert (found.counts, native.times_staged) == ((STEPS, 0), 1)
    return found


def test_the_double_is_comfyuis_dynamic_loading_and_samples_as_the_other(file: Path, native: DynamicOnCPU) -> None:
    assert isinstance(native.clone(), DynamicOnCPU)
    assert native.is_dynamic()
    for _ in range(2):
        assert torch.equal(sample(native), sample(load(file)))
    assert native.times_staged == 2, "ComfyUI stages for each run"
    assert native.backup, "small weights are forced over"


def test_weights_are_staged_once_for_many_runs_on_an_engine(patched: Patched, native: DynamicOnCPU, file: Path) -> None:
    native.pins.update(active=False, failed=True)  # as ComfyUI leaves them between two prompts
    seen: list[tuple[int, dict]] = []
    for seed in (2, 3):
        latent = patched.sample(seed, step=lambda _i: seen.append((native.times_staged, dict(native.pins))))
        assert patched.counts == (STEPS, 0)
        assert error(latent, sample(load(file), seed)) <= LIMIT
    assert {times for times, _ in seen} == {1}
    assert all(pins["active"] and not pins["failed"] for _, pins in seen)


def test_a_native_call_in_a_run_that_staged_nothing_gives_natives_picture(
    patched: Patched, native: DynamicOnCPU, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched.sample()
    failed = Unavailable(Reason.ENGINE_FAILED, "as on a GPU")
    monkeypatch.setattr(patched.handle.session, "run", lambda *_: (_ for _ in ()).throw(failed))
    latent = patched.sample()
    assert patched.counts[1] == STEPS
    assert native.times_staged == 1
    assert torch.equal(latent, sample(load(file)))


def lora(patcher: ModelPatcher) -> None:
    name = "diffusion_model.out.2.weight"
    assert patcher.add_patches({name: ("diff", (torch.full_like(patcher.get_model_object(name), 0.01),))}, 1.0)


def layer(patcher: ModelPatcher) -> None:
    patcher.add_object_patch("diffusion_model.out.0", torch.nn.Identity())


def on_load(patcher: ModelPatcher) -> None:
    patcher.add_callback(CallbacksMP.ON_LOAD, lambda *_: None)


def taken_back(patcher: ModelPatcher) -> None:
    patcher.partially_unload(patcher.offload_device, 1e32)


def unloaded(patcher: ModelPatcher) -> None:
    patcher.detach()


@pytest.mark.parametrize("change", [lora, layer, on_load, taken_back, unloaded])
def test_weights_are_staged_anew_after_a_change(patched: Patched, native: DynamicOnCPU, change: Any) -> None:
    assert native.times_staged == 1
    change(patched.model)
    patched.sample()
    assert native.times_staged == 2


def test_layers_that_another_patcher_put_in_are_gone_and_weights_staged_for_the_next_run(
    patched: Patched, native: DynamicOnCPU, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = native.clone()
    layer(other)
    sample(other)
    times = native.times_staged
    monkeypatch.setattr(patched.handle, "refresh", lambda: gone(patched.handle))
    latent = patched.sample()
    assert native.times_staged == times + 1
    assert torch.equal(latent, sample(load(file)))
