"""Differences between versions of ComfyUI, detected by their features and never by a version number.

Each section names the change of ComfyUI that it is for. ``comfyui_internals`` checks the names that all versions have.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .comfyui_internals import Feature, switch_off, works

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase

# -- hints: one for each control, or (ComfyUI's pull request 15832) one for each of the last two sizes of the latent

MOST_HINTS = 2
"""Sizes for which ComfyUI keeps a control's hints."""


def hint_of(control: ControlBase, x_noisy: torch.Tensor) -> torch.Tensor | None:
    """Return the hint that a control holds for a latent. With a single slot, the hint may be of another size."""
    by_size = hints_by_size(control)
    return control.cond_hint if by_size is None else by_size.get(_size(x_noisy))


def give_hint(control: ControlBase, x_noisy: torch.Tensor, hint: torch.Tensor | None) -> None:
    """Let a control hold this hint for a latent, or none; it keeps as many sizes as ComfyUI does."""
    by_size = hints_by_size(control)
    if by_size is None:
        control.cond_hint = hint
        return
    by_size.pop(_size(x_noisy), None)
    if hint is not None:
        while len(by_size) >= MOST_HINTS:
            by_size.pop(next(iter(by_size)))
        by_size[_size(x_noisy)] = hint


def hints_by_size(control: ControlBase) -> dict | None:
    """Return a control's hints by height and width of the latent, one for a whole batch; None where it has one slot."""
    found = getattr(control, "cond_hints", None)
    return found if isinstance(found, dict) else None


def _size(x_noisy: torch.Tensor) -> tuple[int, int]:
    return x_noisy.shape[2], x_noisy.shape[3]


# -- attributes of loading: dynamic VRAM and ComfyUI's compiler put more of them on layers with each version

_LOADING = frozenset(
    "_pin_state _pins _prefetch _v _v_bias _v_signature _v_weight bias_lowvram_function comfy_force_cast_weights "
    "comfy_patched_weights current_patcher current_weight_patches_uuid dynamic_patchers dynamic_pins dynamic_vbars "
    "lowvram_patch_counter model_loaded_weight_memory model_lowvram model_offload_buffer_memory "
    "prev_comfy_cast_weights seed_key weight_lowvram_function".split()
)
_LOADING_BEGINS = ("_v_", "_pin", "_prefetch", "_comfy")
_RECORDED = (torch.cuda.CUDAGraph, torch.cuda.Stream, torch.cuda.Event)


def is_of_loading(name: str, value: Any) -> bool:
    """Tell whether ComfyUI's patchers keep an attribute on a model or layer to load its weights.

    It may hold the allocator's memory or a recorded graph. A copy must not keep it, nor free it in another process.
    """
    return name in _LOADING or name.startswith(_LOADING_BEGINS) or _holds_memory(value)


def _holds_memory(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return any(map(_holds_memory, value))
    if isinstance(value, Mapping):
        return any(map(_holds_memory, value.values()))
    return isinstance(value, _RECORDED) or type(value).__module__.split(".")[0] == "comfy_aimdo"


# -- free memory: a method of patchers that may read the patcher

_NO_PLACE = torch.device("cpu")


def free_memory(device: torch.device) -> float:
    """Return the free bytes of a device, with the weights that dynamic VRAM gives up on demand."""
    from comfy import model_management
    from comfy.model_patcher import ModelPatcher

    try:
        return ModelPatcher(torch.nn.Module(), device, _NO_PLACE).get_free_memory(device)
    except (AttributeError, TypeError):  # patchers of this version have another interface
        return model_management.get_free_memory(device)


# -- pinned memory: newer versions have more kinds, which loading sets up

_KNOWN_PINS = frozenset(
    "weights patches weights-loaded patches-loaded hostbufs_initialized failed active current_prompt".split()
)


def knows_pins(pins: Mapping) -> bool:
    """Tell whether loading handles all of a model's record of pinned memory once, and nothing in each run."""
    unknown = set(pins) - _KNOWN_PINS
    if unknown:
        switch_off(Feature.STAGED_ONCE, f"this ComfyUI's dynamic_pins has {', '.join(sorted(unknown))}")
    return not unknown


# -- ComfyUI's compiler: some models record what their forward allocates, wrappers included (since 0.34)


def outside_recording() -> contextlib.AbstractContextManager:
    """Keep allocations inside out of ComfyUI's recordings, which expect the same allocations in each call."""
    prefetch = sys.modules.get("comfy.model_prefetch")  # not imported: nothing is recorded
    pause = getattr(prefetch, "pause_malloc_graph", None)
    return pause(sync=False) if pause is not None and works(Feature.GRAPHS) else _NOTHING


_NOTHING: contextlib.AbstractContextManager = contextlib.nullcontext()


def import_comfyui(folder: str) -> None:
    """Make ComfyUI's network classes importable; on the CPU, so that no GPU memory is taken."""
    if "comfy.model_management" in sys.modules:
        return
    sys.path.append(folder)
    import comfy.cli_args  # parses no sys.argv unless main.py asked for it

    comfy.cli_args.args.cpu = True
    _have_no_int8_kernels()


def _have_no_int8_kernels() -> None:
    """Keep ComfyUI's attention from asking for int8 kernels at import: that starts CUDA, and no build uses them."""
    with contextlib.suppress(ImportError):
        import comfy_kitchen

        if hasattr(comfy_kitchen, "int8_attention_is_available"):
            comfy_kitchen.int8_attention_is_available = lambda *_: False
