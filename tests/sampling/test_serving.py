"""The right thing serves a call: the weights of this call's patcher, the engine that is on disk now, or native."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fake_engine
import pytest
import torch
from builds import main_file
from fake_recorder import Recorder
from hybrid_trt.architectures import architecture_of
from hybrid_trt.architectures.calls import EngineCall, RequestedCalls
from hybrid_trt.architectures.shapes import Profile, Range, sample_inputs, symbols_in
from hybrid_trt.backends import AUTO, backends, lookup
from hybrid_trt.backends.lookup import usable_backends
from hybrid_trt.backends.torch_inductor.compiled import file_name
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model import weight_hash
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.weight_patches import WeightPatches, version_of
from hybrid_trt.engine_builder.jobs import BuildQueue
from hybrid_trt.engine_library import Engine, EngineIdentity, Library, Manifest, Reason, Unavailable
from hybrid_trt.engine_library.engine import describe_files, relative_error
from hybrid_trt.engine_library.manifest import MANIFEST_NAME
from hybrid_trt.page_api import node_states, outlook
from hybrid_trt.sampling.call_stats import CallStats
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.engine_status import lacks_engine, status
from hybrid_trt.sessions.file_session import FileSession, file_session
from small_networks import CPU, HintEncoder, lora_for, native_call, network, with_lora

TORCH = backends()["torch"]
CUDA = torch.device("cuda", 0)
PROFILE = Profile({"B": Range(1, 2, 4), "H": Range(4, 9, 40), "W": Range(4, 12, 40), "T": Range(77, 77, 231),
                   "HB": Range(1, 1, 4)})
OPT = PROFILE.sizes("opt")


def inputs_of(net: NativeNetwork, seed: int = 1) -> dict[str, torch.Tensor]:
    return sample_inputs(architecture_of(net.module).inputs(net.module, "float32"), OPT, seed)


def handle_of(net: NativeNetwork, folder: Path, backend: str = "torch") -> EngineHandle:
    return EngineHandle.look_up(net, EngineChoice(PROFILE, "auto", backend), Library([folder]), "1")


def native(net: NativeNetwork, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Native's results with the patcher's patches in place."""
    net.patcher.patch_model(CPU)
    try:
        return native_call(net, given)
    finally:
        net.patcher.unpatch_model(CPU)


# The weights of each call


@pytest.mark.fault("two nodes share a network with different patches", see="nothing: each has its own weights")
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_nodes_of_one_network_with_other_patches_do_not_serve_each_others_weights(kind: str, tmp_path: Path) -> None:
    plain = network(kind, "unlike_levels")
    nets = [plain, with_lora(plain)]
    handles = [handle_of(net, tmp_path) for net in nets]
    assert handles[0].session is handles[1].session, "they share the network's memory"
    given = inputs_of(plain)
    with torch.inference_mode():
        references = [native(net, given) for net in nets]
        assert relative_error(references[1][-1], references[0][-1]) > 1e-3
        for i in (0, 1, 1, 0, 1):
            _, results = handles[i].serve(None, lambda: EngineCall(dict(given), dict))
            for result, reference in zip(results.values(), references[i], strict=True):
                assert relative_error(result, reference) <= 1e-5


def test_a_patch_that_comes_between_two_runs_of_one_execution_is_in_the_encoded_hint() -> None:
    net = network("controlnet", "unlike_levels")
    encoder, hint = HintEncoder(net), torch.rand(1, 3, 72, 96)
    with torch.inference_mode():
        before = encoder(hint)
        first = net.module.input_hint_block[0].weight
        net.patcher.add_patches({"input_hint_block.0.weight": ("diff", (torch.ones_like(first),))}, 0.5)
        after = encoder(hint)
        net.patcher.patch_model(CPU)
        assert torch.allclose(after, net.module.input_hint_block(hint, None, None), atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-3)


