"""Sizes as the server tells them to the page: Auto's numbers, pictures that no engine serves, and what mends that."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from pack import import_comfy

import_comfy()

from hybrid_trt.architectures import architectures
from hybrid_trt.architectures.shapes import SIZE_NAMES, Picture, Profile, RequestedSizes, Sizes
from hybrid_trt.backends import AUTO, backends
from hybrid_trt.page_api import build_routes, picture_fit
from hybrid_trt.page_api.graph_pictures import readers_of, samplers_of
from hybrid_trt.page_api.outlook import NodeRequest, request_of

ZEROS = RequestedSizes()
OWN = RequestedSizes(256, 512, 768, 2, 231)
UNET = "sdxl_unet"
SDXL = architectures()[UNET].sizes


def picture(width: int, height: int, images: int = 1, cfg: float | None = 7.0) -> Picture:
    batches = (2 * images, images) if cfg is None else (images,) if cfg == 1 else (2 * images,)
    return Picture(width, height, batches, images)


def told(
    *pictures: Picture, sizes: RequestedSizes | None = OWN, family: str = UNET, engines: Any = (), choice: str = AUTO,
    backend: str = AUTO, any_size: bool = False, tokens: int = 0,
) -> dict[str, Any]:  # fmt: skip
    wish = NodeRequest("unet", "a", False, backend, sizes, pictures, pictures)
    return picture_fit.size_report(wish, family, engines, choice, any_size, tokens)


def engine(backend: str, asked: RequestedSizes = OWN, *calls: dict[str, int]) -> Any:
    profile = architectures()[UNET].profile(asked).only("BHWT")
    identity = SimpleNamespace(backend=backend, architecture=UNET, profile=profile)
    return SimpleNamespace(manifest=SimpleNamespace(identity=identity), calls=calls)


def call(width: int, height: int, batch: int = 2, tokens: int = 77) -> dict[str, int]:
    return {"B": batch, "H": height // 8, "W": width // 8, "T": tokens}


def test_the_picture_that_reaches_the_sampler_is_compared_with_the_nodes_settings() -> None:
    assert told(picture(512, 768))["misfit"] is None
    assert told(picture(512, 768), picture(512, 1024))["misfit"] == {"width": 512, "height": 1024, "images": 1}
    for one in (picture(512, 128), picture(512, 512, 3), picture(72, 512)):
        assert told(one)["misfit"] is not None
        assert told(one, backend="torch")["misfit"] is None, "live weights serve every size"
        assert told(one, any_size=True)["misfit"] is None
        assert told(one, sizes=None)["misfit"] is None, "a number that another node makes"
        assert told(one, sizes=replace(OWN, min_size=900))["misfit"] is None, "the page says that these do not rise"
    assert told(picture(512, 128), family="")["misfit"] is not None, "its numbers are known before its model"


def test_an_engine_that_is_there_decides_by_its_own_shapes() -> None:
    larger = [engine("onnxruntime", replace(OWN, max_size=1024))]
    assert told(picture(512, 1024), engines=larger)["misfit"] is None
    assert told(picture(512, 1032), engines=larger)["misfit"]["height"] == 1032
    assert told(picture(512, 1088), engines=larger, any_size=True)["misfit"] is None, "live weights stand behind it"
    assert told(picture(512, 1031), engines=larger)["misfit"] is None, "a latent has an element for every 8 pixels"


def test_without_cfg_twice_the_images_fit_and_where_it_is_not_known_nothing_is_claimed() -> None:
    for most, cfg in ((2, 7), (4, 1), (4, None)):
        for images in (most, most + 1):
            one = picture(512, 512, images, cfg)
            for engines in ([], [engine("onnxruntime")]):
                assert (told(one, engines=engines)["misfit"] is None) is (images == most), one


def test_zeros_are_what_fits_the_model_and_a_number_that_contradicts_that_wins() -> None:
    def asked(**given: int) -> list[int]:
        return list(told(sizes=RequestedSizes(**given))["sizes"]["asked"].values())

    assert asked() == [512, 1024, 1536, 1, 231]
    assert asked(max_size=256) == [256, 256, 256, 1, 231]
    assert asked(min_size=2048) == [2048, 2048, 2048, 1, 231]
    assert asked(opt_size=320, max_images=3) == [320, 320, 1536, 3, 231]
    assert told(sizes=ZEROS, family="")["sizes"]["asked"] is None
    for numbers in product((0, 320, 2048), repeat=3):
        given = [number for number in numbers if number]
        if given == sorted(given):
            RequestedSizes(*numbers).filled(SDXL).check()


def test_what_does_not_fit_widens_only_what_has_to_be_wider() -> None:
    def widened(*size: int, sizes: RequestedSizes = ZEROS, **more: Any) -> dict[str, int] | None:
        return told(picture(*size), sizes=sizes, **more)["widened"]

    assert widened(832, 1216) is None, "it fits"
    assert widened(2048, 1024) == {"max_size": 2048}
    assert widened(832, 1216, 4) == {"max_images": 4}
    assert widened(2048, 1024, family="") is None, "nothing is certain yet"
    assert widened(1024, 512, sizes=replace(OWN, max_images=4)) == {"max_size": 1024}
    assert widened(128, 512, 8, sizes=replace(OWN, max_images=4)) == {"min_size": 128, "max_images": 8}
    assert widened(512, 1088, engines=[engine("onnxruntime")], sizes=OWN) == {"max_size": 1088}
    for size in ((512, 512, 65), (9000, 512), (512, 8)):
        assert told(picture(*size))["misfit"] is not None
        assert widened(*size, sizes=OWN) is None, "no node may ask for it"


def test_a_picture_that_no_engine_of_one_size_is_for_is_told_whatever_its_prompts_length(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    portrait = picture(832, 1216)
    monkeypatch.setattr(backends()["onnxruntime"], "sizes", lambda engine: engine.calls)

    def lacking(one: Picture, *calls: dict[str, int]) -> Any:
        return told(one, engines=[engine("onnxruntime", OWN, *calls)], choice="onnxruntime")["uncompiled"]

    square, tall = call(1024, 1024), call(832, 1216, tokens=154)
    assert lacking(portrait, square, tall) is None
    assert lacking(portrait, square, call(1216, 832)) == {"width": 832, "height": 1216, "images": 1}
    assert lacking(portrait, call(1024, 1216), call(832, 1024)) is not None
    assert lacking(portrait, call(832, 1216, 1)) is not None, "with CFG a call has both prompts"
    assert lacking(picture(832, 1216, 2), tall) is not None, "two images"
    assert lacking(picture(832, 1216, 2, None), call(832, 1216, 2)) is None, "nobody knows whether there is a CFG"
    assert lacking(picture(836, 1220), tall) is None, "a latent has an element for 8 pixels"
    assert lacking(portrait) is None, "an engine of no size in particular"
    assert told(portrait, engines=[engine("torch")])["uncompiled"] is None
    assert told(portrait)["uncompiled"] is None, "the button builds for it anyway"


@pytest.mark.parametrize("fits", [SDXL, None], ids=["known", "unknown"])
def test_auto_is_best_at_the_graphs_picture_and_as_wide_as_usual(fits: Sizes | None) -> None:
    def auto(*pictures: Picture, tokens: int = 0) -> dict[str, int]:
        numbers = picture_fit.auto(pictures, fits, tokens)
        assert tuple(numbers) == SIZE_NAMES
        RequestedSizes(**numbers).check()
        return {name: number for name, number in numbers.items() if number}

    assert auto(picture(704, 960)) == {"opt_size": 832}
    assert auto(picture(832, 1216)) == {}, "what fits the model is best at that"
    assert auto(picture(512, 512)) == ({"opt_size": 512} if fits else {}), "and may be at that"
    assert auto(picture(72, 72)).get("opt_size") == 72
    assert auto(picture(704, 960), tokens=231) == {"opt_size": 832}
    assert auto(picture(704, 960), tokens=300) == {"opt_size": 832, "max_tokens": 308}, "a whole number of steps"
    wide = {"max_size": 2048} if fits else {}
    assert auto(picture(2048, 1024, 4)) == {"opt_size": 1472, **wide, "max_images": 4}
    assert auto(picture(832, 1216), picture(2048, 2048)) == wide, "best at the first"
    assert auto(picture(512, 512, 128), tokens=9999).items() >= {"max_images": 64, "max_tokens": 4928}.items()
    assert auto(picture(16384, 12288))["opt_size"] == 8192
    assert auto(picture(8, 8))["opt_size"] == 16


@pytest.mark.parametrize("size", [(2048, 1024), (512, 512), (64, 4096), (1536, 640), (20, 8192)])
def test_what_auto_asks_for_holds_the_picture(size: tuple[int, int]) -> None:
    sizes = RequestedSizes(**told(picture(*size))["sizes"]["auto"])
    sizes.filled(SDXL).check()
    assert told(picture(*size), sizes=sizes)["misfit"] is None


def test_auto_keeps_the_tokens_that_a_node_has_or_that_its_last_run_showed() -> None:
    def tokens(run: int, sizes: RequestedSizes) -> int:
        return told(picture(640, 960), sizes=sizes, tokens=run)["sizes"]["auto"]["max_tokens"]

    assert [tokens(300, ZEROS), tokens(0, replace(ZEROS, max_tokens=308)), tokens(400, ZEROS)] == [308, 308, 462]
    assert told()["sizes"]["auto"] is None, "nothing is certain"


def graph(use: str = "") -> dict[str, Any]:
    """A UNet and a ControlNet for one sampler, another UNet for a second one that gets the first one's picture."""

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": {
            name: [use + value, 0] if isinstance(value, str) else value for name, value in inputs.items()}}  # fmt: skip

    nodes = {
        "unet": node("TRTUNetEngine", max_size=512),
        "net": node("TRTControlNetEngine"),
        "sampler": node("KSampler", model="unet", positive="net", latent_image="empty", cfg=7),
        "empty": node("EmptyLatentImage", width=512, height=640, batch_size=1),
        "other": node("TRTUNetEngine", max_size=512),
        "later": node("KSampler", model="other", latent_image="sampler"),
    }
    return {use + name: made for name, made in nodes.items()}


