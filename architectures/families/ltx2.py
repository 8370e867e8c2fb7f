"""LTX-2.0, 2.3 and 2.5: two streams, of video and of sound, that attend to prompts of their own and to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from comfy.ldm.lightricks.av_model import BasicAVTransformerBlock, LTXAVModel
from comfy.ldm.lightricks.model import LTXVModel

from .. import Role
from ..calls import Binding, EngineCall, PerImagePass, Unsupported, prompt_of, refuse_all_but
from ..shapes import MOST, Dim, Picture, Range, RequestedSizes, Sizes, Symbol, TensorSpec
from ..shared_tokens import SharedTokens
from ..sizes import BATCH, PROMPT, ImageTokenSizes
from .ltx2_network import OnTokens

VIDEO, SOUND, GUIDES = Dim("N"), Dim("A"), Dim("G")
CLOCKS, SOUND_CLOCKS = Dim("K"), Dim("L")
EACH = 8
"""Frames of the video that a latent frame stands for; the first one stands for one."""
SECOND = 25
"""Tokens of sound in a second, and frames of a usual video."""


@dataclass(frozen=True)
class LTX2(ImageTokenSizes):
    """The transformer from its tokens on. Guides are tokens behind the video's, references of sound before its own.

    Each token has one of some clocks: there is one for all, one for each frame or one for each token. The least number
    is two, since code that was compiled for one would serve no other number.
    """

    name = "ltx2"
    role = Role.BACKBONE
    arguments = ("x", "timestep", "context", "attention_mask", "frame_rate", "transformer_options", "keyframe_idxs",
                 "denoise_mask")  # fmt: skip
    shared = SharedTokens("N", masked="G")
    pixels = 32
    patch = 1
    usual_prompt = 1024
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 2, 16), "N": Range(2, 1000, 1 << 18), "T": Range(1, 130, MOST["max_tokens"]),
        "A": Range(1, 59, 1 << 14), "K": Range(2, 31, 1 << 18), "L": Range(2, 17, 1 << 14), "G": Range(0, 37, 1 << 17)}
    named: ClassVar[Mapping[str, Symbol]] = {
        **ImageTokenSizes.named, "N": Symbol("tokens of the video"), "A": Symbol("tokens of the sound"),
        "K": Symbol("parts of the video with noise of their own", of_picture=False),
        "L": Symbol("parts of the sound with noise of their own", of_picture=False),
        "G": Symbol("guide tokens", of_picture=False)}
    traced: ClassVar[Mapping[str, int]] = {"B": 2, "N": 12, "T": 7, "A": 5, "K": 3, "L": 4, "G": 6}
    compared: ClassVar[Sequence[Mapping[str, int]]] = (
        {"B": 1, "N": 16, "T": 8, "A": 3, "K": 2, "L": 2, "G": 0},
        {"B": 2, "N": 35, "T": 13, "A": 9, "K": 35, "L": 9, "G": 10})

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is LTXAVModel
            and (module.prompt_adaln_single is not None) is bool(module.cross_attention_adaln)
            and all(type(block) is BasicAVTransformerBlock for block in module.transformer_blocks)
        )

    def lacking(self, module: torch.nn.Module, settings: Mapping[str, Any]) -> str:
        """Return why ComfyUI itself computes this file wrongly: older versions pass over settings of LTX-2.5."""
        known = settings.get("ff_bias", True) or hasattr(module, "ff_bias")
        return "" if known else "this ComfyUI loads LTX-2.5 with missing weights, so natively videos are wrong too"

    def inputs(self, module: LTXAVModel, dtype: str) -> list[TensorSpec]:
        heads, sound_heads = module.num_attention_heads, module.audio_num_attention_heads
        half, sound_half = module.inner_dim // heads // 2, module.audio_inner_dim // sound_heads // 2
        cross = module.audio_cross_attention_dim // sound_heads // 2
        words, sound_words = _widths_of_prompt(module)
        return [
            TensorSpec("video", dtype, (BATCH, VIDEO, module.in_channels)),
            TensorSpec("sound", dtype, (BATCH, SOUND, module.audio_in_channels)),
            TensorSpec("context", dtype, (BATCH, PROMPT, words)),
            TensorSpec("sound_context", dtype, (BATCH, PROMPT, sound_words)),
            TensorSpec("times", "float32", (BATCH, CLOCKS), sample="sigma"),
            TensorSpec("sound_times", "float32", (BATCH, SOUND_CLOCKS), sample="sigma"),
            TensorSpec("clocks", "float32", (VIDEO,), sample="unit"),
            TensorSpec("sound_clocks", "float32", (SOUND,), sample="unit"),
            TensorSpec("pe", dtype, (VIDEO, heads, half, 2), steady=True),
            TensorSpec("pe_sound", dtype, (SOUND, sound_heads, sound_half, 2), steady=True),
            TensorSpec("pe_cross", dtype, (VIDEO, sound_heads, cross, 2), steady=True),
            TensorSpec("pe_sound_cross", dtype, (SOUND, sound_heads, cross, 2), steady=True),
            TensorSpec("guides", dtype, (GUIDES,)),
            *([TensorSpec("marks", dtype, (VIDEO,), sample="unit")] if _marks_frames(module) else ()),
        ]

    def outputs(self, module: LTXAVModel, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("video_out", dtype, (BATCH, VIDEO, module.out_channels)),
                TensorSpec("sound_out", dtype, (BATCH, SOUND, module.audio_out_channels))]  # fmt: skip

    def passes(self, module: LTXAVModel) -> list[PerImagePass]:
        """See ``Architecture``: none. Native prepares prompts before sampling, by layers that go out.

        Native's factory of layers goes out too. For quantised files it is a class that no other process can import.
        """
        module.operations = None
        module.video_embeddings_connector = module.audio_embeddings_connector = torch.nn.Identity()
        if module.caption_proj_before_connector:
            module.caption_projection = module.audio_caption_projection = torch.nn.Identity()
        return []

    def function(self, module: LTXAVModel) -> torch.nn.Module:
        return OnTokens(module)

    def binding(self, module: LTXAVModel) -> Binding:
        return partial(_bind, module, _without_weights(module), _Places())

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        """See ``NetworkSizes``: videos of 16 seconds, with two frames as guides."""
        own = super()._ranges(asked)
        most = 16 * SECOND // EACH + 1
        tokens = Range(own["N"].min, own["N"].opt * 16, own["N"].max * most)
        return {**own, "N": tokens, "A": Range(1, 5 * SECOND, 16 * SECOND), "K": Range(2, 2, tokens.max),
                "L": Range(2, 2, 16 * SECOND), "G": Range(0, 0, 2 * own["N"].max)}  # fmt: skip

    def _of_picture(self, picture: Picture) -> dict[str, int]:
        frames = (picture.length - 1) // EACH + 1
        return {"N": frames * super()._of_picture(picture)["N"], "A": picture.length}

    def _sides(self, call: Mapping[str, int]) -> Sequence[int]:
        """See ``NetworkSizes``: the tokens of a video tell no sides."""
        return []

    def _shown(self, steps: int) -> str:
        return str(steps)

    def _picture_words(self, call: Mapping[str, int]) -> list[str]:
        """See ``NetworkSizes``: ``14080 tokens of video with 4.8 s of sound``."""
        sound = f" with {call['A'] / SECOND:.1f} s of sound" if "A" in call else ""
        return [f"{call['N']} tokens of video{sound}"] if "N" in call else []


def _widths_of_prompt(module: LTXAVModel) -> tuple[int, int]:
    """Features of the parts of a prompt's token, for video and for sound."""
    if module.caption_proj_before_connector is False:
        return module.caption_channels, module.caption_channels
    return module.inner_dim, module.audio_inner_dim


