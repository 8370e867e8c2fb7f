"""Native serves each call that an engine cannot serve: the image is exactly native's, and the reason is told."""

from __future__ import annotations

from typing import Any

import pytest
import slow
from comfy_process import ComfyProcess, History
from hybrid_trt.engine_library import Reason
from scenarios import (
    A,
    B,
    Control,
    Prompt,
    Scenario,
    compare,
    latent_of,
    native_latent,
    node,
    prompt,
    relative_difference,
)

LIMIT = 1e-5
ENGINES = Scenario(steps=2, width=64, height=64)
PLAIN = ENGINES.but(controls=(Control(A.file, 1, 0.7, engine=False), Control(B.file, 2, 0.4, engine=False)))
LORA = ("LoraLoaderModelOnly", {"lora_name": "tiny_sd15_lora.safetensors", "strength_model": 1.0})
BUILD = {"when_missing": "build now"}
ON_ENGINE = {"engine": 2, "native": 0, "reasons": {}}

@pytest.mark.fault("a LoRA stands behind the engine", see="normal speed: *weights changed*")
def test_a_lora_after_the_sampler_patch_acts_as_in_native(sd15: ComfyProcess) -> None:
    scenario = ENGINES.but(patches=(LORA,))
    result = compare(sd15, scenario)
    assert 0 < result.error <= LIMIT, "ControlNets stay on engines"
    assert result.unet == {"engine": 0, "native": 2, "reasons": {"weights changed": 2}}
    assert all(row["native"] == 0 and row["engine"] == 2 for row in result.controlnets.values())
    assert relative_difference(native_latent(sd15, ENGINES), native_latent(sd15, scenario)) > 1e-3, "it acts"


def hooked(built: Prompt) -> Prompt:
    """Return the prompt with a LoRA hooked to its positive conditioning."""
    built["hook"] = node("CreateHookLoraModelOnly", lora_name=LORA[1]["lora_name"], strength_model=0.8)
    built["hooked"] = node(
        "ConditioningSetProperties", cond_NEW=built["sampler"]["inputs"]["positive"], strength=1.0,
        set_cond_area="default", hooks=["hook", 0],
    )
    built["sampler"]["inputs"]["positive"] = ["hooked", 0]
    return built


def unet_row(history: History) -> dict[str, Any]:
    return history.output("report", "report")[0]["unet"]


@pytest.mark.fault("a LoRA is hooked to the prompt", see="normal speed: *hooks*")
def test_a_lora_hooked_to_the_prompt_acts_as_in_native_and_is_gone_with_its_prompt(sd15: ComfyProcess) -> None:
    unhooked = native_latent(sd15, PLAIN)
    native = latent_of(sd15.queue(hooked(prompt(PLAIN, engines=False, name="hooked"))))
    history = sd15.queue(hooked(prompt(PLAIN, engines=True, name="hooked")))
    assert relative_difference(latent_of(history), native) == 0
    assert unet_row(history) == {"engine": 0, "native": 4, "reasons": {"LoRA tied to a prompt": 4}}
    assert relative_difference(native, unhooked) > 0.1
    history = sd15.queue(prompt(PLAIN, engines=True, name="plain"))  # ComfyUI keeps the patched model from before
    assert 0 < relative_difference(latent_of(history), unhooked) <= LIMIT
    assert unet_row(history) == ON_ENGINE


def test_hooks_in_a_native_run_do_not_part_a_model_from_its_engine(sd15: ComfyProcess) -> None:
    native = native_latent(sd15, PLAIN)

    def through_a_clone(built: Prompt, node_name: str) -> Prompt:
        built["clone"] = node("ModelSamplingDiscrete", model=["unet", 0], sampling="eps", zsnr=False)
        built[node_name]["inputs"]["model"] = ["clone", 0]
        return built

    before = through_a_clone(prompt(PLAIN, engines=False, name="native"), "sampler")
    sd15.queue(before)
    beside = hooked(prompt(PLAIN.but(controls=()), engines=False, name="beside"))
    sd15.queue(before | {
        "hook": beside["hook"], "hooked": beside["hooked"], "beside": beside["sampler"],
        "save_beside": node("TestSaveLatent", latent=["beside", 0], name="beside"),
    })
    history = sd15.queue(through_a_clone(prompt(PLAIN, engines=True, name="plain"), "patch"))
    assert 0 < relative_difference(latent_of(history), native) <= LIMIT
    assert unet_row(history) == ON_ENGINE


