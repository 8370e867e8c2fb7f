"""Cases of ``fidelity.py``: the tests' tiny models, and what graphs ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from random_workflows import Net, Workflow, prompt_of
from scenarios import A, B, Control, Link, Prompt, Scenario, node, prompt
from test_parity import SCENARIOS
from test_what_is_served import ADAPTER, BUILD, FLUX, KINDS, KREA2, QWEN, SD15, TORCH, VAES, XL, ZIMAGE, through_vae

Change = Callable[[Prompt], None]
BACKENDS = {"onnxruntime": BUILD | {"backend": "onnxruntime"}, "torch": TORCH}
"""Backend -> settings of engine nodes. On a CPU nothing is compiled for the second."""

SD_NAME, XL_NAME = "SD1.5 and SD2", "SDXL"
FLUX_NAME, ZIMAGE_NAME = "Flux.1 (dev, schnell, Kontext, Fill)", "Z-Image, Turbo and base"
FAMILIES = {FLUX_NAME: FLUX.but(cfg=3.0), "Flux.2 (dev, klein)": FLUX.but(unet="tiny_flux2_klein_unet", cfg=3.0),
            ZIMAGE_NAME: ZIMAGE, "Qwen-Image and Qwen-Image-Edit": QWEN, "Krea 2": KREA2}
STACK = SD15.but(controls=(A, B))
FEW_STEPS = {"steps": 4, "controls": (A,)}
PRECISIONS = {"fp8": "fp8 weights", "int8": "int8 weights"}
NETS = {"sd15": ("tiny_sd15_a", "tiny_sd15_b"), "sdxl": ("tiny_sdxl_a", "tiny_sdxl_b")}
WORKFLOW = Workflow(
    family="sd15", unet="tiny_sd15_unet", size=(128, 64, 1), tokens=(77, 77), seed=7, steps=4, cfg=5.0, sampler="euler",
    scheduler="normal", denoise=1.0, before=(), after=(), nets=(), conditioning="plain", style="one sampler",
    stack=False, unet_engine=True, backend="onnxruntime")  # fmt: skip
CONDITIONINGS = {
    "area": "a prompt for an area", "mask": "a prompt for a mask", "range": "prompts for a range of steps each",
    "concat": "prompts joined", "average": "the mean of prompts", "zeroed": "a prompt of zeros",
    "hook": "a LoRA hooked to a prompt",
}  # fmt: skip
STYLES = {"two stages": "two samplers, one half of the steps each", "custom": "SamplerCustomAdvanced",
          "noise mask": "inpainting by a noise mask", "twice": "a second pass at 1.5 times the size"}  # fmt: skip
LORA = ("LoraLoaderModelOnly", {"lora_name": "tiny_sd15_lora.safetensors", "strength_model": 0.8})
STOCK = {
    "a LoRA": LORA,
    "perturbed attention": ("PerturbedAttentionGuidance", {"scale": 3.0}),
    "HyperTile": ("HyperTile", {"tile_size": 32, "swap_size": 2, "max_depth": 0, "scale_depth": False}),
    "token merging": ("TomePatchModel", {"ratio": 0.5}),
    "RescaleCFG": ("RescaleCFG", {"multiplier": 0.7}),
    "EasyCache": ("EasyCache", {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}),
    "v-prediction": ("ModelSamplingDiscrete", {"sampling": "v_prediction", "zsnr": False}),
    "attention multiplied": ("UNetSelfAttentionMultiply", {"q": 1.3, "k": 1.0, "v": 1.0, "out": 1.0}),
}  # fmt: skip
"""Stock nodes that take a MODEL and give one."""
TILES = ("held back", "copies", "hint", "image", "in place", "method", "strength", "time")
PACKED = ("GGUF", "GGUF, a layout", "GGUF, in ComfyUI's layers", "NF4", "whole numbers")


@dataclass(frozen=True)
class Case:
    """A row to be measured.

    Attributes:
        graph: engines, factor of the guidance -> the prompt, which saves a latent.
        plain: the same without what is tried: native's pictures of both have to differ.
        guided: whether the guidance has any part in it.
        reason: why a ControlNet runs native that is counted nowhere.
    """

    model: str
    name: str
    backend: str
    graph: Callable[[bool, float], Prompt]
    plain: Callable[[bool, float], Prompt] | None = None
    precision: str = "float32"
    guided: bool = True
    reason: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.name, self.backend


def of_scenario(scenario: Scenario, change: Change | None = None) -> Callable[[bool, float], Prompt]:
    """Return what makes a scenario's prompt and changes it."""

    def graph(engines: bool, factor: float) -> Prompt:
        built = prompt(scenario.but(cfg=scenario.cfg * factor), engines, "fidelity")
        if change is not None:
            change(built)
        return built

    return graph


