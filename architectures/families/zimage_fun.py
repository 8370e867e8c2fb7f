"""Z-Image with Fun control, a model patch with a network of its own: both in one engine.

The control image's tokens are embedded once per image. Blocks of the patch run beside the network's, and their results
are added to the picture's tokens. The control's tokens are not padded, unlike the picture's, so their number is a size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.lumina.controlnet import ZImage_Control, ZImageControlTransformerBlock

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, PerImagePass, Unsupported
from ..model_patches import STRENGTH, AbsorbedPatch, WithCompanion
from ..shapes import Dim, Picture, Range, Symbol, TensorSpec
from ..sizes import PATCH
from ..token_layers import MOST_KEPT, numbers, to_tokens
from .zimage import GROUP, ZImage, ZImageSizes, block, finished, is_plain, started
from .zimage import NEEDS as _BASE_NEEDS

BASE = ZImage()
FUN = AbsorbedPatch(
    "ZImageFunControlnet", ("model", "model_patch"), "nodes_model_patch",
    dict.fromkeys(("noise_refiner", "double_block"), "ZImageControlPatch"),
)  # fmt: skip
LAYERS = 30
"""The number of layers over which native spreads the blocks of the patch, for any network."""
BEHIND = 10 * LAYERS
"""The number of a layer behind the last: there the patch only encodes its image for the picture."""


class FunSizes(ZImageSizes):
    """The sizes of Z-Image, and the tokens of the control image: as many as the picture has without padding."""

    halved: ClassVar[Sequence[str]] = ("B",)
    free: ClassVar[Mapping[str, Range]] = {**ZImageSizes.free, "C": Range(1, 1041, 1 << 18)}
    named: ClassVar[Mapping[str, Symbol]] = {**ZImageSizes.named, "C": Symbol("size of the control image")}
    traced: ClassVar[Mapping[str, int]] = {"B": 2, "N": 3, "T": 1, "C": 70}
    compared: ClassVar[Sequence[Mapping[str, int]]] = ({"B": 1, "N": 2, "T": 2, "C": 50}, traced)

    @property
    def symbols(self) -> Mapping[str, Symbol]:
        return {**super().symbols, "C": replace(self.named["C"], shown=self._square)}

    def _of_sides(self, side: Range) -> dict[str, Range]:
        own = super()._of_sides(side)
        return {**own, "C": Range(GROUP * (own["N"].min - 1) + 1, side.opt**2, GROUP * own["N"].max)}

    def _of_picture(self, picture: Picture) -> dict[str, int]:
        return {**super()._of_picture(picture), "C": self._steps(picture.height) * self._steps(picture.width)}


@dataclass(frozen=True)
class ZImageFun(FunSizes):
    """Z-Image and a Fun control, of any version; the strength is an input."""

    name = "zimage_fun"
    role = Role.BACKBONE
    arguments = BASE.arguments
    absorbs = FUN

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is WithCompanion and BASE.matches(module.base) and _fits(module.base, module.companion)

    def inputs(self, module: WithCompanion, dtype: str) -> list[TensorSpec]:
        return [*BASE.inputs(module.base, dtype), _hint(module.companion, dtype), STRENGTH]

    def engine_inputs(self, module: WithCompanion, dtype: str) -> list[TensorSpec]:
        control = TensorSpec("control", dtype, (1, Dim("C"), module.base.dim))
        return [*BASE.engine_inputs(module.base, dtype), control, STRENGTH]

    def outputs(self, module: WithCompanion, dtype: str) -> list[TensorSpec]:
        return BASE.outputs(module.base, dtype)

    def function(self, module: WithCompanion) -> torch.nn.Module:
        return _WithFun(module)

    def passes(self, module: WithCompanion) -> list[PerImagePass]:
        """See ``Architecture``: the prompt's, and the embedding of the control image."""
        net, fun = module.base, module.companion
        takes = _hint(fun, str(net.dtype).removeprefix("torch."))
        hint = PerImagePass(takes, ("control",), _HintEmbedder(_embedder(fun)))
        fun.control_all_x_embedder = torch.nn.Identity()
        return [*BASE.passes(net), hint]

    def binding(self, module: WithCompanion) -> Binding:
        return _Binding(BASE.binding(module.base), _hint(module.companion, "float32").dims[1])


def _embedder(fun: ZImage_Control) -> torch.nn.Linear:
    return fun.control_all_x_embedder[f"{PATCH}-1"]


def _hint(fun: ZImage_Control, dtype: str) -> TensorSpec:
    """The encoded control image, with the masked image and its mask if the patch takes these."""
    channels = fun.control_in_dim + fun.additional_in_dim
    return TensorSpec("hint", dtype, (1, channels, Dim("H"), Dim("W")))


def _every(fun: ZImage_Control) -> int:
    """The number of layers from one control block to the next."""
    return round(LAYERS / fun.n_control_layers)


def _fits(net: torch.nn.Module, fun: torch.nn.Module) -> bool:
    """Tell whether a patch's network fits a Z-Image, and its last block runs before the last layer."""
    if type(fun) is not ZImage_Control or not 2 <= fun.n_control_layers <= LAYERS or len(net.noise_refiner) != 2:
        return False
    blocks, refiners = list(fun.control_layers), list(fun.control_noise_refiner)
    blocks, refiners = (blocks + refiners, []) if fun.refiner_control else (blocks, refiners)
    plain = all(is_plain(layer, ZImageControlTransformerBlock) for layer in blocks) and all(map(is_plain, refiners))
    ends = _every(fun) * (fun.n_control_layers - 1) < len(net.layers)  # else native goes on with it in the next step
    return plain and ends and _embedder(fun).out_features == net.dim


