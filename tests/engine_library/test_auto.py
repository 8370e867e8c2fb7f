"""``auto`` takes the fastest engine that proved itself on this GPU. A double of it: the CPU, under a GPU's name."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import slow
import torch
from builds import main_file
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures.calls import EngineCall
from hybrid_trt.architectures.shapes import Profile, Range, sample_inputs, symbols_in
from hybrid_trt.backends import AUTO, backends, lookup
from hybrid_trt.backends.torch_inductor.compiled import file_name
from hybrid_trt.comfy_model import hash_cache
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder.jobs import BuildQueue
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, EngineIdentity, Library, Manifest, Reason, Unavailable, trust
from hybrid_trt.engine_library.engine import describe_files, relative_error
from hybrid_trt.engine_library.inventory import entries
from hybrid_trt.page_api.node_states import NodeStates
from hybrid_trt.page_api.outlook import NodeRequest
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.engine_patcher import EnginePatcher
from hybrid_trt.sampling.engine_status import lacks_engine, status
from small_networks import CPU, native_call, network, with_lora
from trt_backends import ADA, TURING, gpu

HERE, ELSEWHERE = f"{ADA.sm} {ADA.name}", f"{TURING.sm} {TURING.name}"
TORCH, ORT = backends()["torch"], backends()["onnxruntime"]
PROFILE = Profile({"B": Range(1, 2, 2), "H": Range(4, 8, 16), "W": Range(4, 8, 16), "T": Range(77, 77, 77),
                   "HB": Range(1, 1, 2)})
WIDE = Profile({**PROFILE.ranges, "H": Range(4, 8, 40), "W": Range(4, 8, 40)})
SIZES = {"B": 2, "H": 8, "W": 12, "T": 77, "HB": 1}
BEYOND = {**SIZES, "H": 20}
FASTER, SLOWER = {"native_ms": 8.0, "engine_ms": 2.5}, {"native_ms": 8.0, "engine_ms": 8.5}
LIMIT = 1e-5


@pytest.fixture(scope="module", params=slow.cases({"unet": "unet", "controlnet": "controlnet"}, ["controlnet"]))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def exported(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of ONNX Runtime in a library: a backend that nobody measured on GPUs."""
    folder = tmp_path_factory.mktemp(kind)
    order = BuildOrder(network(kind, "unlike_levels"), "float32", PROFILE, ORT)
    return builder.build_engine(order, Library([folder]), lambda *_: None, run=builder.run_here).folder


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double: the CPU is this GPU, and what was measured on CUDA counts for it."""
    gpu(monkeypatch, ADA)
    monkeypatch.setattr(lookup, "kind_of", lambda _device: "cuda")
    monkeypatch.setattr(type(TORCH), "cannot_build", lambda *_: None)
    for backend in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setattr(backends()[backend], "cannot_run", lambda _device: None)


def like(engine: Engine, figures: dict, fingerprint: str = "", **changes: Any) -> Engine:
    """One that does not open: by default for another checkpoint or another LoRA, with the same biases and norms."""
    library = Library([engine.folder.parent])
    identity = replace(engine.manifest.identity, **{"weights": "f" * 64, **changes})
    with library.building_folder() as building:
        (building / "model.onnx").write_bytes(b"other weights")
        manifest = replace(engine.manifest, identity=identity, files=describe_files(building, ["model.onnx"]),
                           fingerprint=fingerprint or engine.manifest.fingerprint)
        return library.publish(building, manifest, record=trust.Record(trust.BUILT, parity=figures, gpu=HERE))


def serve(handle: EngineHandle, sizes: dict[str, int] = SIZES, patcher: ModelPatcher | None = None) -> float:
    """Serve a call: who did is in the stats. How far the result is from native's."""
    net, patcher = handle.network, patcher or handle.network.patcher
    given = sample_inputs(net.architecture().inputs(net.module, "float32"), sizes, seed=3)
    with torch.inference_mode():
        done, result = handle.serve(None, lambda: EngineCall(dict(given), dict), patcher)
        assert done, handle.fallback or handle.stats.details
        patcher.patch_model(CPU)
        try:
            expected = native_call(net, given)
        finally:
            patcher.unpatch_model(CPU)
    return max(relative_error(a, b) for a, b in zip(result.values(), expected, strict=True))


