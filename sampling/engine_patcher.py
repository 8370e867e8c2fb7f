"""Engines in ComfyUI's memory management: it sees their size, loads them before sampling, and may evict them.

ComfyUI plans memory before each run (``load_models_gpu``). It asks each patcher for its additional models: then an
engine is looked up. It frees memory for their sizes and loads them in turn: then an engine opens. So models that are
loaded later find that memory taken.
"""

from __future__ import annotations

import copy
import math
import uuid
import weakref
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher

from ..engine_library import Fallback
from ..sessions.gpu_memory import no_room
from . import NotCopied

if TYPE_CHECKING:
    from ..comfy_model.network import NativeNetwork
    from ..sessions.session import Session

KEPT_PROMPTS = 2
"""Number of the latest prompts whose engines stay open, although their nodes' outputs were dropped."""

_kept: OrderedDict[str, set[EnginePatcher]] = OrderedDict()
_beside: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, EnginePatcher]] = weakref.WeakKeyDictionary()


class Owner(Protocol):
    """Owner of the engine; see ``engine_handle``."""

    network: NativeNetwork

    def models_beside(self, patcher: ModelPatcher | None = None) -> list[ModelPatcher]:
        """Look the engine up for a run that ComfyUI plans with a patcher; return the models to load beside it."""
        ...

    def open(self, most: float = math.inf) -> None:
        """Open the engine with at most so many bytes of weights; if that fails native serves, without an error."""
        ...

    def give_up(self, fallback: Fallback) -> None:
        """Let native serve the rest of the run."""
        ...


class EngineModule(NotCopied, torch.nn.Module):
    """The "model" that ComfyUI manages: no parameters, only the session that holds the memory.

    Attributes:
        session: the engine that serves now, or None.
        expected: True if the planned run will call it.
        planning: True while ComfyUI frees memory for a run that it takes part in.
    """

    def __init__(self, owner: Owner | None = None) -> None:
        super().__init__()
        self.session: Session | None = None
        self.expected = True
        self.planning = False
        self.device = torch.device("cpu")
        self._owner = None if owner is None else weakref.ref(owner)

    @property
    def owner(self) -> Owner | None:
        return None if self._owner is None else self._owner()


class EnginePatcher(NotCopied, ModelPatcher):
    """A patcher with the size of an engine, loaded in part only where its weights can be streamed.

    Clones share the engine.

    Attributes:
        native: the native patcher whose patches the engine needs; None for the network's own.
    """

    native: ModelPatcher | None = None
    module = EngineModule

    @classmethod
    def on(cls, device: torch.device, owner: Owner | None = None) -> EnginePatcher:
        """Return a patcher without an engine yet; it refers weakly to its owner."""
        return cls(cls.module(owner), load_device=device, offload_device=torch.device("cpu"))

    def is_clone(self, other: object) -> bool:
        """Tell whether both stand for the same engines: ComfyUI then counts their memory once."""
        if isinstance(other, EnginePatcher) and self.model.session is not None:
            return other.model.session is not None and self.model.session.parts == other.model.session.parts
        return super().is_clone(other)

    def clone(self, *arguments: Any, **options: Any) -> EnginePatcher:
        """Return a clone whose parent is the engine's first patcher, which lives as long as the engine.

        When a clone is gone ComfyUI uses its parent. A parent that is itself a clone may be gone too, and then
        ComfyUI looks for a leak each time that it loads something.
        """
        cloned = super().clone(*arguments, **options)
        cloned.parent = self.parent or self
        return cloned

    def current_loaded_device(self) -> torch.device:
        """Return the device of an open engine, also if another node opened it: ComfyUI then frees nothing for it."""
        return self.load_device if self.loaded_size() else super().current_loaded_device()

    def model_patches_models(self) -> list[ModelPatcher]:
        """Look the engine up: ComfyUI calls this at the start of its planning, before it asks for sizes."""
        owner = self.model.owner
        self.model.planning = owner is not None
        return [] if owner is None else owner.models_beside(self.native)

    def deepclone_multigpu(self, new_load_device: torch.device | None = None, **_: Any) -> EnginePatcher:
        """Return a patcher without an engine for another GPU; ``several_gpus`` replaces it."""
        clone = EnginePatcher.on(new_load_device or self.load_device)
        clone.clone_base_uuid = self.clone_base_uuid  # so ComfyUI does not clone the clone again
        return clone

    def model_size(self) -> int:
        session = self.model.session
        if session is None or not (self.model.expected or session.loaded):
            return 0
        return session.bytes

    def loaded_size(self) -> int:
        session = self.model.session
        return session.bytes if session is not None and session.loaded else 0

    def load(self, device_to: torch.device | None = None, *_: Any, most: float = math.inf, **__: Any) -> None:
        """Open the engine and mark it as on the device; an engine that cannot be opened has no size."""
        owner = self.model.owner
        self.model.planning = False
        if owner is not None and self.model.expected:
            owner.open(most)
        self.model.device = device_to or self.load_device
        self.model.current_weight_patches_uuid = self.patches_uuid
        self.model.model_loaded_weight_memory = self.loaded_size()

    def partially_load(self, device_to: torch.device, extra_memory: float = math.inf, *_: Any, **__: Any) -> int:
        """Open the engine with ``extra_memory`` bytes more than it has; return the bytes that it took."""
        before = self.loaded_size()
        self.load(device_to, most=before + extra_memory)
        return self.loaded_size() - before

    def partially_unload(self, _device_to: torch.device, memory_to_free: int = 0, *_: Any, **__: Any) -> int:
        """Have the engine give memory back: of some blocks where its weights can be streamed, else all."""
        session = self.model.session
        if session is None or not session.loaded:
            return 0
        freed = session.give_back(memory_to_free, self.model.planning)
        if not session.loaded:
            self._release()
        self.model.model_loaded_weight_memory = self.loaded_size()
        return freed

    def detach(self, unpatch_all: bool = True, **_: Any) -> torch.nn.Module:
        if unpatch_all:  # False: a clone takes over, with the same engine
            self._release()
        return self.model

    def close_engine(self, why: Fallback | None = None) -> None:
        """Give the engine's memory back to native for the rest of the run; by default because native lacked memory."""
        if (session := self.model.session) is not None and session.loaded:
            session.close()
            model_management.soft_empty_cache()  # dynamic VRAM does not take the blocks that torch keeps
        self._release()
        if (owner := self.model.owner) is not None:
            owner.give_up(why or no_room("the normal model needed what it had").fallback)

    def _release(self) -> None:
        if self.model.session is not None:
            self.model.session.unload()
        self.model.device = self.offload_device
        self.model.model_loaded_weight_memory = 0


