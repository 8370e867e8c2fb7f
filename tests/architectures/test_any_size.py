"""Any size that a graph asks for is compiled: one more is added beside what is there, and what is not is told."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hybrid_trt.architectures.calls import RequestedCalls, UncoveredCall, calls_to_compile
from hybrid_trt.architectures.families.stable_diffusion import UNetArchitecture
from hybrid_trt.architectures.shapes import Picture, Profile, Range, RequestedSizes, Symbol
from hybrid_trt.architectures.sizes import ANY
from hybrid_trt.backends import BuildSizes
from hybrid_trt.backends.torch_inductor.compiled import file_name
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, trust
from hybrid_trt.nodes import building
from hybrid_trt.page_api.graph_pictures import asked_pictures
from hybrid_trt.page_api.workflow_graph import network_inputs
from hybrid_trt.sampling import engine_status
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.engine_status import status
from live_sessions import TORCH, error, given_for
from live_sessions import opened as opened_for
from small_networks import network

PROFILE = ANY.profile(RequestedSizes()).only("BHWT")
PORTRAIT = {"B": 2, "H": 152, "W": 104, "T": 77}


def call(width: int, height: int, batch: int = 2, tokens: int = 77) -> dict[str, int]:
    return {"B": batch, "H": height // 8, "W": width // 8, "T": tokens}


def lacking(pictures: list[Picture], seen: list[dict] | None = None, compiled: list[dict] | None = None) -> list:
    return calls_to_compile(ANY, RequestedCalls(PROFILE, pictures, seen), "BHWT", compiled or [])


@pytest.mark.parametrize("tokens", [77, 154, 231])
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [(832, 1216), (1216, 832), (512, 768)])
def test_each_size_that_a_run_made_is_wanted_exactly_until_a_file_is_for_it(
    size: tuple[int, int], batch: int, tokens: int
) -> None:
    made = call(*size, batch, tokens)
    square = call(512, 512)
    assert lacking([], [made], [square]) == [[made]]
    assert lacking([], [made], [square, made]) == []
    others = [made | {"B": batch + 1}, made | {"T": tokens + 77}, made | {"W": made["H"], "H": made["W"]}]
    assert lacking([], [made], others) == [[made]], "neighbours do not count"


def test_a_picture_that_the_graph_asks_for_is_wanted_and_not_what_the_profile_is_best_at() -> None:
    assert lacking([Picture(832, 1216, (2,))]) == [[PORTRAIT]]
    assert lacking([Picture(832, 1216, (6, 3))]) == [[PORTRAIT | {"B": 6}, PORTRAIT | {"B": 3}]]
    assert lacking([Picture(832, 1216, (2,))], None, [call(1216, 832)]) == [[PORTRAIT]], "portrait is no landscape"
    assert lacking([]) == [[call(512, 512), call(512, 512, 1)]], "where nothing tells: the best size"
    assert lacking([], None, [call(512, 512)]) == []


def test_a_picture_has_the_tokens_that_its_run_had() -> None:
    """So that a long prompt is compiled for once, and not for 77 tokens besides."""
    picture = [Picture(832, 1216, (2,))]
    long = PORTRAIT | {"T": 154}
    assert lacking(picture, [long]) == [[long]]
    assert lacking(picture, [], [long]) == []
    assert lacking(picture, [long], [PORTRAIT]) == [[long]]
    made = [PORTRAIT, call(512, 512), PORTRAIT | {"B": 1}, long]
    wanted = [[PORTRAIT, PORTRAIT | {"B": 1}], [call(512, 512)], [long]]
    assert lacking([], made) == wanted, "sizes of one picture are one engine"


def test_a_network_of_image_tokens_tells_what_lacks_without_telling_a_height() -> None:
    """Of such a call nobody knows which picture it samples."""

    def calls(_profile: Profile, picture: Picture) -> list[dict[str, int]]:
        return [{"B": batch, "N": picture.width * picture.height // 256, "T": 9} for batch in picture.batches]

    symbols = {"B": Symbol("batch"), "N": Symbol("image tokens"), "T": Symbol("words", of_picture=False)}
    tokens = SimpleNamespace(symbols=symbols, calls=calls, batch="B", free={})
    square, wide = Picture(512, 512, (2,)), Picture(1024, 512, (2,))
    requested = RequestedCalls(Profile({"B": Range(1, 2, 4), "N": Range(1, 9, 9999)}), [square, wide])

    def lack(*compiled: dict[str, int]) -> list[list[dict[str, int]]]:
        return calls_to_compile(tokens, requested, "BNT", compiled)

    assert lack() == [[{"B": 2, "N": 1024, "T": 9}], [{"B": 2, "N": 2048, "T": 9}]]
    assert lack({"B": 2, "N": 1024, "T": 300}) == [[{"B": 2, "N": 2048, "T": 9}]], "a prompt of another length"
    assert lack({"B": 1, "N": 1024, "T": 9}, {"B": 2, "N": 2048, "T": 9}) == [[{"B": 2, "N": 1024, "T": 9}]]


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
A, B = {"B": 2, "H": 8, "W": 8, "T": 77}, {"B": 2, "H": 12, "W": 8, "T": 154}


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Builds for some calls; what it keeps is the network itself, opened by ``opened``."""
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setattr(type(TORCH), "cannot_build", lambda *_: None)
    monkeypatch.setattr(UNetArchitecture, "free", {})  # as a network that is compiled whole has it
    library = Library([tmp_path / "library"])

    def compiler(task: dict, *_: object) -> dict:
        names = [file_name(sizes) for sizes in task["compiled"]]
        for name in names:
            (Path(task["folder"]) / name).write_bytes(random.randbytes(8))
        return {"files": names, "parity": {"rel_err": 0.0}, "seconds": {}}

    def build(net: NativeNetwork, *calls: dict[str, int], again: bool = False) -> Engine:
        order = BuildOrder(net, "float32", Profile.around(calls), TORCH, calls=calls)
        return build_engine(order, library, lambda *_: None, run=compiler, again=again)

    build.library = library
    return build