def test_engine_nodes_of_one_sampler_are_told_by_it() -> None:
    prompt, readers = graph(), readers_of(graph())
    found = {node: list(samplers_of(prompt, node, readers)) for node in ("unet", "net", "other")}
    assert found == {"unet": ["sampler"], "net": ["sampler"], "other": ["later"]}


def test_a_node_tells_its_numbers_unless_another_node_makes_one() -> None:
    assert request_of(graph(), "unet").sizes == RequestedSizes(max_size=512)
    made = graph()
    made["unet"] = {"class_type": "TRTUNetEngine", "inputs": {"max_size": ["empty", 0]}}
    assert request_of(made, "unet").sizes is None


def test_the_settings_of_a_node_that_is_used_twice_are_for_the_pictures_of_both_uses() -> None:
    prompt = graph("1:") | graph("2:")
    prompt["2:empty"] = {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 768, "batch_size": 3}}
    found = build_routes.states(prompt, [["1:unet", "2:unet"], ["1:other"]])
    assert list(found) == ["1:unet", "2:unet", "1:other"]
    sizes = found["1:unet"]["sizes"]
    assert sizes == found["2:unet"]["sizes"]
    assert [one["height"] for one in sizes["pictures"]] == [640, 768]
    assert sizes["samplers"] == ("1:sampler", "2:sampler")
    assert sizes["auto"]["max_images"] == 3
    other = found["1:other"]["sizes"]
    assert other["samplers"] == ("1:later",)
    assert other["pictures"] == sizes["pictures"][:1], "the latent that it goes on with is of this size"


def test_a_profile_holds_what_its_node_asks_for() -> None:
    profile = architectures()[UNET].profile(OWN)
    assert isinstance(profile, Profile)
    assert profile.sizes("max") == {"B": 4, "H": 96, "W": 96, "T": 231, "HB": 4}
