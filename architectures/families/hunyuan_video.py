"""HunyuanVideo 1.5, HunyuanVideo, HunyuanImage 2.1 and its refiner: one transformer on tokens of prompt and video.

A picture is a video of one frame. Native's own blocks compute; the cut is at the tokens, as for Wan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import mul
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from comfy.ldm.flux.layers import DoubleStreamBlock, SingleStreamBlock, timestep_embedding
from comfy.ldm.hunyuan_video.model import HunyuanVideo as Native

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, Unsupported, prompt_of, refuse_all_but
from ..shapes import Dim, Range, RequestedSizes, Sizes, Symbol, TensorSpec
from ..shared_tokens import SharedTokens
from ..sizes import BATCH, FRAMES, PROMPT, VIDEO, VideoSizes
from ..token_layers import MOST_KEPT, RotaryAttention, to_tokens, to_video, write_out_norms
from .flux import thousandths

GLYPHS, IMAGE = Dim("G"), Dim("I")
SEEN, MOST_GLYPHS = 729, 256
"""Tokens of a picture by ComfyUI's SigLIP encoder; tokens of quoted text, by byT5, that a file engine takes."""
_SUMMED = 4096
"""The longest prompt whose mean a compiled file takes; Inductor compiles longer sums differently."""


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo(VideoSizes):
    """The transformer from its tokens on. Text by byT5 and a picture by SigLIP stand beside the prompt.

    Attributes:
        patches: latent elements per token, along each side of the latent.
        vision: whether it takes a picture by SigLIP.
    """

    name: str
    patches: tuple[int, ...]
    vision: bool = False

    role = Role.BACKBONE
    arguments = ("x", "timestep", "context", "y", "txt_byt5", "clip_fea", "guidance", "attention_mask",
                 "guiding_frame_index", "ref_latent", "disable_time_r", "control", "transformer_options")  # fmt: skip
    shared = SharedTokens("RC", front=(IMAGE, GLYPHS, PROMPT))
    usual_prompt = 128
    one_length = False
    free: ClassVar[Mapping[str, Range]] = {
        **VideoSizes.free, "T": Range(1, 97, _SUMMED), "I": Range(0, 29, 1 << 12), "G": Range(0, 33, MOST_GLYPHS)}
    named: ClassVar[Mapping[str, Symbol]] = {
        **{name: symbol for name, symbol in VideoSizes.named.items() if name != "V"},
        "G": Symbol("tokens of quoted text", of_picture=False)}
    traced: ClassVar[Mapping[str, int]] = {**VideoSizes.traced, "G": 5}
    compared: ClassVar[Sequence[Mapping[str, int]]] = (
        {**VideoSizes.compared[0], "I": 0, "G": 0}, {**VideoSizes.compared[1], "I": 25, "G": 11})

    @property
    def patch(self) -> int:
        return self.patches[-1]

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        """See ``NetworkSizes``: a call may go without pictures and without text by byT5."""
        return {**super()._ranges(asked), "I": Range(0, 0, SEEN), "G": Range(0, 0, MOST_GLYPHS)}

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is Native
            and tuple(module.patch_size) == self.patches
            and (module.vision_in is not None) is self.vision
            and hasattr(module, "final_layer")
            and all(type(block) is DoubleStreamBlock for block in module.double_blocks)
            and all(type(block) is SingleStreamBlock for block in module.single_blocks)
        )

    def inputs(self, module: Native, dtype: str) -> list[TensorSpec]:
        words, pairs = module.txt_in.input_embedder.in_features, module.hidden_size // module.num_heads // 2
        found = [
            TensorSpec("video", dtype, (BATCH, VIDEO, self.patch**2 * module.in_channels)),
            TensorSpec("context", dtype, (BATCH, PROMPT, words)),
            TensorSpec("timestep", "float32", (BATCH,), sample="timestep"),
            TensorSpec("pe", "float32", (FRAMES, Dim("R"), Dim("C"), pairs, 2), steady=True),
        ]
        if module.vector_in is not None:
            found.append(TensorSpec("y", dtype, (BATCH, module.params.vec_in_dim)))
        if module.params.guidance_embed:
            found.append(TensorSpec("guidance", "float32", (BATCH,), sample="unit"))
        if module.byt5_in is not None:
            found.append(TensorSpec("byt5", dtype, (BATCH, GLYPHS, module.byt5_in.fc1.in_features)))
        if module.vision_in is not None:
            found.append(TensorSpec("vision", dtype, (BATCH, IMAGE, module.vision_in_dim)))
        if module.time_r_in is not None:
            found.append(TensorSpec("next_sigma", "float32", (BATCH,), sample="sigma"))
            found.append(TensorSpec("has_next", "float32", (BATCH,), sample="unit"))
        return found

    def outputs(self, module: Native, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("out", dtype, (BATCH, VIDEO, self.patch**2 * module.out_channels))]

    def function(self, module: Native) -> torch.nn.Module:
        return _OnTokens(module)

    def binding(self, module: Native) -> Binding:
        return partial(_bind, module, lru_cache(MOST_KEPT)(partial(_places, module)))


