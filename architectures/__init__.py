"""Architectures: the networks that can become engines, and what the rest of the pack asks of them.

A module of ``families/`` that defines ``ARCHITECTURES`` is a family: adding one is adding a file. An architecture looks
at a loaded native module and says whether the module is of its family, what tensors go in and out, how to call it as a
function of tensors alone, and how ComfyUI's own calls become such calls. All sizes are read off the module, never from
a table.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from . import families
from .calls import Binding, PerImagePass
from .shapes import Examples, Picture, Profile, Range, RequestedSizes, Sizes, Symbol, TensorSpec, words_for
from .sizes import ANY

if TYPE_CHECKING:
    import torch

    from .model_patches import AbsorbedPatch

log = logging.getLogger(__name__)


class Role(str, Enum):
    """Role of a network in ComfyUI; the values stand in manifests."""

    BACKBONE = "unet"
    CONTROLNET = "controlnet"
    VAE_DECODER = "vae_decoder"
    VAE_ENCODER = "vae_encoder"


class Architecture(Protocol):
    """Description of a kind of network for the rest of the pack.

    The classes of ``sizes`` have the last five methods, and ``passes`` and ``engine_inputs`` for networks without
    passes.

    Attributes:
        name: stands in manifests and file names, for example ``sd15_unet``; never change it.
        sizes: what its engines are built for when the user names no numbers.
        symbols: the symbols of its tensors' dimensions, and their names for people.
        batch: the symbol of the batch.
        prompt: the symbol of the prompt's tokens.
        free: all symbols of its tensors, and the sizes that its compiled blocks serve; other calls run uncompiled. It
            is compiled with the sizes ``opt``, which differ from each other. Empty for a network that is not compiled.
        halved: symbols whose sizes are halved, in this order, where a call is too large for a CPU.
        per_step: True for networks that each step calls. A network that runs once per picture is served by compiled
            blocks alone, and not captured as a CUDA graph.
        arguments: the positional arguments of the native forward, in order. ``control`` and ``transformer_options`` are
            ComfyUI's in every backbone.

    The architecture of a network with the companion of a model patch also has ``absorbs``, see ``model_patches``.
    An architecture whose calls may attend to earlier frames has ``keeping_tokens``: module -> the architecture of
    such calls, or None. One whose tokens several GPUs may share has ``shared``. One that no file backend can run says
    what it has in ``only_live``. One whose files some versions of ComfyUI load wrongly has ``lacking``: module,
    settings of the file -> why, or ``""``.
    """

    name: str
    role: Role
    sizes: Sizes
    symbols: Mapping[str, Symbol]
    batch: str
    prompt: str
    free: Mapping[str, Range]
    halved: Sequence[str]
    per_step: bool
    arguments: tuple[str, ...]

    def matches(self, module: torch.nn.Module) -> bool:
        """Tell whether this native module belongs to the family."""
        ...

    def inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        """Return the native network's inputs, in order; ``dtype`` is the compute precision (torch's name)."""
        ...

    def outputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        """Return the engine's outputs, in order."""
        ...

    def function(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return ``module`` as a function of the engine's inputs, in order, to a tuple of the output tensors.

        Attention inside is torch's scaled_dot_product_attention, whatever ComfyUI runs; in blocks it is that of
        ``user_attention.computed``, by which they may call what the user chose. May add hooks to ``module``,
        so give it a copy. A function with ``blocks`` is compiled once for each kind of them, see ``blocks``.
        """
        ...

    def passes(self, module: torch.nn.Module) -> list[PerImagePass]:
        """Take the parts that depend on neither latent nor timestep out of a copy: they run once, not in every step.

        The copy then expects their results among its inputs: see ``engine_inputs``.
        """
        ...

    def engine_inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        """Return the engine's inputs: results of the per-image passes replace the inputs of these passes."""
        ...

    def binding(self, module: torch.nn.Module) -> Binding:
        """Return the function from native calls to calls of the engine; made once per look-up, used in every step."""
        ...

    def profile(self, asked: RequestedSizes) -> Profile:
        """Return the shapes to build for; a number that was not given is the family's.

        Raises:
            ValueError: sizes that are too small or in the wrong order; the text is for the user.
        """
        ...

    def examples(self, profile: Profile) -> Examples:
        """Return the sizes to trace, compare and time an engine of this profile with."""
        ...

    def words(self, profile: Profile) -> str:
        """Return a profile in a few words for people."""
        ...

    def calls(self, profile: Profile, picture: Picture) -> list[dict[str, int]]:
        """Return the calls that sample a picture, symbol -> size, a call for each of its batches.

        Sizes that do not follow from a picture (``Symbol.of_picture``), as the prompt's, are the profile's best.
        """
        ...

    def call_words(self, call: Mapping[str, int]) -> str:
        """Return a call's sizes in a few words for people."""
        ...


_left_out: set[str] = set()
"""Names of families' modules that do not fit this ComfyUI's code; see ``leave_out``."""


def leave_out(family: str) -> None:
    """Do without a family from now on: its networks run natively."""
    _left_out.add(family)


def needs() -> dict[str, tuple[str, ...] | None]:
    """Return the names in ComfyUI's own code that each family relies on, by its module's name.

    A family lists them in ``NEEDS``, in the notation of ``comfyui_internals``. None: its import fails.
    """
    return {name: None if family is None else getattr(family, "NEEDS", ()) for name, family in _modules()}


def _modules(skipped: Collection[str] = ()) -> Iterator[tuple[str, ModuleType | None]]:
    """Yield the name and module of each family; None where its import fails."""
    for entry in pkgutil.iter_modules(families.__path__):
        if entry.name in skipped:
            continue
        try:
            module = importlib.import_module(f"{families.__name__}.{entry.name}")
        except ImportError as error:
            log.debug("Hybrid TRT: %s is left out (%s)", entry.name, error)
            module = None
        if module is None or hasattr(module, "ARCHITECTURES"):
            yield entry.name, module


def _families() -> Iterator[ModuleType]:
    return (family for _, family in _modules(_left_out) if family is not None)


def architectures() -> dict[str, Architecture]:
    """Return every architecture of the families by name."""
    return {architecture.name: architecture for family in _families() for architecture in family.ARCHITECTURES}


def presets() -> dict[str, tuple[str, RequestedSizes]]:
    """Return the families' choices of sizes for the page (``PRESETS``): key -> a family's name, and its numbers."""
    return {key: preset for family in _families() for key, preset in getattr(family, "PRESETS", {}).items()}


@functools.cache
def kept_in_runs() -> frozenset[str]:
    """Return names of attributes in which families' native networks keep results of a run (``KEPT_IN_RUNS``)."""
    return frozenset().union(*(getattr(family, "KEPT_IN_RUNS", ()) for family in _families()))


def may_be_served(tensors: Iterable[str]) -> bool:
    """Tell whether a file with tensors of these names may hold a network of a family. False is certain.

    ``FILE_MARKS`` are parts of names in a family's files. A family without them may be in any file.
    """
    marks = [getattr(family, "FILE_MARKS", ("",)) for family in _families()]
    return any(mark in name for name in tensors for part in marks for mark in part)


def architecture_of(module: torch.nn.Module, role: Role | None = None) -> Architecture | None:
    """Return the architecture that a native module belongs to, or None when no engine can be built for it.

    Args:
        role: the module's; None for a module with a single role.
    """
    alike = (a for a in architectures().values() if role in (None, a.role))
    return next((a for a in alike if a.matches(module)), None)


def absorbed_patch(module: torch.nn.Module, patches: Mapping[str, Sequence[Any]]) -> tuple[AbsorbedPatch, Any] | None:
    """Return the model patch of a network's calls that engines compute themselves, with its kind, or None.

    Args:
        patches: of the calls, by ComfyUI's names of their places.
    """
    if not any(patches.values()):
        return None
    from .model_patches import WithCompanion, companion_of

    for architecture in architectures().values():
        kind: AbsorbedPatch | None = getattr(architecture, "absorbs", None)
        patch = None if kind is None else kind.find(patches)
        if patch is not None and architecture.matches(WithCompanion(module, companion_of(patch).model)):
            return kind, patch
    return None


@functools.cache
def patch_nodes() -> Mapping[str, Collection[str]]:
    """Return the nodes of model patches that engines compute: name -> the inputs that decide on the engine."""
    kinds = (getattr(architecture, "absorbs", None) for architecture in architectures().values())
    return {kind.node: kind.decides for kind in kinds if kind is not None}


def timestep_per_image(module: torch.nn.Module) -> bool:
    """Tell whether each image of a batch may be at a timestep of its own.

    A family says so by ``timestep_per_image``. False for a network of no known family.
    """
    return getattr(architecture_of(module, Role.BACKBONE), "timestep_per_image", False)


def runs_per_step(architecture: str) -> bool:
    """Tell whether each step calls networks of an architecture; True for an unknown name."""
    known = architectures().get(architecture)
    return known is None or known.per_step


def profile_words(architecture: str, profile: Profile) -> str:
    """Return a profile in words.

    Where the family is not known, or ComfyUI is not loaded, the words are for still images.
    """
    known = architectures().get(architecture) if "comfy.model_management" in sys.modules else None
    try:
        return (known or ANY).words(profile)
    except KeyError:  # a manifest may lack a size of its family
        return words_for(profile, (known or ANY).symbols)


def symbols_of(architecture: str) -> Mapping[str, Symbol]:
    """Return the symbols of an architecture by its name; none for an unknown name."""
    known = architectures().get(architecture)
    return known.symbols if known is not None else {}
