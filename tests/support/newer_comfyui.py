"""Changes of ComfyUI since 0.30.0, made to the ComfyUI of this process: one fixture for each.

Each one leaves a ComfyUI alone that has the change already. ``EMULATIONS`` has them all by name, for tests that hold
with each: parametrise with ``NAMES`` and call ``emulate``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import comfy.controlnet
import comfy.model_patcher
import comfy.model_prefetch
import pytest
import torch
from comfy.controlnet import ControlBase, ControlNet
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.model_patcher import ModelPatcher, ModelPatcherDynamic
from dynamic_vram import DynamicOnCPU
from hybrid_trt.comfy_model import comfyui_internals
from torch.utils._python_dispatch import TorchDispatchMode

MOST_HINTS = 2

FOREIGN = ("_v_block", "_v_block_faulted", "_comfy_graph", "_comfy_malloc_graph", "_comfy_cross_step_state",
           "_comfy_tomorrow", "unit_of_pages")  # fmt: skip
"""Names of attributes that newer versions put on layers, the last one known by its value alone."""

FAST_PINS = ("weights-fast", "patches-fast", "fast_disk")


def hint_map_on(patch: pytest.MonkeyPatch) -> None:
    """Pull request 15832: a ControlNet keeps hints by the latent's size in ``cond_hints``, and repeats them after;
    ``cond_hint`` stays and is never set."""
    if "cond_hints" in vars(ControlBase()):
        return
    begin, get_control = ControlBase.__init__, ControlNet.get_control
    set_hint, cleanup = ControlBase.set_cond_hint, ControlBase.cleanup
    repeat = comfy.controlnet.broadcast_image_to

    @functools.wraps(begin)
    def __init__(self: ControlBase) -> None:
        begin(self)
        self.cond_hints = {}

    def set_cond_hint(self: ControlBase, *args: Any, **options: Any) -> ControlBase:
        self.cond_hints.clear()
        return set_hint(self, *args, **options)

    def cleaned(self: ControlBase) -> None:
        cleanup(self)
        self.cond_hints.clear()

    def get_control_by_size(
        self: ControlNet, x_noisy: torch.Tensor, t: torch.Tensor, cond: dict, batched_number: int,
        transformer_options: dict,
    ) -> dict | None:
        """ComfyUI's own way, which finds the map's hint in its slot; a new one is taken before it is repeated."""
        module, size, made = comfy.controlnet, tuple(x_noisy.shape[2:4]), []
        before = module.broadcast_image_to  # that of the control after it in the chain
        module.broadcast_image_to = lambda hint, *rest: (made.append(hint), repeat(hint, *rest))[1]
        self.cond_hint = known = self.cond_hints.get(size)
        try:
            return get_control(self, x_noisy, t, cond, batched_number, transformer_options)
        finally:
            module.broadcast_image_to = before
            hint, self.cond_hint = made[-1] if made else self.cond_hint, None
            if hint is not None and known is None:
                while len(self.cond_hints) >= MOST_HINTS:
                    self.cond_hints.pop(next(iter(self.cond_hints)))
                self.cond_hints[size] = hint

    patch.setattr(ControlBase, "__init__", __init__)
    patch.setattr(ControlBase, "set_cond_hint", _as_comfyuis(set_cond_hint))
    patch.setattr(ControlBase, "cleanup", _as_comfyuis(cleaned))
    patch.setattr(ControlNet, "get_control", functools.wraps(get_control)(_as_comfyuis(get_control_by_size)))


class Pages:
    """Memory of the allocator: a copy of it in another process, or one more that refers to it, would be an error."""

    __module__ = "comfy_aimdo.model_vbar"

    def __reduce_ex__(self, _protocol: object) -> tuple:
        raise TypeError("cannot pickle pages of GPU memory")

    __deepcopy__ = __copy__ = __reduce_ex__


def put_on_layers(module: torch.nn.Module) -> Pages:
    """Put on each layer with weights what loading does since then; what all of it refers to."""
    pages = Pages()
    for layer in module.modules():
        if hasattr(layer, "comfy_cast_weights"):
            for name in FOREIGN:
                setattr(layer, name, (pages, 0, 16) if name != "_comfy_tomorrow" else _Unknown(pages))
    return pages


class _Unknown:
    """Something that holds pages and does not tell."""

    def __init__(self, pages: Pages):
        self.__dict__["held"] = pages

    def __reduce_ex__(self, _protocol: object) -> tuple:
        raise TypeError("cannot pickle what holds pages of GPU memory")


def foreign_attributes_on(patch: pytest.MonkeyPatch) -> None:
    """Loading a model puts handles of memory and recorded graphs on its layers."""
    for kind in (ModelPatcher, ModelPatcherDynamic):

        def load(self: ModelPatcher, *args: Any, _own: Callable = kind.load, **options: Any) -> Any:
            put_on_layers(self.model)
            return _own(self, *args, **options)

        patch.setattr(kind, "load", load)


def fast_disk_on(patch: pytest.MonkeyPatch) -> None:
    """Patchers and ControlNets take one keyword more, which clones pass on by its name."""
    if "fast_disk" in inspect.signature(ModelPatcher).parameters:
        return
    begin, begin_dynamic, begin_control = ModelPatcher.__init__, ModelPatcherDynamic.__init__, ControlNet.__init__
    new = ModelPatcherDynamic.__new__

    def __init__(self: ModelPatcher, *args: Any, fast_disk: bool = False, **options: Any) -> None:
        begin(self, *args, **options)
        self.fast_disk = fast_disk

    def init_dynamic(self: ModelPatcherDynamic, *args: Any, fast_disk: bool = False, **options: Any) -> None:
        begin_dynamic(self, *args, **options)
        self.fast_disk = fast_disk

    def new_dynamic(cls: type, *args: Any, fast_disk: bool = False, **options: Any) -> ModelPatcher:
        made = new(cls, *args, **options)
        made.fast_disk = fast_disk
        return made

    def init_control(self: ControlNet, *args: Any, fast_disk: bool = False, **options: Any) -> None:
        begin_control(self, *args, **options)
        if getattr(self, "control_model_wrapped", None) is not None:
            self.control_model_wrapped.fast_disk = fast_disk

    for kind, its in ((ModelPatcher, __init__), (ModelPatcherDynamic, init_dynamic), (ControlNet, init_control)):
        patch.setattr(kind, "__init__", functools.wraps(kind.__init__)(its))
    patch.setattr(ModelPatcherDynamic, "__new__", new_dynamic)
    passes = "weight_inplace_update=self.weight_inplace_update"
    _rewrite(patch, ModelPatcher, "clone", passes, f"{passes}, fast_disk=self.fast_disk")
    passes = "offload_device=comfy.model_management.unet_offload_device()"
    _rewrite(patch, ControlNet, "deepclone_multigpu", passes,
             f"{passes}, fast_disk=self.control_model_wrapped.fast_disk")  # fmt: skip


def free_memory_of_a_patcher_on(patch: pytest.MonkeyPatch) -> None:
    """``get_free_memory`` reads the patcher that it is asked of."""
    own = ModelPatcher.get_free_memory

    def get_free_memory(self: ModelPatcher, device: torch.device) -> float:
        return own(self, self.load_device if device is None else device) + 0 * len(self.patches)

    patch.setattr(ModelPatcher, "get_free_memory", get_free_memory)


def more_pins_on(patch: pytest.MonkeyPatch) -> None:
    """The record of a model's pinned memory has entries for disks that are fast."""
    patch.setattr(comfyui_internals, "_off", dict(comfyui_internals.check()))  # what is switched off is on afterwards
    for kind in (ModelPatcherDynamic, DynamicOnCPU):

        def register(self: Any, device: torch.device, _own: Callable = kind.register_load_device) -> None:
            _own(self, device)
            for name in FAST_PINS:
                self.model.dynamic_pins[device].setdefault(name, False)

        patch.setattr(kind, "register_load_device", register)


