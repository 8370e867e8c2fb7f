"""API prompts for the tests: one scenario, sampled natively by stock nodes or through engines, to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
from comfy_process import ComfyProcess, History

Prompt = dict[str, dict[str, Any]]
Link = list[Any]

CONDITIONING = {"sd15": {"width": 768, "pooled": 0}, "sdxl": {"width": 2048, "pooled": 1280},
                "zimage": {"width": 64, "pooled": 0}, "flux1": {"width": 64, "pooled": 32},
                "qwen": {"width": 48, "pooled": 0},
                "qwen_image21": {"width": 48, "pooled": 0}, "krea2": {"width": 240, "pooled": 0},
                "wan": {"width": 4096, "pooled": 0}, "anima": {"width": 1024, "pooled": 0},
                "hunyuan": {"width": 64, "pooled": 768}, "minimax_h3": {"width": 64, "pooled": 0},
                "ltx2": {"width": 96, "pooled": 0}}
SETTINGS = {
    "when_missing": "use native",
    "min_size": 64,
    "opt_size": 128,
    "max_size": 512,
    "max_images": 4,
    "max_tokens": 616,
    "precision": "auto",
    "backend": "auto",
}


@dataclass(frozen=True)
class Control:
    """One ControlNet of a scenario; ``image`` is a seed of TestImage, ``engine`` whether an engine backs it.

    ``before`` and ``after`` are nodes in front of its engine node and behind it: (class, inputs without the net).
    """

    file: str = "tiny_sd15_a"
    image: int = 1
    strength: float = 1.0
    start: float = 0.0
    end: float = 1.0
    engine: bool = True
    before: Sequence[tuple[str, dict[str, Any]]] = ()
    after: Sequence[tuple[str, dict[str, Any]]] = ()


A = Control("tiny_sd15_a", 1, 0.7)
B = Control("tiny_sd15_b", 2, 0.4)


@dataclass(frozen=True)
class Scenario:
    """Everything that decides a latent.

    Attributes:
        tokens: prompt lengths of positive and negative.
        length: frames of a video; 0 for a picture.
        loader: class of the node that loads the model.
        area: whether a second positive prompt acts on a part of the picture only.
        patches: model nodes after the sampler patch: (class, inputs without the model).
        loras_before: the same, before the engine node.
        apply: ``"trt"`` for our stacking node, ``"stock"`` for a chain of ComfyUI's own.
        image_options: inputs of TestImage other than seed and size.
        vae: the file of the VAE that ControlNets get, if they take one.
        parts: more nodes, that others name in their inputs.
    """

    family: str = "sd15"
    unet: str | None = None
    loader: str = "UNETLoader"
    controls: Sequence[Control] = (A, B)
    unet_engine: bool = True
    width: int = 128
    height: int = 128
    batch: int = 1
    length: int = 0
    tokens: tuple[int, int] = (77, 77)
    area: bool = False
    steps: int = 4
    cfg: float = 5.0
    sampler: str = "euler"
    seed: int = 7
    patches: Sequence[tuple[str, dict[str, Any]]] = ()
    loras_before: Sequence[tuple[str, dict[str, Any]]] = ()
    apply: str = "trt"
    settings: dict[str, Any] = field(default_factory=dict)
    image_options: dict[str, Any] = field(default_factory=dict)
    vae: str | None = None
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def but(self, **changes: Any) -> Scenario:
        """This scenario with some things changed."""
        return replace(self, **changes)


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node of an API-format prompt; a link is [node id, output index]."""
    return {"class_type": class_type, "inputs": inputs}


FUN = ("ZImageFunControlnet", {"model_patch": ["fun", 0], "vae": ["fun_vae", 0], "image": ["fun_image", 0],
                               "strength": 0.7})  # fmt: skip
FUN_PARTS = {
    "fun": node("TestFunPatch", version="2.1"), "fun_vae": node("VAELoader", vae_name="tiny_flux_kl.safetensors"),
    "fun_image": node("TestImage", seed=3, width=72, height=64, batch=1, channels=3),
}
"""A Fun control of Z-Image as a node before the engine node, and the parts that it takes."""


