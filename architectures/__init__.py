"""The network families that can become engines, one module each.

A module in this folder that defines ``ARCHITECTURE`` is an architecture: adding a family is adding a file. An
architecture looks at a loaded native module and says whether it is one of its family, what tensors go in and out, and
how to call it as a function of tensors alone. All sizes are read off the module, never from a table.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Protocol

from .tensors import Sizes, TensorSpec

if TYPE_CHECKING:
    import torch


class Architecture(Protocol):
    """What the builder needs to know about a network family.

    Attributes:
        name: stands in manifests and file names, for example ``sd15_unet``; never change it.
        kind: ``"unet"`` or ``"controlnet"``.
        sizes: what its engines are built for when the user names no numbers.
    """

    name: str
    kind: str
    sizes: Sizes

    def matches(self, module: torch.nn.Module) -> bool:
        """Whether this native module belongs to the family."""
        ...

    def inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        """What the native network takes, in order; ``dtype`` is the compute precision (torch's name)."""
        ...

    def outputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        """The engine's outputs, in order."""
        ...

    def function(self, module: torch.nn.Module) -> torch.nn.Module:
        """``module`` as a function of the input tensors, in order, returning a tuple of the output tensors.

        Attention inside is torch's scaled_dot_product_attention, whatever ComfyUI runs. May add hooks to ``module``,
        so give it a copy.
        """
        ...

    def hint_encoder(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """Take the part that depends on the hint alone out of a copy, or None where there is none.

        The copy then expects that part's result where it took the hint: see ``encoded_inputs``. So the work is done
        once per image and not in every step.
        """
        ...

    def encoded_inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        """The engine's inputs: the encoded hint is in the hint's place. ``module`` still has its encoder."""
        ...


def architectures() -> dict[str, Architecture]:
    """Every architecture of this folder by name."""
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        architecture = getattr(importlib.import_module(f".{entry.name}", __name__), "ARCHITECTURE", None)
        if architecture is not None:
            found[architecture.name] = architecture
    return found


def architecture_of(module: torch.nn.Module) -> Architecture | None:
    """The architecture that a native module belongs to, or None when no engine can be built for it."""
    return next((a for a in architectures().values() if a.matches(module)), None)
