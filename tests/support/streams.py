"""Prompts with TRT Stream, and prompts in which ComfyUI's own nodes make the same pictures, frame by frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
from comfy_process import ComfyProcess, History
from scenarios import CONDITIONING, SETTINGS, Prompt, node

CONTROLS = ("tiny_sd15_a", "tiny_sd15_b", "tiny_sd15_control_lora", "tiny_sd15_shuffle")
STRENGTHS = (0.7, 0.4, 0.5, 0.6)
LORA = {"sd15": "tiny_sd15_lora.safetensors", "sdxl": "tiny_sdxl_lora.safetensors"}
NODES = "nodes"
"""In the place of a choice of TRT Stream's: nodes behind TRT Frame make the control images."""


@dataclass(frozen=True)
class Case:
    """Everything that decides the pictures.

    Attributes:
        follow: where the control images come from, as the node has it.
        images: images that each ControlNet gets: one for each frame, or one for all.
        end: the share of steps that ControlNets act on.
        start: the share of steps before that.
        region: ``"area"`` or ``"mask"``: a second positive prompt acts on a part of the picture alone; ``"timesteps"``:
            on a part of the steps; ``"all"``: on all of both.
        tokens: lengths of the positive and the negative prompt.
        lora: ``"before"`` or ``"behind"`` the engine node.
        apply: ``"stock"`` nodes apply the stream's ControlNets, or ``"trt"``: our one.
    """

    frames: int = 3
    width: int = 64
    height: int = 72
    steps: int = 2
    cfg: float = 1.0
    sampler: str = "lcm"
    scheduler: str = "sgm_uniform"
    denoise: float = 0.5
    seed: int = 7
    controls: int = 0
    follow: str = "as connected"
    images: int = 3
    region: str = ""
    family: str = "sd15"
    unet: str = ""
    vae: str = "tiny_kl"
    new_seeds: bool = False
    patch: tuple[str, dict[str, Any]] | None = None
    hooked: bool = False
    start: float = 0.0
    end: float = 0.9
    strengths: tuple[float, ...] = STRENGTHS
    tokens: tuple[int, int] = (77, 77)
    lora: str = ""
    apply: str = "stock"


def loaders(case: Case) -> Prompt:
    """The nodes that both ways have in common: models, prompts, frames and control images."""
    unet = case.unet or f"tiny_{case.family}_unet"
    built = {
        "model": node("UNETLoader", unet_name=f"{unet}.safetensors", weight_dtype="default"),
        "vae": node("VAELoader", vae_name=f"{case.vae}.safetensors"),
        "positive": node("TestConditioning", tokens=case.tokens[0], seed=1, **CONDITIONING[case.family]),
        "negative": node("TestConditioning", tokens=case.tokens[1], seed=2, **CONDITIONING[case.family]),
        "frames": image(case, 5, case.frames),
    }
    for name in controls_of(case):
        built[name] = node("ControlNetLoader", control_net_name=f"{name}.safetensors")
        built[f"image_{name}"] = image(case, 31 + len(built), case.images)
    if case.follow == NODES:
        built["tint"] = image(case, 99, 1)
    if case.patch is not None:
        built["plain_model"] = built["model"]
        built["model"] = node(case.patch[0], model=["plain_model", 0], **case.patch[1])
    if case.lora:
        built["without_lora"] = built["model"]
        built["model"] = with_lora(case, ["without_lora", 0])
    if case.hooked:
        built["plain"] = built["positive"]
        built["hook"] = node("CreateHookLoraModelOnly", lora_name="tiny_sd15_lora.safetensors", strength_model=0.8)
        built["positive"] = node("ConditioningSetProperties", cond_NEW=["plain", 0], strength=1.0, hooks=["hook", 0],
                                 set_cond_area="default")
    if case.region:
        built["plain"] = built["positive"]
        built["part"] = node("TestConditioning", tokens=77, seed=3, **CONDITIONING[case.family])
        size = {"width": 64, "height": 72, "x": 32, "y": 0}
        # as wide as ComfyUI's node lets a part be at least
        built["part_there"] = node("ConditioningSetArea", conditioning=["part", 0], strength=1.0, **size)
        if case.region == "timesteps":
            built["part_there"] = node("ConditioningSetTimestepRange", conditioning=["part", 0], start=0.0, end=0.5)
        if case.region == "all":
            built["part_there"] = built["part"]
        if case.region == "mask":
            built["mask"] = node("SolidMask", value=0.6, width=64, height=64)
            built["part_there"] = node("ConditioningSetMask", conditioning=["part", 0], mask=["mask", 0], strength=0.8,
                                       set_cond_area="default")
        built["positive"] = node("ConditioningCombine", conditioning_1=["plain", 0], conditioning_2=["part_there", 0])
    return built


