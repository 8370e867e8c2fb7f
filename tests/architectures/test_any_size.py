"""A build is for any size: a node orders one, whatever its graph asks for, and engines for one size are outdated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_trt.architectures.calls import RequestedCalls
from hybrid_trt.architectures.shapes import Picture, Profile, Range
from hybrid_trt.backends import backends
from hybrid_trt.backends.lookup import Found, refusals
from hybrid_trt.backends.torch_inductor.compiled import file_name
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, trust
from hybrid_trt.engine_library.inventory import STALE, entries
from hybrid_trt.nodes import building
from hybrid_trt.page_api.graph_pictures import asked_pictures
from hybrid_trt.page_api.workflow_graph import network_inputs
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.engine_status import lacks_engine, status
from live_sessions import TORCH, given_for
from small_networks import network


def graph(width: Any = 832, height: int = 1216, images: int = 1, **sampler: Any) -> dict[str, Any]:
    return {
        "net": {"class_type": "ControlNetLoader", "inputs": {}},
        "engine": {"class_type": "TRTUNetEngine", "inputs": {"model": ["load", 0]}},
        "net_engine": {"class_type": "TRTControlNetEngine", "inputs": {"control_net": ["net", 0]}},
        "apply": {"class_type": "TRTApplyControlNet", "inputs": {"rows.control_net_1": ["net_engine", 0]}},
        "patch": {"class_type": "TRTSamplerPatch", "inputs": {"engine": ["engine", 0]}},
        "sampler": {"class_type": "KSampler", "inputs": {
            "model": ["patch", 0], "positive": ["apply", 0], "latent_image": ["empty", 0], "cfg": 7.0} | sampler},
        "empty": {"class_type": "EmptyLatentImage", "inputs": {"width": width, "height": height, "batch_size": images}},
        "second": {"class_type": "KSampler", "inputs": {"latent_image": ["up", 0]}},
        "up": {"class_type": "LatentUpscale", "inputs": {"samples": ["sampler", 0]}},
    }  # fmt: skip


def test_a_prompt_tells_its_pictures_with_the_batch_that_cfg_makes_of_them() -> None:
    for node in ("engine", "net_engine"):
        assert asked_pictures(graph(), node, "model") == (Picture(832, 1216, (2,)),)
        assert asked_pictures(graph(images=3, cfg=1.0), node, "model") == (Picture(832, 1216, (3,)),)
        assert asked_pictures(graph(images=2, cfg=["primitive", 0]), node, "model") == (Picture(832, 1216, (4, 2)),)
    other = {"class_type": "KSampler", "inputs": {"positive": ["up", 0], "latent_image": ["large", 0]}}
    large = {"class_type": "EmptyLatentImage", "inputs": {"width": 2048, "height": 2048}}
    later = {**graph(), "other": other, "large": large}
    first = (Picture(832, 1216, (2,)),)
    assert asked_pictures(later, "engine", "model") == first, "what comes after its sampler is another's"
    assert asked_pictures(graph(width=["number", 0]), "engine", "model") == (), "what is not certain is not asked for"
    assert asked_pictures(graph(latent_image=["up", 0]), "engine", "model") == ()
    samplers = {"first": {"class_type": "KSamplerAdvanced", "inputs": {"latent_image": ["empty", 0]}}}
    assert asked_pictures(graph(latent_image=["first", 0]) | samplers, "engine", "model") == first
    samplers["first"]["inputs"]["latent_image"] = ["sampler", 0]
    assert asked_pictures(graph(latent_image=["first", 0]) | samplers, "engine", "model") == (), "a ring"
    assert asked_pictures({"engine": None, "x": {"inputs": {"a": ["engine", 0]}}}, "engine", "model") == ()
    video = graph(latent_image=["video", 2]) | {"video": {"class_type": "WanImageToVideo", "inputs": {
        "width": 832, "height": 480, "length": 81, "batch_size": 1}}}  # fmt: skip
    assert asked_pictures(video, "engine", "model") == (Picture(832, 480, (2,), length=81),)
    del video["video"]["inputs"]["length"]
    assert asked_pictures(video, "engine", "model") == ()


def test_a_stream_tells_the_size_of_its_frames_and_both_networks_of_its_vae() -> None:
    def streamed(denoise: float = 0.5, **frames: Any) -> dict[str, Any]:
        return {
            "all": {"class_type": "TRTAccelerate", "inputs": {"model": ["load", 0], "vae": ["load", 2]}},
            "stream": {"class_type": "TRTStream", "inputs": {
                "model": ["all", 0], "vae": ["all", 1], "frames": ["more", 0], "cfg": 1.0, "denoise": denoise}},
            "more": {"class_type": "RepeatImageBatch", "inputs": {"image": ["video", 0], "amount": 2}},
            "video": {"class_type": "ImageScale", "inputs": {
                "image": ["file", 0], "width": 512, "height": 384} | frames},
            "file": {"class_type": "LoadVideo", "inputs": {}},
        }  # fmt: skip

    for name in ("model", "vae", "vae:encode"):
        assert asked_pictures(streamed(), "all", name) == (Picture(512, 384, (1,)),)
    assert asked_pictures(streamed(width=["file", 1]), "all", "model") == ()
    at_once = streamed()
    at_once["stream"]["inputs"] |= {"steps": 4, "steps_as_batch": True, "sampler_name": "lcm"}
    assert asked_pictures(at_once, "all", "model") == (Picture(512, 384, (4,)),), "a frame at each step"
    at_once["stream"]["inputs"] |= {"sampler_name": "dpmpp_2m"}
    assert asked_pictures(at_once, "all", "model") == (Picture(512, 384, (1,)),), "only where a batch is exact"
    assert network_inputs(streamed(), "all") == ["model", "vae", "vae:encode"]
    assert network_inputs(streamed(denoise=1.0), "all") == ["model", "vae"], "noise is not encoded"


@pytest.mark.parametrize(("guider", "inputs", "batches"), [
    ("BasicGuider", {"conditioning": ["apply", 0]}, (1,)),
    ("CFGGuider", {"positive": ["apply", 0], "negative": ["apply", 1], "cfg": 3.0}, (2,)),
    ("CFGGuider", {"positive": ["apply", 0], "negative": ["apply", 1], "cfg": ["scale", 0]}, (1,)),
    ("CFGGuider", {"positive": ["apply", 0], "negative": ["apply", 1], "cfg": ["math", 0]}, (2, 1)),
    ("DualCFGGuider", {"cond1": ["apply", 0], "cond2": ["apply", 1], "cfg_conds": 1.0}, (2, 1)),
])  # fmt: skip
def test_a_guider_tells_the_batch_of_custom_sampling(
    guider: str, inputs: dict[str, Any], batches: tuple[int, ...]
) -> None:
    prompt = {
        **graph(width=["width", 0]),
        "sampler": {"class_type": "SamplerCustomAdvanced", "inputs": {
            "guider": ["guider", 0], "latent_image": ["empty", 0]}},
        "guider": {"class_type": guider, "inputs": {"model": ["patch", 0]} | inputs},
        "width": {"class_type": "PrimitiveInt", "inputs": {"value": 640}},
        "scale": {"class_type": "PrimitiveFloat", "inputs": {"value": 1.0}},
        "math": {"class_type": "MathExpression", "inputs": {"value": 1.0}},
    }  # fmt: skip
    prompt["empty"]["class_type"] = "EmptySD3LatentImage"
    for node in ("engine", "net_engine"):
        assert asked_pictures(prompt, node, "model") == (Picture(640, 1216, batches),)
    prompt["width"]["class_type"] = "MathExpression"
    assert asked_pictures(prompt, "engine", "model") == ()


# --- with a compiler that takes no time ---

SMALL = Profile({"B": Range(1, 2, 4), "H": Range(4, 8, 40), "W": Range(4, 8, 40), "T": Range(77, 77, 231)})
INSIDE, BEYOND = Picture(64, 64, (2,)), Picture(64, 640, (2,))
SEEN = {"B": 2, "H": 80, "W": 8, "T": 154}


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Builds an engine that no test opens for real, with a file of some name."""
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setattr(type(TORCH), "cannot_build", lambda *_: None)
    library = Library([tmp_path / "library"])

    def build(net: NativeNetwork, profile: Profile, name: str = file_name("BHWT")) -> Engine:
        def compiler(task: dict, *_: object) -> dict:
            (Path(task["folder"]) / name).write_bytes(random.randbytes(8))
            return {"files": [name], "parity": {"rel_err": 0.0}, "seconds": {}}

        return build_engine(BuildOrder(net, "float32", profile, TORCH), library, lambda *_: None, run=compiler)

    build.library = library
    return build