class Recording:
    """ComfyUI's recording of a forward's allocations, opened before its DIFFUSION_MODEL wrappers run.

    Attributes:
        open: how many forwards are being recorded; 0 while somebody has paused it.
        calls: how many were recorded.
        made: new tensors that were made while one was recorded, by the operator that made them; see ``counting``.
    """

    def __init__(self) -> None:
        self.open = self.calls = 0
        self.made: list[str] = []
        self._counts = False

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        self.open += 1
        self.calls += 1
        try:
            with _NewTensors(self) if self._counts else contextlib.nullcontext():
                yield
        finally:
            self.open -= 1

    @contextlib.contextmanager
    def pause(self, sync: bool = False) -> Iterator[None]:
        before, self.open = self.open, 0
        try:
            yield
        finally:
            self.open = before

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[str]]:
        """Inside, new tensors are counted, from none."""
        self.made, self._counts = [], True
        try:
            yield self.made
        finally:
            self._counts = False


class _NewTensors(TorchDispatchMode):
    def __init__(self, recording: Recording):
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._recording.open:
            given = {_place(t) for t in _tensors((args, kwargs))}
            self._recording.made += [str(function) for t in _tensors(result) if _place(t) not in given]
        return result


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def recording_on(patch: pytest.MonkeyPatch) -> Recording:
    """A UNet's forward is recorded from before its wrappers to after them, and ``model_prefetch`` can pause it."""
    recording, forward = Recording(), UNetModel.forward

    @functools.wraps(forward)
    def recorded(self: UNetModel, *args: Any, **options: Any) -> torch.Tensor:
        with recording.record():
            return forward(self, *args, **options)

    patch.setattr(UNetModel, "forward", _as_comfyuis(recorded))
    patch.setattr(comfy.model_prefetch, "pause_malloc_graph", recording.pause, raising=False)
    return recording


