"""Hints: control images of the picture's size, made as ComfyUI does and kept for later runs.

ComfyUI resizes and converts each control image on the CPU at the first step of every prompt, even if only the seed
changed; the GPU rests meanwhile. Here an image of the right size is only copied. A hint is kept as long as the node's
image: the next prompt with the same values finds it, and with it the result of the hint encoder.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import comfy.controlnet
import numpy
import torch
from comfy.controlnet import ControlBase, ControlNet
from torch.utils.weak import WeakTensorKeyDictionary

from ..comfy_model.comfyui_internals import Feature, works
from ..comfy_model.comfyui_shims import give_hint, hint_of, hints_by_size
from ..comfy_model.whose_code import makes_hints_as_comfyui
from ..sessions.cuda_capture import in_larger_graph

LARGEST = 32 << 20
"""Most bytes of a kept hint, and of its image: 20 and 10 pictures of 512 by 512 pixels."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Kept:
    """A hint with its sources, and its version: a hint that was written to since is not used."""

    made_with: Hashable
    image: torch.Tensor
    hint: torch.Tensor
    version: int


class KeptHints:
    """The hints of one engine-backed ControlNet, by the tensors of their images."""

    def __init__(self) -> None:
        self._of: Any = WeakTensorKeyDictionary()  # an entry goes when the node's output does
        self._repeated: Any = WeakTensorKeyDictionary()  # hint -> ((its version, batch, batched_number), repeated hint)

    def find(self, control: ControlNet, x_noisy: torch.Tensor) -> torch.Tensor | None:
        """Return the hint that ComfyUI would make of a control's image, value for value; None if unknown."""
        image = control.cond_hint_original
        kept: _Kept | None = self._of.get(image)
        if kept is None or kept.made_with != _made_with(control, x_noisy) or kept.hint._version != kept.version:
            return None
        # nodes' tensors have no versions: only their values show a change
        return kept.hint if _same_bits(kept.image, image) else None

    def keep(self, control: ControlNet, x_noisy: torch.Tensor) -> None:
        """Keep a control's new hint; the control gets a copy with a version if the hint has none."""
        image, hint = control.cond_hint_original, hint_of(control, x_noisy)
        if hint is None or not _fits(hint, control, x_noisy):
            return
        if hint.is_inference():
            hint = counting_versions(hint)
            give_hint(control, x_noisy, hint)
        repeated = hint.shape[0] != image.shape[0]  # for this batch
        if repeated or max(hint.nbytes, image.nbytes) > LARGEST:
            return
        self._of[image] = _Kept(_made_with(control, x_noisy), image.clone(), hint, hint._version)

    def repeated(self, hint: torch.Tensor, batch: int, batched_number: int) -> torch.Tensor:
        """Return a hint of several images, repeated for a batch as ComfyUI does.

        It is the same tensor from call to call if the hint has versions, which show changes.
        """
        if hint.is_inference() or in_larger_graph():  # a kept repetition may be of older values
            return comfy.controlnet.broadcast_image_to(hint, batch, batched_number)
        made_for = (hint._version, batch, batched_number)
        known = self._repeated.get(hint)
        if known is None or known[0] != made_for:
            known = (made_for, comfy.controlnet.broadcast_image_to(hint, batch, batched_number))
            self._repeated[hint] = known
        return known[1]