@pytest.mark.parametrize(("pictures", "seen", "builds"), [
    ((), None, 1), ((INSIDE, BEYOND), None, 1), ((), [SEEN], 1), ((INSIDE,), [SEEN, SEEN | {"B": 1}], 1), ((), [], 0)],
    ids=["nothing is known", "pictures", "a run", "both", "a run that lacked nothing"])  # fmt: skip
def test_one_engine_is_wanted_for_all_that_a_graph_and_a_run_show_and_none_beside_it(
    built: Callable[..., Engine], pictures: tuple[Picture, ...], seen: list | None, builds: int
) -> None:
    net = network("unet", "unlike_levels")
    asked = RequestedCalls(SMALL, pictures, seen)
    parts = TORCH.to_build(net, asked, [])
    assert len(parts) == builds
    free = net.architecture().free
    assert all(part.profile == Profile.around([{s: free[s].opt for s in "BHWT"}]) for part in parts)
    assert TORCH.to_build(net, asked, [built(net, SMALL)]) == []


@pytest.mark.parametrize(("pictures", "seen", "builds"), [
    ((INSIDE,), None, 0), ((INSIDE, BEYOND), None, 1), ((INSIDE,), [SEEN], 1), ((INSIDE,), [], 0)])  # fmt: skip
def test_beside_an_engine_of_another_backend_one_is_wanted_for_calls_that_this_does_not_serve(
    tmp_path: Path, pictures: tuple[Picture, ...], seen: list | None, builds: int, built: Callable[..., Engine]
) -> None:
    net, ort = network("unet", "unlike_levels"), backends()["onnxruntime"]
    manifest = built(net, SMALL).manifest
    engine = Engine(tmp_path, replace(manifest, identity=replace(manifest.identity, backend="onnxruntime")))
    found = Found(ort, TORCH, [engine], live=TORCH)
    assert len(found.to_build(net, RequestedCalls(SMALL, pictures, seen))) == builds