def weakly_patched(net: NativeNetwork, strength: float = 0.0, strength_model: float = 1.0) -> NativeNetwork:
    patcher = net.patcher.clone()
    assert patcher.add_patches(lora_for(net), strength, strength_model)
    return NativeNetwork(patcher, net.module, net.prefix, net.dtype, net.label, net.role)


def test_patches_of_strength_0_are_no_patches(tmp_path: Path) -> None:
    plain = network("unet", "unlike_levels")
    weak = weakly_patched(plain)
    assert weak.patcher.patches, "ComfyUI keeps them"
    assert version_of(weak.patcher) is version_of(plain.patcher) is None
    assert WeightPatches(plain.patcher).same_on(weak.patcher)
    assert weight_hash._state(weak.patcher, "") == weight_hash._state(plain.patcher, "")
    assert weak.weights_hash() == plain.weights_hash()
    both = with_lora(weak)
    assert WeightPatches(with_lora(plain).patcher)._patches.keys() == WeightPatches(both.patcher)._patches.keys()
    assert not WeightPatches(plain.patcher).same_on(both.patcher)
    more = WeightPatches(plain.patcher).difference_on(both.patcher)
    fewer = WeightPatches(both.patcher).difference_on(plain.patcher)
    assert (more.detail, more.advice) == ("a LoRA or another weight patch was added after the engine node", "")
    assert "before the engine node is missing" in fewer.detail, "the other direction has another cure"
    assert "wire the model behind the LoRA" in fewer.advice
    live = LiveSession(plain, TORCH, "float32", Recorder())
    with torch.inference_mode():
        live.run(inputs_of(plain))
        version = live.live.weights.version
        live.sync_from(weak, weak.patcher)
        live.run(inputs_of(plain))
    assert live.live.weights.version == version


@pytest.mark.parametrize("acts", ["strength_model", "set", "pad"])
def test_patches_of_strength_0_that_change_weights_all_the_same_are_patches(acts: str) -> None:
    plain = network("unet", "unlike_levels")
    (key, (_, (diff,))), *_ = lora_for(plain).items()
    other = plain.patcher.clone()
    patch = {"set": ("set", (diff,)), "pad": ("diff", (diff, {"pad_weight": True}))}.get(acts, ("diff", (diff,)))
    other.add_patches({key: patch}, 0.0, 0.5 if acts == "strength_model" else 1.0)
    assert version_of(other) is not None
    assert not WeightPatches(plain.patcher).same_on(other)


# Engines that were replaced, deleted or refused


class ReadingBackend:
    """A double of a backend: its engine is what the file says when it is opened."""

    name = "onnxruntime"

    def load(self, engine: Engine, _device: torch.device) -> Any:
        runner = type("Runner", (), {"bytes": 1, "capturable": False, "run": lambda *_: None})()
        runner.contents = main_file(engine).read_bytes()
        return runner


def published(folder: Path, contents: bytes) -> Engine:
    fake_engine.publish(folder, contents)
    (engine,) = Library([folder]).engines()
    return engine


def test_an_engine_that_was_built_again_serves_in_the_place_of_the_open_one(tmp_path: Path) -> None:
    backend = ReadingBackend()
    open_one = file_session(published(tmp_path, b"first"), backend.load, CPU)
    open_one.load()
    assert file_session(Library([tmp_path]).engines()[0], backend.load, CPU) is open_one
    assert open_one.loaded, "the same engine stays open"
    assert file_session(published(tmp_path, b"the second"), backend.load, CPU) is open_one
    for _ in range(2):
        open_one.load()
        assert open_one._runner.contents == b"the second"
        open_one.unload()  # evicted; it was "broken" after this