class _Binding:
    """Calls with a Fun patch: Z-Image's, with the encoded control image and the strength."""

    def __init__(self, base: Binding, channels: int):
        self._base, self._channels = base, channels
        self._hint: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._strength = lru_cache(MOST_KEPT)(numbers)

    def __call__(self, call: Mapping[str, Any]) -> EngineCall:
        bound = self._base(call)
        patch = FUN.find((call.get("transformer_options") or {}).get("patches", {}))
        if patch is None:
            raise Unsupported("no Fun control, or another patch beside it; this engine needs a Fun control alone")
        bound.inputs["hint"] = self._steady(self._encoded(patch, call["x"]))
        bound.inputs["strength"] = self._strength((float(patch.strength),), call["x"].device)
        return bound

    def _encoded(self, patch: Callable[[dict], Any], x: torch.Tensor) -> torch.Tensor:
        """Return the patch's image, which it encodes anew for each size of a picture."""
        if any(side % PATCH for side in x.shape[2:]):
            x = pad_to_patch_size(x, (PATCH, PATCH))
        patch({"x": x, "img": None, "txt": None, "block_index": BEHIND})
        found = patch.encoded_image
        if found is None:
            raise Unsupported("Fun control without an image, which engines do not do")
        if len(found) != 1:
            raise Unsupported(f"Fun control with {len(found)} images at once, which engines do not do")
        if tuple(found.shape[1:]) != (self._channels, *x.shape[2:]):
            raise Unsupported("Fun control whose VAE gives another size than the picture's, which engines do not do")
        return found

    def _steady(self, hint: torch.Tensor) -> torch.Tensor:
        """Return the same tensor for the same hint: a copy, since ComfyUI's tensor has no version."""
        if self._hint[0] is not hint:
            with torch.inference_mode(False):
                self._hint = hint, hint.clone()
        return self._hint[1]


class _HintEmbedder(torch.nn.Module):
    """The layer from an encoded control image to tokens."""

    def __init__(self, embedder: torch.nn.Linear):
        super().__init__()
        self.embedder = embedder

    def forward(self, hint: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.embedder(to_tokens(hint.unsqueeze(2), channels_last=True)),)


class _WithFun(torch.nn.Module):
    """All that native does in each step."""

    def __init__(self, both: WithCompanion):
        super().__init__()
        self.net, self.fun = both.base, both.companion
        net, fun = self.net, self.fun
        layers = *net.noise_refiner, *net.layers, *fun.control_layers, *fun.control_noise_refiner
        self.blocks = in_blocks(layers, block)

    def forward(
        self, picture: torch.Tensor, padding: torch.Tensor, prompt: torch.Tensor, timesteps: torch.Tensor,
        prompt_places: torch.Tensor, picture_places: torch.Tensor, control: torch.Tensor, strength: torch.Tensor,
    ) -> tuple[torch.Tensor]:  # fmt: skip
        net, fun = self.net, self.fun
        x, time = started(net, picture, padding, timesteps)
        control_places = picture_places[: control.shape[1]]
        if not fun.refiner_control:
            for layer in fun.control_noise_refiner:
                control = layer(control, control_places, time)
        unrefined = x
        for layer, own in zip(net.noise_refiner, _refining(fun), strict=True):
            x = layer(x, picture_places, time)
            given = []
            for block_beside in own:
                skip, control = _control_block(block_beside, control, unrefined, control_places, time)
                given.append(skip)
            if given:
                x = _added(x, given[0], strength, 0)
        refined, before = x, prompt.shape[1]
        x, places = torch.cat([prompt, x], 1), torch.cat([prompt_places, picture_places])
        blocks = {_every(fun) * i: layer for i, layer in enumerate(fun.control_layers)}
        for i, layer in enumerate(net.layers):
            x = layer(x, places, time)
            if i in blocks:
                skip, control = _control_block(blocks[i], control, refined, control_places, time)
                x = _added(x, skip, strength, before)
        return finished(net, x[:, before:], time)


def _refining(fun: ZImage_Control) -> list[list[torch.nn.Module]]:
    """Return the control blocks beside each of the two refiners; of several blocks the first result is added.

    Files with empty refiners were trained with ``control_layers`` in their place: ComfyUI calls these broken.
    """
    if not fun.refiner_control:
        return [[], []]
    if fun.broken:
        first, *rest = fun.control_layers
        return [[first], rest]
    return [[layer] for layer in fun.control_noise_refiner]


def _control_block(
    layer: ZImageControlTransformerBlock, control: torch.Tensor, x: torch.Tensor, places: torch.Tensor,
    time: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the addition to the picture's tokens, and the control's tokens for the next block."""
    if layer.block_id == 0:
        control = layer.before_proj(control) + x[:, : control.shape[1]]
    control = layer(control, places, time)
    return layer.after_proj(control), control


def _added(x: torch.Tensor, skip: torch.Tensor, strength: torch.Tensor, before: int) -> torch.Tensor:
    """Add a control to the tokens from ``before`` on."""
    scaled = (skip.float() * strength).to(x.dtype)
    return x + F.pad(scaled, (0, 0, before, x.shape[1] - before - skip.shape[1]))


FILE_MARKS = ()
"""No file has both networks; Z-Image's own family has the marks of its files."""

NEEDS = (
    *_BASE_NEEDS,
    "comfy.ldm.lumina.controlnet:ZImage_Control.forward(self, cap_feats, control_context, x_freqs_cis, adaln_input)",
    "comfy.ldm.lumina.controlnet:ZImageControlTransformerBlock.forward(self, c, x, **)",
)

ARCHITECTURES = (ZImageFun(),)
