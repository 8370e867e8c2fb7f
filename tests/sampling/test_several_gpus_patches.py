"""MultiGPU CFG Split and Select Model Device with model patches that engines compute, and with streams.

Each GPU has a patch and a network of it of its own. The second GPU is a double, the CPU under another name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.multigpu
import comfy.sd
import fun
import lllite
import pytest
import token_calls
import token_networks
import torch
import zimage
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.utils import load_torch_file
from fun import GIVEN, TWO_ONE
from given_frames import Given, apart, image, prompts, streamed
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling import several_gpus
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.model_wrapper import KEY
from hybrid_trt.streaming.frames import Frame, Settings
from hybrid_trt.streaming.stream import Stream
from lllite import TOGETHER, WIDTH
from memory_fixtures import file, nothing_loaded
from patched import Patched, gone, load
from second_device import SECOND, split, two_devices

__all__ = ["file", "nothing_loaded", "two_devices"]  # fixtures: pytest finds them by name

LIMIT = 1e-5
STEPS = 3


@dataclass
class Family:
    """A model that a patch is for.

    Attributes:
        behind: the model and the patch's network -> the model behind ComfyUI's node for the patch.
        networks: of two files of the patch.
        wrapped: a model and a folder -> the model behind its engine.
        options: of samplings.
    """

    model: ModelPatcher
    networks: list[ModelPatcher]
    behind: Callable[..., ModelPatcher]
    wrapped: Callable[..., Any]
    given: tuple[Any, ...]
    options: dict[str, Any]
    sampled: Callable[..., torch.Tensor]

    def natively(self, model: ModelPatcher) -> torch.Tensor:
        """Native's latent on one GPU."""
        return self.sampled(model, *self.given, **self.options)

    def sample(self, engine: Any) -> torch.Tensor:
        return engine.sample(*self.given, **self.options)

    def on_two(self, model: ModelPatcher, folder: Path, backend: str = "torch") -> Any:
        """A model behind its engine and MultiGPU CFG Split."""
        engine = self.wrapped(model, folder, backend)
        engine.model = split(engine.model)
        return engine


def of_fun() -> Family:
    model = fun.model()
    model.cached_patcher_init = (fun.model, ())
    networks = [fun.control(other=other, **TWO_ONE) for other in (False, True)]
    wrapped = lambda given, folder, backend: zimage.Patched(given, Library([folder]), backend)  # noqa: E731
    return Family(model, networks, fun.with_fun, wrapped, GIVEN, {"steps": STEPS}, zimage.sample)


def of_lllite(models: dict[str, Path]) -> Family:
    model = lllite.anima(models)
    model.cached_patcher_init = (token_networks.load, (str(models[lllite.BASE]),))
    networks = [lllite.load(models, file) for file in (lllite.FILE, "tiny_anima_lllite_other")]
    wrapped = lambda given, *where: token_calls.Patched(lllite.network(given), *where)  # noqa: E731
    return Family(model, networks, lllite.behind, wrapped, (WIDTH,), TOGETHER, token_calls.sample)


@pytest.fixture(params=["fun", "lllite"])
def family(request: pytest.FixtureRequest) -> Family:
    return of_fun() if request.param == "fun" else of_lllite(request.getfixturevalue("models"))


quickly = pytest.mark.parametrize(
    "family", [pytest.param("fun", marks=pytest.mark.slow), "lllite"], indirect=True)  # fmt: skip


def copy_of(engine: Any) -> EngineHandle:
    """The handle of the second GPU's engine."""
    (router,) = engine.model.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY)
    return router._copies[SECOND]._handle


