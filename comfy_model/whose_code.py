"""Owner of code: ComfyUI, torch, Python, this pack, or another pack; and code of other packs that a network runs.

``is_known`` serves any code. The functions for controls tell whether another pack's code computes.

Engines compute as ComfyUI's own code does. Packs replace functions of its modules and methods of its classes for all
models at once, some for good, some for a single call. ``replaced_code`` notes each such place that a network's forward
reaches once, by reading the names in its code. Later it compares, which takes microseconds.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..architectures.calls import APPLY_CONTROL, only_adds_residuals
from .comfyui_internals import names_in

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase, ControlNet

_LIBRARIES = ("torch", "torchvision", "einops", "comfy_kitchen", "comfy_aimdo", "safetensors", "numpy", "scipy",
              "torchsde", "tqdm", "sageattention", "sageattn3", "flash_attn", "xformers")  # fmt: skip
"""Packages that ComfyUI computes with. The last ones hold kernels of the attention that users choose by flags."""
_PACKS = ("custom_nodes", "site-packages", "dist-packages", "tests")
"""Names of folders with the code of other packs and libraries."""
_OURS = __name__.rpartition(".comfy_model")[0]
_MOST_WRAPPED = 16


def wrapped(function: Any) -> Iterator[Any]:
    """Iterate over a function and the functions that it wraps."""
    for _ in range(_MOST_WRAPPED):
        yield function
        if (function := getattr(function, "__wrapped__", None)) is None:
            return


def code_of(value: Any) -> types.CodeType | None:
    """Return the code of a Python function, or None."""
    return getattr(value, "__code__", None)


def is_known(value: Any) -> bool:
    """Tell whether a function, class or object is ComfyUI's, torch's, Python's or this pack's own."""
    if isinstance(value, functools.partial):
        return is_known(value.func)
    if str(getattr(value, "__module__", "")).startswith(f"{_OURS}."):
        return True
    if (code := code_of(value)) is not None:
        return _is_known_file(code.co_filename)
    owner = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    return _is_known_module(str(getattr(owner, "__module__", None) or "builtins"))


def pack_of(value: Any) -> str:
    """Return the owner of a function or object: the folder of the pack, else the name of its module. No path."""
    value = getattr(value, "func", value)
    code = code_of(value)
    owner = value if hasattr(value, "__module__") else type(value)
    module = str(owner.__module__)
    file = code.co_filename if code is not None else getattr(sys.modules.get(module), "__file__", None) or ""
    parts = Path(file).parts
    if "custom_nodes" in parts[:-1]:
        return Path(parts[len(parts) - parts[::-1].index("custom_nodes")]).stem
    return module.split(".")[0]


@functools.cache
def _is_known_module(name: str) -> bool:
    if name.split(".")[0] in (*_LIBRARIES, *sys.stdlib_module_names) or f"{name}.".startswith(f"{_OURS}."):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and _is_known_file(file)


@functools.cache
def _is_known_file(name: str) -> bool:
    if name.startswith("<frozen "):
        return True
    if any(name.startswith(folder) for folder in _own_folders()):
        return True
    return any(name.startswith(folder) and not set(Path(name[len(folder) :]).parts).intersection(_PACKS)
               for folder in _shared_folders())  # fmt: skip


@functools.cache
def _own_folders() -> tuple[str, ...]:
    """Return the folders of libraries, each with a separator at its end."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return tuple(f"{Path(file).parent}{os.sep}" for file in files if file)


@functools.cache
def _shared_folders() -> tuple[str, ...]:
    """Return the folders of ComfyUI, of this pack and of Python's library, in which other packs' code may lie too."""
    import comfy.controlnet

    folders = Path(comfy.controlnet.__file__).parents[1], Path(__file__).parents[1], Path(os.__file__).parent
    return tuple(f"{folder}{os.sep}" for folder in folders)


_METHODS = ("get_control", "control_merge")
"""Methods of a ControlNet in whose place ``control_stack`` computes."""


@functools.cache
def _controlnets() -> types.ModuleType:
    """ComfyUI's module of controls. Imported late: not every process that reads this module can find ComfyUI."""
    import comfy.controlnet

    return comfy.controlnet


def computes_as_comfyui(control: ControlNet) -> bool:
    """Tell whether a ControlNet runs ComfyUI's code as we know it: no pack's methods, and none from another file."""
    if _own_methods(control):
        return False
    comfyui = _controlnets()
    return all(_file_of(getattr(comfyui.ControlNet, name)) == comfyui.__file__ for name in _METHODS)


def makes_hints_as_comfyui(control: ControlNet) -> bool:
    """Tell whether ComfyUI's code alone makes a hint; it changes no image in place."""
    from comfy import utils

    comfyui = _controlnets()
    if _file_of(utils.common_upscale) != utils.__file__ or not computes_as_comfyui(control):
        return False
    return _file_of(control.preprocess_image) == comfyui.__file__