def of_workflow(workflow: Workflow) -> Callable[[bool, float], Prompt]:
    """Return what makes a workflow's prompt."""
    missing = "build now" if workflow.backend == "onnxruntime" else "use native"
    return lambda engines, factor: prompt_of(
        replace(workflow, cfg=workflow.cfg * factor), engines, "fidelity", missing)  # fmt: skip


def on_both(model: str, name: str, scenario: Scenario, change: Change | None = None, plain: Scenario | None = None,
            backends: Sequence[str] = tuple(BACKENDS)) -> Iterator[Case]:
    """Yield a scenario on each backend."""
    for backend in backends:
        graph = of_scenario(scenario.but(settings=BACKENDS[backend]), change)
        yield Case(model, name, backend, graph, plain and of_scenario(plain))


def words(scenario: Scenario) -> str:
    """A scenario of the table of models in words."""
    controls = [
        control.file.removeprefix("tiny_") + " (its type set first)" * any(
            name == "SetUnionControlNetType" for name, _ in control.before)
        for control in scenario.controls
    ]  # fmt: skip
    parts = [
        (scenario.unet or f"tiny_{scenario.family}_unet").removeprefix("tiny_").removesuffix("_unet"),
        f"{scenario.width}x{scenario.height} px", f"{scenario.batch} pictures" * (scenario.batch > 1),
        f"{scenario.length} frames" * bool(scenario.length),
        "prompts of {} and {} tokens".format(*scenario.tokens) * (scenario.tokens != (77, 77)),
        "a prompt for an area" * scenario.area, f"guidance {scenario.cfg:g}" * (scenario.cfg in (1.0, 3.0)),
        "a LoRA before" * any("Lora" in name for name, _ in scenario.loras_before),
        *(f"version {part['inputs']['version']}" for part in scenario.parts.values() if "version" in part["inputs"]),
        " and ".join(name for name, _ in scenario.patches),
        "ControlNets " * bool(controls) + " and ".join(controls), "stock apply nodes" * (scenario.apply == "stock"),
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def of_models() -> Iterator[Case]:
    """Yield each scenario of the table in docs/models.md, and VAEs."""
    for model, kind in KINDS.items():
        if "int8" in model:  # native's own picture changes by more than the guidance shows, see the test of it
            continue
        for scenario in kind.scenarios:
            backend = scenario.settings.get("backend", "onnxruntime")
            precision = next((words for part, words in PRECISIONS.items() if part in model), "float32")
            yield Case(model, words(scenario), backend, of_scenario(scenario), None, precision, reason=kind.reason)
    for name, file in VAES.items():
        for case, tiled, *size in (("encoded and decoded", False, 136, 120, 3), ("in tiles", True, 200, 168, 1)):
            def graph(engines: bool, _: float, given: tuple = (file, tiled, *size)) -> Prompt:
                return through_vae(given[0], engines, *given[1:])

            yield Case(f"VAE: {name}", case, "onnxruntime", graph, guided=False)
    ip2p = SD15.but(unet="tiny_sd15_ip2p_unet")
    yield from on_both("inpainting and instruct-pix2pix UNets", "a picture to change", ip2p, edited, ip2p)


def edited(built: Prompt) -> None:
    """Give the UNet a picture to change."""
    built["vae"] = node("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors")
    built["picture"] = node("TestImage", seed=4, width=64, height=64, batch=1, channels=3)
    built["edit"] = node("InstructPixToPixConditioning", positive=["positive", 0], negative=["negative", 0],
                         vae=["vae", 2], pixels=["picture", 0])
    built["sampler"]["inputs"] |= {"positive": ["edit", 0], "negative": ["edit", 1], "latent_image": ["edit", 2]}


def of_graphs() -> Iterator[Case]:
    """Yield stacks, ranges, sizes and prompts, all that conditionings and samplers in a row may be."""
    for name, scenario in SCENARIOS.items():
        steps = scenario.steps if scenario.sampler == "euler" else 4  # two of other samplers amplify rounding
        yield from on_both(SD_NAME, name.replace("_", " "), scenario.but(steps=steps))
    for model, family in ((SD_NAME, "sd15"), (XL_NAME, "sdxl")):
        nets = tuple(Net(file, i, 0.7, 0.0, 1.0, True, False) for i, file in enumerate(NETS[family], start=1))
        base = replace(WORKFLOW, family=family, unet=f"tiny_{family}_unet", nets=nets)
        for backend in BACKENDS if family == "sd15" else ["onnxruntime"]:
            base = replace(base, backend=backend)
            for key, name in CONDITIONINGS.items():
                if family == "sd15" or key != "hook":
                    yield Case(model, name, backend, of_workflow(replace(base, conditioning=key)), of_workflow(base))
            for key, name in STYLES.items():
                yield Case(model, name, backend, of_workflow(replace(base, style=key)))
    yield from on_both(SD_NAME, "two prompts for halves, a ControlNet each", STACK.but(width=128), regional)
    yield from on_both(SD_NAME, "two models with an engine each in one prompt", STACK, two_models)
    yield from on_both(SD_NAME, "two samplers of one engine in one prompt", STACK, two_samplers)
    adapted = SD15.but(unet="tiny_sd15_t2i_unet", controls=(ADAPTER,))
    yield from on_both("T2I-adapters", "a second pass at 1.5 times the size", adapted, second_pass)
    for model, scenario in FAMILIES.items():
        yield from on_both(model, "a second pass at 1.5 times the size", scenario, second_pass)
        if "Flux.2" in model:  # a half is no whole number of its tokens
            continue
        wide = scenario.but(width=128)
        yield from on_both(model, "a prompt for an area", wide.but(area=True), None, wide)
    z_lora = ("LoraLoaderModelOnly", {"lora_name": "tiny_zimage_lora.safetensors", "strength_model": 0.8})
    yield from on_both(ZIMAGE_NAME, "behind the patch: a LoRA", ZIMAGE.but(patches=(z_lora,)), None, ZIMAGE)


def network(built: Prompt, file: str) -> Link:
    """Return a ControlNet's engine node, or its loader where there is none."""
    return [f"engine_{file}" if f"engine_{file}" in built else f"load_{file}", 0]


def regional(built: Prompt) -> None:
    """Give each half of the picture a prompt and a ControlNet of its own."""
    built["part"] = node("TestConditioning", tokens=77, seed=3, width=768, pooled=0)
    for i, (name, control) in enumerate((("positive", A), ("part", B))):
        built[f"half_{i}"] = node("ConditioningSetArea", conditioning=[name, 0], width=64, height=64, x=64 * i, y=0,
                                  strength=1.0)
        built[f"own_{i}"] = node(
            "ControlNetApplyAdvanced", positive=[f"half_{i}", 0], negative=["negative", 0], strength=control.strength,
            control_net=network(built, control.file), image=[f"image_{control.image}", 0], start_percent=0.0,
            end_percent=1.0)
    built["halves"] = node("ConditioningCombine", conditioning_1=["own_0", 0], conditioning_2=["own_1", 0])
    built["sampler"]["inputs"] |= {"positive": ["halves", 0], "negative": ["own_1", 1]}


def another_sampler(built: Prompt, **inputs: Any) -> None:
    """Add a sampler, and save its latent beside the first one's."""
    built["another"] = {**built["sampler"], "inputs": built["sampler"]["inputs"] | inputs}
    built["both"] = node("LatentBatch", samples1=["sampler", 0], samples2=["another", 0])
    built["save"]["inputs"]["latent"] = ["both", 0]
    if "report" in built:
        built["report"]["inputs"]["after"] = ["both", 0]


def two_samplers(built: Prompt) -> None:
    """Sample with the same engine again."""
    another_sampler(built, steps=3, seed=32)


def two_models(built: Prompt) -> None:
    """Sample with another model, on an engine of its own."""
    built["other"] = node("UNETLoader", unet_name="tiny_sd15_other_unet.safetensors", weight_dtype="default")
    model = ["other", 0]
    if "unet_engine" in built:
        built["other_engine"] = {**built["unet_engine"], "inputs": built["unet_engine"]["inputs"] | {"model": model}}
        built["other_patch"] = node("TRTSamplerPatch", model=model, engine=["other_engine", 0])
        model = ["other_patch", 0]
    another_sampler(built, model=model)


def second_pass(built: Prompt) -> None:
    """Sample what was made again, larger."""
    built["larger"] = node("LatentUpscaleBy", samples=["sampler", 0], upscale_method="nearest-exact", scale_by=1.5)
    again = built["sampler"]["inputs"] | {"latent_image": ["larger", 0], "denoise": 0.5}
    built["second"] = node("KSampler", **again)
    built["save"]["inputs"]["latent"] = ["second", 0]
    if "report" in built:
        built["report"]["inputs"]["after"] = ["second", 0]


def noise_masked(built: Prompt) -> None:
    """Put noise on half of the strength alone."""
    built["where"] = node("SolidMask", value=0.5, width=64, height=64)
    built["masked"] = node("SetLatentNoiseMask", samples=["latent", 0], mask=["where", 0])
    built["sampler"]["inputs"]["latent_image"] = ["masked", 0]


def of_patches(kinds: Sequence[str]) -> Iterator[Case]:
    """Yield each kind of patch and stock nodes, before the engine node and behind TRT Sampler Patch."""
    models = {"sd15": (SD_NAME, SD15.but(controls=(A,))), "flux1": (FLUX_NAME, FLUX.but(cfg=3.0)),
              "zimage": (ZIMAGE_NAME, ZIMAGE)}
    patches = {kind: (kind.partition("/")[2], ("TestModelPatch", {"kind": kind})) for kind in kinds}
    patches |= {f"sd15/{name}": (name, given) for name, given in STOCK.items()}
    for kind, (name, given) in patches.items():
        model, scenario = models[kind.partition("/")[0]]
        steps = 6 if name == "EasyCache" else 2
        scenario = scenario.but(steps=steps)
        if name == "compute_dtype":  # a strength changed by a millionth moves native's own result by 2.6 %
            scenario = scenario.but(controls=())
        change = noise_masked if name == "denoise_mask_function" else None
        before, behind = scenario.but(loras_before=(given,)), scenario.but(patches=(given,))
        backends = tuple(BACKENDS) if kind.startswith("sd15") else ("onnxruntime",)
        for case in (*on_both(model, f"before the engine: {name}", before, change, scenario, ("onnxruntime",)),
                     *on_both(model, f"behind the patch: {name}", behind, change, scenario, backends)):
            case = replace(case, precision="bfloat16") if name == "compute_dtype" else case
            yield case if change is None else replace(case, plain=of_scenario(scenario, change))


def of_other_packs() -> Iterator[Case]:
    """Yield stand-ins for packs that compute in their own way, or keep weights in theirs."""
    large = STACK.but(width=128, height=96)
    for way in TILES:
        tiles = large.but(patches=(("TestTiles", {"way": way}),))
        yield from on_both(SD_NAME, f"another pack: tiles, {way}", tiles, None, large, ("onnxruntime",))
    for name, inputs in (("UNet called by its parts", {}), ("UNet called by its parts every other time", {"every": 2}),
                         ("UNet's forward replaced", {"replaced": True})):
        own = STACK.but(steps=4, patches=(("TestOwnForward", inputs),))
        yield from on_both(SD_NAME, f"another pack: {name}", own, None, None, ("onnxruntime",))
    for kind in PACKED:
        def packed(built: Prompt, kind: str = kind) -> None:
            loader = node("TestOtherPacksWeights", unet_name=built["unet"]["inputs"]["unet_name"], kind=kind)
            built["unet"] = loader

        for backend in BACKENDS:
            graph = of_scenario(STACK.but(settings=BACKENDS[backend]), packed)
            yield Case(SD_NAME, f"another pack's weights: {kind}", backend, graph, None, "8 bits")


def of_samplers(samplers: Sequence[str]) -> Iterator[Case]:
    """Yield all samplers of ComfyUI, a few steps each."""
    for sampler in samplers:
        scenario = SD15.but(sampler=sampler, **FEW_STEPS)
        if sampler == "dpm_adaptive":  # it chooses its own steps, and takes 39 of them with guidance
            scenario = scenario.but(cfg=1.0)
        yield from on_both(SD_NAME, f"sampler {sampler}", scenario, None, None, ("onnxruntime",))
    for model, scenario in ((XL_NAME, XL.but(controls=(Control("tiny_sdxl_a", 1, 0.7),))), *FAMILIES.items()):
        for sampler in ("dpmpp_2m", "uni_pc", "euler_ancestral"):
            few = scenario.but(sampler=sampler, steps=4)
            yield from on_both(model, f"sampler {sampler}", few, None, None, ("torch",))


def options(info: Mapping[str, Any], class_type: str, name: str) -> list[str]:
    """Return the choices of a node's input; ``info`` is ComfyUI's object_info."""
    kind, *more = info[class_type]["input"]["required"][name]
    return kind if isinstance(kind, list) else more[0]["options"]


def cases(info: Mapping[str, Any]) -> list[Case]:
    """Return all cases, those of a model side by side; ``info`` is ComfyUI's object_info."""
    found = [*of_models(), *of_graphs(), *of_samplers(options(info, "KSampler", "sampler_name")),
             *of_patches(options(info, "TestModelPatch", "kind")), *of_other_packs()]
    models = list(dict.fromkeys(case.model for case in found))
    return sorted(found, key=lambda case: models.index(case.model))