def test_a_node_orders_one_build_and_anew_what_is_there_or_was_not_opened(
    built: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network("unet", "unlike_levels")
    handle = EngineHandle.look_up(net, EngineChoice(SMALL, "float32", "torch", pictures=(INSIDE, BEYOND)),
                                  built.library, "node", "key")  # fmt: skip

    def orders() -> list[tuple[Profile, bool]]:
        handle.refresh()
        return [(order.profile, anew) for order, anew in building._orders(handle)]

    ((profile, anew),) = orders()
    assert not anew
    assert "not compiled; build for full speed" in status(handle)
    built(net, profile)
    assert orders() == [(profile, True)]
    assert "compiled for every size" in status(handle)

    def fails(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(type(TORCH), "open_live", fails)
    with torch.inference_mode():
        handle.session.run(given_for(net, 3))
    assert orders() == [(profile, True)]
    assert "the disk is gone; build it again" in status(handle)


@pytest.mark.fault("an engine of an earlier version is for one size", see="*outdated engine*; build it again")
def test_an_engine_that_was_compiled_for_one_size_is_outdated_until_one_for_every_size_is_built(
    built: Callable[..., Engine]
) -> None:
    net = network("unet", "unlike_levels")
    old = built(net, SMALL, "B2-H8-T77-W8.bin")
    (entry,) = entries(built.library, refusals(net.device), source_changed)
    assert (entry.state, "compiled for one size" in entry.reason) == (STALE, True)
    handle = EngineHandle.look_up(net, EngineChoice(SMALL, "float32", "torch"), built.library, "node")
    assert handle.session.engines == []
    assert "build for full speed. The engine that is there is not used: outdated engine" in status(handle)
    assert lacks_engine(handle)
    assert TORCH.known([old], net.device) == [], "a build takes nothing of it"
    ((order, _),) = building._orders(handle)
    new = built(net, order.profile)
    handle.refresh()
    assert handle.session.engines == [new]
    assert "not used" not in status(handle)
