"""One execution of a node may sample several models, on several GPUs: each call gets the weights of who asks for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import slow
from comfy_process import ComfyProcess, History
from scenarios import (
    A,
    Control,
    Prompt,
    Scenario,
    latent_of,
    native_latent,
    node,
    prompt,
    relative_difference,
)

LIMIT = 1e-5
PLAIN = Scenario(controls=(), seed=41, width=64, height=64)
TORCH = {"backend": "torch"}
REPLACEABLE = {"backend": "onnxruntime", "weights": "replaceable", "when_missing": "build now"}
OTHER = "tiny_sd15_other_unet.safetensors"


def with_loras(built: Prompt, model: list, *strengths: float) -> list[list]:
    """Links to a model with a LoRA at each of these strengths."""
    for strength in strengths:
        built[f"lora_{strength}"] = node(
            "LoraLoaderModelOnly", model=model, lora_name="tiny_sd15_lora.safetensors", strength_model=strength
        )
    return [[f"lora_{strength}", 0] for strength in strengths]


def other_model(built: Prompt, engines: bool, patched: bool = True) -> list:
    """A link to a second model, behind an engine node and a sampler patch of its own."""
    built["other"] = node("UNETLoader", unet_name=OTHER, weight_dtype="default")
    if not engines or not patched:
        return ["other", 0]
    settings = {**built["unet_engine"]["inputs"], "model": ["other", 0]}
    if "weights" not in settings:
        settings |= TORCH
    built["other_engine"] = node("TRTUNetEngine", **settings)
    built["other_patch"] = node("TRTSamplerPatch", model=["other", 0], engine=["other_engine", 0])
    return ["other_patch", 0]


def twice(built: Prompt, first: list, second: list) -> Prompt:
    """The prompt with a sampler that samples two models in one execution."""
    given = built["sampler"]["inputs"]
    names = ("positive", "negative", "latent_image", "seed", "steps")
    inputs = {name: given[name] for name in names}
    built["sampler"] = node("TestSampleTwice", model=first, second_model=second, **inputs)
    return built


def check(comfy: ComfyProcess, native: Prompt, engines: Prompt) -> dict[str, Any]:
    """The report of a prompt that samples twice; both latents are native's, which differ from each other."""
    references = latent_of(comfy.queue(native))
    assert relative_difference(references[1], references[0]) > 0.05, "nothing is proved"
    history = comfy.queue(engines)
    latents = latent_of(history)
    assert max(relative_difference(a, b) for a, b in zip(latents, references, strict=True)) <= LIMIT
    return history.output("report", "report")[0]


@pytest.fixture(params=["torch", "replaceable"])
def any_weights(request: pytest.FixtureRequest, sd15: ComfyProcess) -> Iterator[dict[str, str]]:
    """Settings of engines that compute with whatever weights ComfyUI samples with."""
    yield TORCH if request.param == "torch" else REPLACEABLE
    for folder in (sd15.base / "models" / "trt_engines").glob("*layout*onnxruntime*"):
        shutil.rmtree(folder)  # it would serve the models of all other tests


STRENGTHS = {"torch-two_strengths": ("torch", (0.4, 1.0)), "torch-with_and_without": ("torch", (1.0, 0.0)),
             "replaceable-with_and_without": ("replaceable", (1.0, 0.0))}

SLOW = ("torch-two_strengths", "replaceable-with_and_without")
"""``test_any_weights.py`` shows the last one in this process."""


@pytest.mark.parametrize(
    ("any_weights", "strengths"), slow.cases(STRENGTHS, SLOW), indirect=["any_weights"]
)
def test_two_runs_in_one_execution_have_each_their_own_lora(
    sd15: ComfyProcess, any_weights: dict[str, str], strengths: tuple[float, float]
) -> None:
    def graph(engines: bool) -> Prompt:
        built = prompt(PLAIN.but(settings=any_weights), engines, f"twice_{engines}")
        return twice(built, *with_loras(built, built["sampler"]["inputs"]["model"], *strengths))

    report = check(sd15, graph(False), graph(True))
    assert report["unet"] == {"engine": 8, "native": 0, "reasons": {}}