@dataclass(frozen=True)
class Shelf:
    """A network, and the library with its engines."""

    net: NativeNetwork
    folder: Path
    exported: Path

    def ort(self, figures: dict, gpu: str = HERE) -> Engine:
        """Put the engine of ONNX Runtime there, with what this machine knows of it."""
        folder = shutil.copytree(self.exported, self.folder / self.exported.name, dirs_exist_ok=True)
        (engine,) = [e for e in Library([self.folder]).engines() if e.folder == folder]
        trust.keep(folder, engine.manifest, trust.Record(trust.BUILT, parity={"rel_err": 1e-6, **figures}, gpu=gpu))
        return engine

    def torch(self, figures: dict, profile: Profile = PROFILE) -> Engine:
        """Put a compiled engine there that does not open: it runs uncompiled then."""
        specs, module = self.net.architecture(), self.net.module
        inputs, outputs = specs.engine_inputs(module, "float32"), specs.outputs(module, "float32")
        used = symbols_in(inputs)
        library = Library([self.folder])
        name = file_name(used)
        identity = EngineIdentity(specs.name, TORCH.weights(self.net), "float32", profile.only(used), "torch",
                                  TORCH.version(), TORCH.target(CPU))  # fmt: skip
        with library.building_folder() as building:
            (building / name).write_bytes(b"what Inductor made")
            manifest = Manifest(identity, specs.role.value, self.net.label, tuple(inputs), tuple(outputs),
                                describe_files(building, [name]), parity={"rel_err": 1e-6, **figures})  # fmt: skip
            return library.publish(building, manifest, record=trust.Record(trust.BUILT, gpu=HERE))

    def handle(self, profile: Profile = PROFILE, backend: str = AUTO, net: NativeNetwork | None = None) -> EngineHandle:
        """Look engines up as a node does; outside of a prompt all tests of a process would count for one node."""
        net = net or self.net
        choice = EngineChoice(profile, backend=backend)
        return EngineHandle.look_up(net, choice, Library([self.folder]), f"{net.module!r:.9}{self.folder}")

    def taken(self, **choice: Any) -> list[str]:
        """Return the engines that a node takes, the page says the same."""
        handle = self.handle(**choice)
        found, engine = [e.folder.name for e in handle.session.engines], self.page_says(handle)["engine"]
        assert [engine["name"] if engine else None] == (found[:1] or [None])
        return found

    def page_says(self, handle: EngineHandle, backend: str = AUTO) -> dict[str, Any]:
        """Return the state that the page shows for a node that has run."""
        states = NodeStates(Library([self.folder]), BuildQueue())
        states.learn("key", handle)
        return states.state("key", NodeRequest(handle.network.role.value, self.net.label, False, backend))


@pytest.fixture
def shelf(kind: str, tmp_path: Path, exported: Path) -> Shelf:
    return Shelf(network(kind, "unlike_levels"), tmp_path, exported)


# Which engine it takes


def test_auto_takes_an_engine_of_any_backend_that_was_timed_on_this_gpu(shelf: Shelf) -> None:
    for figures, where in (({}, HERE), (FASTER, ELSEWHERE), (FASTER, "")):
        unproven = shelf.ort(figures, where)
        assert shelf.taken() == [], f"{figures} on {where!r} proves nothing"
        by_name = [unproven.folder.name] if where == HERE else []  # there it would have to be checked first
        handle = shelf.handle(backend="onnxruntime")
        assert [e.folder.name for e in (handle.session.engines if handle.session else [])] == by_name
        assert serve(handle := shelf.handle()) <= LIMIT
        assert handle.stats.backend == "torch"
    engine = shelf.ort(FASTER)
    assert shelf.taken() == [engine.folder.name]
    assert serve(handle := shelf.handle()) <= LIMIT
    assert (handle.stats.backend, handle.stats.engine_name) == ("onnxruntime", engine.folder.name)