_TAKEN = frozenset({"x", "timestep", "context", "y", "txt_byt5", "clip_fea", "guidance", "disable_time_r",
                    "transformer_options", "denoise_mask", "crossattn_controlnet"})  # fmt: skip
"""Arguments that a call may carry. Native looks at neither of the last two."""


def _bind(module: Native, places: Callable[..., torch.Tensor], call: Mapping[str, Any]) -> EngineCall:
    x, context, timestep = call["x"], prompt_of(call), call["timestep"]
    refuse_all_but(call, _TAKEN)
    video, patch = x if x.ndim == 5 else x.unsqueeze(2), module.patch_size[-1]
    frames, rows, columns = video.shape[2], video.shape[3] // patch, video.shape[4] // patch
    if (rows * patch, columns * patch) != video.shape[3:]:
        raise Unsupported("a latent of odd sides, which engines do not do")
    inputs = {
        "video": to_tokens(video, patch),
        "context": context,
        "timestep": timestep,
        "pe": places((frames, rows, columns), x.device, x.dtype),
        **_conditioning(module, call, context),
    }
    if module.time_r_in is not None:
        inputs |= _next_sigma(call, timestep)

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        result = to_video(outputs["out"], frames, rows, columns, patch, channels_last=False)
        return (result if x.ndim == 5 else result.squeeze(2)).to(x.device, x.dtype)

    return EngineCall(inputs, finish)


_CALLED = {"y": "pooled prompt", "guidance": "guidance"}