@slow.when("replaceable")
def test_two_runs_in_one_execution_have_each_their_own_model(
    sd15: ComfyProcess, any_weights: dict[str, str]
) -> None:
    def graph(engines: bool) -> Prompt:
        built = prompt(PLAIN.but(settings=any_weights), engines, f"twice_{engines}")
        return twice(built, built["sampler"]["inputs"]["model"], other_model(built, engines))

    report = check(sd15, graph(False), graph(True))
    assert {row["name"]: row["engine"] for row in report["rows"]} == {"tiny_sd15_unet.safetensors": 4, OTHER: 4}


def test_a_live_engine_serves_a_model_that_was_loaded_twice_with_the_weights_of_the_patched_one(
    sd15: ComfyProcess
) -> None:
    def graph(engines: bool) -> Prompt:
        built = prompt(PLAIN.but(settings=TORCH), engines, f"twice_{engines}")
        if engines:
            built["again"] = node("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors")
            built["unet_engine"]["inputs"]["model"] = ["again", 0]
        return twice(built, *with_loras(built, built["sampler"]["inputs"]["model"], 0.4, 1.0))

    report = check(sd15, graph(False), graph(True))
    assert report["unet"] == {"engine": 8, "native": 0, "reasons": {}}


@pytest.mark.parametrize("place", ["before the engine node", "after the sampler patch"])
def test_a_lora_for_clip_alone_leaves_the_model_its_engine(sd15: ComfyProcess, place: str) -> None:
    built = prompt(PLAIN, engines=True, name="engine")
    built["clip"] = node("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors")
    source = ["unet", 0] if place.startswith("before") else ["patch", 0]
    built["clip_lora"] = node(
        "LoraLoader", model=source, clip=["clip", 1], lora_name="tiny_sd15_lora.safetensors", strength_model=0.0,
        strength_clip=1.0)
    for name in ("unet_engine", "patch") if place.startswith("before") else ("sampler",):
        built[name]["inputs"]["model"] = ["clip_lora", 0]
    history = sd15.queue(built)
    assert history.output("report", "report")[0]["unet"] == {"engine": 4, "native": 0, "reasons": {}}
    assert 0 < relative_difference(latent_of(history), native_latent(sd15, PLAIN)) <= LIMIT


def guided_by_two(built: Prompt, second: list) -> Prompt:
    """The prompt with a guider that asks another model for the negative prediction."""
    given = built["sampler"]["inputs"]
    built["noise"] = node("RandomNoise", noise_seed=given["seed"])
    built["method"] = node("KSamplerSelect", sampler_name="euler")
    built["sigmas"] = node("BasicScheduler", model=given["model"], scheduler="normal", steps=4, denoise=1.0)
    built["guider"] = node(
        "DualModelGuider", model=given["model"], model_negative=second, cfg=4.0, positive=given["positive"],
        negative=given["negative"])
    built["sampler"] = node(
        "SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["method", 0], sigmas=["sigmas", 0],
        latent_image=given["latent_image"])
    return built


@pytest.mark.parametrize("patched", [True, False])
def test_each_model_of_a_guider_that_samples_with_two_has_its_own_engine_and_count(
    sd15: ComfyProcess, patched: bool
) -> None:
    def graph(engines: bool) -> Prompt:
        built = prompt(PLAIN, engines, f"two_models_{engines}")
        return guided_by_two(built, other_model(built, engines, patched))

    native = latent_of(sd15.queue(graph(False)))
    history = sd15.queue(graph(True))
    assert relative_difference(latent_of(history), native) <= LIMIT
    rows = {row["name"]: (row["engine"], row["native"]) for row in history.output("report", "report")[0]["rows"]}
    second = {OTHER: (4, 0)} if patched else {"a second model without TRT Sampler Patch": (0, 4)}
    assert rows == {"tiny_sd15_unet.safetensors": (4, 0)} | second