def test_one_engines_figures_prove_nothing_of_another_engine_of_its_backend(shelf: Shelf) -> None:
    engine = shelf.ort({})
    like(engine, FASTER)
    assert shelf.taken() == []
    shelf.ort(FASTER)
    assert shelf.taken() == [engine.folder.name]


def test_auto_takes_the_fastest_of_several_whichever_backend_is_preferred(shelf: Shelf) -> None:
    engine = shelf.ort(FASTER)
    compiled = shelf.torch({"native_ms": 8.0, "engine_ms": 4.0})
    assert TORCH.preference > ORT.preference
    assert shelf.taken() == [engine.folder.name]
    compiled = shelf.torch({"native_ms": 40.0, "engine_ms": 10.0})
    assert shelf.taken() == [compiled.folder.name], "4x beats 3.2x, whatever the milliseconds at its size"
    compiled = shelf.torch({})
    assert shelf.taken() == [engine.folder.name], "what has no figures comes after what has"
    assert shelf.taken(backend="torch") == [compiled.folder.name], "chosen by name"
    assert shelf.taken(backend="onnxruntime") == [engine.folder.name]


def test_of_two_engines_of_one_backend_the_faster_one_serves_and_by_name_the_smaller_one(shelf: Shelf) -> None:
    engine = shelf.ort({"native_ms": 8.0, "engine_ms": 4.0})
    ranges = engine.manifest.identity.profile.ranges
    larger = like(engine, FASTER, weights=engine.manifest.identity.weights, profile=WIDE.only(ranges))
    assert shelf.taken() == [larger.folder.name]
    by_name = shelf.handle(backend="onnxruntime")
    assert by_name.session.engines == [engine], "which takes less memory"


def test_an_engine_that_holds_the_nodes_sizes_comes_before_a_faster_one_that_does_not(shelf: Shelf) -> None:
    engine = shelf.ort(FASTER)
    assert shelf.taken(profile=WIDE) == [engine.folder.name], "better than none"
    compiled = shelf.torch({"native_ms": 8.0, "engine_ms": 6.0}, WIDE)
    assert shelf.taken(profile=WIDE) == [compiled.folder.name]
    assert shelf.taken() == [engine.folder.name]
    shelf.torch(SLOWER, WIDE)
    assert shelf.taken(profile=WIDE) == [engine.folder.name], "one that is no gain serves nobody"


def test_an_engine_compiled_for_one_size_is_not_behind_for_that_since_live_weights_serve_all_others(
    shelf: Shelf
) -> None:
    engine = shelf.ort({"native_ms": 8.0, "engine_ms": 4.0})
    compiled = shelf.torch(FASTER, Profile({s: Range(n, n, n) for s, n in SIZES.items()}))
    assert shelf.taken() == [compiled.folder.name]
    shelf.torch({"native_ms": 8.0, "engine_ms": 6.0}, compiled.manifest.identity.profile)
    assert shelf.taken() == [engine.folder.name]


def test_an_engine_that_was_slower_than_native_is_not_taken_where_live_weights_serve(shelf: Shelf) -> None:
    engine = shelf.ort(SLOWER)
    assert shelf.taken() == []
    assert serve(handle := shelf.handle()) <= LIMIT
    assert handle.stats.backend == "torch"
    assert shelf.taken(backend="onnxruntime") == [engine.folder.name], "chosen by name"