class ControlEngineModule(EngineModule):
    """The "model" of a ControlNet's engine: its weights and layers are the native network's."""

    def __getattr__(self, name: str) -> Any:
        owner = None if name == "_owner" else self.owner
        if owner is None:
            raise AttributeError(name)
        return getattr(owner.network.module, name)


for _name in ("state_dict", "named_parameters", "named_buffers", "named_modules", "named_children"):
    setattr(ControlEngineModule, _name, property(partial(ControlEngineModule.__getattr__, name=_name)))


class ControlEnginePatcher(EnginePatcher):
    """The patcher of a ControlNet's engine, which never counts as a clone.

    ComfyUI unloads clones of a ControlNet before each run that several GPUs share, to copy them. An engine is not
    copied, and stays open.
    """

    module = ControlEngineModule

    @property
    def clone_base_uuid(self) -> uuid.UUID:
        return uuid.uuid4()

    @clone_base_uuid.setter
    def clone_base_uuid(self, _value: uuid.UUID) -> None: ...


class ControlPatcher(ControlEnginePatcher):
    """The patcher of an engine-backed CONTROL_NET. Clones share the engine; all else is ``native``'s.

    Attributes:
        native: ComfyUI loads it where the engine is not valid for its patches.
        last: the latest loaded of all patchers that share the weights: its patches act, as in native. Deep copies
            have their own, as native deep copies have weights of their own.
    """

    _own = frozenset({"model", "size", "load_device", "offload_device", "parent"})

    def __init__(self, engine: EnginePatcher, native: ModelPatcher, last: Last | None = None):
        super().__init__(engine.model, engine.load_device, engine.offload_device)
        self.parent = getattr(engine, "parent", None) or engine
        for name in vars(self).keys() - self._own:
            del vars(self)[name]
        vars(self).update(native=native, last=_last.setdefault(native.model, []) if last is None else last)

    def __getattr__(self, name: str) -> Any:
        if "native" not in vars(self):  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.native, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own or "native" not in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self.native, name, value)

    def clone(self, *arguments: Any, **options: Any) -> ControlPatcher:
        return ControlPatcher(self, self.native.clone(*arguments, **options), self.last)

    def __deepcopy__(self, memo: dict[int, Any]) -> ControlPatcher:
        return ControlPatcher(self, self.native.clone(), copy.deepcopy(self.last, memo))

    def in_force(self) -> ModelPatcher:
        """Return the native patcher whose patches act on calls."""
        patcher = self.last[0]() if self.last else None
        return self.native if patcher is None else patcher.native

    def load(self, *arguments: Any, **options: Any) -> None:
        self.last[:] = [weakref.ref(self)]
        super().load(*arguments, **options)


Last = list["weakref.ref[ControlPatcher]"]
_last: weakref.WeakKeyDictionary[torch.nn.Module, Last] = weakref.WeakKeyDictionary()
"""Native network -> the ``Last`` of its patchers that are no deep copies."""


def keep(patcher: EnginePatcher, prompt_id: str) -> None:
    """Keep an engine open until two more prompts have used engines; ComfyUI sees it and may evict it.

    ComfyUI drops a node's output before the node runs again. Without this a changed setting would reload the engine.
    """
    _kept.setdefault(prompt_id, set()).add(patcher)
    _kept.move_to_end(prompt_id)
    while len(_kept) > KEPT_PROMPTS:
        _kept.popitem(last=False)


def keep_with_module(module: torch.nn.Module, role: str, patcher: EnginePatcher) -> None:
    """Keep the session of a live network, which uses the native module's weights, as long as the module lives.

    Nothing here refers to the module, so ComfyUI may free the model at any time.
    """
    _beside.setdefault(module, {})[role] = patcher