def is_foreign(control: ControlNet) -> bool:
    """Tell whether another pack's code computes for a ControlNet or makes its hint."""
    from comfy import utils

    makes_hints = (control.preprocess_image, utils.common_upscale)
    return has_foreign_methods(control) or not all(map(_is_comfyuis, makes_hints))


def has_foreign_methods(control: ControlBase) -> bool:
    """Tell whether a control has a method or a class of another pack."""
    kind = type(control)
    if _own_methods(control) or kind.__module__.split(".")[0] != "comfy":
        return True
    return not all(_is_comfyuis(getattr(kind, name)) for name in _METHODS)


def is_stock(function: Callable[..., Any]) -> bool:
    """Tell whether a function and all functions of its module that it names are ComfyUI's.

    Then no other code sees its arguments.
    """
    if not _is_comfyuis(function):
        return False
    around = function.__globals__
    named = (around[name] for name in function.__code__.co_names if name in around)
    return all(_is_comfyuis(one) for one in named if callable(one) and not isinstance(one, type))


def _own_methods(control: ControlBase) -> list[Any]:
    """Methods set on the instance itself."""
    kind = _controlnets().ControlNet
    return [value for name, value in vars(control).items() if callable(getattr(kind, name, None))]


def _is_comfyuis(function: Any) -> bool:
    file = _file_of(function)
    return file is not None and _is_in_comfyui(file)


@functools.cache
def _is_in_comfyui(file: str) -> bool:
    return Path(file).is_relative_to(Path(_controlnets().__file__).parent)


def _file_of(function: Any) -> str | None:
    code = code_of(function)
    return code.co_filename if code is not None else None


_FOLLOWED = ("comfy.ldm", "comfy.cldm", "comfy.taesd", "comfy.ops", "torch.nn.modules")
"""Packages whose functions are read for the names that they use. Engines need no packages for loading."""
_LOOKED_INTO = (*_FOLLOWED, "comfy.float", "torch", "einops", "math", "comfy_kitchen")
"""Packages in which a name after a dot is looked up."""
_CASTS = ("comfy.model_management", "cast_to")
"""A module, and the start of the names of its functions that networks use."""
ATTENTION = "scaled_dot_product_attention"
"""The function of torch that the attention of ComfyUI and of engines calls in the end."""

_CALLED = ("forward", "decode", "encode", "forward_control_block", "forward_noise_refiner_block", "apply",
           "encode_conditioning")
"""Methods that ComfyUI calls from outside: ``decode`` and ``encode`` of VAEs, the rest of model patches' networks."""

_MAY_DIFFER: Mapping[tuple[str, str], Callable[[Callable], bool]] = {APPLY_CONTROL: only_adds_residuals}
"""Places where packs leave harmless functions for good -> a test of harmlessness: harmless functions differ only in
calls that no engine takes."""

_IDLE = frozenset({"run_every_op"})
"""Functions that compute nothing: ``run_every_op`` looks for interrupts."""
_CHOSEN = "optimized_attention"
"""Start of ComfyUI's names for the attention that the GPU and the user's flags choose."""

_code = attrgetter("__code__")

_noted: dict[frozenset[type], _Places] = {}
"""The places of networks by the classes of their layers, where all of them are ComfyUI's own."""


