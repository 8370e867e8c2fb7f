"""Model patches with a network that engines compute too: what ``test_absorbed_patches.py`` needs of each kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.sd
import fun
import lllite
import torch
from comfy.ldm.anima.lllite import (
    AnimaLLLite,
    AnimaLLLiteAttentionPatch,
    AnimaLLLiteConditioning,
    AnimaLLLiteMLPPatch,
    AnimaLLLiteModule,
    AnimaLLLitePatch,
)
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_model_patch import ZImageControlPatch
from family_contract import LIMIT, Call, Change, Family, Models, Prompt, live, lora_of, model_patch, natively, on_engine
from fun import TWO_ONE
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions.session import Session
from model_families import anima, zimage
from token_calls import Patched


@dataclass(frozen=True)
class AbsorbedPatch:
    """A kind of model patch, and the family that it is for.

    Attributes:
        name: of the architecture of both networks; ``base`` is that of the model alone.
        model: makes a model, with weights of a type.
        patch: makes the network of a file of the patch, or that of another file.
        behind: gives the model behind ComfyUI's node for the patch; takes a control image, a strength and more.
        calls: that the family's engines serve.
        prompts: of the family, each with its calls of the network.
        prompt: that the other tests sample.
        passes: what a run computes once: prompts and the control image.
        node: ComfyUI's node for the patch, as the page sends it.
        place: words of the reason that names the patch.
        beside: puts another patch into a model.
        altered: has the patch at the engine act on other layers; None where it has no choice.
        called: the patch in reasons.
        code: classes and their methods that another pack may replace.
        unserved: patches that no engine computes, as models behind them.
        inpainting: models behind patches that inpaint; the first five of them act differently.
    """

    name: str
    base: str
    family: Family
    model: Callable[..., ModelPatcher]
    patch: Callable[[Models, bool], ModelPatcher]
    behind: Callable[..., ModelPatcher]
    calls: tuple[Call, ...]
    prompts: tuple[str, ...]
    prompt: Prompt
    passes: int
    node: dict[str, Any]
    place: str
    beside: Change
    altered: Change | None
    called: str
    code: tuple[tuple[type, str], ...]
    unserved: Callable[[Models, ModelPatcher], list[ModelPatcher]]
    inpainting: Callable[[Models, ModelPatcher], list[ModelPatcher]]

    def __str__(self) -> str:
        return self.name

    def network(self, model: ModelPatcher) -> NativeNetwork:
        """The network that an engine node behind a model sees."""
        return NativeNetwork.of_model(model, self.base)

    def patched(self, model: ModelPatcher, folder: Path, backend: str = "torch", any_weights: bool = False) -> Patched:
        """A model with its engine behind the sampler patch."""
        return Patched(self.network(model), folder, backend, any_weights)

    def results(self, model: ModelPatcher, call: dict[str, Any], session: Session | None = None) -> tuple[Any, ...]:
        """A call's results: the engine's, native's, and native's without the patch."""
        net, given = self.network(model), {**call, "transformer_options": model.model_options["transformer_options"]}
        session = session or live(net, net.precision)
        return on_engine(net, session, given), natively(net.parts[0], given), natively(net.parts[0], call)

    def served(self, native: ModelPatcher, folder: Path, *backend: Any) -> torch.Tensor:
        """Native's latent, which the engine has to give too."""
        engine, expected = self.patched(native, folder, *backend), self.prompt.sample(native)
        assert relative_error(self.prompt.sample(engine.model), expected) <= LIMIT
        assert engine.counts == (self.prompt.calls, 0), engine.handle.stats.reasons
        return expected

    def with_lora(self, model: ModelPatcher, strength: float) -> ModelPatcher:
        """A model behind a LoRA."""
        (layers, *_) = self.family.loras.values()
        lora = lora_of(self.network(model).parts[0], layers)
        return comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]


def all_differ(latents: list[torch.Tensor]) -> None:
    assert all(relative_error(a, b) > 100 * LIMIT for a, b in itertools.combinations(latents, 2))


def places_of(model: ModelPatcher) -> dict[str, list]:
    return model.model_options["transformer_options"]["patches"]


def of_another_class(model: ModelPatcher, place: str) -> ModelPatcher:
    """Have a patch be of another pack's class, which inherits from ComfyUI's."""
    (patch,) = places_of(model)[place]
    patch.__class__ = type("Other", (type(patch),), {})
    return model


def elsewhere(patch: ModelPatcher) -> ModelPatcher:
    patch.load_device = torch.device("cpu", 1)
    return patch


