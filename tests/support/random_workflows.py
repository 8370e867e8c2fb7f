"""Workflows of stock nodes drawn at random, natively or through engines: what nobody thought of putting together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from model_nodes import model_nodes
from scenarios import CONDITIONING, SETTINGS, Link, Prompt, node

UNUSABLE = {"TorchCompileModel", "MultiGPU_WorkUnits"}
"""Minutes to compile, and a number of GPUs."""
CONDITIONINGS = ("plain", "plain", "area", "mask", "range", "concat", "average", "zeroed", "hook")
STYLES = ("one sampler", "one sampler", "two stages", "custom", "noise mask", "twice")
SAMPLERS = ("euler", "euler_ancestral", "heun", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_sde", "lcm", "uni_pc", "ddim",
            "euler_cfg_pp", "dpm_fast", "res_multistep")  # fmt: skip
SCHEDULERS = ("normal", "karras", "simple", "sgm_uniform", "ddim_uniform", "beta")
OTHER_NETS = ("tiny_sd15_t2i", "tiny_sd15_shuffle", "tiny_sd15_control_lora")
TYPES = ("auto", "openpose", "depth", "canny/lineart/anime_lineart/mlsd")
NUDGE = 1.000003

ModelNode = tuple[str, tuple[str, ...], tuple[tuple[str, Any], ...]]
"""Class, names of its model inputs, its other inputs."""


@dataclass(frozen=True)
class Net:
    """One ControlNet; ``union`` gives it the parts of a union ControlNet and a type."""

    file: str
    image: int
    strength: float
    start: float
    end: float
    engine: bool
    union: bool


@dataclass(frozen=True)
class Workflow:
    """All that decides a latent, and which of its networks are given to engines of which backend."""

    family: str
    unet: str
    size: tuple[int, int, int]
    tokens: tuple[int, int]
    seed: int
    steps: int
    cfg: float
    sampler: str
    scheduler: str
    denoise: float
    before: tuple[ModelNode, ...]
    after: tuple[ModelNode, ...]
    nets: tuple[Net, ...]
    conditioning: str
    style: str
    stack: bool
    unet_engine: bool
    backend: str

    def nudged(self) -> Workflow:
        """Next to nothing changed, which tells how far rounding leads astray here."""
        nets = tuple(replace(net, strength=net.strength * NUDGE) for net in self.nets)
        return replace(self, nets=nets, cfg=self.cfg if self.cfg == 1.0 else self.cfg * NUDGE)


class Draws:
    """Draws workflows; ``info`` is ComfyUI's object_info."""

    def __init__(self, random: Random, info: Mapping[str, Any]):
        self._random, self._info = random, info
        self._nodes = {name: found for name, found in model_nodes(info).items() if name not in UNUSABLE}

    def workflow(self) -> Workflow:
        """Any workflow."""
        r = self._random
        family = r.choices(("sd15", "sdxl"), (4, 1))[0]
        return Workflow(
            family=family, unet=f"tiny_{family}_unet",
            size=(r.choice((64, 72, 128, 128, 136, 192)), r.choice((64, 96, 128, 128, 200)), r.choice((1, 1, 2, 3))),
            tokens=(r.choice((77, 77, 154, 231)), r.choice((77, 77, 154))), seed=r.randrange(10**6),
            steps=r.choice((1, 2, 3, 4)), cfg=r.choice((1.0, 3.0, 5.0, 7.5)), sampler=r.choice(SAMPLERS),
            scheduler=r.choice(SCHEDULERS), denoise=r.choice((1.0, 1.0, 0.6)),
            before=tuple(self._model_node() for _ in range(r.choice((0, 0, 0, 1)))),
            after=tuple(self._model_node() for _ in range(r.choice((0, 0, 1, 1, 2, 3)))),
            nets=tuple(self._net(family) for _ in range(r.choice((0, 1, 1, 2, 2, 3)))),
            conditioning=r.choice(CONDITIONINGS), style=r.choice(STYLES), stack=r.random() < 0.5,
            unet_engine=r.random() < 0.85, backend=r.choice(("onnxruntime", "torch", "torch", "auto")),
        )  # fmt: skip

    def but_one_thing(self, workflow: Workflow) -> Workflow:
        """The same with one thing from another: what one run leaves behind meets the next."""
        if self._random.random() < 0.2 and workflow.family == "sd15":
            return replace(workflow, unet=self._random.choice(("tiny_sd15_unet", "tiny_sd15_other_unet")))
        other = self.workflow()
        names = [f.name for f in fields(Workflow) if f.name not in ("family", "unet")]
        name = self._random.choice([n for n in names if n != "nets" or other.family == workflow.family])
        return replace(workflow, **{name: getattr(other, name)})

    def _net(self, family: str) -> Net:
        r = self._random
        file = r.choice((f"tiny_{family}_a", f"tiny_{family}_b"))
        if family == "sd15" and r.random() < 0.25:
            file = r.choice(OTHER_NETS)
        start, end = sorted((r.choice((0.0, 0.0, 0.0, 0.3, 0.5)), r.choice((1.0, 1.0, 1.0, 0.5, 0.75))))
        union = family == "sd15" and file not in OTHER_NETS and r.random() < 0.15
        return Net(file, r.randrange(1, 4), r.choice((0.0, 0.3, 0.7, 1.0, 1.4)), start, end, r.random() < 0.85, union)

    def _model_node(self) -> ModelNode:
        name = self._random.choice(sorted(self._nodes))
        models, inputs = self._nodes[name]
        specs = self._info[name]["input"].get("required", {})
        drawn = {key: self._value(specs[key], value) if key in specs else value for key, value in inputs.items()}
        if "lora_name" in drawn:
            drawn["lora_name"] = "tiny_sd15_lora.safetensors"
        return name, tuple(models), tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in drawn.items())

    def _value(self, spec: Sequence[Any], value: Any) -> Any:
        """A value in the place of one of a node's own, often the same; links stay."""
        kind, options = spec[0], spec[1] if len(spec) > 1 else {}
        if isinstance(value, list) or self._random.random() < 0.5:
            return value
        choices = kind if isinstance(kind, list) else options.get("options") if kind == "COMBO" else None
        if choices:
            return self._random.choice(choices)
        if kind == "BOOLEAN":
            return self._random.random() < 0.5
        if kind not in ("FLOAT", "INT"):
            return value
        drawn = self._random.choice((value * 0.5, value * 1.5, value + 0.3) if kind == "FLOAT" else
                                    (value + 1, value - 1, value * 2))  # fmt: skip
        return max(options.get("min", drawn), min(options.get("max", drawn), drawn))