def test_a_compiled_file_that_was_slower_than_native_is_not_opened(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(type(TORCH), "open_live", lambda *_: opened.append(1))
    shelf.torch({"native_ms": 8.0, "engine_ms": 10.0})
    handle = shelf.handle()
    assert serve(handle, {**SIZES, "W": 8}) <= LIMIT
    assert opened == []
    assert "1.25 times as long as the normal model on this GPU" in status(handle)
    assert handle.stats.engine_name == "live weights, CUDA graph"


def test_a_checkpoint_is_hashed_only_for_an_engine_that_could_be_its_own_and_was_timed_here(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []
    found = NativeNetwork.weights_hash
    monkeypatch.setattr(NativeNetwork, "weights_hash", lambda self, *_: hashed.append(self) or found(self))
    engine = shelf.ort(FASTER, ELSEWHERE)
    shelf.handle()
    shutil.rmtree(engine.folder)
    like(engine, {}, backend="tensorrt")
    like(engine, FASTER, fingerprint="f" * 16)
    shelf.handle()
    assert hashed == [], "one that was not timed and one of other weights are no reason"
    shelf.ort(FASTER)
    shelf.handle()
    assert hashed == [shelf.net]


def test_a_model_with_a_lora_is_hashed_only_for_an_engine_that_is_not_its_files(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``auto`` a LoRA's strength may change from prompt to prompt: a checkpoint takes minutes to hash."""
    file = shelf.folder / "model.safetensors"
    file.write_bytes(b"1")
    shelf.net.patcher.cached_patcher_init = (network, (str(file), {}))
    monkeypatch.setattr(hash_cache, "_folder", shelf.folder)
    engine, patched = shelf.ort(FASTER), with_lora(shelf.net)
    assert shelf.handle().session.engines == [engine]
    assert shelf.handle(net=patched).session.engines == []
    assert patched.known_hash() == ""
    like(engine, FASTER)
    assert shelf.handle(net=patched).session.engines == [], "of other weights"
    assert patched.known_hash() not in ("", engine.manifest.identity.weights)


# What the engine cannot serve


def test_calls_of_other_sizes_than_the_engines_run_on_live_weights_and_not_native(shelf: Shelf) -> None:
    engine = shelf.ort(FASTER)
    handle = shelf.handle(profile=WIDE)
    served = []
    for sizes in (SIZES, BEYOND, BEYOND, SIZES, {**SIZES, "T": 154}):
        assert serve(handle, sizes) <= LIMIT
        served.append(handle.stats.backend)
    assert served == ["onnxruntime", "torch", "torch", "onnxruntime", "torch"]
    assert (handle.stats.engine, handle.stats.native) == (5, 0)
    assert handle.session.engines == [engine]
    assert "larger pictures run on torch's live weights" in status(handle)
    by_name = shelf.handle(profile=WIDE, backend="onnxruntime")
    with pytest.raises(AssertionError, match="height 160 px is outside"):
        serve(by_name, BEYOND)
    assert "larger pictures run at normal speed" in status(by_name)


def test_calls_with_a_lora_that_the_engine_has_not_run_on_live_weights(shelf: Shelf) -> None:
    shelf.ort(FASTER)
    handle, patched = shelf.handle(), with_lora(shelf.net).patcher
    assert handle.follows_patches, "the sampler patch lets such calls through"
    served = []
    for patcher in (shelf.net.patcher, patched, shelf.net.patcher, shelf.net.patcher.clone(), patched):
        assert serve(handle, patcher=patcher) <= LIMIT
        served.append(handle.stats.backend)
    assert served == ["onnxruntime", "torch", "onnxruntime", "onnxruntime", "torch"]


@pytest.mark.fault("an engine does not open where live weights are at hand", see="live weights serve in its place")
@pytest.mark.parametrize("opens", [True, False], ids=["ComfyUI opens it", "a call opens it"])
def test_live_weights_serve_in_the_place_of_an_engine_that_does_not_open(opens: bool, shelf: Shelf) -> None:
    engine = shelf.ort(FASTER)
    contents = bytearray(main_file(engine).read_bytes())
    contents[len(contents) // 2] ^= 0xFF
    main_file(engine).write_bytes(contents)
    handle = shelf.handle()
    assert handle.session.engines == [engine]
    handle.plan()
    if opens:
        handle.open()
    for _ in range(2):  # the second run does not try it again
        assert serve(handle) <= LIMIT
        assert (handle.stats.backend, handle.stats.native) == ("torch", 0)
    assert "is not used: " in status(handle)
    assert engine.folder.name in status(handle)
    assert not handle.session._engine.loaded

    told = shelf.page_says(handle)
    assert told["state"] == "stale"
    assert told["text"].endswith("delete it in the panel, or build it again with the backend onnxruntime.")


def test_a_damaged_engine_has_the_same_state_on_its_node_and_in_the_panel(shelf: Shelf) -> None:
    engine = shelf.ort(FASTER)
    main_file(engine).write_bytes(b"")
    handle = shelf.handle(backend="onnxruntime")
    told = shelf.page_says(handle, "onnxruntime")
    (entry,) = entries(Library([shelf.folder]), lambda _: None, source_changed)
    assert (told["state"], entry.state) == ("broken", "broken")
    assert lacks_engine(handle), "a build ends it"


def test_an_engine_that_lacks_memory_is_tried_again_in_the_next_run(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise Unavailable(Reason.ENGINE_FAILED, "not enough GPU memory")

    shelf.ort(FASTER)
    handle = shelf.handle()
    with monkeypatch.context() as patched:
        patched.setattr(handle.session._engine, "load", full)
        handle.plan()
        handle.open()
    assert handle.fallback.detail == "not enough GPU memory"
    again = shelf.handle()
    assert again.session.refusal is None
    assert serve(again) <= LIMIT
    assert again.stats.backend == "onnxruntime"


def test_comfyui_sees_and_frees_the_memory_of_the_engine_and_of_the_live_weights(shelf: Shelf) -> None:
    engine = shelf.ort(FASTER)
    handle = shelf.handle()
    patcher: EnginePatcher = handle.patcher
    assert patcher.model_size() == engine.manifest.device_bytes, "what the run will take"
    serve(handle)
    alone = patcher.loaded_size()
    assert alone > 0
    serve(handle, BEYOND, with_lora(shelf.net).patcher)
    weights = sum(p.numel() for p in shelf.net.module.parameters()) * 4
    live = TORCH.session(shelf.net, [], "float32", None)
    assert live.loaded
    assert patcher.loaded_size() == alone + live.bytes
    assert live.bytes <= weights
    patcher.detach()
    assert patcher.loaded_size() == 0
    assert not live.loaded


def test_two_nodes_with_one_engine_count_its_memory_once(shelf: Shelf) -> None:
    shelf.ort(FASTER)
    one, other = shelf.handle(), shelf.handle()
    assert one.patcher.is_clone(other.patcher)
    before = one.session
    one.refresh()
    assert one.session is before, "a run does not open anything anew"
    assert not one.patcher.is_clone(shelf.handle(backend="onnxruntime").patcher)


def test_a_network_whose_parts_were_replaced_keeps_its_engine(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(*_: Any) -> None:
        raise Unavailable(Reason.MODEL_PATCHED, "another node replaced a part of it")

    engine = shelf.ort(FASTER)
    monkeypatch.setattr(type(TORCH), "session", replaced)
    handle = shelf.handle()
    assert handle.session.engines == [engine]
    assert not handle.follows_patches


def test_the_page_knows_that_any_size_is_served(shelf: Shelf) -> None:
    shelf.ort(FASTER)
    for backend, expected in ((AUTO, True), ("onnxruntime", False)):
        told = shelf.page_says(shelf.handle(profile=WIDE, backend=backend), backend)
        assert (told["state"], told["any_size"], told["engine"]["covers"]) == ("ready", expected, False)
        assert told["build_helps"], "a build gives a wider engine"
        assert told["engine"]["speed"] == 3.2


@pytest.mark.parametrize(("family", "expected"), [
    ("sdxl_unet", True), ("flux1", True), ("kl_vae_decoder", True), ("", False)])  # fmt: skip
def test_auto_builds_meanwhile_what_is_compiled_in_blocks(
    family: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TORCH, "cannot_build", lambda _device: None)
    for backend in (TORCH, ORT):
        monkeypatch.setattr(backend, "cannot_run", lambda _device: None)
    where = torch.device("cuda", 0)
    assert lookup.builds_by_itself("torch", where, family) is expected
    assert not lookup.builds_by_itself("onnxruntime", where, family), "that takes minutes"
    monkeypatch.setattr(TORCH, "cannot_build", lambda _device: "no compiler")
    assert not lookup.builds_by_itself("torch", where, family)
