"""One engine for all checkpoints of a layout with any LoRA: it computes with the weights that ComfyUI samples with."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import slow
import torch
from fake_engine import publish_engine
from pack import import_comfy
from small_networks import CPU, HintEncoder, native_call, network, random_weights

import_comfy()

from comfy.model_patcher import ModelPatcher
from comfy_execution.utils import CurrentNodeContext
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.calls import EngineCall
from hybrid_trt.architectures.samples import sample_inputs
from hybrid_trt.architectures.tensors import Profile, Range
from hybrid_trt.backends import backends
from hybrid_trt.backends.onnxruntime import RefittableRunner
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder.jobs import BuildQueue
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import BuildError, Engine, Library, Reason, local_key, trust
from hybrid_trt.engine_library.parity import relative_error
from hybrid_trt.engine_runtime.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.engine_sessions.session import Session
from hybrid_trt.native_model.hash_cache import source_changed
from hybrid_trt.native_model.layout import layout_of
from hybrid_trt.native_model.network import NativeNetwork
from hybrid_trt.page_api.node_states import NodeStates, engine_json
from hybrid_trt.page_api.outlook import Wish

PROFILE = Profile({"B": Range(1, 2, 2), "H": Range(4, 8, 16), "W": Range(4, 8, 16), "T": Range(77, 77, 77),
                   "HB": Range(1, 1, 2)})
SIZES = {"B": 2, "H": 8, "W": 12, "T": 77, "HB": 1}
LIMIT = 1e-5
GROUP = 16
"""So many parameters are put into an engine at once: ONNX Runtime takes a second each time."""
ORT = backends()["onnxruntime"]


def built(net: NativeNetwork, folder: Path, replaceable: bool = True, **options: Any) -> Engine:
    order = BuildOrder(net, "float32", PROFILE, ORT, replaceable=replaceable, **options)
    return builder.build_engine(order, Library([folder]), lambda *_: None, run=builder.run_here)


def handle_of(net: NativeNetwork, folder: Path, replaceable: bool = False) -> EngineHandle:
    choice = EngineChoice(PROFILE, backend="onnxruntime", replaceable=replaceable)
    # outside of a prompt all tests of a process would count for one node
    return EngineHandle(net, choice, Library([folder]), f"node of {folder}")


def another(net: NativeNetwork, layout: str = "unlike_levels") -> NativeNetwork:
    """A network of the same layout with other weights."""
    other = network("unet" if net.role is Role.BACKBONE else "controlnet", layout)
    random_weights(other.module)
    for parameter in other.module.parameters():
        parameter.data.neg_() if parameter.ndim > 1 else parameter.data.mul_(0.9)
    return other


def lora(net: NativeNetwork, seed: int, ends: str = "to_k.weight") -> dict[str, tuple]:
    """A difference for the weights of some name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: ("diff", (0.3 * torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5,))
        for name, p in net.patcher.model.named_parameters()
        if name.endswith(ends)
    }


def patched(net: NativeNetwork, *patches: tuple[dict[str, tuple], float]) -> ModelPatcher:
    patcher = net.patcher.clone()
    for values, strength in patches:
        assert patcher.add_patches(values, strength)
    return patcher


def inputs_of(net: NativeNetwork, sizes: dict[str, int] = SIZES) -> dict[str, torch.Tensor]:
    return sample_inputs(net.architecture().inputs(net.module, "float32"), sizes, seed=3)


def native(net: NativeNetwork, patcher: ModelPatcher) -> list[torch.Tensor]:
    patcher.patch_model(CPU)
    try:
        return native_call(net, inputs_of(net))
    finally:
        patcher.unpatch_model(CPU)


def served(handle: EngineHandle, patcher: ModelPatcher | None = None) -> list[torch.Tensor]:
    with torch.inference_mode():
        done, result = handle.serve(None, lambda: EngineCall(inputs_of(handle.network), dict), patcher)
    assert done, handle.fallback or handle.tally.details
    return list(result.values())