def prompt_of(workflow: Workflow, engines: bool, name: str, when_missing: str = "use native") -> Prompt:
    """The workflow as a prompt that saves its latent under ``name``."""
    w = workflow
    width, height, batch = w.size
    settings = {**SETTINGS, "backend": w.backend, "when_missing": when_missing}
    built: Prompt = {
        "unet": node("UNETLoader", unet_name=f"{w.unet}.safetensors", weight_dtype="default"),
        "other": node("UNETLoader", unet_name="tiny_sd15_other_unet.safetensors", weight_dtype="default"),
        "operation": node("LatentOperationTonemapReinhard", multiplier=0.5),
        "latent": node("EmptyLatentImage", width=width, height=height, batch_size=batch),
        "save": node("TestSaveLatent", latent=["sampler", 0], name=name),
        **{name: node("TestConditioning", tokens=tokens, seed=seed, **CONDITIONING[w.family])
           for name, tokens, seed in (("positive", w.tokens[0], 1), ("negative", w.tokens[1], 2), ("part", 77, 3))},
    }  # fmt: skip
    model = _through(built, w.before, ["unet", 0], "before")
    if engines and w.unet_engine:
        built["unet_engine"] = node("TRTUNetEngine", model=model, **settings)
        built["patch"] = node("TRTSamplerPatch", model=model, engine=["unet_engine", 0])
        model = ["patch", 0]
    model = _through(built, w.after, model, "after")
    positive, negative = _controlled(built, w, *_conditionings(built, w), settings if engines else None)
    _sampler(built, w, model, positive, negative)
    if engines:
        built["report"] = node("TRTReport", after=["sampler", 0])
    return built


def _through(built: Prompt, nodes: Sequence[ModelNode], model: Link, name: str) -> Link:
    for number, (class_type, models, inputs) in enumerate(nodes):
        own = {key: list(value) if isinstance(value, tuple) else value for key, value in inputs}
        own |= dict(zip(models, [model, ["other", 0]], strict=False))
        built[f"{name}_{number}"] = node(class_type, **own)
        model = [f"{name}_{number}", 0]
    return model


def _conditionings(built: Prompt, w: Workflow) -> tuple[Link, Link]:
    positive, negative, part = ["positive", 0], ["negative", 0], ["part", 0]
    width, height, _ = w.size
    if w.conditioning == "zeroed":
        built["zeroed"] = node("ConditioningZeroOut", conditioning=negative)
        return positive, ["zeroed", 0]
    if w.conditioning == "hook" and w.family == "sd15":
        built["hook"] = node("CreateHookLoraModelOnly", lora_name="tiny_sd15_lora.safetensors", strength_model=0.9)
        built["hooked"] = node("ConditioningSetProperties", cond_NEW=positive, strength=1.0,
                               set_cond_area="default", hooks=["hook", 0])  # fmt: skip
        return ["hooked", 0], negative
    if w.conditioning == "concat":
        built["both"] = node("ConditioningConcat", conditioning_to=positive, conditioning_from=part)
    elif w.conditioning == "average":
        built["both"] = node("ConditioningAverage", conditioning_to=positive, conditioning_from=part,
                             conditioning_to_strength=0.4)  # fmt: skip
    elif w.conditioning in ("area", "mask", "range"):
        whole = positive
        if w.conditioning == "area":
            built["own"] = node("ConditioningSetArea", conditioning=part, width=64, height=64, x=0, y=0, strength=0.8)
        elif w.conditioning == "mask":
            built["mask"] = node("SolidMask", value=0.6, width=width, height=height)
            built["own"] = node("ConditioningSetMask", conditioning=part, mask=["mask", 0], strength=0.7,
                                set_cond_area="default")  # fmt: skip
        else:
            built["own"] = node("ConditioningSetTimestepRange", conditioning=part, start=0.0, end=0.5)
            built["rest"] = node("ConditioningSetTimestepRange", conditioning=positive, start=0.5, end=1.0)
            whole = ["rest", 0]
        built["both"] = node("ConditioningCombine", conditioning_1=whole, conditioning_2=["own", 0])
    return (["both", 0] if "both" in built else positive), negative