def test_perturbed_attention_guidance_mixes_engine_and_native_calls(sd15: ComfyProcess) -> None:
    result = compare(sd15, ENGINES.but(patches=(("PerturbedAttentionGuidance", {"scale": 3.0}),)))
    assert result.error <= LIMIT
    assert result.unet == {"engine": 2, "native": 2, "reasons": {"changed by another node": 2}}


def test_easycache_after_the_sampler_patch_still_caches(sd15: ComfyProcess) -> None:
    cache = ("EasyCache", {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False})
    result = compare(sd15, ENGINES.but(patches=(cache,), steps=6))
    assert result.error <= LIMIT
    assert 0 < result.unet["engine"] < 6
    assert result.unet["native"] == 0, "steps that are left out are no native calls"
    uncached = native_latent(sd15, ENGINES.but(steps=6))
    assert relative_difference(uncached, native_latent(sd15, ENGINES.but(patches=(cache,), steps=6))) > 1e-3


@pytest.mark.fault("a LoRA stands before an engine with weights of its own",
                   see="normal speed: *no engine*, until one is built")
def test_a_lora_before_the_engine_node_needs_an_engine_of_its_own_and_gets_one(sd15: ComfyProcess) -> None:
    scenario = ENGINES.but(loras_before=(LORA,))
    missing = compare(sd15, scenario)
    assert missing.error <= LIMIT
    assert missing.unet == {"engine": 0, "native": 2, "reasons": {"no engine": 2}}
    (status,) = missing.history.output("unet_engine", "text")
    assert "no engine" in status
    assert "build first" in status
    built = compare(sd15, scenario.but(settings=BUILD))
    assert built.error <= LIMIT
    assert built.unet["engine"] == 2
    without = compare(sd15, ENGINES)
    assert without.error <= LIMIT, "the engine with the LoRA served the model without it"
    assert relative_difference(native_latent(sd15, ENGINES), native_latent(sd15, scenario)) > 0.1


@pytest.mark.fault("the picture or the prompt is larger than the engine takes",
                   see="normal speed: *size the engine was not built for*")
def test_calls_outside_the_profile_run_native_per_net(sd15: ComfyProcess) -> None:
    result = compare(sd15, ENGINES.but(width=520, height=64))
    assert result.error == 0
    assert result.unet["reasons"] == {"size the engine was not built for": 2}
    for row in result.controlnets.values():
        assert row["reasons"] == {"size the engine was not built for": 2}
        assert "520" in row["details"]["size the engine was not built for"]


@pytest.mark.fault("the engine node and the sampler patch get different models",
                   see="normal speed: *engine of another model*")
@pytest.mark.parametrize("other", ["tiny_sd15_unet", "tiny_sdxl_unet"], ids=["other_checkpoint", "other_family"])
def test_an_engine_of_another_model_is_never_used(sd15: ComfyProcess, other: str) -> None:
    scenario = PLAIN.but(unet="tiny_sd15_other_unet")
    graph = prompt(scenario, engines=True, name="engine")
    graph["right_unet"] = node("UNETLoader", unet_name=f"{other}.safetensors", weight_dtype="default")
    graph["unet_engine"]["inputs"]["model"] = ["right_unet", 0]
    history = sd15.queue(graph)
    assert relative_difference(latent_of(history), native_latent(sd15, scenario)) == 0
    assert unet_row(history)["reasons"] == {"engine of another model": 2}