def counting_versions(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the same memory layout that has versions, which show changes."""
    with torch.inference_mode(False):
        return tensor.clone()


def lacks_hint(control: ControlNet, x_noisy: torch.Tensor) -> bool:
    """Tell whether an engine-backed control still needs a hint that only ComfyUI's code makes.

    Such a hint is the image resized, preprocessed and converted.
    """
    if type(control) is not ControlNet or not isinstance(getattr(control.control_model, "hints", None), KeptHints):
        return False
    if not works(Feature.HINTS):
        return False
    if control.timestep_range is None or x_noisy.ndim != 4 or has_hint(control, x_noisy):
        return False
    return _is_plain_image(control.cond_hint_original) and takes_plain_hint(control)


def takes_plain_hint(control: ControlBase) -> bool:
    """Tell whether a control's hint depends on its image alone, and other code may make it as ComfyUI does."""
    if type(control) is not ControlNet or control.vae is not None or control.latent_format is not None:
        return False
    if control.concat_mask or control.extra_concat_orig or control.multigpu_clones:
        return False
    return makes_hints_as_comfyui(control)


def make_hints(controls: Iterable[ControlNet], x_noisy: torch.Tensor) -> list[ControlNet]:
    """Give these controls without a hint the hints that are known or plain copies of their images.

    Returns:
        Controls whose hint is new, or made by ComfyUI in this call; ``keep_hints`` takes them afterwards.
    """
    new = []
    for control in controls:
        give_hint(control, x_noisy, None)  # first, as ComfyUI does: frees the old hint
        hint = control.control_model.hints.find(control, x_noisy)
        if hint is None:
            new.append(control)
            if _only_copies(control, x_noisy):
                image = control.preprocess_image(control.cond_hint_original)
                with torch.inference_mode(False):  # as in ``counting_versions``: it is kept as it is
                    hint = image.to(device=x_noisy.device, dtype=dtype_of(control), copy=True)
        give_hint(control, x_noisy, hint)
    return new


def keep_hints(controls: Iterable[ControlNet], x_noisy: torch.Tensor) -> None:
    """Keep the hints that these controls have by now."""
    for control in controls:
        control.control_model.hints.keep(control, x_noisy)


def has_hint(control: ControlNet, x_noisy: torch.Tensor) -> bool:
    """Tell whether a control has a hint of the picture's size."""
    return _fits(hint_of(control, x_noisy), control, x_noisy)


def hint_for(control: ControlNet, x_noisy: torch.Tensor, batched_number: int) -> torch.Tensor | None:
    """Return the hint that ComfyUI would give to the network in this call; None if it is not made yet."""
    hint, batch = hint_of(control, x_noisy), x_noisy.shape[0]
    if hint is None or hint.shape[0] in (1, batch):
        return hint
    if hints_by_size(control) is None:
        return None  # ComfyUI repeats the hint in its slot, and leaves it there
    return control.control_model.hints.repeated(hint, batch, batched_number)


def _fits(hint: torch.Tensor | None, control: ControlNet, x_noisy: torch.Tensor) -> bool:
    return hint is not None and tuple(hint.shape[2:]) == hint_size(control, x_noisy)


def hint_size(control: ControlNet, x_noisy: torch.Tensor) -> tuple[int, int]:
    """Return height and width of a control's hint for a latent."""
    ratio = control.compression_ratio
    return x_noisy.shape[2] * ratio, x_noisy.shape[3] * ratio


def _is_plain_image(image: Any) -> bool:
    if type(image) is not torch.Tensor or image.device.type != "cpu" or not image.dtype.is_floating_point:
        return False
    return image.ndim == 4 and image.numel() > 0


def _only_copies(control: ControlNet, x_noisy: torch.Tensor) -> bool:
    """Tell whether the hint is a copy: the image has the size, and nearest-pixel resizing keeps its memory layout."""
    image = control.cond_hint_original
    if control.upscale_algorithm != "nearest-exact" or not _fits(image, control, x_noisy):
        return False
    return image.is_contiguous() or image.is_contiguous(memory_format=torch.channels_last)


def _made_with(control: ControlNet, x_noisy: torch.Tensor) -> Hashable:
    """Return a key of all that a hint depends on besides the image."""
    size, device = hint_size(control, x_noisy), x_noisy.device
    return size, control.upscale_algorithm, control.preprocess_image, dtype_of(control), device


def dtype_of(control: ControlNet) -> torch.dtype:
    """Return the dtype that ComfyUI gives to a control's inputs."""
    return control.manual_cast_dtype or control.control_model.dtype


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two tensors in main memory bit by bit, in one thread.

    The GPU rests meanwhile; torch.equal takes 11 ms on a host with sixteen cores.
    """
    if one.dtype != other.dtype:
        return False
    bits = _BITS[one.dtype.itemsize]
    return numpy.array_equal(one.view(bits).numpy(), other.detach().view(bits).numpy())