@pytest.mark.fault("an engine is deleted while a prompt uses it", see="normal speed: *damaged engine*")
@pytest.mark.parametrize("when", ["before", "while it is looked at"])
def test_an_engine_that_is_deleted_while_it_is_used_is_a_fallback(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = published(tmp_path, b"engine")
    opened = FileSession(engine, ReadingBackend().load, CPU)
    opened.load()
    opened.unload()
    if when != "before":
        monkeypatch.setattr(Engine, "check_sizes", lambda _self: None)
    shutil.rmtree(engine.folder)
    with pytest.raises(Unavailable) as refused:
        opened.run({})
    assert refused.value.fallback.reason is Reason.BROKEN_ENGINE


def test_a_lack_of_memory_for_a_calls_results_is_a_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = FileSession(published(tmp_path, b"engine"), ReadingBackend().load, CPU)

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(Unavailable) as refused:
        opened.run({"x": torch.zeros(1, 4)})
    assert refused.value.fallback.reason is Reason.ENGINE_FAILED


@pytest.mark.fault("the library's drive cannot be read", see="normal speed: *no engine*, with the system's words")
def test_a_library_that_cannot_be_read_is_a_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = handle_of(network("unet", "unlike_levels"), tmp_path)

    def gone(*_: Any) -> None:
        raise PermissionError(13, "the share is gone")

    monkeypatch.setattr(handle.library, "find", gone)
    handle.refresh()
    assert handle.session is None
    assert "the share is gone" in handle.fallback.detail


def compiled_engine(net: NativeNetwork, folder: Path, created: str) -> Engine:
    """An engine of the torch backend with a file for every size, which no test opens for real."""
    library = Library([folder])
    used = symbols_in(net.architecture().inputs(net.module, "float32"))
    name = file_name(used)
    identity = EngineIdentity("sd15_unet", TORCH.weights(net), "float32", PROFILE.only(used), "torch", TORCH.version(),
                              TORCH.target(CPU))
    specs = architecture_of(net.module)
    with library.building_folder() as building:
        (building / name).write_bytes(created.encode())
        return library.publish(building, Manifest(
            identity, "unet", net.label, tuple(specs.inputs(net.module, "float32")),
            tuple(specs.outputs(net.module, "float32")), describe_files(building, [name]), created=created))


def lacking(session: LiveSession) -> list:
    return TORCH.to_build(network("unet", "unlike_levels"), RequestedCalls(PROFILE), session.engines)


@pytest.fixture
def wish() -> outlook.NodeRequest:
    return outlook.NodeRequest("unet", network("unet", "unlike_levels").label, False, "torch")


def test_an_engine_that_cannot_be_opened_is_told_and_wanted_anew_and_tried_again_when_it_was_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: outlook.NodeRequest
) -> None:
    net, opened = network("unet", "unlike_levels"), []

    def refuse(_self: Any, engine: Engine, *_: Any) -> None:
        opened.append(engine.manifest.created)
        raise OSError("the disk is gone")

    monkeypatch.setattr(type(TORCH), "cannot_build", lambda *_: None)
    engine = compiled_engine(net, tmp_path, "first")
    handle, states = handle_of(net, tmp_path), node_states.NodeStates(Library([tmp_path]), BuildQueue())
    states.learn("key", handle)
    live, given = handle.session, inputs_of(net)
    assert not lacking(live)
    told = states.state("key", wish)
    assert (told["state"], told["build_helps"]) == ("ready", False)
    monkeypatch.setattr(type(TORCH), "open_live", refuse)
    with torch.inference_mode():
        for _ in range(2):
            result = handle.serve(None, lambda: EngineCall(dict(given), dict))[1]["out"]
            assert relative_error(result, native(net, given)[0]) <= 1e-5
    assert opened == ["first"]
    assert lacking(live)
    told = states.state("key", wish)
    assert (told["state"], told["engine"]["name"], told["build_helps"]) == ("stale", engine.folder.name, True)
    assert all("the disk is gone" in words for words in (live.status(PROFILE), live.refusal, told["text"]))
    later = LiveSession(with_lora(net), TORCH, "float32", Recorder())
    later.use(Library([tmp_path]).engines())
    assert lacking(later), "another session knows it too"
    assert "the disk is gone" in later.status(PROFILE)
    for one in (live, later):
        one.use([compiled_engine(net, tmp_path, "second")])
        assert one.refusal is None
        assert not lacking(one)
    with torch.inference_mode():
        live.run(given)
    assert opened == ["first", "second"]