def test_an_sdxl_controlnet_on_an_sd15_model_fails_as_in_native_and_the_server_lives(sd15: ComfyProcess) -> None:
    wrong = ENGINES.but(controls=(Control("tiny_sdxl_a"),), settings={"backend": "torch"})
    native = sd15.queue(prompt(wrong, engines=False, name="native"))
    engine = sd15.queue(prompt(wrong, engines=True, name="engine"))
    assert native.status == engine.status == "error"
    assert engine.error == native.error
    assert Reason.OTHER_KIND.value in sd15.log_text()
    assert compare(sd15, ENGINES).error <= LIMIT


@pytest.mark.parametrize(("engine", "settings"), [(False, {}), (True, {}), (False, {"backend": "torch"})],
                         ids=["plain", "on_an_engine", "live_weights"])  # fmt: skip
def test_a_prompt_with_a_controlnet_for_another_kind_of_model_says_so(
    sd15: ComfyProcess, engine: bool, settings: dict[str, str]
) -> None:
    """Those of a smaller UNet: its residuals do not fit, and ComfyUI leaves them out."""
    wrong = Control("tiny_sd15_flat_a", engine=engine)
    result = compare(sd15, Scenario(controls=(wrong,), steps=2, seed=931, settings=settings))
    assert result.error <= LIMIT
    assert result.unet["reasons"] == {Reason.OTHER_KIND.value: 2}
    text = result.history.output("report", "text")[0]
    assert "made for another kind of model" in text
    assert not {"wider", "larger", "size"} & set(text.split()), "a larger engine would not help"


def test_two_samplers_in_one_prompt_are_reported_apart(sd15: ComfyProcess) -> None:
    graph = prompt(ENGINES.but(seed=31), engines=True, name="engine")
    graph["second"] = {**graph["sampler"], "inputs": {**graph["sampler"]["inputs"], "steps": 3, "seed": 32}}
    graph["report_2"] = node("TRTReport", after=["second", 0])
    history = sd15.queue(graph)
    counts = [history.output(r, "report")[0]["unet"]["engine"] for r in ("report", "report_2")]
    assert counts == [2, 3]


# Samplings that do not call the UNet as the sampler patch expects it


STEPS = 4
ALONE = Scenario(controls=(), steps=STEPS, seed=921, width=64, height=64)


def ran(comfy: ComfyProcess, built: Prompt) -> tuple[Any, dict[str, Any], str]:
    history = comfy.queue(built)
    assert history.ok, history.error
    report, text = (history.output("report", name)[0] for name in ("report", "text"))
    return latent_of(history), report, text


