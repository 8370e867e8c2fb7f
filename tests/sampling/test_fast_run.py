"""Whole runs do what makes them fast as often as they should, on this ComfyUI and on what newer ones do.

A picture is right without any of it, so nothing else would tell that it has stopped. ComfyUI samples; doubles are the
streams and graphs of a GPU, and the CPU as a device with a memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.controlnet
import pytest
import slow
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from dynamic_vram import DynamicOnCPU, on_cpu
from gpu_doubles import gpu_recorder, play_gpu
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.comfyui_internals import Feature, switched_off
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.engine_library import Library, Reason, Unavailable
from hybrid_trt.sampling import call_stats, control_stack, native_weights, run_inputs
from hybrid_trt.sampling.engine_handle import EngineHandle
from memory_fixtures import CONTROLNET, device, file, files, library, nothing_loaded, on_engine
from newer_comfyui import NAMES, emulate
from patched import LIMIT, Failing, Patched, gone, load
from patched import on_device as bytes_on_device

from sampling import STEPS, error, sample

# fixtures: pytest finds them by name
__all__ = ["device", "file", "files", "library", "nothing_loaded"]

SIZES = {"resized": (100, 60), "as large as the picture": (64, 64)}
"""Control images: ComfyUI makes the hint of the first one, the other is copied."""


def chain(files: dict[str, Path], as_wanted: Callable[[Any, int], Any] = lambda net, _: net) -> Any:
    """Two ControlNets one behind the other, each as it is wanted: given it and its number."""
    control = None
    for number, size in enumerate(SIZES.values()):
        with torch.inference_mode():  # as nodes make images
            image = torch.rand(1, *size, 3, generator=torch.Generator().manual_seed(number)).movedim(-1, 1)
        net = as_wanted(comfy.controlnet.load_controlnet(str(files[CONTROLNET])), number).copy()
        net.set_cond_hint(image, 0.4 + 0.3 * number, (0.0, 1.0)).set_previous_controlnet(control)
        control = net
    return control


@pytest.fixture(scope="module")
def native(files: dict[str, Path]) -> list[torch.Tensor]:
    """Native's latents: of both runs, and of the first without ControlNets."""
    model = load(next(iter(files.values())))
    return [*(sample(model, seed, control=chain(files)) for seed in (1, 2)), sample(model, 1)]


class Runs:
    """A UNet with two ControlNets on live weights, sampled twice; what was done in each run, and its latent."""

    def __init__(self, files: dict[str, Path], folder: Path, patch: pytest.MonkeyPatch):
        self._patch, self.done = patch, Counter()
        self.patched = Patched(load(next(iter(files.values()))), Library([folder]), "torch")
        self.handles = [self.patched.handle]
        self.control = chain(files, lambda net, number: self._backed(net, number, Library([folder])))
        self.recorders = [gpu_recorder(wait_point=not number) for number, _ in enumerate(self.handles)]
        for handle, recorder in zip(self.handles, self.recorders, strict=True):
            handle.session.graphs._capture = recorder
        self._count()
        self.latents, self.counts, self.stats = [], [], []
        for seed in (1, 2):
            self._run(seed)

    def _backed(self, net: Any, number: int, library: Library) -> Any:
        backed, handle = on_engine(net, library, node=str(number))
        self.handles.append(handle)
        return backed

    def _count(self) -> None:
        self._spy(control_stack, "_run", "joined", lambda *_: True)
        self._spy(torch.nn.functional, "interpolate", "resized", lambda image, *_, **__: image.shape[1] == 3)
        self._spy(EngineHandle, "refresh", "looked up", lambda *_: True)
        self._spy(LiveWeights, "_bind", "opened", lambda *_: True)
        self._spy(
            run_inputs.RunInputs, "_copy", "copied prompts", lambda run, source, _: source not in run._copies
        )
        self._patch.setattr(run_inputs, "_names_elsewhere", lambda *_: {"c_crossattn"})

    def _spy(self, owner: Any, name: str, what: str, counts: Callable[..., bool]) -> None:
        own = getattr(owner, name)

        def seen(*args: Any, **options: Any) -> Any:
            self.done[what] += counts(*args, **options)
            return own(*args, **options)

        self._patch.setattr(owner, name, seen)

    def _run(self, seed: int) -> None:
        before = Counter(self.all_done)
        self.latents.append(self.patched.sample(seed, control=self.control))
        self.counts.append(self.all_done - before)
        self.stats.append([handle.stats for handle in self.handles])

    @property
    def all_done(self) -> Counter:
        sessions: list[LiveSession] = [handle.session for handle in self.handles]
        captured = sum(recorder.captured for recorder in self.recorders)
        replayed = sum(recorder.replayed for recorder in self.recorders)
        encoded = sum(session.live.passes.computed for session in sessions)
        return self.done + Counter({"captured": captured, "replayed": replayed, "encoded": encoded})

    def each(self, what: str) -> list[int]:
        return [counts[what] for counts in self.counts]