def test_each_gpu_runs_an_engine_of_both_networks_which_stays_open(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, used, run = family.behind(family.model, family.networks[0]), [], LiveSession.run
    expected, plain = family.natively(native), family.natively(family.model)
    assert relative_error(plain, expected) > 100 * LIMIT
    engine = family.on_two(native, tmp_path)
    monkeypatch.setattr(LiveSession, "run", lambda self, *rest: (used.append(self), run(self, *rest))[1])
    for _ in range(2):
        used.clear()
        assert relative_error(family.sample(engine), expected) <= LIMIT
        assert engine.counts == (2 * STEPS, 0), engine.handle.stats.reasons
        assert set(used) == {engine.handle.session, copy_of(engine).session}
        assert {session.device for session in used} == {torch.device("cpu"), SECOND}
        assert engine.handle.stats.reopened == 0, "each engine was opened once"
        monkeypatch.setattr(LiveSession, "unload", lambda _self: pytest.fail("an engine is closed"))
    monkeypatch.setattr(LiveSession, "unload", lambda _self: None)
    companions = engine.handle.network.companion, copy_of(engine).network.companion
    assert companions[0].module is family.networks[0].model
    assert companions[0].module is not companions[1].module
    assert companions[1].patcher.load_device == SECOND


def test_a_model_with_a_patch_is_computed_by_one_gpu_where_the_step_has_a_single_call(
    family: Family, tmp_path: Path
) -> None:
    native, options = family.behind(family.model, family.networks[0]), {**family.options, "cfg": 1.0}
    expected = family.sampled(native, *family.given, **options)
    engine = family.wrapped(split(native), tmp_path, "torch")
    assert relative_error(family.sampled(engine.model, *family.given, **options), expected) <= LIMIT
    assert (engine.handle.stats.engine, engine.handle.stats.native) == (STEPS, 0)
    assert "GPUs cannot share the tokens of this model" in engine.handle.stats.remark
    assert not engine.handle.session.calls_attention, "its blocks are those of one GPU"


@pytest.mark.fault("a model patch that keeps values on itself is called on several GPUs at once",
                   see="each GPU has a patch and its network of its own, with an engine or without")
@pytest.mark.parametrize("without", ["second", "both"])
def test_gpus_without_an_engine_run_native_with_a_patch_of_their_own(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """ComfyUI's own nodes give another picture with Fun control: a layer takes what another GPU's layer has left."""
    native, refresh = family.behind(family.model, family.networks[0]), EngineHandle.refresh
    expected = family.natively(native)
    monkeypatch.setattr(EngineHandle, "refresh", lambda self: (
        gone(self) if without == "both" or self.network.device == SECOND else refresh(self)))  # fmt: skip
    engine = family.on_two(native, tmp_path)
    assert relative_error(family.sample(engine), expected) <= LIMIT
    assert engine.counts == ((0, 2 * STEPS) if without == "both" else (STEPS, STEPS))
    assert list(engine.handle.stats.reasons) == [Reason.NO_ENGINE.value]


@quickly
def test_values_that_another_node_writes_into_the_patch_are_followed_on_each_gpu(
    family: Family, tmp_path: Path
) -> None:
    network = family.networks[0]
    native = family.behind(family.model, network)
    engine = family.on_two(native, tmp_path)
    before = family.sample(engine)
    for parameter in network.model.parameters():
        parameter.data.mul_(1.3)
    expected = family.natively(native)
    assert relative_error(before, expected) > 100 * LIMIT
    assert relative_error(family.sample(engine), expected) <= LIMIT
    assert engine.counts == (2 * STEPS, 0)


def test_a_network_of_a_patch_is_copied_once_for_all_its_images_and_strengths(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, copied = [], several_gpus.native_copy
    monkeypatch.setattr(several_gpus, "native_copy", lambda network: (made.append(network), copied(network))[1])
    for strength, seed in ((0.7, 2), (1.0, 3)):
        shown = fun.picture(seed, 90, 70)  # of another size than the picture
        native = family.behind(family.model, family.networks[0], shown, strength=strength)
        assert relative_error(family.sample(family.on_two(native, tmp_path)), family.natively(native)) <= LIMIT
    assert made == [family.networks[0].model]


@quickly
def test_control_goes_on_and_off_between_prompts_on_each_gpu(family: Family, tmp_path: Path) -> None:
    for native in (family.model, family.behind(family.model, family.networks[1]), family.model):
        engine = family.on_two(native, tmp_path)
        assert relative_error(family.sample(engine), family.natively(native)) <= LIMIT
        assert engine.counts == (2 * STEPS, 0)


@quickly
@pytest.mark.parametrize("change", ["another file", "behind the engine", "patched weights"])
def test_what_the_engines_are_not_for_is_natives_on_each_gpu_with_a_reason(
    family: Family, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    network, served = family.networks[0], 0
    if change == "patched weights":
        name = next(name for name, value in network.model.named_parameters() if value.ndim == 2)
        assert network.add_patches({name: (torch.ones_like(network.model.state_dict()[name]),)})
        native = family.behind(family.model, network)
        engine, served, reason = family.on_two(native, tmp_path), STEPS, Reason.MODEL_PATCHED
    else:
        engine = family.wrapped(family.model if change == "behind the engine" else family.behind(family.model, network),
                                tmp_path, "torch")  # fmt: skip
        base = engine.model.clone()
        base.model_options["transformer_options"].pop("patches", None)
        engine.model = split(family.behind(base, family.networks[1]))
        native = family.behind(family.model, family.networks[1])
        reason = Reason.OTHER_MODEL if change == "another file" else Reason.MODEL_PATCHED
    assert relative_error(family.sample(engine), family.natively(native)) <= LIMIT
    assert engine.counts == (served, 2 * STEPS - served)
    assert list(engine.handle.stats.reasons) == [reason.value]
    assert f"{reason.value}: " in caplog.text


@quickly
@pytest.mark.fault("Select Model Device has a model on another GPU than its model patch",
                   see="normal speed: *changed by another node*; the advice names the GPU of the patch")
@pytest.mark.parametrize("several", [False, True], ids=["alone", "split"])
def test_a_model_on_another_gpu_than_its_patch_runs_native_with_what_to_do(
    family: Family, tmp_path: Path, several: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = family.natively(family.behind(family.model, family.networks[0]))
    native = family.behind(family.model.deepclone_multigpu(new_load_device=SECOND), family.networks[0])
    assert native.load_device == SECOND
    engine = family.on_two(native, tmp_path) if several else family.wrapped(native, tmp_path, "torch")
    assert relative_error(family.sample(engine), expected) <= LIMIT
    assert engine.counts[0] == (STEPS if several else 0)
    assert list(engine.handle.stats.reasons) == [Reason.MODEL_PATCHED.value]
    assert "have the model on cpu, where the patch of " in caplog.text


@pytest.mark.slow
def test_files_of_engines_serve_both_networks_on_each_gpu(models: dict[str, Path], tmp_path: Path) -> None:
    family = of_lllite(models)
    native = family.behind(family.model, family.networks[0])
    token_calls.engine_of(lllite.network(native), tmp_path)
    engine = family.on_two(native, tmp_path, "onnxruntime")
    assert relative_error(family.sample(engine), family.natively(native)) <= LIMIT
    assert engine.counts == (2 * STEPS, 0), engine.handle.stats.reasons
    assert copy_of(engine).session.device == SECOND


@pytest.mark.fault("a stream's model is shared among GPUs",
                   see="each frame is a sampling of its own, and the stream says why; the VAE stays on one GPU")
@pytest.mark.parametrize("remembered", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stream_on_several_gpus_samples_frame_by_frame_and_says_why(
    file: Path, models: dict[str, Path], tmp_path: Path, remembered: int
) -> None:
    """Its VAE is copied to no GPU. Tokens of earlier frames are kept by device, of which the double has one."""
    own = Settings(steps=2, cfg=2.0, sampler_name="euler", scheduler="simple", denoise=0.6, seed=7,
                   remembered=remembered)  # fmt: skip
    pictures, calls = [], []
    for on_gpus in (lambda model: model, split):
        engine, vae = Patched(load(file), Library([tmp_path]), "torch"), comfy.sd.VAE(
            sd=load_torch_file(str(models["tiny_kl"])))
        stream = Stream(on_gpus(engine.model), vae, *prompts(), own)
        source = Given(*(Frame(number, image(number)) for number in range(2)))
        streamed(stream, source)
        (router,) = stream._model.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY)
        calls.append((router._handle.stats.engine, router._handle.stats.native))
        pictures.append([source.pictures[number] for number in range(2)])
    assert stream.one_by_one.endswith("MultiGPU shares each step among GPUs.")
    assert calls[1] == (2 * calls[0][0], 0)
    assert all(picture.isfinite().all() for picture in pictures[1])
    if not remembered:
        assert max(map(apart, *pictures)) <= LIMIT