def test_one_more_size_stands_beside_the_others_and_nothing_is_lost_or_opened_again(
    built: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, opened = network("unet", "unlike_levels"), []
    session = opened_for(net)

    def open_live(_self: Any, engine: Engine, symbols: dict[str, int], _device: Any) -> Callable[..., tuple]:
        opened.append((engine.folder.name, symbols["T"]))
        return lambda *tensors: session.live.function(*tensors[len(session.live.flat_weights()) :])

    monkeypatch.setattr(type(TORCH), "open_live", open_live)

    def run(sizes: dict[str, int]) -> str | None:
        assert error(session, net, given_for(net, 3, **sizes)) <= 1e-5
        return session.uncovered and session.uncovered.words

    assert run(A) == "64x64, 77 tokens"
    first = built(net, A)
    before = {file: os.stat(file).st_ino for file in first.folder.iterdir()}
    session.use([first])
    assert [run(A), run(B), run(A), run(B)] == [None, "64x96, 154 tokens"] * 2
    assert (session.name, session.serving) == ("live weights, CUDA graph", [])
    seen = RequestedCalls(SMALL, (), [dict(session.uncovered.sizes)])
    assert TORCH.to_build(net, seen, [first]) == [BuildSizes(Profile.around([B]), (B,))]

    second = built(net, B)
    assert second.folder != first.folder
    assert {file: os.stat(file).st_ino for file in before} == before, "what was compiled stays as it is"
    assert built(net, A) == first, "what is there is not compiled again"
    session.use([first, second])
    assert [run(A), run(B), run(A), run(B)] == [None] * 4
    assert (session.name, session.serving) == (second.folder.name, [second])
    assert opened == [(first.folder.name, 77), (second.folder.name, 154)]
    drawn = RequestedCalls(SMALL, (Picture(64, 96, (2,)), Picture(64, 64, (2,))), [])
    assert TORCH.to_build(net, drawn, [first, second]) == []
    status = session.status(SMALL)
    assert "compiled for 64x64, 77 tokens; 64x96, 154 tokens, " in status

    third = built(net, A, again=True)
    session.use([third, second])
    assert [run(A), run(B)] == [None, None]
    assert opened[2:] == [(first.folder.name, 77)], "only what was built again"


def test_a_build_orders_what_is_lacking_and_anew_only_what_is_there_or_was_not_opened(
    built: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network("unet", "unlike_levels")
    run = SimpleNamespace(uncovered={UncoveredCall(frozenset(B.items()), "64x96, 154 tokens", "eager"): 2})
    monkeypatch.setattr(engine_status, "last_run", lambda key: ("prompt", [run]))
    choice = EngineChoice(SMALL, "float32", "torch", pictures=(Picture(64, 64, (2,)),))
    handle = EngineHandle.look_up(net, choice, built.library, "node", "key")

    def orders() -> list[tuple]:
        handle.refresh()
        return [(*order.calls, order.profile, anew) for order, anew in building._orders(handle)]

    assert orders() == [(B, Profile.around([B]), False), (A, Profile.around([A]), False)]
    first = built(net, A)
    assert orders() == [(B, Profile.around([B]), False)]
    assert "Not compiled for 64x96, 154 tokens; build for full speed" in status(handle)
    second = built(net, B)
    both = {(*TORCH.sizes(engine)[0].items(),) for engine in (first, second)}
    found = orders()
    assert {(*call.items(),) for call, _, _ in found} == both
    assert [anew for _, _, anew in found] == [True, True]
    assert "Not compiled" not in status(handle)

    def fails(_self: Any, engine: Engine, _symbols: dict) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(type(TORCH), "open_live", fails)
    with torch.inference_mode():
        handle.session.run(given_for(net, 3, **B))
    assert orders() == [(B, second.manifest.identity.profile, True)], "the other one is left alone"