@pytest.fixture(scope="module", params=NAMES)
def runs(
    request: pytest.FixtureRequest, files: dict[str, Path], native: list, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        emulate(request.param, patch)
        patch.setattr(call_stats, "_logged", set())
        play_gpu(patch)
        yield Runs(files, tmp_path_factory.mktemp("library"), patch)


def test_the_picture_is_natives(runs: Runs, native: list[torch.Tensor]) -> None:
    *references, uncontrolled = native
    assert all(error(*both) <= LIMIT for both in zip(runs.latents, references, strict=True))
    assert error(runs.latents[0], uncontrolled) > 100 * LIMIT, "the ControlNets act"
    assert [[row.native for row in rows] for rows in runs.stats] == [[0, 0, 0]] * 2


def test_controlnets_are_joined_in_all_steps_but_the_very_first(runs: Runs) -> None:
    assert runs.each("joined") == [STEPS - 1, STEPS]


def test_a_hint_is_made_once_and_kept_for_the_next_prompt(runs: Runs) -> None:
    assert runs.each("resized") == [1, 0], "the other image is copied"


def test_a_control_image_is_encoded_once_and_not_again_in_the_next_prompt(runs: Runs) -> None:
    assert runs.each("encoded") == [3, 0], "ComfyUI's first hint, its copy that is kept, and the one that was copied"


def test_calls_are_captured_once_and_replayed(runs: Runs) -> None:
    assert runs.each("captured") == [3, 0]
    assert runs.each("replayed") == [3 * (STEPS - 1), 3 * STEPS]


def test_the_unet_starts_beside_its_controlnets_as_soon_as_it_is_captured(runs: Runs) -> None:
    assert [rows[0].beside for rows in runs.stats] == [STEPS - 2, STEPS]
    assert [rows[2].late for rows in runs.stats] == [STEPS - 2, STEPS]


def test_engines_are_looked_up_once_for_each_run_and_opened_for_the_first(runs: Runs) -> None:
    assert runs.each("looked up") == [3, 3]
    assert runs.each("opened") == [3, 0]


def test_prompts_are_copied_to_the_device_once_for_each_run(runs: Runs) -> None:
    assert runs.each("copied prompts") == [2, 2]


def test_nothing_is_said_to_be_slow(runs: Runs) -> None:
    assert [call_stats.slow_sentences(rows) for rows in runs.stats] == [[], []]
    assert call_stats._logged == set()


PROMPTS = {f"{name}-{'dynamic VRAM' if dynamic else 'loaded'}": (name, dynamic)
           for name in NAMES for dynamic in (False, True)}  # fmt: skip
QUICK = ("as it is-loaded", "as it is-dynamic VRAM", "free memory of a patcher-loaded", "more pins-dynamic VRAM",
         "foreign attributes-loaded", "fast_disk-loaded")
SLOW = [name for name in PROMPTS if name not in QUICK]


@pytest.fixture
def newer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    emulate(request.param, monkeypatch)
    return request.param


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("newer", "dynamic"), slow.cases(PROMPTS, SLOW), indirect=["newer"])
def test_two_prompts_open_an_engines_file_once_and_no_native_weights(
    newer: str, dynamic: bool, file: Path, library: Library, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    native, opened, runtime = load(file), [], type(backends()["onnxruntime"])
    native, open_file = on_cpu(native) if dynamic else native, runtime.load
    monkeypatch.setattr(runtime, "load", lambda *given: (opened.append(given), open_file(*given))[1])
    patched, held = Patched(native, library), []
    for seed in (1, 2):
        latent = patched.sample(seed, step=lambda _i: held.append(bytes_on_device(patched.model)))
        assert patched.counts == (STEPS, 0)
    assert len(opened) == 1
    if not dynamic:
        assert held == [0] * (2 * STEPS)
    elif newer == "more pins":
        assert native.times_staged == 2, "nobody here knows these pins"
        (said,) = (record.message for record in caplog.records if "dynamic_pins" in record.message)
        assert "weights-fast" in said
        assert Feature.STAGED_ONCE.value[0] in "".join(switched_off()), "and the report says so"
    else:
        assert native.times_staged == 1
    assert error(latent, sample(load(file), 2)) <= LIMIT


# Under dynamic VRAM native weights are staged once for many runs on an engine, and anew whenever anything changed


@pytest.fixture
def loader(device: None, file: Path) -> DynamicOnCPU:
    return on_cpu(load(file))


@pytest.fixture
def staged(loader: DynamicOnCPU, library: Library) -> Patched:
    found = Patched(loader, library)
    found.sample()
    assert (found.counts, loader.times_staged) == ((STEPS, 0), 1)
    return found


def test_the_double_is_comfyuis_dynamic_loading_and_samples_as_the_other(file: Path, loader: DynamicOnCPU) -> None:
    assert isinstance(loader.clone(), DynamicOnCPU)
    assert loader.is_dynamic()
    for _ in range(2):
        assert torch.equal(sample(loader), sample(load(file)))
    assert loader.times_staged == 2, "ComfyUI stages for each run"
    assert loader.backup, "small weights are forced over"


@pytest.mark.parametrize(("free", "given_up"), [(1000, []), (999, [300]), (0, [300])])
def test_pages_of_native_calls_are_given_up_only_where_memory_is_short(
    loader: DynamicOnCPU, monkeypatch: pytest.MonkeyPatch, free: int, given_up: list[int]
) -> None:
    freed: list[int] = []
    small = loader.model.model_loaded_weight_memory
    monkeypatch.setattr(loader, "loaded_size", lambda: small + 300)
    monkeypatch.setattr(loader, "partially_unload", lambda _device, size: freed.append(size))
    monkeypatch.setattr(native_weights.model_management, "get_free_memory", lambda _: loader.model_size() + free)
    native_weights._give_up_pages(loader, 1000)
    assert freed == given_up


def test_weights_are_staged_once_for_many_runs_on_an_engine(staged: Patched, loader: DynamicOnCPU, file: Path) -> None:
    loader.pins.update(active=False, failed=True)  # as ComfyUI leaves them between two prompts
    seen: list[tuple[int, dict]] = []
    for seed in (2, 3):
        latent = staged.sample(seed, step=lambda _i: seen.append((loader.times_staged, dict(loader.pins))))
        assert staged.counts == (STEPS, 0)
        assert error(latent, sample(load(file), seed)) <= LIMIT
    assert {times for times, _ in seen} == {1}
    assert all(pins["active"] and not pins["failed"] for _, pins in seen)


def test_a_native_call_in_a_run_that_staged_nothing_gives_natives_picture(
    staged: Patched, loader: DynamicOnCPU, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged.sample()
    failed = Failing(None, error=Unavailable(Reason.ENGINE_FAILED, "as on a GPU"))
    monkeypatch.setattr(staged.handle.session, "run", failed)
    latent = staged.sample()
    assert staged.counts[1] == STEPS
    assert loader.times_staged == 1
    assert torch.equal(latent, sample(load(file)))


def put_layer(model: ModelPatcher) -> None:
    model.add_object_patch("diffusion_model.out.0", torch.nn.Identity())


CHANGES: dict[str, Callable[[ModelPatcher], Any]] = {
    "lora": lambda model: model.add_patches({OUT: ("diff", (torch.full((4, 320, 3, 3), 0.01),))}, 1.0),
    "layer": put_layer,
    "on load": lambda model: model.add_callback(CallbacksMP.ON_LOAD, lambda *_: None),
    "taken back": lambda model: model.partially_unload(model.offload_device, 1e32),
    "unloaded": lambda model: model.detach(),
}
OUT = "diffusion_model.out.2.weight"


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_are_staged_anew_after_a_change(staged: Patched, loader: DynamicOnCPU, change: Callable) -> None:
    assert loader.times_staged == 1
    change(staged.model)
    staged.sample()
    assert loader.times_staged == 2


def test_layers_that_another_patcher_put_in_are_gone_and_weights_staged_for_the_next_run(
    staged: Patched, loader: DynamicOnCPU, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = loader.clone()
    put_layer(other)
    sample(other)
    times = loader.times_staged
    monkeypatch.setattr(staged.handle, "refresh", lambda: gone(staged.handle))
    latent = staged.sample()
    assert loader.times_staged == times + 1
    assert torch.equal(latent, sample(load(file)))
