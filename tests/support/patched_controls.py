"""Stand-ins for packs that patch a ControlNet's own weights, or a VAE's, through the patcher that comes with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import comfy.hooks
import torch
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import PatcherInjection
from comfy.utils import get_attr

STRENGTH = 0.8
LAYER = "middle_block.0.in_layers.2"


def differences(keys: Any, seed: int = 1, of: str = "middle_block") -> dict[str, tuple]:
    """Patches for some weights, by the names and shapes that a network tells."""
    generator = torch.Generator().manual_seed(seed)
    names = (name for name in keys if name.startswith(of) and name.endswith("weight") and keys[name].ndim > 1)
    return {name: ("diff", (_like(keys[name], generator),)) for name in names}


def _like(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(weight.shape, generator=generator) * float(weight.float().std())


def patch(patcher: ModelPatcher, seed: int = 1, of: str = "middle_block") -> None:
    """Add patches to weights, with keys of the patcher's model, as a LoRA's are found."""
    wanted = differences(patcher.model.state_dict(), seed, of)
    assert wanted, "a pack that finds nothing applies nothing"
    assert sorted(patcher.add_patches(wanted, STRENGTH)) == sorted(wanted)


def half(weight: torch.Tensor) -> torch.Tensor:
    return weight * 0.5


def put_layer(patcher: ModelPatcher, name: str = LAYER) -> None:
    """Replace a layer by one with other weights."""
    other = copy.deepcopy(patcher.get_model_object(name))
    other.weight = torch.nn.Parameter(other.weight.detach() * 0.5, requires_grad=False)
    patcher.add_object_patch(name, other)


def put_in(patcher: ModelPatcher, name: str = "middle_block.0") -> None:
    """Put a hook of torch's into a layer while the patcher is loaded."""
    put: list[Any] = []
    patcher.set_injections("test", [PatcherInjection(
        lambda p: put.append(get_attr(p.model, name).register_forward_hook(lambda *given: given[-1] * 0.5)),
        lambda p: put and put.pop().remove())])  # fmt: skip


def force_hooks(patcher: ModelPatcher) -> None:
    """Patch weights by a hook that is always on."""
    hook, group = comfy.hooks.WeightHook(), comfy.hooks.HookGroup()
    group.add(hook)
    patcher.add_hook_patches(hook, differences(patcher.model.state_dict()), STRENGTH)
    patcher.forced_hooks = group


def on_a_clone(change: Callable[[ModelPatcher], None], times: int = 1) -> Callable[[ControlNet], ControlNet]:
    """A pack's node that changes a clone, or a clone of clones, of a ControlNet's patcher."""

    def node(net: ControlNet) -> ControlNet:
        made = net.copy()
        for _ in range(times):
            made.control_model_wrapped = made.control_model_wrapped.clone()
        change(made.control_model_wrapped)
        return made

    return node


def in_place(change: Callable[[ModelPatcher], None]) -> Callable[[ControlNet], ControlNet]:
    """A pack's node that changes the patcher itself."""

    def node(net: ControlNet) -> ControlNet:
        change(net.control_model_wrapped)
        return net.copy()

    return node


def on_a_deep_copy(net: ControlNet) -> ControlNet:
    """A pack's node that changes the patcher of a deep copy."""
    made = copy.deepcopy(net)
    patch(made.control_model_wrapped)
    return made


def with_keys_of_the_network(net: ControlNet) -> ControlNet:
    """A pack's node that reads the keys from the network itself."""
    made = net.copy()
    made.control_model_wrapped = net.control_model_wrapped.clone()
    assert made.control_model_wrapped.add_patches(differences(net.control_model.state_dict()), STRENGTH)
    return made


def wrap(patcher: ModelPatcher) -> None:
    patcher.add_weight_wrapper(f"{LAYER}.weight", half)


WAYS: dict[str, Callable[[ControlNet], ControlNet]] = {
    "a clone": on_a_clone(patch),
    "clone of clones": on_a_clone(patch, 3),
    "in place": in_place(patch),
    "a deep copy": on_a_deep_copy,
    "keys of the network": with_keys_of_the_network,
    "object": on_a_clone(put_layer),
    "object in place": in_place(put_layer),
    "weight wrapper": on_a_clone(wrap),
    "weight wrapper in place": in_place(wrap),
    "injection": on_a_clone(put_in),
    "hooks": on_a_clone(force_hooks),
}


def with_image(net: ControlNet, previous: ControlNet | None = None) -> ControlNet:
    """As ComfyUI's node applies a ControlNet."""
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    return net.copy().set_cond_hint(image, 0.7, (0.0, 1.0)).set_previous_controlnet(previous)
