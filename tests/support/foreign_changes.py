"""Stands for packs that change a network for good, while a sampling runs, or in single calls."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

Change = Callable[[torch.nn.Module], contextlib.AbstractContextManager[None]]


def scaled(value: Any) -> Any:
    """Return a result of a network's method changed: its first tensor of real numbers."""
    if isinstance(value, torch.Tensor):
        return value * 0.7 if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        first, *rest = value
        return type(value)([scaled(first), *rest])
    return value


def with_method(name: str) -> Change:
    """Put a method of another pack on the network itself."""

    @contextlib.contextmanager
    def change(net: torch.nn.Module) -> Iterator[None]:
        own = getattr(net, name)
        setattr(net, name, lambda *args, **kwargs: scaled(own(*args, **kwargs)))
        try:
            yield
        finally:
            delattr(net, name)

    return change


def with_part(path: str, other: Callable[[torch.nn.Module], torch.nn.Module]) -> Change:
    """Put another part into a network, and the first one back, as ``unittest.mock.patch.object`` does."""

    @contextlib.contextmanager
    def change(net: torch.nn.Module) -> Iterator[None]:
        owner, _, name = path.rpartition(".")
        layer = net.get_submodule(owner)
        own = getattr(layer, name)
        setattr(layer, name, other(own))
        try:
            yield
        finally:
            delattr(layer, name)
            setattr(layer, name, own)

    return change


def with_hook(path: str, before: bool = False) -> Change:
    """Put a hook of torch's on a layer: behind it, or before."""

    @contextlib.contextmanager
    def change(net: torch.nn.Module) -> Iterator[None]:
        layer = net.get_submodule(path)
        if before:
            hook = layer.register_forward_pre_hook(lambda _layer, given: (given[0] * 0.5, *given[1:]))
        else:
            hook = layer.register_forward_hook(lambda _layer, _given, result: result * 0.5)
        with contextlib.closing(types.SimpleNamespace(close=hook.remove)):
            yield

    return change


def fewer(blocks: torch.nn.ModuleList) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(list(blocks)[:-1])


def doubled(blocks: torch.nn.ModuleList) -> torch.nn.ModuleList:
    return torch.nn.ModuleList([*blocks, blocks[-1]])


def turned(blocks: torch.nn.ModuleList) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(list(blocks)[::-1])


class Caching(torch.nn.Module):
    """Computes some blocks in the first of two calls, and gives the same again in the next."""

    def __init__(self, blocks: torch.nn.ModuleList):
        super().__init__()
        self.blocks = blocks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.blocks[0](*args, **kwargs))


def caching(blocks: torch.nn.ModuleList) -> torch.nn.ModuleList:
    return torch.nn.ModuleList([Caching(blocks)])


@contextlib.contextmanager
def two_swapped(net: torch.nn.Module, name: str) -> Iterator[None]:
    """Swap two parts where torch keeps them, behind its back."""
    parts = getattr(net, name)._modules
    first, last = list(parts)[0], list(parts)[-1]
    parts[first], parts[last] = parts[last], parts[first]
    try:
        yield
    finally:
        parts[first], parts[last] = parts[last], parts[first]


def halved(layer: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with half the weights."""
    other = copy.deepcopy(layer)
    with torch.inference_mode():
        for parameter in other.parameters():
            parameter.data = parameter.data * 0.5
    return other


def _place(module: str, path: str) -> tuple[Any, str]:
    owner: Any = importlib.import_module(module)
    *way, name = path.split(".")
    for part in way:
        owner = getattr(owner, part)
    return owner, name


def with_function(module: str, path: str, by: Callable[[Any], Any] | None = None) -> Change:
    """Replace a function of ComfyUI's, for all models."""

    @contextlib.contextmanager
    def change(_net: torch.nn.Module) -> Iterator[None]:
        owner, name = _place(module, path)
        own = getattr(owner, name)
        setattr(owner, name, by(own) if by else lambda *args, **kwargs: scaled(own(*args, **kwargs)))
        try:
            yield
        finally:
            setattr(owner, name, own)

    return change


def with_code(module: str, path: str) -> Change:
    """Replace the code inside of a function of ComfyUI's."""

    @contextlib.contextmanager
    def change(_net: torch.nn.Module) -> Iterator[None]:
        owner, name = _place(module, path)
        function = getattr(owner, name)
        own = function.__code__
        space = function.__globals__
        space["_tests_scaled"] = scaled
        space["_tests_own"] = types.FunctionType(own, space, "own", function.__defaults__)
        function.__code__ = (lambda *args, **kwargs: _tests_scaled(_tests_own(*args, **kwargs))).__code__  # noqa: F821
        try:
            yield
        finally:
            function.__code__ = own

    return change


def with_setting(path: str, name: str, value: Callable[[Any], Any]) -> Change:
    """Write another setting on a layer."""

    @contextlib.contextmanager
    def change(net: torch.nn.Module) -> Iterator[None]:
        layer = net.get_submodule(path)
        own = getattr(layer, name)
        setattr(layer, name, value(own))
        try:
            yield
        finally:
            setattr(layer, name, own)

    return change


@contextlib.contextmanager
def list_written(net: torch.nn.Module, path: str, name: str) -> Iterator[None]:
    """Write into a setting that is a list."""
    values = getattr(net.get_submodule(path), name)
    values[0], values[-1] = values[-1], values[0]
    try:
        yield
    finally:
        values[0], values[-1] = values[-1], values[0]


CALLS = {kind: kind for kind in (
    WrappersMP.OUTER_SAMPLE, WrappersMP.SAMPLER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH,
    WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)} | {"function": "function"}  # fmt: skip
"""Places from which packs change a network, by name; the last is a model function wrapper."""


def changing(model: ModelPatcher, place: str, change: Change, calls: Callable[[int], bool] = lambda _n: True
             ) -> ModelPatcher:  # fmt: skip
    """Return a model that is changed while a place of ComfyUI's runs; in some calls of that place alone."""
    other, net, count = model.clone(), model.model.diffusion_model, [0]

    def changed() -> contextlib.AbstractContextManager[None]:
        count[0] += 1
        return change(net) if calls(count[0] - 1) else contextlib.nullcontext()

    def wrapper(executor: Callable, *args: Any, **kwargs: Any) -> Any:
        with changed():
            return executor(*args, **kwargs)

    def function(call: Callable, given: dict) -> torch.Tensor:
        with changed():
            return call(given["input"], given["timestep"], **given["c"])

    if place == "function":
        other.set_model_unet_function_wrapper(function)
    else:
        other.add_wrapper_with_key(place, "tests", wrapper)
    return other


def changes(methods: tuple[str, ...], blocks: str, code: tuple[tuple[str, str], ...]) -> dict[str, Change]:
    """Return changes of a network by name: of methods of its own, of a list of blocks and of ComfyUI's functions."""
    found = {f"method {name}": with_method(name) for name in methods}
    for other in (fewer, doubled, turned, caching):
        found[f"blocks {other.__name__}"] = with_part(blocks, other)
    found["blocks swapped"] = functools.partial(two_swapped, name=blocks)
    for module, path in code:
        found[f"function {path}"] = with_function(module, path)
        found[f"code of {path}"] = with_code(module, path)
    return found
