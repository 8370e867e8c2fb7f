"""Workflows of the newer families drawn at random: transformers with references, controls, patches and LoRAs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import random_workflows
from random_workflows import NUDGE, ModelNode


@dataclass(frozen=True)
class Family:
    """Files of a family and what ComfyUI has for it.

    Attributes:
        words: the family's entry in ``CONDITIONING``.
        step: pixels that sides are multiples of.
        methods: ways of references; none where it knows no references.
        patches: kinds of model patches that belong to it.
    """

    files: tuple[str, ...]
    words: str
    vae: str
    loader: str = "UNETLoader"
    lora: str = ""
    step: int = 8
    methods: tuple[str, ...] = ()
    nets: tuple[str, ...] = ()
    net_loader: str = "ControlNetLoader"
    patches: tuple[str, ...] = ()
    nodes: tuple[ModelNode, ...] = ()
    video: bool = False


METHODS = ("", "offset", "index", "uxo/uno", "index_timestep_zero")
FUN = ("fun 1", "fun 2.1", "fun 2.1 inpaint", "fun other")
LLLITE = ("tiny_anima_lllite", "tiny_anima_lllite_other", "tiny_anima_lllite_inpaint")
AURA = ("ModelSamplingAuraFlow", ("model",), (("shift", 3.0),))
SHIFT = ("ModelSamplingSD3", ("model",), (("shift", 5.0),))
FLUX = ("ModelSamplingFlux", ("model",), (("max_shift", 1.15), ("base_shift", 0.5), ("width", 512), ("height", 512)))
LTX = ("ModelSamplingLTXV", ("model",), (("max_shift", 2.05), ("base_shift", 0.95)))
SHIFTS = ("MiniMaxH3SigmaShift", ("model",), (("shift_video", 5.0), ("shift_audio", 2.0)))
WINDOWS = ("WanContextWindowsManual", ("model",), (
    ("context_length", 5), ("context_overlap", 4), ("context_schedule", "standard_static"), ("context_stride", 1),
    ("closed_loop", False), ("fuse_method", "pyramid"), ("freenoise", False), ("retain_first_frame", False),
    ("split_conds_to_windows", False)))  # fmt: skip

FAMILIES: dict[str, Family] = {
    "flux1": Family(
        ("tiny_flux1_unet", "tiny_flux1_unet", "tiny_flux1_schnell_unet", "tiny_flux1_fp8_unet"), "flux1",
        "tiny_flux_kl", lora="tiny_flux1_lora", methods=METHODS, nodes=(FLUX,),
        nets=("tiny_flux1_a", "tiny_flux1_b", "tiny_flux1_union", "tiny_flux1_xlabs", "tiny_flux1_mistoline")),
    "flux2": Family(("tiny_flux2_klein_unet",), "flux1", "tiny_flux2_kl", lora="random_tiny_flux2_klein_unet", step=16,
                    methods=METHODS, nodes=(("FluxKVCache", ("model",), ()),)),
    "zimage": Family(("tiny_zimage", "tiny_zimage", "tiny_zimage_fp8", "tiny_zimage_16"), "zimage", "tiny_flux_kl",
                     lora="tiny_zimage_lora", methods=("",), nodes=(AURA,), patches=FUN),
    "qwen": Family(("tiny_qwen_image",), "qwen", "tiny_qwen_vae", "TestTokenNetwork", "random_tiny_qwen_image",
                   methods=METHODS, nodes=(AURA, ("CFGNorm", ("model",), (("strength", 0.9),))),
                   nets=("tiny_qwen_image_control",), net_loader="TestTokenControl"),
    "krea2": Family(("tiny_krea2",), "krea2", "tiny_qwen_vae", lora="random_tiny_krea2", methods=METHODS,
                    nodes=(AURA,)),
    "anima": Family(("tiny_anima",), "anima", "tiny_qwen_vae", "TestTokenNetwork", "random_tiny_anima",
                    nodes=(SHIFT,), patches=LLLITE),
    "wan": Family(("tiny_wan", "tiny_wan_low_noise", "tiny_wan_i2v", "tiny_wan_flf2v", "tiny_wan22_i2v",
                   "tiny_wan_vace", "tiny_wan_vace", "tiny_wan22_5b"), "wan", "tiny_qwen_vae",
                  lora="random_tiny_wan", step=16, nodes=(SHIFT, WINDOWS), video=True),
    "hunyuan": Family(("tiny_hunyuan_video15", "tiny_hunyuan_video15_sr", "tiny_hunyuan_video"), "hunyuan",
                      "tiny_qwen_vae", lora="random_tiny_hunyuan_video15", step=16, nodes=(SHIFT,), video=True),
    "ltx2": Family(("tiny_ltx2", "tiny_ltx2_interleaved", "tiny_ltx23"), "ltx2", "tiny_qwen_vae",
                   lora="random_tiny_ltx2", step=32, nodes=(LTX,), video=True),
    "minimax_h3": Family(("tiny_minimax_h3", "tiny_minimax_h3_pruned"), "minimax_h3", "tiny_qwen_vae",
                         lora="random_tiny_minimax_h3", step=32, nodes=(SHIFTS,), video=True),
    "qwen_image21": Family(("tiny_qwen_image21", "tiny_qwen_image21_unfused"), "qwen_image21", "tiny_qwen_vae",
                           "TestTokenNetwork", "random_tiny_qwen_image21", step=16, methods=("",), nodes=(AURA,)),
}  # fmt: skip
RELAYS = {"tiny_zimage": "zimage", "tiny_flux1_schnell_unet": "flux1", "tiny_flux1_unet": "flux1"}
"""Models whose latents those with 16 channels can go on with."""
CHANNELS_16 = ("flux1", "zimage", "qwen", "krea2", "anima")
UNUSABLE = random_workflows.UNUSABLE | {
    "SelectModelDevice", "ModelComputeDtype", "TripoSplatSamplingPreview", "FreeU", "FreeU_V2", "ModelNoiseScale",
    "HiDreamO1PatchSeamSmoothing", "HyperTile", "TomePatchModel",
    "PatchModelAddDownscale"}  # fmt: skip
"""Those whose results rounding leads astray, and those that fail with each of these families."""
SLOW_SAMPLERS = {"dpm_adaptive"}
CONDITIONINGS = ("plain", "plain", "plain", "area", "mask", "range", "concat", "average", "zeroed", "hook", "default",
                 "multiply", "three")  # fmt: skip
STYLES = ("one sampler", "one sampler", "two stages", "custom", "basic", "dual", "perp", "two models", "noise mask",
          "twice", "relay")  # fmt: skip


@dataclass(frozen=True)
class Net:
    """One ControlNet of a workflow."""

    file: str
    image: int
    strength: float
    start: float
    end: float
    engine: bool
    type: str


@dataclass(frozen=True)
class Patch:
    """A model patch with a network of its own: Fun control or LLLite."""

    kind: str
    image: int
    strength: float
    start: float
    end: float
    behind: bool


@dataclass(frozen=True)
class Workflow:
    """All that decides a latent, and what of it is given to engines of which backend.

    Attributes:
        words: tokens of the positive prompt that its mask leaves; 0 is no mask.
    """

    family: str
    unet: str
    size: tuple[int, int, int] = (64, 64, 1)
    length: int = 0
    tokens: tuple[int, int, int] = (20, 31, 9)
    words: int = 0
    seed: int = 6
    steps: int = 2
    cfg: float = 3.0
    sampler: str = "euler"
    scheduler: str = "simple"
    denoise: float = 1.0
    picture: bool = False
    before: tuple[ModelNode, ...] = ()
    after: tuple[ModelNode, ...] = ()
    patches: tuple[Patch, ...] = ()
    nets: tuple[Net, ...] = ()
    conditioning: str = "plain"
    negative: str = "plain"
    references: tuple[tuple[int, int], ...] = ()
    negative_references: bool = False
    method: str = ""
    guidance: float | None = None
    style: str = "one sampler"
    relay: str = "tiny_zimage"
    video: tuple[float, ...] = ()
    stack: bool = False
    way: str = "patch"
    backend: str = "torch"
    weights: str = "built in"
    vae_engine: bool = False

    def nudged(self) -> Workflow:
        """Next to nothing changed, which tells how far rounding leads astray here.

        A cfg of 1 too, though the negative prompt is computed then: else nothing might be changed at all.
        """
        return replace(self, cfg=self.cfg * NUDGE,
                       nets=tuple(replace(net, strength=net.strength * NUDGE) for net in self.nets),
                       patches=tuple(replace(patch, strength=patch.strength * NUDGE) for patch in self.patches),
                       guidance=self.guidance and self.guidance * NUDGE)  # fmt: skip


class Draws:
    """Draws workflows; ``info`` is ComfyUI's object_info."""

    def __init__(self, random: Random, info: Mapping[str, Any], families: tuple[str, ...] = tuple(FAMILIES),
                 backends: tuple[str, ...] = ("torch", "torch", "torch", "onnxruntime", "auto")):  # fmt: skip
        self._random, self._info, self._families, self._backends = random, info, families, backends
        # the same draw of values; another choice of nodes
        self._stock = random_workflows.Draws(random, info)
        self._stock._nodes = {name: found for name, found in self._stock._nodes.items()
                              if name not in UNUSABLE and not name.startswith(("Test", "TRT"))}
        choices = info["KSampler"]["input"]["required"]
        self._samplers = [one for one in _options(choices["sampler_name"]) if one not in SLOW_SAMPLERS]
        self._schedulers = _options(choices["scheduler"])

    def workflow(self, family: str | None = None, unet: str | None = None) -> Workflow:
        """Any workflow, or any of a family."""
        r = self._random
        family = family or r.choice(self._families)
        f = FAMILIES[family]
        unet = unet or r.choice(f.files)
        patches = self._patches(f) if r.random() < 0.5 else ()
        if any(one.kind.startswith("fun") for one in patches):
            unet = "tiny_zimage_16"
        nets = tuple(self._net(f) for _ in range(r.choice((0, 0, 1, 1, 2, 3)))) if f.nets else ()
        step = 16 if any("xlabs" in n.file or "mistoline" in n.file for n in nets) else f.step
        sides = [side for side in (64, 64, 72, 80, 96, 104) if side % step == 0]
        return Workflow(
            family=family, unet=unet, size=(r.choice(sides), r.choice(sides), r.choice((1, 1, 2, 3))),
            length=r.choice((1, 5, 5, 9)) if f.video else 0,
            words=r.choice((0, 0, 0, 0, 0, 9, 20, 400)),
            tokens=tuple(r.choice((1, 9, 20, 31, 32, 77, 77, 77, 130)) for _ in range(3)), seed=r.randrange(10**6),
            steps=r.choice((1, 2, 2, 3)), cfg=r.choice((1.0, 1.0, 1.5, 3.0, 5.0)),
            sampler=r.choice(("euler", r.choice(self._samplers))), scheduler=r.choice(("simple", *self._schedulers)),
            denoise=r.choice((1.0, 1.0, 0.6)), picture=r.random() < 0.25,
            before=tuple(self._model_node(f) for _ in range(r.choice((0, 0, 0, 1)))),
            after=tuple(self._model_node(f) for _ in range(r.choice((0, 0, 0, 1, 1, 2)))), patches=patches,
            nets=nets,
            conditioning=r.choice(CONDITIONINGS), negative=r.choice(("plain", "plain", r.choice(CONDITIONINGS))),
            references=tuple((r.choice((64, 96) if family == "zimage" else (64, 72, 96)), r.choice((64, 80)))
                             for _ in range(r.choice((0, 0, 1, 2)) if f.methods else 0)),
            negative_references=r.random() < 0.5, method=r.choice(f.methods or ("",)),
            guidance=r.choice((None, None, 1.0, 3.5, -1.0)), style=r.choice(STYLES), relay=r.choice(sorted(RELAYS)),
            video=tuple(r.choice((0.0, 0.5, 1.0, 1.3)) for _ in range(r.choice((0, 1, 1, 2)))), stack=r.random() < 0.5,
            way=r.choice(("patch", "patch", "patch", "accelerate", "accelerate", "none")),
            backend=r.choice(self._backends),
            weights=r.choice(("built in", "built in", "replaceable")), vae_engine=r.random() < 0.15,
        )  # fmt: skip

    def but_two_things(self, workflow: Workflow) -> Workflow:
        """The same with two things from another: what one run leaves behind meets the next."""
        other = self.workflow(workflow.family, None if self._random.random() < 0.2 else workflow.unet)
        names = [f.name for f in fields(Workflow) if f.name not in ("family", "unet")]
        changed = replace(workflow, **{name: getattr(other, name) for name in self._random.sample(names, 2)})
        fun = any(one.kind.startswith("fun") for one in changed.patches)
        return replace(changed, unet="tiny_zimage_16" if fun else other.unet)

    def _net(self, f: Family) -> Net:
        r = self._random
        start, end = sorted((r.choice((0.0, 0.0, 0.0, 0.3, 0.5)), r.choice((1.0, 1.0, 1.0, 0.5, 0.75))))
        types = _options(self._info["SetUnionControlNetType"]["input"]["required"]["type"])
        return Net(r.choice(f.nets), r.randrange(1, 4), r.choice((0.0, 0.3, 0.7, 1.0, 1.4)), start, end,
                   r.random() < 0.8, r.choice(("", *types)))  # fmt: skip

    def _patches(self, f: Family) -> tuple[Patch, ...]:
        r = self._random
        if not f.patches:
            return ()
        return tuple(
            Patch(r.choice(f.patches), r.randrange(1, 4), r.choice((0.0, 0.5, 1.0, 1.0, -1.0)),
                  r.choice((0.0, 0.0, 0.4)), r.choice((1.0, 1.0, 0.6)), r.random() < 0.15)
            for _ in range(r.choice((1, 1, 1, 2)))
        )  # fmt: skip

    def _model_node(self, f: Family) -> ModelNode:
        r = self._random
        if r.random() < 0.35 and f.lora:
            kind = r.choice(("LoraLoaderModelOnly", "LoraLoaderModelOnly", "LoraLoaderBypassModelOnly"))
            return kind, ("model",), (("lora_name", f"{f.lora}.safetensors"),
                                      ("strength_model", r.choice((0.5, 0.8, 1.0, -0.4))))  # fmt: skip
        if r.random() < 0.3:
            return r.choice(f.nodes)
        name, models, inputs = self._stock._model_node()
        return model_node(f, name, models, dict(inputs))