def prompt(scenario: Scenario, engines: bool, name: str) -> Prompt:
    """The scenario as a prompt that saves its latent under ``name``.

    Args:
        engines: with TRT nodes and a report; otherwise not one node of ours is in it.
    """
    s = scenario
    unet = f"{s.unet or f'tiny_{s.family}_unet'}.safetensors"
    built: Prompt = {
        "unet": node(s.loader, unet_name=unet, weight_dtype="default"),
        "positive": node("TestConditioning", tokens=s.tokens[0], seed=1, **CONDITIONING[s.family]),
        "negative": node("TestConditioning", tokens=s.tokens[1], seed=2, **CONDITIONING[s.family]),
        "latent": _latent(s),
        "save": node("TestSaveLatent", latent=["sampler", 0], name=name),
        **s.parts,
    }
    model = _models(built, s, engines)
    positive, negative = _conditioning(built, s, engines)
    built["sampler"] = node(
        "KSampler", model=model, positive=positive, negative=negative, latent_image=["latent", 0], seed=s.seed,
        steps=s.steps, cfg=s.cfg, sampler_name=s.sampler, scheduler="normal", denoise=1.0,
    )
    if engines:
        built["report"] = node("TRTReport", after=["sampler", 0])
    return built


def _latent(s: Scenario) -> dict[str, Any]:
    sizes = {"width": s.width, "height": s.height, "batch_size": s.batch}
    if s.family == "minimax_h3":  # with its sound
        return node("EmptyMiniMaxH3LatentAV", width=s.width, height=s.height, length=s.length)
    if s.family == "ltx2":
        return node("TestVideoWithSound", width=s.width, height=s.height, length=s.length, batch=s.batch)
    return node("EmptyHunyuanLatentVideo", **sizes, length=s.length) if s.length else node("EmptyLatentImage", **sizes)


def _models(built: Prompt, s: Scenario, engines: bool) -> Link:
    model = ["unet", 0]
    for i, (class_type, inputs) in enumerate(s.loras_before):
        built[f"before_{i}"] = node(class_type, model=model, **inputs)
        model = [f"before_{i}", 0]
    if engines and s.unet_engine:
        built["unet_engine"] = node("TRTUNetEngine", model=model, **{**SETTINGS, **s.settings})
        built["patch"] = node("TRTSamplerPatch", model=model, engine=["unet_engine", 0])
        model = ["patch", 0]
    for i, (class_type, inputs) in enumerate(s.patches):
        built[f"after_{i}"] = node(class_type, model=model, **inputs)
        model = [f"after_{i}", 0]
    return model


def _conditioning(built: Prompt, s: Scenario, engines: bool) -> tuple[Link, Link]:
    positive, negative = ["positive", 0], ["negative", 0]
    if s.area:
        built["part"] = node("TestConditioning", tokens=77, seed=3, **CONDITIONING[s.family])
        built["area"] = node(
            "ConditioningSetArea", conditioning=["part", 0], width=64, height=128, x=64, y=0, strength=1.0
        )
        built["combine"] = node("ConditioningCombine", conditioning_1=positive, conditioning_2=["area", 0])
        positive = ["combine", 0]
    links = [_control(built, s, c, i, engines) for i, c in enumerate(s.controls, start=1)]
    vae: dict[str, Any] = {}
    if s.vae is not None and s.controls:
        built["vae"] = node("VAELoader", vae_name=f"{s.vae}.safetensors")
        vae = {"vae": ["vae", 0]}
    if engines and s.apply == "trt" and s.controls:
        rows: dict[str, Any] = {"rows": str(len(s.controls)), **vae}
        for i, (control, net, image) in enumerate(links, start=1):
            rows |= {f"rows.control_net_{i}": net, f"rows.image_{i}": image, f"rows.strength_{i}": control.strength,
                     f"rows.start_{i}": control.start, f"rows.end_{i}": control.end}
        built["apply"] = node("TRTApplyControlNet", positive=positive, negative=negative, **rows)
        return ["apply", 0], ["apply", 1]
    for i, (control, net, image) in enumerate(links, start=1):
        built[f"apply_{i}"] = node(
            "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=net, image=image,
            strength=control.strength, start_percent=control.start, end_percent=control.end, **vae,
        )
        positive, negative = [f"apply_{i}", 0], [f"apply_{i}", 1]
    return positive, negative