EMULATIONS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "hint map": hint_map_on,
    "foreign attributes": foreign_attributes_on,
    "fast_disk": fast_disk_on,
    "free memory of a patcher": free_memory_of_a_patcher_on,
    "more pins": more_pins_on,
    "recording": recording_on,
}
NAMES = ("as it is", *EMULATIONS)
"""All of them, and ComfyUI as it is."""


def emulate(name: str, patch: pytest.MonkeyPatch) -> Any:
    """Make this process's ComfyUI do what a newer one does, by its name in ``NAMES``; what the emulation gives."""
    return EMULATIONS[name](patch) if name in EMULATIONS else None


def _fixture(name: str) -> Any:
    @pytest.fixture
    def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
        return emulate(name, monkeypatch)

    return emulated


hint_map, foreign_attributes, fast_disk, free_memory_of_a_patcher, more_pins, recording = map(_fixture, EMULATIONS)


def _as_comfyuis(function: types.FunctionType) -> types.FunctionType:
    """A method that counts as ComfyUI's own, which code tells by its file; one that wraps another has its names."""
    function.__code__ = function.__code__.replace(co_filename=comfy.controlnet.__file__)
    return function


def _rewrite(patch: pytest.MonkeyPatch, kind: type, name: str, old: str, new: str) -> None:
    """Put a method of ComfyUI's in place whose source has other words in one place."""
    method = getattr(kind, name)
    source = textwrap.dedent(inspect.getsource(method))
    if source.count(old) != 1:
        pytest.fail(f"{kind.__name__}.{name} of this ComfyUI is written in another way; mend this emulation")
    found: dict[str, Any] = {}
    flags = method.__code__.co_flags & annotations.compiler_flag
    code = compile(source.replace(old, new), method.__code__.co_filename, "exec", flags, dont_inherit=True)
    exec(code, method.__globals__, found)  # noqa: S102  # ComfyUI's own source
    patch.setattr(kind, name, found[name])