def error(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def refits(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """What was put into engines, each time."""
    put: list[set[str]] = []
    refit = RefittableRunner.refit

    def counted(self: RefittableRunner, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        put.append(set(changed))
        refit(self, weights, changed)

    monkeypatch.setattr(RefittableRunner, "refit", counted)
    return put


@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_an_engine_serves_every_checkpoint_of_its_layout(tmp_path: Path, kind: str) -> None:
    first = network(kind, "unlike_levels")
    other = another(first)
    engine = built(first, tmp_path)
    assert engine.manifest.identity.weights == layout_of(other.module)
    handles = [handle_of(net, tmp_path) for net in (first, other)]
    for handle in (*handles, *handles):
        net = handle.network
        assert handle.session.engines == [engine]
        assert error(served(handle), native(net, net.patcher)) <= LIMIT
    assert error(native(first, first.patcher), native(other, other.patcher)) > 0.1


def test_such_an_engine_holds_no_weights(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    engine = built(net, tmp_path)
    assert list(engine.manifest.files) == ["model.onnx", "parameters.json"]
    weights = sum(p.numel() for p in net.module.parameters()) * 4
    assert engine.manifest.bytes < 0.1 * weights
    assert engine.manifest.device_bytes == weights
    assert handle_of(net, tmp_path).session.bytes == weights, "ComfyUI makes room for what it will take"


def test_loras_at_changing_strengths_are_followed_and_only_what_changed_is_put_in(
    tmp_path: Path, refits: list[set[str]]
) -> None:
    net = network("unet", "unlike_levels")
    built(net, tmp_path)
    handle = handle_of(net, tmp_path)
    keys, values = lora(net, 5), lora(net, 6, "to_v.weight")
    names = [{name.replace("diffusion_model.", "unet.") for name in each} for each in (keys, values)]
    everything = {f"unet.{name}" for name, _ in net.module.named_parameters()}
    strong, weak, both = patched(net, (keys, 0.8)), patched(net, (keys, 0.3)), patched(net, (keys, 0.3), (values, 1.0))
    steps = [
        (net.patcher, everything),
        (strong, names[0]),
        (strong.clone(), None),
        (weak, names[0]),
        (both, names[0] | names[1]),
        (net.patcher, names[0] | names[1]),
    ]
    seen = []
    for patcher, changed in steps:
        before = len(refits)
        results = served(handle, patcher)
        assert error(results, native(net, patcher)) <= LIMIT
        assert refits[before:] == ([] if changed is None else [changed])
        seen.append(results)
    assert error(seen[0], seen[-1]) == 0
    assert min(error(seen[0], other) for other in seen[1:-1]) > 1e-3
    assert error(seen[1], seen[3]) > 1e-3, "the strength counts"


def test_calls_of_one_sampling_run_put_nothing_in_again(tmp_path: Path, refits: list[set[str]]) -> None:
    net = network("unet", "unlike_levels")
    built(net, tmp_path)
    handle, patcher = handle_of(net, tmp_path), patched(net, (lora(net, 5), 0.8))
    with CurrentNodeContext("prompt", "sampler"):
        for _ in range(3):
            served(handle, patcher)
    assert len(refits) == 1
    handle.session.unload()
    assert error(served(handle, patcher), native(net, patcher)) <= LIMIT
    assert len(refits) == 2, "an engine that was closed has no weights"


# Engines that have weights when they are opened, as TensorRT's, with ONNX Runtime as their double


class Keeping(RefittableRunner):
    """Has the weights of ``built_with`` when it is opened."""

    built_with: ClassVar[torch.nn.Module]
    given: ClassVar[list[set[str]]]

    def _open(self, options: Any) -> None:
        super()._open(options)
        names = json.loads((self._path.parent / "parameters.json").read_text())
        self.kept = {i: self.built_with.get_parameter(name).detach().clone() for name, i in names.items()}
        super().refit(self.kept, self.kept.keys())

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        self.given.append(set(changed))
        super().refit(weights, changed)


class Forgetful(Keeping):
    """Loses all others when it is given some weights."""

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        values = {name: weights[name] if name in changed else old for name, old in self.kept.items()}
        super().refit(values, values.keys())


class Careless(Keeping):
    """Damages those that it was opened with when it is given some others."""

    def _open(self, options: Any) -> None:
        self.done: set[str] = set()
        super()._open(options)

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        self.done |= set(changed)
        values = {name: weights[name] if name in self.done else 0.97 * old for name, old in self.kept.items()}
        super().refit(values, values.keys())


class Stale(Keeping):
    """Has other weights when it is opened than it was built with."""

    def _open(self, options: Any) -> None:
        super()._open(options)
        RefittableRunner.refit(self, {name: 0.97 * value for name, value in self.kept.items()}, self.kept.keys())


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> NativeNetwork:
    """A network whose engines, from now on, have its weights when they are opened."""
    net = network("unet", "unlike_levels")
    Keeping.built_with, Keeping.given = net.module, []
    monkeypatch.setattr("hybrid_trt.backends.onnxruntime.RefittableRunner", Keeping)
    monkeypatch.setattr(type(ORT), "keeps_weights", True)
    return net


def test_an_engine_that_was_opened_with_this_very_models_weights_is_given_only_what_loras_change(
    keeping: NativeNetwork, tmp_path: Path
) -> None:
    built(keeping, tmp_path)
    handle, keys = handle_of(keeping, tmp_path), lora(keeping, 5)
    with_lora = patched(keeping, (keys, 0.8))
    changed = {name.replace("diffusion_model.", "unet.") for name in keys}
    for patcher, given in ((keeping.patcher, []), (with_lora, [changed]), (keeping.patcher, [changed])):
        Keeping.given.clear()
        assert error(served(handle, patcher), native(keeping, patcher)) <= LIMIT
        assert Keeping.given == given
    handle.session.unload()
    Keeping.given.clear()
    assert error(served(handle, with_lora), native(keeping, with_lora)) <= LIMIT
    assert Keeping.given == [changed], "it has its own weights again when it is opened again"


def test_another_models_weights_are_all_put_into_it(keeping: NativeNetwork, tmp_path: Path) -> None:
    engine, other = built(keeping, tmp_path), another(keeping)
    assert error(served(handle_of(other, tmp_path)), native(other, other.patcher)) <= LIMIT
    assert Keeping.given == [set(json.loads((engine.folder / "parameters.json").read_text()).values())]


@pytest.mark.parametrize("verdict", [trust.CHECKED, trust.BUILT])
def test_so_are_all_where_another_machine_says_what_is_inside(
    keeping: NativeNetwork, tmp_path: Path, verdict: str
) -> None:
    engine = built(keeping, tmp_path)
    trust.keep(engine.folder, engine.manifest, trust.Record(verdict, parity=trust.figures(engine)))
    assert error(served(handle_of(keeping, tmp_path)), native(keeping, keeping.patcher)) <= LIMIT
    assert len(Keeping.given) == (verdict == trust.CHECKED)


def test_so_are_all_where_it_was_built_with_a_lora(keeping: NativeNetwork, tmp_path: Path) -> None:
    patcher = patched(keeping, (lora(keeping, 5), 0.8))
    with_lora = NativeNetwork(patcher, keeping.module, keeping.prefix, keeping.dtype, keeping.label)
    engine = built(with_lora, tmp_path)
    assert error(served(handle_of(keeping, tmp_path)), native(keeping, keeping.patcher)) <= LIMIT
    assert Keeping.given == [set(json.loads((engine.folder / "parameters.json").read_text()).values())]


def test_two_models_in_one_prompt_do_not_take_each_others_weights_out(
    tmp_path: Path, refits: list[set[str]]
) -> None:
    first = network("unet", "unlike_levels")
    built(first, tmp_path)
    handles = [handle_of(net, tmp_path) for net in (first, another(first))]
    for handle in handles * 3:
        assert error(served(handle), native(handle.network, handle.network.patcher)) <= LIMIT
    assert handles[0].session is not handles[1].session
    assert handle_of(first, tmp_path).session is handles[0].session
    assert len(refits) == 2


def test_a_network_of_another_layout_is_not_served(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    built(net, tmp_path)
    heads = network("unet", "unlike_levels")
    for layer in heads.module.modules():
        if hasattr(layer, "heads"):
            layer.heads //= 2
    for other in (network("unet", "sd15_as_published"), heads):
        handle = handle_of(other, tmp_path)
        assert handle.session is None
        assert handle.fallback.reason is Reason.NO_ENGINE


def test_an_engine_with_the_models_own_weights_comes_first(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    any_weights = built(net, tmp_path)
    fixed = built(net, tmp_path, replaceable=False)
    assert fixed.manifest.identity.weights == net.weights_hash()
    assert handle_of(net, tmp_path).session.engines == [fixed]
    wants_any = handle_of(net, tmp_path, replaceable=True)
    assert wants_any.session.engines == [any_weights]
    assert "takes any LoRA" in wants_any.status()
    assert handle_of(another(net), tmp_path).session.engines == [any_weights]


def test_a_node_that_wants_replaceable_weights_is_not_content_with_fixed_ones_nor_is_the_page(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    built(net, tmp_path, replaceable=False)
    fixed, handle = (handle_of(net, tmp_path, replaceable=replaceable) for replaceable in (False, True))
    assert fixed.session is not None
    assert (handle.session, handle.fallback.reason) == (None, Reason.NO_ENGINE)
    assert told(fixed)["state"] == "ready"
    assert told(handle)["state"] == "none"
    built(net, tmp_path)
    assert told(handle)["state"] == "ready"


def test_a_backend_that_cannot_replace_weights_says_so_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network("unet", "unlike_levels")
    built(net, tmp_path, replaceable=False)
    monkeypatch.setattr(type(ORT), "refits", False)  # as TensorRT-RTX's are
    words = "onnxruntime has no engines with replaceable weights: this one is for these alone"
    assert words in handle_of(net, tmp_path, replaceable=True).status()
    assert words not in handle_of(net, tmp_path, replaceable=False).status()


def told(handle: EngineHandle) -> dict[str, Any]:
    """What the page says of a handle's node."""
    states = NodeStates(handle.library, BuildQueue())
    states.learn("key", handle)
    return states.state("key", Wish("unet", handle.network.label, False, "onnxruntime"))


def test_nothing_is_hashed_for_an_engine_that_takes_any_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashed(*_: Any) -> None:
        raise AssertionError("seconds for each strength of a LoRA")

    monkeypatch.setattr(NativeNetwork, "weights_hash", hashed)
    net = network("unet", "unlike_levels")
    built(net, tmp_path)
    wanted = NativeNetwork(patched(net, (lora(net, 5), 0.8)), net.module, net.prefix, net.dtype, net.label)
    assert error(served(handle_of(wanted, tmp_path, True)), native(wanted, wanted.patcher)) <= LIMIT


@pytest.mark.parametrize("kind", slow.cases({"unet": "unet", "controlnet": "controlnet"}, ["controlnet"]))
def test_each_parameter_reaches_the_engine(tmp_path: Path, kind: str) -> None:
    net = network(kind, "inpainting_channels")
    engine = built(net, tmp_path)
    runner: Any = ORT.load(engine, CPU)
    names = json.loads((engine.folder / "parameters.json").read_text())
    preludes = {"input_hint_block"} if kind == "controlnet" else set()
    assert names.keys() == {name for name, _ in net.module.named_parameters() if name.split(".")[0] not in preludes}
    parameters = dict(net.module.named_parameters())
    weights = {initialiser: parameters[name].data.clone() for name, initialiser in names.items()}
    sizes = {"B": 1, "H": 4, "W": 4, "T": 77, "HB": 1}
    given = inputs_of(net, sizes)
    taken = {**given, "hint": HintEncoder(net)(given["hint"])} if kind == "controlnet" else given

    def run() -> list[torch.Tensor]:
        runner.refit(weights, weights.keys())
        results = {s.name: torch.empty(s.shape(sizes)) for s in engine.manifest.outputs}
        runner.run(taken, results)
        return list(results.values())

    plain = native_call(net, given)
    assert error(run(), plain) <= LIMIT
    generator = torch.Generator().manual_seed(11)
    every = list(names.items())
    for group in (every[i : i + GROUP] for i in range(0, len(every), GROUP)):
        before = {name: parameters[name].data for name, _ in group}
        for name, initialiser in group:
            old = before[name]
            new = old + torch.randn(old.shape, generator=generator) * (0.5 + old.abs().mean())
            parameters[name].data = new
            assert error(native_call(net, given), plain) > 10 * LIMIT, f"{name} has no effect to be seen"
            parameters[name].data = old
            weights[initialiser] = new
        for name, initialiser in group:
            parameters[name].data = weights[initialiser]
        changed = native_call(net, given)
        assert error(run(), changed) <= 5 * LIMIT, [name for name, _ in group]
        for name, initialiser in group:
            parameters[name].data = weights[initialiser] = before[name]


def test_what_is_damaged_is_refused_with_a_sentence(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    engine = built(net, tmp_path)
    path = engine.folder / "parameters.json"
    for text, why in (("{}", "takes no weights"), ('{"strange.weight": "x"}', "wants a weight strange.weight"),
                      ("no JSON", "cannot take weights")):  # fmt: skip
        path.write_text(text + " " * (engine.manifest.files["parameters.json"].bytes - len(text)))
        handle = handle_of(net, tmp_path)
        assert (handle.session, handle.fallback.reason) == (None, Reason.BROKEN_ENGINE)
        assert why in handle.fallback.detail


def test_a_refit_that_fails_leaves_native_to_serve_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("it has no weight unet.out.2.bias")

    net = network("unet", "unlike_levels")
    built(net, tmp_path)
    handle = handle_of(net, tmp_path)
    with monkeypatch.context() as failing:
        failing.setattr(RefittableRunner, "refit", refused)
        assert handle.serve(None, lambda: EngineCall(inputs_of(net), dict)) == (False, None)
    assert handle.fallback.reason is Reason.ENGINE_FAILED
    assert "it has no weight unet.out.2.bias" in handle.fallback.detail
    handle.refresh()
    assert error(served(handle), native(net, net.patcher)) <= LIMIT, "the next run tries again"


def test_it_does_not_grow_stale_with_the_file_that_it_was_built_from(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"another model")
    source = {"path": str(file), "size": 1, "mtime_ns": 1}
    fixed, replaceable = (publish_engine(tmp_path, weights=w, source=source) for w in ("f" * 64, "layout-f"))
    assert source_changed(fixed).reason is Reason.STALE_ENGINE
    assert source_changed(replaceable) is None


# The proof on a GPU, with the CPU as its double


class Deaf(RefittableRunner):
    """Computes with something else than the weights that it is given."""

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        super().refit({name: value * (0.97 if "to_k" in name else 1) for name, value in weights.items()}, changed)


@pytest.mark.parametrize("runner", [RefittableRunner, Deaf, Keeping, Forgetful, Careless, Stale])
def test_a_build_proves_on_its_gpu_that_the_engine_takes_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: type[RefittableRunner]
) -> None:
    monkeypatch.setenv(local_key.FOLDER_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setattr(builder, "gpu_of", lambda device: "a GPU")
    monkeypatch.setattr(type(ORT), "unavailable", lambda *_: None)
    monkeypatch.setattr("hybrid_trt.backends.onnxruntime.RefittableRunner", runner)
    tasks = []

    def run(task: dict, progress: Callable, log: Callable, environment: Mapping[str, str]) -> dict:
        tasks.append(task)
        if task["step"] == "check":
            task = {**task, "device": "cpu", "timed": None}
        return builder.run_here(task, progress, log, environment)

    net = network("unet", "inpainting_channels")
    Keeping.built_with, Keeping.given = net.module, []
    order = BuildOrder(net, "float32", PROFILE, ORT, torch.device("cuda", 0), replaceable=True)
    monkeypatch.setattr(type(ORT), "keeps_weights", issubclass(runner, Keeping))
    if runner not in (RefittableRunner, Keeping):
        with pytest.raises(BuildError, match="differs from native"):
            builder.build_engine(order, Library([tmp_path]), lambda *_: None, run=run)
    else:
        engine = builder.build_engine(order, Library([tmp_path]), lambda *_: None, run=run)
        assert 0 < engine_json(engine)["refit_s"] < 60, "the page knows how long other weights take"
    assert tasks[-1]["step"] == "check"


def session_of(handle: EngineHandle) -> Session:
    assert handle.session is not None
    return handle.session


def test_a_lora_after_the_engine_node_needs_no_other_place(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    built(net, tmp_path)
    handle = handle_of(net, tmp_path)
    assert session_of(handle).follows_patches
    assert handle.follows_patches
