"""Anima with LLLite, a model patch with a network of its own: both in one engine.

The control image is embedded once per picture, a vector for each of its tokens. In many blocks small networks change by
these vectors the inputs of attention's projections, or of the first layer behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from comfy.ldm.anima.lllite import AnimaLLLite as Companion
from comfy.ldm.anima.lllite import AnimaLLLiteModule
from comfy.ldm.common_dit import pad_to_patch_size

from ..blocks import in_blocks
from ..calls import Binding, EngineCall, PerImagePass, Unsupported
from ..model_patches import STRENGTH, AbsorbedPatch, WithCompanion
from ..shapes import Dim, TensorSpec
from ..sizes import PATCH, PICTURE
from ..token_layers import MOST_KEPT, numbers
from .anima import NEEDS as _BASE_NEEDS
from .anima import SIZES, Anima, OnTokens

_TARGETS = {
    "attn1_patch": {"q": "self_attn_q_proj", "k": "self_attn_k_proj", "v": "self_attn_v_proj"},
    "attn2_patch": {"q": "cross_attn_q_proj"},
}
"""The layers of attention whose inputs the patch of ComfyUI's node changes."""


def _joined(parts: Mapping[str, Any]) -> Any | None:
    """Return the patch that all parts belong to, as from ComfyUI's node; else None."""
    patch = parts["post_input"]
    own = all(part.patch is patch for place, part in parts.items() if place != "post_input")
    return patch if own and all(parts[place].targets == targets for place, targets in _TARGETS.items()) else None


LLLITE = AbsorbedPatch(
    "AnimaLLLiteApply",
    ("model", "model_patch"),
    "lllite",
    {"post_input": "AnimaLLLitePatch", **dict.fromkeys(_TARGETS, "AnimaLLLiteAttentionPatch"),
     "mlp_patch": "AnimaLLLiteMLPPatch"},
    _joined,
)  # fmt: skip


@dataclass(frozen=True)
class AnimaLLLite(Anima):
    """Anima and an LLLite of any layout; the strength is an input."""

    name = "anima_lllite"
    absorbs = LLLITE
    shared = None  # convolutions embed the control image, whose rows would need their neighbours

    def matches(self, module: torch.nn.Module) -> bool:
        if type(module) is not WithCompanion or type(module.companion) is not Companion:
            return False
        net, lllite = module.base, module.companion
        return super().matches(net) and lllite.model_dim == net.model_channels

    def inputs(self, module: WithCompanion, dtype: str) -> list[TensorSpec]:
        return [*super().inputs(module.base, dtype), _hint(module.companion, dtype), STRENGTH]

    def engine_inputs(self, module: WithCompanion, dtype: str) -> list[TensorSpec]:
        features = next(m for m in module.companion.modules() if type(m) is AnimaLLLiteModule).depth_embed.shape[0]
        control = TensorSpec("control", dtype, (1, PICTURE, features))
        return [*super().inputs(module.base, dtype), control, STRENGTH]

    def outputs(self, module: WithCompanion, dtype: str) -> list[TensorSpec]:
        return super().outputs(module.base, dtype)

    def function(self, module: WithCompanion) -> torch.nn.Module:
        return _WithLLLite(module)

    def passes(self, module: WithCompanion) -> list[PerImagePass]:
        """See ``Architecture``: the embedding of the control image."""
        lllite = module.companion
        takes = _hint(lllite, str(module.base.dtype).removeprefix("torch."))
        hint = PerImagePass(takes, ("control",), _HintEmbedder(lllite.lllite_conditioning1))
        lllite.lllite_conditioning1 = torch.nn.Identity()
        return [hint]

    def binding(self, module: WithCompanion) -> Binding:
        return _Binding(super().binding(module.base), module.companion)


def _hint(lllite: Companion, dtype: str) -> TensorSpec:
    """The control image at the picture's size, with its mask if the patch takes a mask."""
    return TensorSpec("hint", dtype, (1, lllite.cond_in_channels, Dim("R", up=Anima.pixels), Dim("C", up=Anima.pixels)))