def model_node(f: Family, name: str, models: Sequence[str], inputs: Mapping[str, Any]) -> ModelNode:
    """A stock node with the family's own LoRA where it takes one."""
    own = {key: f"{f.lora}.safetensors" if key == "lora_name" else value for key, value in inputs.items()}
    return name, tuple(models), tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in own.items())


def plain(family: str) -> Workflow:
    """Text alone to a small picture, or to a short video, on live weights."""
    f = FAMILIES[family]
    return Workflow(family, f.files[0], length=5 if f.video else 0)


def _options(spec: list[Any]) -> list[str]:
    return list(spec[0] if isinstance(spec[0], list) else spec[1]["options"])


def make_loras(models: Path) -> None:
    """Write a LoRA for each family that no recipe has one for: rank 4, on most of its layers."""
    import torch
    from safetensors.torch import load_file, save_file

    for f in FAMILIES.values():
        path = models / "loras" / f"{f.lora}.safetensors"
        if path.exists() or not f.lora.startswith("random_"):
            continue
        generator, found = torch.Generator().manual_seed(4), {}
        weights = load_file(models / "diffusion_models" / f"{f.lora.removeprefix('random_')}.safetensors")
        for name, weight in weights.items():
            if weight.ndim == 2 and min(weight.shape) >= 16 and name.endswith(".weight"):
                rows, columns = weight.shape
                stem, scale = f"diffusion_model.{name.removesuffix('.weight')}", 0.5 * columns**-0.5
                found[f"{stem}.lora_A.weight"] = scale * torch.randn(4, columns, generator=generator)
                found[f"{stem}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        save_file(found, temporary)
        temporary.replace(path)