def _control(built: Prompt, s: Scenario, control: Control, i: int, engines: bool) -> tuple[Control, Link, Link]:
    loader, image = f"load_{control.file}", f"image_{control.image}"
    options = {"width": s.width, "height": s.height, "batch": 1, "channels": 3} | s.image_options
    built[loader] = node("ControlNetLoader", control_net_name=f"{control.file}.safetensors")
    built[image] = node("TestImage", seed=control.image, **options)
    net = _through(built, control.before, [loader, 0], f"before_{i}_{control.file}")
    if engines and control.engine:
        engine = f"engine_{control.file}" if not control.before else f"engine_{i}_{control.file}"
        built[engine] = node("TRTControlNetEngine", control_net=net, **{**SETTINGS, **s.settings})
        net = [engine, 0]
    return control, _through(built, control.after, net, f"after_{i}_{control.file}"), [image, 0]


def _through(built: Prompt, nodes: Sequence[tuple[str, dict[str, Any]]], net: Link, name: str) -> Link:
    """A ControlNet behind a row of nodes that take and give one."""
    for number, (class_type, inputs) in enumerate(nodes):
        built[f"{name}_{number}"] = node(class_type, control_net=net, **inputs)
        net = [f"{name}_{number}", 0]
    return net


def latent_of(history: History) -> numpy.ndarray:
    """The latent that TestSaveLatent wrote."""
    path, shape = history.output("save", "latent")
    latent = numpy.load(path)
    assert list(latent.shape) == shape
    assert numpy.isfinite(latent).all()
    return latent


def relative_difference(value: numpy.ndarray, reference: numpy.ndarray) -> float:
    """Return how far ``value`` is from ``reference``, as a share of the reference's size."""
    return float(numpy.linalg.norm(value - reference) / numpy.linalg.norm(reference))


@dataclass(frozen=True)
class Comparison:
    """One scenario sampled both ways.

    Attributes:
        error: relative difference of the engine run's latent to native's.
        report: TRT Report's counts.
        history: of the engine run.
    """

    error: float
    report: dict[str, Any]
    history: History

    @property
    def unet(self) -> dict[str, Any]:
        return self.report["unet"]

    @property
    def controlnets(self) -> dict[str, dict[str, Any]]:
        """The ControlNets' rows by the stem of their file."""
        return {row["name"].removesuffix(".safetensors"): row for row in self.report["controlnets"]}

    def all_on_engines(self) -> bool:
        """Return whether something was called and nothing ran native."""
        rows = self.report["rows"]
        return bool(rows) and all(row["engine"] > 0 and row["native"] == 0 for row in rows)


_native_latents: dict[str, numpy.ndarray] = {}


def native_latent(comfy: ComfyProcess, scenario: Scenario) -> numpy.ndarray:
    """The scenario's latent from stock nodes alone; sampled once per session."""
    controls = tuple(replace(c, engine=False) for c in scenario.controls)
    key = repr(scenario.but(settings={}, apply="stock", unet_engine=False, controls=controls))
    if key not in _native_latents:
        _native_latents[key] = latent_of(comfy.queue(prompt(scenario, engines=False, name="native")))
    return _native_latents[key]


def compare(comfy: ComfyProcess, scenario: Scenario) -> Comparison:
    """Sample a scenario natively and through engines."""
    reference = native_latent(comfy, scenario)
    history = comfy.queue(prompt(scenario, engines=True, name="engine"))
    latent = latent_of(history)
    assert latent.shape == reference.shape
    return Comparison(relative_difference(latent, reference), history.output("report", "report")[0], history)


def control_effect(comfy: ComfyProcess, scenario: Scenario, without: int | None = None) -> float:
    """Return how much the native latent changes when one ControlNet (by index), or all of them, are taken away."""
    kept = [] if without is None else [c for i, c in enumerate(scenario.controls) if i != without]
    return relative_difference(native_latent(comfy, scenario.but(controls=kept)), native_latent(comfy, scenario))