class _Binding:
    """Calls with an LLLite: Anima's, with the control image and the strength."""

    def __init__(self, base: Binding, lllite: Companion):
        self._base = base
        as_it_is = SimpleNamespace(
            cond_in_channels=lllite.cond_in_channels,
            inpaint_masked_input=lllite.inpaint_masked_input,
            encode_conditioning=_same,
        )
        self._unencoded = SimpleNamespace(model=as_it_is)
        self._made_of: tuple[Any, ...] | None = None
        self._strength = lru_cache(MOST_KEPT)(numbers)

    def __call__(self, call: Mapping[str, Any]) -> EngineCall:
        bound = self._base(call)
        options = call.get("transformer_options") or {}
        patch = LLLITE.find(options.get("patches", {}))
        if patch is None:
            raise Unsupported("no LLLite, or another patch beside it; this engine needs an LLLite alone")
        bound.inputs["hint"] = self._hint(patch, call["x"])
        strength = _acting(patch, options.get("sigmas"))
        bound.inputs["strength"] = self._strength((strength,), call["x"].device)
        return bound

    def _hint(self, patch: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the same tensor for the same image, mask and size of a picture."""
        made_of = (id(patch.image), id(patch.mask), x.shape[3:], x.dtype, x.device)
        if made_of != self._made_of:
            self._images = patch.image, patch.mask  # kept, so that no other tensor gets their ids
            self._made_of, self._made = made_of, self._fitted(patch, x)
        return self._made

    def _fitted(self, patch: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the patch's embedding: its image and mask, at the picture's size."""
        own, found = copy.copy(patch), {}
        own.model_patch, own.strength = self._unencoded, 1.0
        padded = pad_to_patch_size(x, (1, PATCH, PATCH))
        try:
            own({"x": padded, "transformer_options": {"model_patch_data": found}})
        except ValueError as error:
            raise Unsupported(f"LLLite with such an image or mask ({error}), which engines do not do") from None
        hint = found[own]
        if len(hint) != 1:
            raise Unsupported(f"LLLite with {len(hint)} images at once, which engines do not do")
        with torch.inference_mode(False):
            return hint.clone()


def _same(image: torch.Tensor) -> torch.Tensor:
    return image


def _acting(patch: Any, sigmas: torch.Tensor | None) -> float:
    """Return the strength of a patch in a call; outside of its range it is 0, which changes no input."""
    if sigmas is None or patch.strength == 0:
        return float(patch.strength)
    return float(patch.strength) if patch.sigma_end <= sigmas.max().item() <= patch.sigma_start else 0.0


class _HintEmbedder(torch.nn.Module):
    """The layers from a control image to a vector for each token."""

    def __init__(self, layers: torch.nn.Module):
        super().__init__()
        self.layers = layers

    def forward(self, hint: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layers(hint),)


class _WithLLLite(OnTokens):
    """All that native does in each step."""

    def __init__(self, both: WithCompanion):
        super().__init__(both.base, both.companion)

    def companion_layers(self, number: int) -> dict[str, torch.nn.Module]:
        """See ``OnTokens``."""
        start = f"lllite_dit_blocks_{number}_"
        own = {name.removeprefix(start): layer for name, layer in self.companion.named_children()
               if name.startswith(start)}  # fmt: skip
        in_blocks(own.values(), _changed)
        return own


def _changed(layer: AnimaLLLiteModule, x: torch.Tensor, control: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    """Change a layer's input by the control image."""
    local = control + layer.depth_embed
    gamma, beta = layer.cond_to_film(local).chunk(2, -1)
    hidden = layer.mid(torch.cat((local.expand(x.shape[0], -1, -1), F.silu(layer.down(x))), -1))
    hidden = F.silu(hidden * (1 + gamma) + beta)
    return x + (layer.up(hidden).float() * strength).to(x.dtype)


FILE_MARKS = ()
"""No file has both networks; Anima's own family has the marks of its files."""

NEEDS = (
    *_BASE_NEEDS,
    "comfy.ldm.anima.lllite:AnimaLLLite.apply(self, x, cond_emb, block_index, target, strength)",
    "comfy.ldm.anima.lllite:AnimaLLLite.encode_conditioning(self, image)",
    "comfy.ldm.anima.lllite:AnimaLLLiteModule.forward(self, x, cond_emb, strength)",
    "comfy.ldm.anima.lllite:AnimaLLLitePatch.__call__(self, args)",
)

ARCHITECTURES = (AnimaLLLite(SIZES),)
