"""ComfyUI's attention as later versions have it, put into the pinned one: containers, preferences, overrides by a node.

``install`` does it for good, in a process of its own. The fixture ``newer`` takes it back, and a build's child has it
too: its Python finds ``newer_child/sitecustomize.py``.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy_kitchen
import pytest
import torch

NAME = "comfy.ldm.modules.attention"
Put = Callable[[Any, str, Any], None]


class AttentionTensorContainer:
    """A tensor that can be taken once."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor: torch.Tensor | None = tensor

    def take(self) -> torch.Tensor:
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            raise RuntimeError("it was taken before")
        return tensor


class ComfyAttention(torch.nn.Module):
    """Preference of a layer: no parameters, no children; what a file says of it is told among the state's tensors."""

    def __init__(self, function: Callable | None = None):
        super().__init__()
        self.config = None if function is None else {"attention": "comfy_kitchen_int8"}
        self.function = function

    def with_config(self, function: Callable) -> ComfyAttention:
        """Another one in its place; later versions are told by a LoRA's ``config``."""
        return ComfyAttention(function)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.config is not None:
            destination[f"{prefix}config"] = torch.zeros(4, dtype=torch.uint8)


def wrap_attn(function: Callable) -> Callable:
    """An attention that takes containers, lets an override go first, then the layer's preference."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        preferred = kwargs.pop("preferred_attention", None)
        outermost = "_inside_attn_wrapper" not in kwargs
        kwargs["_inside_attn_wrapper"] = True
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override") if outermost else None
        if override is None and outermost and preferred is not None and preferred.function is not None:
            return preferred.function(*args, **kwargs)
        inner = override or wrapper
        if isinstance(args[0], AttentionTensorContainer):
            if getattr(inner, "container_function", None) is not None:
                return inner.container_function(*args, **kwargs)
            args = (*(container.take() for container in args[:3]), *args[3:])
        return function(*args, **kwargs) if override is None else override(function, *args, **kwargs)

    wrapper.container_function = None
    return as_comfyuis(wrapper)


def as_comfyuis(function: Any) -> Any:
    """A function that counts as ComfyUI's own, which code tells by its file."""
    function.__code__ = function.__code__.replace(co_filename=sys.modules[NAME].__file__)
    return function


def _rounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention of rounded values."""
    rounded = []
    for tensor in (q, k, v):
        step = tensor.abs().amax() / 7
        rounded.append((tensor / step).round() * step)
    return _plain()(*rounded, heads, *args, **kwargs)


def _plain() -> Callable:
    return sys.modules[NAME].REGISTERED_ATTENTION_FUNCTIONS["pytorch"].__wrapped__


def install(attention: ModuleType, put: Put = setattr) -> None:
    """Let ComfyUI's module be like the later one, which asks for kernels when it is imported."""
    if hasattr(comfy_kitchen, "int8_attention_is_available"):
        comfy_kitchen.int8_attention_is_available()
    for kind in (AttentionTensorContainer, ComfyAttention):
        put(kind, "__module__", NAME)
        _put(put, attention, kind.__name__, kind)
    wrapped = {}
    as_comfyuis(_rounded)
    for name in [name for name in vars(attention) if name.startswith("attention_")]:
        own = getattr(attention, name)
        if hasattr(own, "__wrapped__"):
            wrapped[own] = wrap_attn(own.__wrapped__)
            put(attention, name, wrapped[own])
    lossy = wrap_attn(_rounded)
    lossy.__module__, lossy.__qualname__ = NAME, "attention_comfy_kitchen_int8"
    lossy.container_function = lambda *args, **kwargs: _rounded(*(c.take() for c in args[:3]), *args[3:], **kwargs)
    _put(put, attention, lossy.__qualname__, lossy)
    known = {name: wrapped[own] for name, own in attention.REGISTERED_ATTENTION_FUNCTIONS.items()}
    put(attention, "REGISTERED_ATTENTION_FUNCTIONS", {**known, "comfy_kitchen_int8": lossy})
    for name in ("optimized_attention", "optimized_attention_masked"):
        put(attention, name, wrapped[getattr(attention, name)])
    _install_layer(attention, put)


def _install_layer(attention: ModuleType, put: Put) -> None:
    layer = attention.CrossAttention
    before = layer.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.comfy_attention = ComfyAttention()

    def forward(
        self: Any, x: torch.Tensor, context: torch.Tensor | None = None, value: torch.Tensor | None = None,
        mask: torch.Tensor | None = None, transformer_options: dict | None = None,
    ) -> torch.Tensor:
        context = x if context is None else context
        given = (self.to_q(x), self.to_k(context), self.to_v(context if value is None else value))
        contained = map(AttentionTensorContainer, given)
        options = {"attn_precision": self.attn_precision, "transformer_options": transformer_options}
        if mask is not None:
            options["mask"] = mask
        preferred = getattr(self, "comfy_attention", None)
        return self.to_out(attention.optimized_attention(
            *contained, self.heads, preferred_attention=preferred, **options))  # fmt: skip

    put(layer, "__init__", make)
    put(layer, "forward", as_comfyuis(forward))


def set_model_optimized_attention(self: Any, optimized_attention: Callable) -> None:
    """ComfyUI's setter, what its node *Model Attention Backend* calls."""

    def override(_usual: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        return optimized_attention(*args, **kwargs)

    if getattr(optimized_attention, "container_function", None) is not None:
        override.container_function = optimized_attention.container_function
    self.model_options["transformer_options"]["optimized_attention_override"] = override


def add_config(model: Any, module: str, function: Callable) -> None:
    """Change a patcher as loading a LoRA with a ``config`` does."""
    model.add_object_patch(module, model.get_model_object(module).with_config(function))


def _put(put: Put, where: Any, name: str, value: Any) -> None:
    """``put`` of a new name."""
    put(where, name, value) if put is setattr else put(where, name, value, raising=False)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """ComfyUI's attention module, its layers and patchers as later versions have them, also in a build's child."""
    from comfy.ldm.modules import attention
    from comfy.model_patcher import ModelPatcher

    install(attention, monkeypatch.setattr)
    monkeypatch.setattr(ModelPatcher, "set_model_optimized_attention", set_model_optimized_attention, raising=False)
    usual = ModelPatcher.get_key_patches
    monkeypatch.setattr(ModelPatcher, "get_key_patches", lambda self, prefix=None: _tensors_alone(usual, self, prefix))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("newer_child")))
    return attention


def _tensors_alone(usual: Callable, patcher: Any, prefix: str | None) -> dict:
    """Later versions skip what is no tensor among a model's state."""
    found = usual(patcher, prefix)
    return {key: value for key, value in found.items() if isinstance(value[0][0], torch.Tensor)}


class Finder(importlib.abc.MetaPathFinder):
    """Has ``install`` called when a process imports ComfyUI's attention."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != NAME:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        usual = found.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            usual(module)
            install(module)

        found.loader.exec_module = exec_module
        return found