def with_lora(case: Case, model: list) -> dict[str, Any]:
    return node("LoraLoaderModelOnly", model=model, lora_name=LORA[case.family], strength_model=0.8)


def image(case: Case, seed: int, batch: int) -> dict[str, Any]:
    return node("TestImage", seed=seed, width=case.width, height=case.height, batch=batch, channels=3)


def made_by_nodes(frame: list, place: int, names: Callable[[str], str]) -> tuple[Prompt, list]:
    """Nodes that make a ControlNet's image of a frame: of V1 and of V3, with several inputs, some from elsewhere."""
    if place == 0:
        edges, mixed = names("edges_of_frame"), names("mixed")
        return {edges: node("Canny", image=frame, low_threshold=0.1, high_threshold=0.3),
                mixed: node("ImageBlend", image1=[edges, 0], image2=["tint", 0], blend_factor=0.3,
                            blend_mode="normal")}, [mixed, 0]  # fmt: skip
    smaller, inverted = names("smaller"), names("inverted")
    return {smaller: node("ResizeImageMaskNode", **{"input": frame, "resize_type": "scale by multiplier",
                                                    "resize_type.multiplier": 0.75, "scale_method": "area"}),
            inverted: node("ImageInvert", image=[smaller, 0])}, [inverted, 0]  # fmt: skip


def controls_of(case: Case) -> tuple[str, ...]:
    return tuple(name.replace("sd15", case.family) for name in CONTROLS[: case.controls])


def sampled(case: Case) -> dict[str, Any]:
    return {"steps": case.steps, "cfg": case.cfg, "sampler_name": case.sampler, "scheduler": case.scheduler,
            "denoise": case.denoise}


def stock(case: Case) -> Prompt:
    """A prompt that makes and saves each picture with ComfyUI's own nodes."""
    built = loaders(case)
    for number in range(case.frames):
        built |= stock_frame(case, number)
    return built


def stock_frame(case: Case, number: int) -> Prompt:
    def own(name: str) -> str:
        return f"{name}_of_{number}"

    built = {own("frame"): node("ImageFromBatch", image=["frames", 0], batch_index=number, length=1)}
    positive, negative = ["positive", 0], ["negative", 0]
    if case.follow == "edges of the frame":
        built[own("edges")] = node("Canny", image=[own("frame"), 0], low_threshold=0.4, high_threshold=0.8)
    for place, (name, strength) in enumerate(zip(controls_of(case), case.strengths, strict=False)):
        shown = {"the frame": own("frame"), "edges of the frame": own("edges")}.get(case.follow, own(f"image_{name}"))
        if case.follow == "as connected":
            index = number if case.images > 1 else 0
            built[shown] = node("ImageFromBatch", image=[f"image_{name}", 0], batch_index=index, length=1)
        if case.follow == NODES:
            made, (shown, _) = made_by_nodes([own("frame"), 0], place, own)
            built |= made
        built[own(name)] = node(
            "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=[name, 0], image=[shown, 0],
            strength=strength, start_percent=case.start, end_percent=case.end)
        positive, negative = [own(name), 0], [own(name), 1]
    built[own("latent")] = node("VAEEncode", pixels=[own("frame"), 0], vae=["vae", 0])
    if case.denoise == 1:
        width, height = case.width // 8 * 8, case.height // 8 * 8
        built[own("latent")] = node("EmptyLatentImage", width=width, height=height, batch_size=1)
    seed = case.seed + number if case.new_seeds else case.seed
    built[own("sampler")] = node("KSampler", model=["model", 0], positive=positive, negative=negative,
                                 latent_image=[own("latent"), 0], seed=seed, **sampled(case))
    built[own("picture")] = node("VAEDecode", samples=[own("sampler"), 0], vae=["vae", 0])
    return built | saved([own("picture"), 0], own("save"))


