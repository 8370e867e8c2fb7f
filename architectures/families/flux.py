"""ComfyUI's Flux transformers as engines: Flux.1 (dev, schnell, Kontext, Fill) and Flux.2 (dev, klein).

The cut is at the tokens. The binding makes tokens of the latent and its references, and computes rotary embeddings once
for each size, with ComfyUI's own code. So all of an engine's sizes follow from batch, tokens of pictures and tokens of
the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from comfy.ldm.flux.model import Flux

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, ResidualLayout, Unsupported, refuse_all_but
from ..shapes import Sizes, TensorSpec
from ..shared_tokens import SharedTokens
from ..sizes import BATCH, IMAGE, PROMPT, ImageTokenSizes
from ..token_layers import (
    MOST_KEPT,
    RotaryAttention,
    latent_to_tokens,
    rope_changes,
    rope_options,
    rotary_inputs,
    to_latent,
    write_out_norms,
)

FLUX1 = Sizes("Flux.1", 256, 1024, 1536, max_tokens=512)
FLUX2 = Sizes("Flux.2", 256, 1024, 1536, max_tokens=512)


@dataclass(frozen=True, kw_only=True)
class FluxArchitecture(ImageTokenSizes):
    """A transformer that takes tokens of picture and prompt, sigmas, rotary embeddings and one tensor per residual.

    It takes ``y`` and ``guidance`` where the network does. Residuals are inputs named ``control_input_<i>`` for each
    double block, and ``control_output_<i>`` for each single block.
    """

    name: str
    patch: int
    usual_prompt: int
    global_modulation: bool

    role = Role.BACKBONE
    arguments = ("x", "timestep", "context", "y", "guidance", "ref_latents", "control", "transformer_options")
    shared = SharedTokens("N", front=(PROMPT,))

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is Flux
            and module.params.global_modulation == self.global_modulation
            and module.patch_size == self.patch
        )

    def inputs(self, module: Flux, dtype: str) -> list[TensorSpec]:
        residuals = [
            TensorSpec(name, dtype, (BATCH, IMAGE, module.hidden_size), optional=True)
            for names in _layout(module).places.values()
            for name in names
        ]
        return [
            TensorSpec("image", dtype, (BATCH, IMAGE, module.in_channels)),
            TensorSpec("context", dtype, (BATCH, PROMPT, module.txt_in.in_features)),
            TensorSpec("timestep", "float32", (BATCH,), sample="sigma"),
            *rotary_inputs(module.hidden_size // module.num_heads),
            *conditioning_specs(module, dtype),
            *residuals,
        ]

    def outputs(self, module: Flux, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("out", dtype, (BATCH, IMAGE, module.out_channels))]

    def function(self, module: Flux) -> torch.nn.Module:
        return _FluxFunction(module)

    def binding(self, module: Flux) -> Binding:
        return partial(_bind, module, _layout(module), lru_cache(MOST_KEPT)(partial(_rotary, module)))


def conditioning_specs(module: Flux, dtype: str) -> list[TensorSpec]:
    """Return specs of ``y`` and ``guidance`` for networks that take them. Without ``y`` a call has zeros."""
    found = []
    if module.vector_in is not None:
        found.append(TensorSpec("y", dtype, (BATCH, module.params.vec_in_dim), optional=True))
    if module.params.guidance_embed:
        found.append(TensorSpec("guidance", "float32", (BATCH,), sample="unit"))
    return found


def conditioning(module: Flux, call: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of ``conditioning_specs`` in a call.

    Raises:
        Unsupported: the network takes guidance, and the call has none.
    """
    found = {}
    if module.vector_in is not None and (y := call.get("y")) is not None:
        found["y"] = y[:, : module.params.vec_in_dim]
    if module.params.guidance_embed:
        if (guidance := call.get("guidance")) is None:
            raise Unsupported("no guidance, which this model needs")
        found["guidance"] = thousandths(guidance)
    return found