def test_a_run_from_before_the_engine_was_published_is_told_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: outlook.NodeRequest
) -> None:
    net = network("unet", "unlike_levels")
    engine = compiled_engine(net, tmp_path, "once")
    states = node_states.NodeStates(Library([tmp_path]), BuildQueue())
    states.learn("key", handle_of(net, tmp_path))
    row = CallStats("unet", "m", "1", "5", native=4, reasons={Reason.NO_ENGINE.value: 4}, node_key="key")
    monkeypatch.setattr(node_states, "last_run", lambda key: ("prompt", [row]))
    published = (engine.folder / MANIFEST_NAME).stat().st_mtime
    told = {}
    for seconds in (-1, 1):
        row.opened = published + seconds
        answer = states.state("key", wish)
        assert answer["state"] == "ready"
        told[seconds] = answer["run"] and answer["run"]["native"]
    assert told == {-1: None, 1: 4}


# What auto takes


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of a machine where every backend could run on a CUDA GPU."""
    for backend in backends().values():
        monkeypatch.setattr(backend, "cannot_run", lambda _device: None)


@pytest.fixture
def cpu_plays_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double: measurements on CUDA count for the CPU."""
    monkeypatch.setattr(lookup, "kind_of", lambda _device: "cuda")


@pytest.mark.usefixtures("everything_installed")
def test_auto_takes_what_was_measured_on_such_a_device_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [b.name for b in usable_backends(AUTO, CUDA)] == ["torch"]
    assert [b.name for b in usable_backends(AUTO, CPU)] == ["onnxruntime"]
    for name in backends():
        assert [b.name for b in usable_backends(name, CUDA)] == [name], "chosen by name"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(Unavailable) as refused:
        usable_backends(AUTO, CUDA)
    assert refused.value.fallback.reason is Reason.BACKEND_MISSING
    assert "or torch or onnxruntime by name" in refused.value.fallback.detail
    monkeypatch.setattr(backends()["tensorrt"], "measured_on", ("rocm", "cuda"), raising=False)
    assert [b.name for b in usable_backends(AUTO, CUDA)] == ["tensorrt"]


@pytest.mark.usefixtures("cpu_plays_cuda")
def test_auto_on_cuda_serves_without_an_engine_and_never_hashes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashed(*_: Any) -> None:
        raise AssertionError("minutes for a checkpoint")

    monkeypatch.setattr(type(TORCH), "cannot_build", lambda *_: None)
    plain = network("unet", "unlike_levels")
    other = network("unet", "unlike_levels")
    fake_engine.publish(tmp_path)
    (stranger,) = Library([tmp_path]).engines()
    assert stranger.manifest.identity.architecture == plain.architecture().name
    for name in ("weights_hash", "fingerprint"):
        monkeypatch.setattr(NativeNetwork, name, hashed)
    larger = Profile({**PROFILE.ranges, "H": Range(4, 20, 80)})
    for net, profile in ((plain, PROFILE), (with_lora(plain), PROFILE), (other, PROFILE), (plain, larger)):
        handle = EngineHandle.look_up(net, EngineChoice(profile), Library([tmp_path]), "1")
        given = inputs_of(net)
        with torch.inference_mode():
            result = handle.serve(None, lambda given=given: EngineCall(dict(given), dict))[1]["out"]
            assert relative_error(result, native(net, given)[0]) <= 1e-5
        assert handle.fallback is None
        assert "build for full speed" in status(handle)
        assert lacks_engine(handle), "the node offers a build"
        states = node_states.NodeStates(handle.library, BuildQueue())
        states.learn("key", handle)
        told = states.state("key", outlook.NodeRequest("unet", net.label, False, AUTO))
        assert (told["state"], told["any_size"]) == ("none", True)
        assert "build for full speed" in told["text"]