def saved(pictures: list, name: str) -> Prompt:
    return {f"{name}_pixels": node("TestPixels", image=pictures),
            name: node("TestSaveLatent", latent=[f"{name}_pixels", 0], name=name)}


def streamed(case: Case, engines: bool = False, example: list | None = None, **more: Any) -> Prompt:
    """The same pictures by one TRT Stream.

    Args:
        example: TRT Frame's, where the prompt has one.
    """
    built, positive, negative = loaders(case), ["positive", 0], ["negative", 0]
    controls = {name: [name, 0] for name in controls_of(case)}
    model, vae = ["model", 0], ["vae", 0]
    if engines:
        numbered = {f"control_net_{n}": link for n, link in enumerate(controls.values(), start=1)}
        settings = SETTINGS | {"when_missing": "build now"}
        given = ["without_lora", 0] if case.lora == "behind" else model
        built["accelerate"] = node("TRTAccelerate", model=given, vae=vae, **numbered, **settings)
        model, vae = ["accelerate", 0], ["accelerate", 1]
        if case.lora == "behind":
            built["model"], model = with_lora(case, model), ["model", 0]
        controls = {name: ["accelerate", n] for n, name in enumerate(controls, start=2)}
    if case.follow == NODES:
        built["frame"] = node("TRTFrame", **({"example": example} if example else {}))
    rows: dict[str, Any] = {}
    for place, ((name, net), strength) in enumerate(zip(controls.items(), case.strengths, strict=False)):
        shown = [f"image_{name}", 0]
        if case.follow == NODES:
            made, shown = made_by_nodes(["frame", 0], place, str)
            built |= made
        given = {"control_net": net, "image": shown, "strength": strength, "start": case.start, "end": case.end}
        rows |= {f"rows.{key}_{place + 1}": value for key, value in given.items()}
        if case.apply == "trt":
            continue
        built[f"apply_{name}"] = node(
            "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=net,
            image=shown, strength=strength, start_percent=case.start, end_percent=case.end)
        positive, negative = [f"apply_{name}", 0], [f"apply_{name}", 1]
    if case.apply == "trt" and rows:
        built["apply"] = node("TRTApplyControlNet", positive=positive, negative=negative, **rows,
                              rows=str(len(controls)))
        positive, negative = ["apply", 0], ["apply", 1]
    seeds = "a new one for each frame" if case.new_seeds else "the same"
    follow = "as connected" if case.follow == NODES else case.follow
    given = {"similar_frames": 0.0, "seed_each_frame": seeds, "control_images": follow, "seed": case.seed} | more
    built["stream"] = node("TRTStream", model=model, vae=vae, positive=positive, negative=negative,
                           frames=["frames", 0], **sampled(case), **given)
    built["report"] = node("TRTReport", after=["stream", 0])
    return built | saved(["stream", 0], "save")


def pictures_of(history: History, name: str = "save") -> numpy.ndarray:
    assert history.ok, history.error
    return numpy.load(history.output(name, "latent")[0])


def compared(comfy: ComfyProcess, case: Case, **options: Any) -> tuple[float, History]:
    """Return the largest difference of a value between a stream's pictures and stock's, and the stream's history."""
    native = comfy.queue(stock(case), timeout=120)
    wanted = numpy.concatenate([pictures_of(native, f"save_of_{n}") for n in range(case.frames)])
    history = comfy.queue(streamed(case, **options), timeout=300)
    found = pictures_of(history)
    assert found.shape == wanted.shape
    assert all(numpy.abs(one - wanted[0]).max() > 1e-3 for one in wanted[1:]), "pictures of unlike frames are alike"
    return float(numpy.abs(found - wanted).max()), history