@pytest.mark.slow
def test_two_models_that_sample_one_video_after_the_other_have_each_their_engine(sd15: ComfyProcess) -> None:
    """As Wan 2.2 is sampled, a second time with another seed."""
    files = ("tiny_wan", "tiny_wan_low_noise")
    video = Scenario("wan", controls=(), width=96, height=64, length=9, settings=TORCH)

    def graph(engines: bool, seed: int) -> Prompt:
        parts = [prompt(video.but(unet=file), engines, f"video_{engines}") for file in files]
        names = ("unet", "unet_engine", "patch")
        built = parts[0] | {f"second_{name}": parts[1][name] for name in names if name in parts[1]}
        for name in (f"second_{name}" for name in names):
            inputs = built.get(name, {"inputs": {}})["inputs"]
            inputs |= {key: [f"second_{value[0]}", value[1]] for key, value in inputs.items() if type(value) is list}
        given = built["sampler"]["inputs"]
        common = {key: given[key] for key in ("positive", "negative", "steps", "cfg", "sampler_name", "scheduler")}
        first = {"add_noise": "enable", "start_at_step": 0, "end_at_step": 2, "return_with_leftover_noise": "enable"}
        second = {"add_noise": "disable", "start_at_step": 2, "end_at_step": 4, "return_with_leftover_noise": "disable"}
        built["begin"] = node("KSamplerAdvanced", model=given["model"], latent_image=given["latent_image"],
                              noise_seed=seed, **common, **first)  # fmt: skip
        model = [f"second_{given['model'][0]}", 0]
        built["sampler"] = node("KSamplerAdvanced", model=model, latent_image=["begin", 0], noise_seed=seed,
                                **common, **second)  # fmt: skip
        return built

    for seed in (3, 4):
        native, history = sd15.queue(graph(False, seed)), sd15.queue(graph(True, seed))
        assert relative_difference(latent_of(history), latent_of(native)) <= LIMIT
        rows = history.output("report", "report")[0]["rows"]
        assert {row["name"]: (row["engine"], row["native"]) for row in rows} == {
            f"{file}.safetensors": (2, 0) for file in files}  # fmt: skip


@pytest.fixture(scope="module")
def two_devices(sd15: ComfyProcess) -> Iterator[ComfyProcess]:
    """The server with a second device: a double, the CPU under another name."""

    def switch(there: bool) -> None:
        built = prompt(PLAIN.but(steps=1), engines=False, name="devices")
        built["devices"] = node("TestSecondDevice", model=["unet", 0], there=there)
        built["sampler"]["inputs"]["model"] = ["devices", 0]
        assert sd15.queue(built).ok

    switch(True)
    yield sd15
    switch(False)


def split(scenario: Scenario, engines: bool, place: str) -> Prompt:
    """The prompt with MultiGPU CFG Split before, between or after our nodes."""
    built = prompt(scenario, engines, f"split_{engines}")
    links = {"before": ("unet_engine", "patch"), "between": ("patch",), "after": ("sampler",)}[place]
    links = links if engines else ("sampler",)
    built["split"] = node("MultiGPU_WorkUnits", model=built[links[0]]["inputs"]["model"], max_gpus=2)
    for link in links:
        built[link]["inputs"]["model"] = ["split", 0]
    return built


@pytest.fixture(scope="module")
def split_natively(two_devices: ComfyProcess) -> numpy.ndarray:
    return latent_of(two_devices.queue(split(SPLIT, engines=False, place="after")))


SPLIT = PLAIN.but(controls=(Control(A.file, 1, 0.7),))


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_a_step_that_comfyui_shares_among_gpus_runs_on_an_engine_of_each(
    two_devices: ComfyProcess, split_natively: numpy.ndarray, place: str
) -> None:
    history: History = two_devices.queue(split(SPLIT, True, place))
    assert relative_difference(latent_of(history), split_natively) <= LIMIT
    (row,) = (row for row in history.output("report", "report")[0]["rows"] if row["kind"] == "unet")
    assert (row["engine"], row["native"], row["reasons"]) == (8, 0, {})