@dataclass
class _Places:
    """The places of a network's code, and the objects that were there.

    Attributes:
        owners: the namespaces, by their ids.
        found: of each namespace the names and the objects.
        classes: namespaces of classes: a new entry may hide an inherited method.
        foreign: another pack's objects that compute something else, in words.
    """

    owners: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    found: dict[int, dict[str, Any]] = field(default_factory=dict)
    classes: list[Mapping[str, Any]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def freeze(self) -> None:
        """Prepare the lists that ``unchanged`` compares."""
        self._readers = [(itemgetter(*names), self.owners[owner]) for owner, names in self.found.items()]
        self._objects = self._now()
        inner = (_inner(one) for found in self.found.values() for one in found.values())
        self._functions = [one for one in inner if code_of(one) is not None]
        self._codes = list(map(_code, self._functions))
        self._sizes = list(map(len, self.classes))

    def _now(self) -> list[Any]:
        return [read(space) for read, space in self._readers]

    def unchanged(self) -> bool:
        """Tell whether the same objects are in all places. Takes about 5 microseconds."""
        try:
            same = self._now() == self._objects  # compares by identity first
        except KeyError:
            return False
        return same and list(map(_code, self._functions)) == self._codes and list(map(len, self.classes)) == self._sizes

    def add(self, owner: Mapping[str, Any], name: str, module: str, qualified: str) -> list[Callable]:
        """Note a place by its module and the name there; return its functions whose code is to be read."""
        value = owner[name]
        self.owners[id(owner)] = owner
        self.found.setdefault(id(owner), {})[name] = value
        functions = list(wrapped(_inner(value)))
        stranger = next((one for one in functions if not is_known(one)), None)
        if stranger is None and _belongs_there(functions[0], name):
            read = str(getattr(functions[0], "__module__", "")).startswith(_FOLLOWED)
            return [one for one in functions if read and code_of(one) is not None]
        who = "another pack" if stranger is None else f"the pack {pack_of(stranger)}"
        words = f"{who} has replaced {qualified} for all models"
        same = _MAY_DIFFER.get((module, qualified))
        if same is None or not same(functions[0]):
            self.foreign.append(words)
        return []


def replaced_code(kinds: frozenset[type]) -> str | None:
    """Describe code of another pack that layers of some classes compute with, or return None.

    The first time it reads the code, in milliseconds; after that it compares, in microseconds.
    """
    places = _noted.get(kinds)
    if places is not None and places.unchanged():
        return None
    places = _places_of(kinds)
    if places.foreign:
        return places.foreign[0]  # the earlier notes hold again once the code is restored
    _noted[kinds] = places
    return None


def _places_of(kinds: Collection[type]) -> _Places:
    """Return all places that the forward of these layer classes reaches, directly or through ComfyUI's functions."""
    places, known, todo = _Places(), set(), []
    bases = {base for kind in kinds for base in kind.__mro__} - {object, torch.nn.Module}
    methods: dict[str, list[type]] = {}  # code that calls a method has only the method's name
    spaces = {base: vars(base) for base in bases}
    places.classes.extend(spaces.values())
    for base, space in spaces.items():
        for name, value in list(space.items()):
            if callable(inner := _inner(value)) or hasattr(inner, "__get__"):  # a partial method is no callable
                methods.setdefault(name, []).append(base)

    def reach(owner: Mapping[str, Any], name: str, module: str, qualified: str) -> None:
        if (module, qualified) not in known and name in owner and name not in _IDLE:
            known.add((module, qualified))
            todo.extend(places.add(owner, name, module, qualified))
            if _is_context(owner[name]):
                reach_class(owner[name])

    def reach_class(kind: type) -> None:
        space = vars(kind)
        places.classes.append(space)
        for name, value in list(space.items()):
            if code_of(_inner(value)) is not None:
                reach(space, name, kind.__module__, f"{kind.__qualname__}.{name}")

    def reach_methods(name: str) -> None:
        for base in methods.pop(name, ()):
            reach(spaces[base], name, base.__module__, f"{base.__qualname__}.{name}")

    module_space = vars(torch.nn.Module)
    for name in ("__call__", "_call_impl", "_wrapped_call_impl"):
        reach(module_space, name, torch.nn.Module.__module__, f"Module.{name}")
    reach(vars(torch.nn.functional), ATTENTION, torch.nn.functional.__name__, ATTENTION)
    for name in _CALLED:
        reach_methods(name)
    while todo:
        function = todo.pop()
        names = frozenset(names_in(function.__code__))
        for name in names:
            reach_methods(name)
        for owner, name, module in _used_by(function, names):
            reach(owner, name, module, name)
    places.freeze()
    return places


def _used_by(function: Callable, names: Collection[str]) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Iterate over callables that a function's code names: their namespace, name there, and module's name."""
    space = function.__globals__
    todo, seen = [], set()
    for name in names:
        value = space.get(name)
        if isinstance(value, types.ModuleType):
            todo.append(value)
        elif callable(value):
            yield space, name, str(space.get("__name__", ""))
    while todo:
        module = todo.pop()
        if module.__name__ in seen:
            continue
        seen.add(module.__name__)
        looked_into = module.__name__.startswith(_LOOKED_INTO)
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, types.ModuleType):
                if value.__name__.split(".")[0] in ("comfy", "torch", "comfy_kitchen"):
                    todo.append(value)
            elif callable(value) and (looked_into or (module.__name__ == _CASTS[0] and name.startswith(_CASTS[1]))):
                yield vars(module), name, module.__name__


def _belongs_there(value: Any, name: str) -> bool:
    """Tell whether a known object has the name of its place: packs put ComfyUI's functions into other places too."""
    if isinstance(value, type) or name == "__call__":
        return True
    own = getattr(value, "__name__", None)  # a partial has no name: it gives its function other arguments
    return own == name or (name.startswith(_CHOSEN) and str(own).startswith("attention_"))


def _is_context(value: Any) -> bool:
    """Tell whether a place holds a context manager around a layer's work: layers of newer servers cast in it."""
    return isinstance(value, type) and value.__module__ == "comfy.ops" and hasattr(value, "__enter__")


def _inner(value: Any) -> Any:
    """Return the function in a class's entry, be it a method or a property, or in an operation of torch."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "_init_fn", None) or value