def unserved_funs(_models: Models, model: ModelPatcher) -> list[ModelPatcher]:
    too_many = fun.control(n_control_layers=3, refiner_control=True, additional_in_dim=17)
    inherited = of_another_class(fun.with_fun(model, fun.control(**TWO_ONE)), "double_block")
    return [inherited, *(fun.with_fun(model, one) for one in (
        too_many, fun.control(n_control_layers=1), elsewhere(fun.control(**TWO_ONE))))]  # fmt: skip


def unserved_lllites(models: Models, model: ModelPatcher) -> list[ModelPatcher]:
    wide = lllite.load(models)
    wide.model.model_dim = 512
    inherited = of_another_class(lllite.behind(model, lllite.load(models)), "mlp_patch")
    return [inherited, *(lllite.behind(model, one) for one in (elsewhere(lllite.load(models)), wide))]


def mask(height: int, width: int) -> torch.Tensor:
    found = torch.zeros(1, height, width)
    found[:, 20:50, 10:30] = 1
    return found


def inpainting_funs(_models: Models, model: ModelPatcher) -> list[ModelPatcher]:
    ways = ({"inpaint_image": fun.picture(5), "mask": mask(64, 48)}, {"inpaint_image": fun.picture(5)},
            {"inpaint_image": fun.picture(5, 80, 80), "mask": mask(64, 48)}, {})  # fmt: skip
    return [fun.with_fun(model, fun.control(**TWO_ONE), **options) for options in ways]


def inpainting_lllites(models: Models, model: ModelPatcher) -> list[ModelPatcher]:
    """With and without the image under the mask; without a mask the image is whole, so that the last two are alike."""
    return [lllite.behind(model, lllite.load(models, lllite.INPAINT, inpaint_masked_input=masked), mask=given)
            for masked in ("false", "true") for given in (mask(72, 48), mask(90, 60), None)]  # fmt: skip


def for_other_layers(model: ModelPatcher) -> None:
    """Another pack's node has the LLLite act on fewer layers."""
    (whole,) = places_of(model)["attn1_patch"]
    places_of(model)["attn1_patch"] = [AnimaLLLiteAttentionPatch(whole.patch, {"q": "self_attn_q_proj"})]


FUN = AbsorbedPatch(
    "zimage_fun", "zimage", zimage.FAMILY,
    model=lambda _models, dtype=None: fun.model(dtype=dtype),
    patch=lambda _models, other: fun.control(other=other, **TWO_ONE),
    behind=fun.with_fun,
    calls=(zimage.call(width=6), zimage.call(height=13, width=11, batch=2, tokens=30),
           zimage.call(height=16, width=8, tokens=32), zimage.call(height=10, width=34, tokens=100)),
    prompts=("two lengths", "odd sides, two pictures", "without CFG"),
    prompt=zimage.prompt(words=(20, 20), calls=3),
    passes=2,
    node={"class_type": "ZImageFunControlnet", "inputs": {
        "model": ["lora", 0], "model_patch": ["file", 0], "vae": ["vae", 0], "image": ["image", 0], "strength": 0.7}},
    place="noise_refiner by ZImageControlPatch",
    beside=model_patch("double_block", lambda given: {"img": given["img"] * 1.1}),
    altered=None,
    called="Fun control",
    code=((ZImage_Control, "forward_control_block"), (ZImage_Control, "forward_noise_refiner_block"),
          (ZImage_Control, "forward"), (ZImageControlPatch, "__call__")),
    unserved=unserved_funs,
    inpainting=inpainting_funs,
)  # fmt: skip
LLLITE = AbsorbedPatch(
    "anima_lllite", "anima", anima.FAMILY,
    model=lllite.anima,
    patch=lambda models, other: lllite.load(models, lllite.OTHER if other else lllite.FILE),
    behind=lllite.behind,
    calls=tuple(anima.FAMILY.calls.values()),
    prompts=("two lengths", "odd sides", "without CFG"),
    prompt=anima.FAMILY.prompts["one length"],
    passes=1,
    node={"class_type": "AnimaLLLiteApply", "inputs": {
        "model": ["lora", 0], "model_patch": ["file", 0], "image": ["image", 0], "strength": 0.7, "end_percent": 1.0}},
    place="by AnimaLLLitePatch",
    beside=model_patch("attn1_patch", lambda q, k, v, **_: {"v": v * 1.5}),
    altered=for_other_layers,
    called="LLLite",
    code=((AnimaLLLite, "apply"), (AnimaLLLite, "encode_conditioning"), (AnimaLLLiteModule, "forward"),
          (AnimaLLLiteConditioning, "forward"), (AnimaLLLitePatch, "__call__"),
          (AnimaLLLiteAttentionPatch, "__call__"), (AnimaLLLiteMLPPatch, "__call__")),
    unserved=unserved_lllites,
    inpainting=inpainting_lllites,
)  # fmt: skip
KINDS = (FUN, LLLITE)
