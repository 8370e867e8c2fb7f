"""One engine for all checkpoints of a layout with any LoRA: it computes with the weights that ComfyUI samples with."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from any_weights import LIMIT, ORT, another, built, error, handle_of, inputs_of, lora, native, patched, served
from comfy_execution.utils import CurrentNodeContext
from fake_engine import publish_engine
from hybrid_trt.architectures.calls import EngineCall
from hybrid_trt.backends.onnxruntime import RefittableRunner
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.comfy_model.structure_hash import structure_hash
from hybrid_trt.engine_builder.jobs import BuildQueue
from hybrid_trt.engine_library import Engine, Reason, trust
from hybrid_trt.engine_library.engine import describe_files
from hybrid_trt.engine_library.manifest import LAYOUT_PREFIX
from hybrid_trt.page_api.node_states import NodeStates
from hybrid_trt.page_api.outlook import NodeRequest
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.engine_status import status
from small_networks import network


@pytest.fixture
def refits(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """List what was put into engines, each time."""
    put: list[set[str]] = []
    refit = RefittableRunner.refit

    def counted(self: RefittableRunner, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        put.append(set(changed))
        refit(self, weights, changed)

    monkeypatch.setattr(RefittableRunner, "refit", counted)
    return put


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


@pytest.mark.fault("two models share one engine in a prompt", see="nothing: each has its own weights")
@pytest.mark.parametrize("kind", ["unet", "controlnet"])
def test_two_models_in_one_prompt_do_not_take_each_others_weights_out(
    tmp_path: Path, refits: list[set[str]], kind: str
) -> None:
    first = network(kind, "unlike_levels")
    other, engine = another(first), built(first, tmp_path)
    assert engine.manifest.identity.weights == structure_hash(other.module)
    handles = [handle_of(net, tmp_path) for net in (first, other)]
    for handle in handles * 3:
        assert handle.session.engines == [engine], "of every checkpoint of its layout"
        assert error(served(handle), native(handle.network, handle.network.patcher)) <= LIMIT
    assert error(native(first, first.patcher), native(other, other.patcher)) > 0.1
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
    assert "takes any LoRA" in status(wants_any)
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
    words = "onnxruntime has no engines for any checkpoint and LoRA: this one is for this model only"
    assert words in status(handle_of(net, tmp_path, replaceable=True))
    assert words not in status(handle_of(net, tmp_path, replaceable=False))


def told(handle: EngineHandle) -> dict[str, Any]:
    """Return the page's words for a handle's node."""
    states = NodeStates(handle.library, BuildQueue())
    states.learn("key", handle)
    return states.state("key", NodeRequest("unet", handle.network.label, False, "onnxruntime"))


def test_nothing_is_hashed_for_an_engine_that_takes_any_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashed(*_: Any) -> None:
        raise AssertionError("seconds for each strength of a LoRA")

    monkeypatch.setattr(NativeNetwork, "weights_hash", hashed)
    net = network("unet", "unlike_levels")
    built(net, tmp_path)
    wanted = NativeNetwork(patched(net, (lora(net, 5), 0.8)), net.module, net.prefix, net.dtype, net.label, net.role)
    assert error(served(handle_of(wanted, tmp_path, True)), native(wanted, wanted.patcher)) <= LIMIT


def signed_as_it_is(engine: Engine) -> None:
    """As if it had been built with the files that it has now."""
    manifest = replace(engine.manifest, files=describe_files(engine.folder, list(engine.manifest.files)))
    (engine.folder / "manifest.json").write_text(json.dumps(manifest.to_json()))
    trust.keep(engine.folder, manifest, trust.BUILT_HERE)


def test_what_is_damaged_is_refused_with_a_sentence(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    engine = built(net, tmp_path)
    path = engine.folder / "parameters.json"
    for text, why in (("{}", "takes no weights"), ('{"strange.weight": "x"}', "wants a weight strange.weight"),
                      ("no JSON", "cannot take weights"), ('{"a": 1}', "cannot take weights")):  # fmt: skip
        path.write_text(text + " " * (engine.manifest.files["parameters.json"].bytes - len(text)))
        for told in ("its content changed", why):
            handle = handle_of(net, tmp_path)
            assert (handle.session, handle.fallback.reason) == (None, Reason.BROKEN_ENGINE)
            assert told in handle.fallback.detail
            signed_as_it_is(engine)


@pytest.mark.fault("weights cannot be put into an engine", see="normal speed: *engine failed*")
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
    fixed, replaceable = (publish_engine(tmp_path, weights=w, source=source) for w in ("f" * 64, f"{LAYOUT_PREFIX}f"))
    assert source_changed(fixed).reason is Reason.STALE_ENGINE
    assert source_changed(replaceable) is None