@pytest.mark.parametrize(("inputs", "engine", "native"), [
    ({}, 0, STEPS), ({"every": 2}, STEPS // 2, STEPS // 2), ({"replaced": True}, 0, STEPS),
])  # fmt: skip
def test_a_unet_that_another_node_computes_by_itself_is_not_said_to_be_on_its_engine(
    sd15: ComfyProcess, inputs: dict[str, Any], engine: int, native: int
) -> None:
    latent, report, text = ran(sd15, prompt(ALONE.but(patches=[("TestOwnForward", inputs)]), True, "own"))
    assert relative_difference(latent, native_latent(sd15, ALONE)) <= LIMIT
    assert (report["unet"]["engine"], report["unet"]["native"]) == (engine, native)
    assert report["unet"]["reasons"] == {"not called through TRT Sampler Patch": native}
    assert text.startswith("Accelerated: 0 of 1 model")
    assert "another node" in text
    assert "computes the UNet by itself" in text
    if "replaced" not in inputs:
        assert "(comfy_test_nodes)" in report["rows"][0]["details"]["not called through TRT Sampler Patch"]


def test_a_sampling_of_no_steps_tells_nothing(sd15: ComfyProcess) -> None:
    built = prompt(ALONE, True, "none")
    built["sampler"]["inputs"]["denoise"] = 0.0
    _, report, text = ran(sd15, built)
    assert report["rows"] == []
    assert text.startswith("No engine was asked for")


@pytest.mark.parametrize("way", ["thread", "executor"])
@slow.when("thread")
def test_a_report_counts_what_a_node_samples_in_a_thread_of_its_own(sd15: ComfyProcess, way: str) -> None:
    for seed in (923, 924):  # the second time on a thread that has sampled before
        scenario = ALONE.but(seed=seed, controls=(Control("tiny_sd15_a", 1, 0.7),))
        built = prompt(scenario, True, "thread")
        given = built["sampler"]["inputs"]
        inputs = {name: given[name] for name in ("model", "positive", "negative", "latent_image", "seed", "steps")}
        built["sampler"] = node("TestSampleInThread", way=way, **inputs)
        latent, report, text = ran(sd15, built)
        assert relative_difference(latent, native_latent(sd15, scenario)) <= LIMIT
        assert {row["sampler_node"] for row in report["rows"]} == {"sampler"}
        assert [(row["engine"], row["native"]) for row in report["rows"]] == [(STEPS, 0)] * 2
        assert text.startswith("Accelerated: 2 of 2 models")


@slow.when("alone")
@pytest.mark.parametrize("controls", [(), (Control("tiny_sd15_a", 1, 0.7),)], ids=["alone", "with_a_controlnet"])
def test_without_an_engine_the_model_runs_native_and_the_node_says_so(sd15: ComfyProcess, controls: tuple) -> None:
    """As the page sends it where TRT UNet Engine is bypassed or muted."""
    scenario = ALONE.but(controls=controls, seed=925)
    built = prompt(scenario, True, "bypassed")
    del built["unet_engine"], built["patch"]["inputs"]["engine"]
    history = sd15.queue(built)
    assert history.ok, history.error
    assert relative_difference(latent_of(history), native_latent(sd15, scenario)) <= LIMIT
    report, text = (history.output("report", name)[0] for name in ("report", "text"))
    assert report["unet"] == {"engine": 0, "native": STEPS, "reasons": {"no engine wired in": STEPS}}
    assert report["missing"] == []
    assert "tiny_sd15_unet: 4 at normal speed" in text
    assert history.output("patch", "native") == [True]
    assert history.output("patch", "text")[0].startswith("no engine wired in: TRT UNet Engine is bypassed")


def test_a_sampler_patch_without_an_engine_leaves_the_one_before_it_in_place(sd15: ComfyProcess) -> None:
    built = prompt(ALONE.but(seed=926, patches=[("TRTSamplerPatch", {})]), True, "twice")
    latent, report, _ = ran(sd15, built)
    assert relative_difference(latent, native_latent(sd15, ALONE.but(seed=926))) <= LIMIT
    assert report["unet"] == {"engine": STEPS, "native": 0, "reasons": {}}


OTHER = "tiny_sd15_other_unet.safetensors"
LIVE = {"backend": "torch", "model": ["other", 0]}


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
        built = prompt(ALONE, engines, f"two_models_{engines}")
        built["other"] = node("UNETLoader", unet_name=OTHER, weight_dtype="default")
        if engines and patched:
            built["other_engine"] = node("TRTUNetEngine", **built["unet_engine"]["inputs"] | LIVE)
            built["other_patch"] = node("TRTSamplerPatch", model=["other", 0], engine=["other_engine", 0])
        return guided_by_two(built, ["other_patch" if engines and patched else "other", 0])

    native = latent_of(sd15.queue(graph(False)))
    history = sd15.queue(graph(True))
    assert relative_difference(latent_of(history), native) <= LIMIT
    rows = {row["name"]: (row["engine"], row["native"]) for row in history.output("report", "report")[0]["rows"]}
    second = {OTHER: (4, 0)} if patched else {"a second model without TRT Sampler Patch": (0, 4)}
    assert rows == {"tiny_sd15_unet.safetensors": (4, 0)} | second