def _controlled(
    built: Prompt, w: Workflow, positive: Link, negative: Link, settings: dict[str, Any] | None
) -> tuple[Link, Link]:
    """The conditionings with the workflow's ControlNets, on engines where there are ``settings`` for them."""
    width, height, _ = w.size
    rows: dict[str, Any] = {}
    for i, n in enumerate(w.nets, start=1):
        built[f"load_{n.file}"] = node("ControlNetLoader", control_net_name=f"{n.file}.safetensors")
        built[f"image_{n.image}"] = node("TestImage", seed=n.image, width=width, height=height, batch=1, channels=3)
        net, image = [f"load_{n.file}", 0], [f"image_{n.image}", 0]
        if n.union:
            built[f"union_{i}"] = node("TestUnionControlNet", control_net=net, types=8)
            net = [f"union_{i}", 0]
        if settings is not None and n.engine:
            built[f"engine_{i}"] = node("TRTControlNetEngine", control_net=net, **settings)
            net = [f"engine_{i}", 0]
        if n.union:
            built[f"type_{i}"] = node("SetUnionControlNetType", control_net=net, type=TYPES[n.image])
            net = [f"type_{i}", 0]
        if settings is not None and w.stack:
            rows |= {f"rows.control_net_{i}": net, f"rows.image_{i}": image, f"rows.strength_{i}": n.strength,
                     f"rows.start_{i}": n.start, f"rows.end_{i}": n.end}  # fmt: skip
            continue
        built[f"apply_{i}"] = node("ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=net,
                                   image=image, strength=n.strength, start_percent=n.start, end_percent=n.end)
        positive, negative = [f"apply_{i}", 0], [f"apply_{i}", 1]
    if rows:
        built["apply"] = node("TRTApplyControlNet", positive=positive, negative=negative, rows=str(len(w.nets)), **rows)
        return ["apply", 0], ["apply", 1]
    return positive, negative


def _sampler(built: Prompt, w: Workflow, model: Link, positive: Link, negative: Link) -> None:
    common = {"model": model, "positive": positive, "negative": negative, "steps": w.steps, "cfg": w.cfg,
              "sampler_name": w.sampler, "scheduler": w.scheduler}  # fmt: skip
    latent, half = ["latent", 0], max(1, w.steps // 2)
    if w.style == "custom":
        built["noise"] = node("RandomNoise", noise_seed=w.seed)
        built["guider"] = node("CFGGuider", model=model, positive=positive, negative=negative, cfg=w.cfg)
        built["select"] = node("KSamplerSelect", sampler_name=w.sampler)
        built["sigmas"] = node("BasicScheduler", model=model, scheduler=w.scheduler, steps=w.steps, denoise=w.denoise)
        built["sampler"] = node("SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0],
                                sampler=["select", 0], sigmas=["sigmas", 0], latent_image=latent)  # fmt: skip
    elif w.style == "two stages":
        built["first"] = node("KSamplerAdvanced", **common, noise_seed=w.seed, add_noise="enable", latent_image=latent,
                              start_at_step=0, end_at_step=half, return_with_leftover_noise="enable")  # fmt: skip
        built["sampler"] = node("KSamplerAdvanced", **common, noise_seed=w.seed, add_noise="disable",
                                latent_image=["first", 0], start_at_step=half, end_at_step=10000,
                                return_with_leftover_noise="disable")  # fmt: skip
    elif w.style == "twice":
        built["first"] = node("KSampler", **common, seed=w.seed, latent_image=latent, denoise=w.denoise)
        built["larger"] = node("LatentUpscaleBy", samples=["first", 0], upscale_method="nearest-exact", scale_by=1.5)
        built["sampler"] = node("KSampler", **common, seed=w.seed, latent_image=["larger", 0], denoise=0.5)
    else:
        if w.style == "noise mask":
            built["where"] = node("SolidMask", value=0.5, width=w.size[0], height=w.size[1])
            built["masked"] = node("SetLatentNoiseMask", samples=latent, mask=["where", 0])
            latent = ["masked", 0]
        built["sampler"] = node("KSampler", **common, seed=w.seed, latent_image=latent, denoise=w.denoise)