def _marks_frames(module: LTXAVModel) -> bool:
    """Tell whether tokens of single pictures, as the first frame, get a learned mark: since 2.5."""
    return getattr(module, "keyframes_abs_pos_embedding", None) is not None


def _without_weights(module: LTXAVModel) -> LTXAVModel:
    """A network with the settings of another and no layers: native's own code makes tokens and places by it.

    It notes in ``marks`` which tokens native would mark.
    """
    found = LTXAVModel.__new__(LTXAVModel)
    torch.nn.Module.__init__(found)
    layers = {"_parameters", "_buffers", "_modules"}
    found.__dict__.update({name: value for name, value in vars(module).items() if name not in layers})
    found.patchify_proj = found.audio_patchify_proj = torch.nn.Identity()
    found.marks = None
    if _marks_frames(module):

        def noted(x: torch.Tensor, coordinates: torch.Tensor, **given: Any) -> torch.Tensor:
            found.marks = found.keyframes_abs_pos_mask(coordinates, **given)[0].float()
            return x

        found.apply_keyframes_abs_pos_embedding = noted
    return found


class _Places:
    """The last rotary embeddings, for steps that want the same again; native makes them in each step."""

    def __init__(self) -> None:
        self._of: tuple[Any, ...] = ()
        self._coordinates: list[torch.Tensor] = []
        self._made: dict[str, torch.Tensor] = {}

    def of(
        self, shell: LTXAVModel, sizes: tuple, rate: float, dtype: torch.dtype,
        coordinates: Callable[[], Sequence[torch.Tensor]], by_value: bool,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Return them for a call.

        Args:
            sizes: all that coordinates depend on, but for guides.
            coordinates: gives the coordinates of video and sound; all of a batch have the same.
            by_value: whether guides have places of their own, so that coordinates are compared.
        """
        wanted = sizes, rate, dtype, by_value
        found = [t[:1] for t in coordinates()] if by_value or wanted != self._of else []
        if wanted != self._of or not all(map(torch.equal, found, self._coordinates)):
            self._of, self._coordinates = wanted, [t.clone() for t in found] if by_value else []
            made = [turns for stream in shell._prepare_positional_embeddings(found, rate, dtype) for turns, _ in stream]
            names = ("pe", "pe_cross", "pe_sound", "pe_sound_cross")
            self._made = {name: turns[0][..., 0].contiguous() for name, turns in zip(names, made, strict=True)}
            if shell.marks is not None:
                self._made["marks"] = shell.marks
        return self._made


_OFF = ("run_vx", "run_ax", "a2v_cross_attn", "v2a_cross_attn")
"""Options that switch a part of the blocks off."""
_TAKEN = frozenset({*LTX2.arguments, "a_timestep", "audio_denoise_mask", "ref_audio", "guide_attention_entries",
                    "crossattn_controlnet"}) - {"attention_mask"}  # fmt: skip
"""Arguments that a call may carry."""


def _bind(module: LTXAVModel, shell: LTXAVModel, places: _Places, call: Mapping[str, Any]) -> EngineCall:
    x, context, options = call["x"], prompt_of(call), call.get("transformer_options") or {}
    refuse_all_but(call, _TAKEN)
    for name in _OFF:
        if not options.get(name, True):
            raise Unsupported(f"a part of the model that is off ({name}), which engines do not do")
    if options.get("stg_self_attn_blocks"):
        raise Unsupported("STG (stg_self_attn_blocks), which engines do not do")
    widths = _widths_of_prompt(module)
    if context.shape[-1] != sum(widths):
        raise Unsupported("a prompt that ComfyUI did not prepare before sampling, which engines do not do")
    if torch.is_tensor(x) or len(x) != 2 or not x[1].numel():
        raise Unsupported("a video without sound, which engines of this model do not do")
    keyframes, reference = call.get("keyframe_idxs"), call.get("ref_audio")
    more = {**options, "guide_attention_entries": call.get("guide_attention_entries")}
    (video, sound), made = _tokens(x), {}
    if reference is not None:
        (_, sound), _, made = shell._process_input(x, None, None, ref_audio=reference)
    guided = keyframes is not None and keyframes.shape[2] > 0
    if guided:
        video, of_video, own = LTXVModel._process_input(shell, x[0], keyframes, call.get("denoise_mask"), **more)
        made, marks = {**made, **own}, shell.marks

    def coordinates() -> Sequence[torch.Tensor]:
        plain = shell._process_input(x, None, None, ref_audio=reference)[1]
        return [of_video, plain[1]] if guided else plain

    rate, sizes = call.get("frame_rate", SECOND), (video.shape[1], *x[0].shape[2:], sound.shape[1], video.device)
    inputs = {"video": video, "sound": sound, "guides": _guides(shell, video, options, {**more, **made})}
    inputs |= places.of(shell, sizes, rate, video.dtype, coordinates, guided)
    if guided and marks is not None:
        inputs["marks"] = marks
    inputs["context"], inputs["sound_context"] = context.split(widths, -1)
    time, sound_time = _timesteps(call)
    frame = x[0].shape[3] * x[0].shape[4]
    inputs["times"], inputs["clocks"] = _clocks(time, video.shape[1], frame, made.get("grid_mask"))
    before = made.get("ref_audio_seq_len", 0)
    inputs["sound_times"], inputs["sound_clocks"] = _clocks_of_sound(sound_time, sound.shape[1], before)
    return EngineCall(inputs, partial(_finished, shell, x, made))


def _finished(
    shell: LTXAVModel, x: Sequence[torch.Tensor], made: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    tokens, heard = (outputs[name].to(x[0].device, x[0].dtype) for name in ("video_out", "sound_out"))
    if (kept := made.get("grid_mask")) is not None:
        every = tokens.new_zeros(made["orig_patchified_shape"])
        every[:, kept] = tokens
        tokens = every
    frames, height, width = x[0].shape[2:]
    video = shell.patchifier.unpatchify(tokens, height, width, frames, x[0].shape[1])
    heard = heard[:, made.get("ref_audio_seq_len", 0) :]
    sound = shell.a_patchifier.unpatchify(heard, shell.num_audio_channels, shell.audio_frequency_bins)
    return [video.clone(), sound.clone()]


def _tokens(x: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of video and sound as tokens, as native's patchifiers make them."""
    return x[0].flatten(2).transpose(1, 2), x[1].transpose(1, 2).flatten(2)


def _timesteps(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The timesteps of video and sound; a call has both in one argument, or in two behind native's own forward."""
    time = call["timestep"]
    return tuple(time) if isinstance(time, tuple | list) else (time, call.get("a_timestep", time))


def _clocks(
    time: torch.Tensor, tokens: int, frame: int, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The times of the clocks, (batch, clocks), and the clock of each token, from 0 for the first to 1 for the last.

    Args:
        time: (batch,), or (batch, tokens, 1) where a mask has each token's own.
        frame: tokens of a frame.
        kept: the tokens that native keeps.
    """
    if time.ndim == 1 or time[0].numel() == 1:
        return time.reshape(-1, 1).expand(-1, 2), torch.zeros(tokens, device=time.device)
    every = time.reshape(time.shape[0], -1)
    if every.shape[1] % frame:
        raise Unsupported("a noise mask of another size than the video, which engines do not do")
    frames = every.unflatten(1, (-1, frame))
    if bool((frames.amax(2) == frames.amin(2)).all()):  # the host waits; native does so twice for each frame
        times, rows = frames[:, :, 0], torch.arange(frames.shape[1], device=time.device).repeat_interleave(frame)
        rows = rows if kept is None else rows[kept]
    else:
        times = every if kept is None else every[:, kept]
        rows = torch.arange(tokens, device=time.device)
    return _at_least_two(times, rows)


def _clocks_of_sound(time: torch.Tensor, tokens: int, before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for sound; tokens of a reference stand before its own, at time zero."""
    if time.ndim > 1 and time[0].numel() > 1:
        times = F.pad(time.reshape(time.shape[0], -1), (before, 0))
        return _at_least_two(times, torch.arange(tokens, device=time.device))
    own = time.reshape(-1, 1)
    rows = (torch.arange(tokens, device=time.device) >= before).float()
    return torch.cat([torch.zeros_like(own) if before else own, own], 1), rows


def _at_least_two(times: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if times.shape[1] == 1:
        return times.expand(-1, 2), torch.zeros_like(rows, dtype=torch.float32)
    return times, rows / (times.shape[1] - 1)


def _guides(
    shell: LTXAVModel, video: torch.Tensor, options: Mapping[str, Any], made: Mapping[str, Any]
) -> torch.Tensor:
    """The number that attention to each weighted guide token is raised by; empty where none is weighted."""
    mask = shell._build_guide_self_attention_mask([video], options, made)
    if mask is None:
        return video.new_zeros(0)
    if mask.guide_start + mask.tracked_count != video.shape[1] or mask.guide_start == 0:
        raise Unsupported("guides elsewhere than behind the video, which engines do not do")
    return mask.noisy_mask[0, 0, 0, mask.guide_start :]


SIZES = Sizes("LTX-2", 256, 704, 1280, max_tokens=1024)

FILE_MARKS = ("audio_adaln_single.",)

NEEDS = (
    "comfy.ldm.lightricks.av_model:BasicAVTransformerBlock",
    "comfy.ldm.lightricks.av_model:LTXAVModel._prepare_positional_embeddings(self, pixel_coords, frame_rate, x_dtype)",
    "comfy.ldm.lightricks.av_model:LTXAVModel._process_input(self, x, keyframe_idxs, denoise_mask, **)",
    "comfy.ldm.lightricks.av_model:LTXAVModel.forward"
    "(self, x, timestep, context, attention_mask, frame_rate, transformer_options, keyframe_idxs, ..., **)",
    "comfy.ldm.lightricks.model:CrossAttention",
    "comfy.ldm.lightricks.model:FeedForward",
    "comfy.ldm.lightricks.model:LTXRopeType",
    "comfy.ldm.lightricks.model:LTXVModel._process_input(self, x, keyframe_idxs, denoise_mask, **)",
    "comfy.ldm.lightricks.model:LTXVModel._build_guide_self_attention_mask"
    "(self, x, transformer_options, merged_args)",
)
"""Names in ComfyUI's own code that the family relies on, see ``needs``."""

ARCHITECTURES = (LTX2(SIZES),)