def thousandths(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` in float32, such that 1000 times each of them is the product that native gets.

    Native rounds the product to half precision before it takes the embedding; a compiled graph does not. In bfloat16
    guidance of 3.5 becomes 3504, whose embedding differs from that of 3500.
    """
    return values if values.dtype == torch.float32 else (1000.0 * values).float() / 1000.0


def _layout(module: Flux) -> ResidualLayout:
    blocks = {"input": module.double_blocks, "output": module.single_blocks}
    places = {kind: [f"control_{kind}_{i}" for i in range(len(found))] for kind, found in blocks.items()}
    return ResidualLayout(places, from_end=False)


_TAKEN = frozenset({*FluxArchitecture.arguments, "ref_latents_method", "crossattn_controlnet"})
"""Arguments that a call may carry. The last one is a prompt for ControlNets alone, which native's model ignores."""
_TWO_TIMES = "index_timestep_zero"
"""The method of references in which their tokens have a timestep of their own."""


def _bind(module: Flux, layout: ResidualLayout, places: Any, call: Mapping[str, Any]) -> EngineCall:
    x, context = call["x"], call["context"]
    refuse_all_but(call, _TAKEN)
    references, method = call.get("ref_latents"), call.get("ref_latents_method", module.params.default_ref_method)
    if references and method == _TWO_TIMES:
        raise Unsupported(f"references by the method {_TWO_TIMES}, which engines of this model do not do")
    patch, references = module.patch_size, references or ()
    tokens = [latent_to_tokens(picture, patch) for picture in (x, *references)]
    image = torch.cat(tokens, 1) if references else tokens[0]
    sizes = tuple(tuple(picture.shape[-2:]) for picture in (x, *references))
    inputs = _padded(layout.take(call.get("control"), x.shape[0]), image)
    residuals = frozenset(inputs)
    inputs |= {"image": image, "context": context, "timestep": call["timestep"], **conditioning(module, call)}
    inputs |= places(sizes, context.shape[1], method, rope_changes(call), x.device)
    return EngineCall(
        inputs, lambda outputs: to_latent(outputs["out"], x, patch).to(x.device, x.dtype), residuals=residuals
    )


def _padded(residuals: dict[str, torch.Tensor], image: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return residuals with zeros behind the picture's own tokens: native adds none to tokens of references."""
    padded: dict[int, torch.Tensor] = {}  # a residual in several places stays the same object
    for residual in residuals.values():
        if residual.ndim == image.ndim and (lacking := image.shape[1] - residual.shape[1]) > 0:
            if id(residual) not in padded:
                padded[id(residual)] = torch.nn.functional.pad(residual, (0, 0, 0, lacking))
    return {name: padded.get(id(residual), residual) for name, residual in residuals.items()}


def _rotary(
    module: Flux, sizes: tuple[tuple[int, int], ...], prompt: int, method: str, changes: tuple,
    device: torch.device,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return the rotary embeddings of a call: ComfyUI's own forward lays the tokens out, on pictures without values.

    Args:
        sizes: height and width of the latent, then of its references.
        changes: see ``rope_changes``.
    """
    found: list[torch.Tensor] = []

    def blocks(img: torch.Tensor, img_ids: torch.Tensor, _txt: object, txt_ids: torch.Tensor, *_: object, **__: object):
        found.extend((txt_ids, img_ids))
        return img

    outside = SimpleNamespace(
        params=module.params, patch_size=module.patch_size, process_img=module.process_img, forward_orig=blocks
    )
    x, *references = [torch.zeros(1, 1, *size, device=device) for size in sizes]
    Flux._forward(
        outside, x, None, x.new_zeros(1, prompt, 1), ref_latents=references or None,
        transformer_options=rope_options(changes), ref_latents_method=method,
    )  # fmt: skip
    return rotary_of(module, *found)


def rotary_of(module: Flux, txt_ids: torch.Tensor, img_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of ``rotary_inputs`` from ComfyUI's places of prompt and picture."""
    pe = module.pe_embedder(torch.cat((txt_ids, img_ids), dim=1))[0, 0, ..., 0]  # the second column follows
    return dict(zip(("pe_prompt", "pe_image"), pe.tensor_split([txt_ids.shape[1]]), strict=True))


class _FluxFunction(torch.nn.Module):
    """ComfyUI's own forward on tokens; hooks add the residuals, so that nothing is written in part."""

    def __init__(self, flux: Flux):
        super().__init__()
        write_out_norms(flux)
        self.flux = flux
        self.blocks = in_blocks((*flux.double_blocks, *flux.single_blocks))
        self._residuals: tuple[torch.Tensor, ...] = ()
        doubles = len(flux.double_blocks)
        for number, block in enumerate(flux.double_blocks):
            block.register_forward_hook(partial(self._after_double, number))
        for number, block in enumerate(flux.single_blocks):
            block.register_forward_hook(partial(self._after_single, doubles + number))

    def forward(
        self, image: torch.Tensor, context: torch.Tensor, timestep: torch.Tensor, pe_prompt: torch.Tensor,
        pe_image: torch.Tensor, *rest: torch.Tensor,
    ) -> tuple[torch.Tensor]:  # fmt: skip
        flux = self.flux
        conditioning = []
        for taken in (flux.vector_in is not None, flux.params.guidance_embed):
            conditioning.append(rest[0] if taken else None)
            rest = rest[taken:]
        self._residuals = rest
        attention = RotaryAttention(torch.cat((pe_prompt, pe_image)))
        found = flux.forward_orig(
            image, None, context, None, timestep, *conditioning, transformer_options=attention.options
        )
        self._residuals = ()
        return (found,)

    def _after_double(self, number: int, _block: torch.nn.Module, _args: tuple, result: tuple) -> tuple:
        image, prompt = result
        return image + self._residuals[number], prompt

    def _after_single(self, number: int, _block: torch.nn.Module, _args: tuple, result: torch.Tensor) -> torch.Tensor:
        residual = self._residuals[number]
        prompt = result.shape[1] - residual.shape[1]
        return torch.cat((result[:, :prompt], result[:, prompt:] + residual), 1)


FILE_MARKS = ("double_blocks.", "single_blocks.", "transformer_blocks.")
"""Diffusers calls both kinds of blocks transformer blocks."""

NEEDS = (
    "comfy.ldm.common_dit:pad_to_patch_size(img, patch_size, ...)",
    "comfy.ldm.flux.model:Flux._forward(self, x, timestep, context, y, guidance, ref_latents, control, "
    "transformer_options, **)",
    "comfy.ldm.flux.model:Flux.forward_orig(self, img, img_ids, txt, txt_ids, timesteps, y, guidance, ...)",
    "comfy.ldm.flux.model:Flux.process_img",
    "comfy.ldm.flux.layers:DoubleStreamBlock",
    "comfy.ldm.flux.layers:SingleStreamBlock",
)

ARCHITECTURES = (
    FluxArchitecture(FLUX1, name="flux1", patch=2, usual_prompt=256, global_modulation=False),
    FluxArchitecture(FLUX2, name="flux2", patch=1, usual_prompt=512, global_modulation=True),
)
