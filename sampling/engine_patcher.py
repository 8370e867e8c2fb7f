"""Engines in ComfyUI's memory management: it sees their size, loads them before sampling, and may evict them.

ComfyUI plans memory before each run (``load_models_gpu``). It asks each patcher which models go with it, which is when
an engine is looked up; makes room for their sizes; and loads them one after the other, which is when an engine opens:
so the models that are loaded after it find that memory taken, instead of taking it first.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

import torch
from comfy.model_patcher import ModelPatcher

from ..engine_library import Fallback
from ..sessions.gpu_memory import no_room
from . import Shared

if TYPE_CHECKING:
    from ..sessions.session import Session

KEPT_PROMPTS = 2
"""Engines that the latest prompts used stay open although the nodes that held them were replaced."""

_kept: OrderedDict[str, set[EnginePatcher]] = OrderedDict()
_beside: weakref.WeakKeyDictionary[torch.nn.Module, EnginePatcher] = weakref.WeakKeyDictionary()


class Owner(Protocol):
    """Whose engine it is; see ``engine_handle``."""

    def models_beside(self) -> list[ModelPatcher]:
        """Look the engine up for a run that ComfyUI plans; the models that it needs besides."""
        ...

    def open(self) -> None:
        """Open the engine; a failure is no error here, native serves then."""
        ...

    def give_up(self, fallback: Fallback) -> None:
        """Native serves the rest of the run."""
        ...


class EngineModule(Shared, torch.nn.Module):
    """The "model" that ComfyUI manages: no parameters, only the session that holds the memory.

    Attributes:
        session: the engine that serves now, or None.
        expected: whether the run that ComfyUI plans is going to call it.
    """

    def __init__(self, owner: Owner | None = None) -> None:
        super().__init__()
        self.session: Session | None = None
        self.expected = True
        self.device = torch.device("cpu")
        self._owner = None if owner is None else weakref.ref(owner)

    @property
    def owner(self) -> Owner | None:
        return None if self._owner is None else self._owner()


class EnginePatcher(Shared, ModelPatcher):
    """A patcher whose size is that of an engine; it loads whole or not at all. Clones share the engine."""

    @classmethod
    def on(cls, device: torch.device, owner: Owner | None = None) -> EnginePatcher:
        """A patcher without an engine yet; it refers weakly to its owner."""
        return cls(EngineModule(owner), load_device=device, offload_device=torch.device("cpu"))

    def is_clone(self, other: object) -> bool:
        """Whether both stand for one engine, or the same ones: ComfyUI then counts their memory once."""
        if isinstance(other, EnginePatcher) and self.model.session is not None:
            return other.model.session is not None and self.model.session.parts == other.model.session.parts
        return super().is_clone(other)

    def current_loaded_device(self) -> torch.device:
        """ComfyUI makes no room for what is there, also where the patcher of another node has brought it."""
        return self.load_device if self.loaded_size() else super().current_loaded_device()

    def model_patches_models(self) -> list[ModelPatcher]:
        """ComfyUI asks at the start of its planning, before it asks for sizes."""
        owner = self.model.owner
        return [] if owner is None else owner.models_beside()

    def deepclone_multigpu(self, new_load_device: torch.device | None = None, **_: Any) -> EnginePatcher:
        """What stands for the engine on a second GPU: nothing. An engine is on one device, so native serves there."""
        clone = EnginePatcher.on(new_load_device or self.load_device)
        clone.clone_base_uuid = self.clone_base_uuid  # by which ComfyUI knows that this one is cared for
        return clone

    def model_size(self) -> int:
        session = self.model.session
        if session is None or not (self.model.expected or session.loaded):
            return 0
        return session.bytes

    def loaded_size(self) -> int:
        session = self.model.session
        return session.bytes if session is not None and session.loaded else 0

    def load(self, device_to: torch.device | None = None, *_: Any, **__: Any) -> None:
        """Open the engine and mark it as on the device; one that could not be opened has no size."""
        owner = self.model.owner
        if owner is not None and self.model.expected:
            owner.open()
        self.model.device = device_to or self.load_device
        self.model.current_weight_patches_uuid = self.patches_uuid
        self.model.model_loaded_weight_memory = self.loaded_size()

    def partially_load(self, device_to: torch.device, *_: Any, **__: Any) -> int:
        before = self.loaded_size()
        self.load(device_to)
        return self.loaded_size() - before

    def partially_unload(self, *_: Any, **__: Any) -> int:
        freed = self.loaded_size()
        self._release()
        return freed

    def detach(self, unpatch_all: bool = True, **_: Any) -> torch.nn.Module:
        if unpatch_all:  # False: a clone takes over, with the same engine
            self._release()
        return self.model

    def close_engine(self) -> None:
        """Give the engine's memory back to native for the rest of the run."""
        self._release()
        if (owner := self.model.owner) is not None:
            owner.give_up(no_room("native needed what it had").fallback)

    def _release(self) -> None:
        if self.model.session is not None:
            self.model.session.unload()
        self.model.device = self.offload_device
        self.model.model_loaded_weight_memory = 0


def keep(patcher: EnginePatcher, prompt_id: str) -> None:
    """Keep an engine open, where ComfyUI sees and may evict it, until two more prompts have used engines.

    ComfyUI drops a node's output before the node runs again; without this, a changed setting would reload the engine.
    """
    _kept.setdefault(prompt_id, set()).add(patcher)
    _kept.move_to_end(prompt_id)
    while len(_kept) > KEPT_PROMPTS:
        _kept.popitem(last=False)


def keep_beside(module: torch.nn.Module, patcher: EnginePatcher) -> None:
    """Keep a live network's session in the same way, as long as the native module lives: it needs that one's weights.

    Nothing here refers to the module, so ComfyUI may free the model whenever it likes.
    """
    _beside[module] = patcher