def _conditioning(module: Native, call: Mapping[str, Any], context: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors beside the prompt that the network takes."""
    given = {name: call.get(name) for name in ("y", "guidance", "txt_byt5", "clip_fea")}

    def needed(name: str) -> torch.Tensor:
        if given[name] is None:
            raise Unsupported(f"no {_CALLED[name]}, which this model needs")
        return given[name]

    def or_none(name: str, width: int) -> torch.Tensor:
        return context.new_zeros(context.shape[0], 0, width) if given[name] is None else given[name]

    found = {}
    if module.vector_in is not None:
        found["y"] = needed("y")[:, : module.params.vec_in_dim]
    if module.params.guidance_embed:
        found["guidance"] = thousandths(needed("guidance"))
    if module.byt5_in is not None:
        found["byt5"] = or_none("txt_byt5", module.byt5_in.fc1.in_features)
    if module.vision_in is not None:
        found["vision"] = or_none("clip_fea", module.vision_in_dim)
    elif given["clip_fea"] is not None:
        raise Unsupported("a picture by CLIP Vision, which engines of this model do not do")
    return found


def _next_sigma(call: Mapping[str, Any], timestep: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the next step's sigma, if the sampler's list has it. The host does not wait for the GPU."""
    options = call.get("transformer_options") or {}
    if call.get("disable_time_r"):
        return {"next_sigma": torch.zeros_like(timestep), "has_next": torch.zeros_like(timestep)}
    if "sigmas" not in options or "sample_sigmas" not in options:
        raise Unsupported("a sampler that does not tell its list of steps, which this model needs")
    every = options["sample_sigmas"].to(timestep.device)
    here = every[:-1] == options["sigmas"][0].to(timestep.device)
    first = here & (here.cumsum(0) == 1)
    found = {"next_sigma": (every[1:] * first).sum(), "has_next": here.any()}
    return {name: value.to(timestep.dtype).expand(timestep.shape[0]) for name, value in found.items()}


def _places(module: Native, size: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return cosine and sine of each token's angles, as native places it: (frames, rows, columns, angles, 2)."""
    sides = map(mul, size[-len(module.patch_size) :], module.patch_size)
    latent = torch.zeros(1, 1, *sides, device=device, dtype=dtype)
    ids = (Native.img_ids if latent.ndim == 5 else Native.img_ids_2d)(module, latent)
    return module.pe_embedder(ids)[0, 0, ..., 0].unflatten(0, size).contiguous()


class _OnTokens(torch.nn.Module):
    """Native's forward behind its patches, without the parts that a network lacks."""

    def __init__(self, net: Native):
        super().__init__()
        write_out_norms(net)
        self.net = net
        self.blocks = in_blocks((*net.double_blocks, *net.single_blocks))

    def forward(
        self, video: torch.Tensor, context: torch.Tensor, timestep: torch.Tensor, pe: torch.Tensor,
        *more: torch.Tensor,
    ) -> tuple[torch.Tensor]:  # fmt: skip
        net, taken = self.net, iter(more)
        patches = net.img_in.proj
        img = F.linear(video, patches.weight.flatten(1).to(video.dtype), patches.bias.to(video.dtype))
        y = next(taken) if net.vector_in is not None else None
        guidance = next(taken) if net.params.guidance_embed else None
        byt5 = next(taken) if net.byt5_in is not None else None
        vision = next(taken) if net.vision_in is not None else None
        vec = self._time(timestep, video.dtype, *taken)
        if y is not None:
            vec = vec + net.vector_in(y)
        if guidance is not None:
            vec = vec + net.guidance_in(timestep_embedding(guidance, 256).to(video.dtype))
        txt = self._words(context, timestep, byt5, vision)
        unmoved = pe.new_ones(txt.shape[1], pe.shape[3])
        unmoved = torch.stack((unmoved, torch.zeros_like(unmoved)), -1)
        options = RotaryAttention(torch.cat((unmoved, pe.flatten(0, 2)))).options
        for block in net.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=None, transformer_options=options)
        words = txt.shape[1]
        img = torch.cat((txt, img), 1)
        for block in net.single_blocks:
            img = block(img, vec=vec, pe=None, transformer_options=options)
        return (net.final_layer(img[:, words:], vec),)

    def _time(self, timestep: torch.Tensor, dtype: torch.dtype, *behind: torch.Tensor) -> torch.Tensor:
        net = self.net
        vec = net.time_in(timestep_embedding(timestep, 256, time_factor=1.0).to(dtype))
        if net.time_r_in is None:
            return vec
        next_sigma, has_next = behind
        both = vec + net.time_r_in(timestep_embedding(next_sigma, 256, time_factor=1000.0).to(dtype))
        return torch.where(has_next.unsqueeze(1) > 0, both if net.params.meanflow_sum else both / 2, vec)

    def _words(
        self, context: torch.Tensor, timestep: torch.Tensor, byt5: torch.Tensor | None, vision: torch.Tensor | None
    ) -> torch.Tensor:
        """Return all tokens of text and picture, in native's order."""
        net, kinds = self.net, self.net.cond_type_embedding
        txt = net.txt_in(context, timestep, None, transformer_options=RotaryAttention().options)
        if kinds is not None:
            txt = txt + kinds.weight[0].to(txt.dtype)
        if byt5 is not None:
            glyphs = net.byt5_in(byt5)
            if kinds is not None:
                txt = torch.cat((glyphs + kinds.weight[1].to(txt.dtype), txt), 1)
            else:
                txt = torch.cat((txt, glyphs), 1)
        if vision is not None:
            seen = net.vision_in(vision)
            seen = seen if kinds is None else seen + kinds.weight[2]
            txt = torch.cat((seen.to(txt.dtype), txt), 1)
        return txt


_VIDEO = Sizes("HunyuanVideo", 256, 640, 1280, max_tokens=1024)
_PICTURE = Sizes("HunyuanImage 2.1", 512, 2048, 2560, max_tokens=1024)

FILE_MARKS = ("txt_in.individual_token_refiner.",)

NEEDS = (
    "comfy.ldm.flux.layers:DoubleStreamBlock",
    "comfy.ldm.flux.layers:SingleStreamBlock",
    "comfy.ldm.flux.layers:timestep_embedding(t, dim, max_period, time_factor)",
    "comfy.ldm.hunyuan_video.model:HunyuanVideo._forward"
    "(self, x, timestep, context, y, txt_byt5, clip_fea, guidance, attention_mask, guiding_frame_index, ref_latent, "
    "disable_time_r, control, transformer_options, **)",
    "comfy.ldm.hunyuan_video.model:HunyuanVideo.img_ids(self, x)",
    "comfy.ldm.hunyuan_video.model:HunyuanVideo.img_ids_2d(self, x)",
)

ARCHITECTURES = (
    HunyuanVideo(_VIDEO, name="hunyuan_video15", patches=(1, 1, 1), vision=True, pixels=16, usual_frames=31),
    HunyuanVideo(_VIDEO, name="hunyuan_video", patches=(1, 2, 2), pixels=16, usual_frames=19),
    HunyuanVideo(_PICTURE, name="hunyuan_image21", patches=(1, 1), pixels=32, usual_frames=1, most_frames=1),
    HunyuanVideo(_PICTURE, name="hunyuan_image21_refiner", patches=(1, 1, 1), pixels=16, usual_frames=1),
)
