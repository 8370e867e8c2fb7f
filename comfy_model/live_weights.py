"""The weights of a live network at stable addresses. They follow ComfyUI's patcher, and a companion's.

A tensor is in one of three places, decided anew each time:

* *shared*: the native parameter lies on the GPU in the right dtype (ComfyUI's non-dynamic loading). It is used where it
  is, and ComfyUI patches LoRAs into it in place.
* *owned*: all other tensors. Under dynamic VRAM weights have no stable address: they are staged outside torch's
  allocator and faulted in per layer. The owned copy is then the only one on the GPU, because native is never called.
  ComfyUI's non-dynamic clone would read the file again and hold a second copy in RAM instead.
* *outside*: weights that are streamed. ComfyUI's own parameter in main memory, or an owned copy there.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..engine_library import Reason, Unavailable
from .main_memory import MainMemory, wait_for_copies
from .module_copy import plain_copy
from .network import NativeNetwork, patchers_of
from .torch_kernels import empty_laid_out, lay_out_in_place, strides_laid_out
from .weight_formats import is_quantised, stored_dtypes, tensors_of
from .weight_hash import edition_of
from .weight_patches import version_of
from .weight_values import PatchedWeight, patched_weights, quantised_again, rounded_when_called, value_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


class LiveWeights:
    """A plain copy of a native module whose parameters are the live weights. It does not keep the native module.

    Methods take the patcher of the network itself. It leads to the companion's patcher: ComfyUI keeps that in the model
    patch of the sampled model.

    Attributes:
        module: the copy.
        generation: changes whenever a tensor moves; CUDA graphs recorded before are void then.
        version: changes whenever values may have changed; results kept from before are void then.
    """

    def __init__(self, network: NativeNetwork, dtype: torch.dtype, share: bool = True):
        self.device = network.device
        self.dtype = dtype
        self.generation = 0
        self.version = 0
        self._parts = [(start, part.prefix) for start, part in zip(network.starts, network.parts, strict=True)]
        self._companion = None if network.companion is None else weakref.ref(network.companion.module)
        self._share = share
        self._bound_to: object = None
        self._editions: Sequence[int] = (0,) * len(self._parts)
        self._patched: set[str] = set()
        self._shared: dict[str, int] = {}
        self._outside: frozenset[str] = frozenset()
        self._main_memory = MainMemory()
        self._bytes = (-1, 0)  # and the generation that it was counted in
        self._dtypes = stored_dtypes(network.module, dtype)
        with torch.inference_mode(False):
            self.module = plain_copy(
                network.module,
                dtype,
                parameter=lambda name, p: torch.empty(p.shape, dtype=self._dtypes[name], device="meta"),
                buffer=lambda _, b: b.detach().to(self.device),
            )
        self._places = {name: place for name, place in _places(self.module)}
        # weak references: live weights must not keep a model
        self._native_places: dict[str, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._names: dict[str, list[str]] = {}  # of a native weight: its parameters here
        for name, (owner, leaf) in _places(network.module):
            path = name[: len(name) - len(leaf)]
            self._names[name] = [path + part for part in tensors_of(leaf, owner._parameters[leaf])]
            self._native_places.update(dict.fromkeys(self._names[name], (weakref.ref(owner), leaf)))

    def only(self, part: torch.nn.Module) -> None:
        """From now on follow the parameters of a part of ``module`` alone."""
        wanted = {id(parameter) for parameter in part.parameters()}
        self._places = {name: place for name, place in self._places.items() if id(self._parameter(name)) in wanted}

    def forget(self, layers: Collection[torch.nn.Module]) -> None:
        """From now on follow no parameters of some layers, which ``module`` no longer has."""
        self._places = {name: place for name, place in self._places.items() if place[0] not in layers}

    @property
    def bytes(self) -> int:
        """Memory of the owned tensors; ComfyUI asks a dozen times per prompt."""
        if self._bytes[0] != self.generation:
            beside = self._outside.union(self._shared)
            owned = (p for n, p in self._parameters() if n not in beside and not p.is_meta)
            self._bytes = (self.generation, sum(p.nbytes for p in owned))
        return self._bytes[1]

    @property
    def most_bytes(self) -> int:
        """Memory of all weights if none could be shared."""
        return sum(parameter.nbytes for _, parameter in self._parameters())

    @property
    def loaded(self) -> bool:
        return self._bound_to is not None

    @property
    def complete(self) -> bool:
        """Tell whether all weights are where they were bound; False once ``move_out`` has let go of some."""
        return bool(self._bound_to)

    def sync_from(self, patcher: ModelPatcher, thorough: bool = True) -> None:
        """Set the weights to a patcher's values: the file's weights with its LoRAs.

        Args:
            thorough: check the address of every shared tensor, and not only ComfyUI's own record of the loading state.

        Raises:
            Unavailable: the patcher lacks the model patch, or another node took a weight out of the model.
        """
        patchers = self._patchers(patcher)
        state = tuple(map(self._state, patchers))
        if state == self._bound_to and not (thorough and self._moved()):
            return
        with torch.inference_mode(False), torch.no_grad():
            self._bind(patchers)
        self._bound_to = state
        self.version += 1

    def missing(self, patcher: ModelPatcher) -> int:
        """Return the bytes that ``sync_from`` would allocate for owned weights."""
        shareable = self._shareable(self._patchers(patcher))
        size = 0
        for name, parameter in self._parameters():
            if parameter.is_meta and name not in shareable and name not in self._outside:
                size += parameter.nbytes
        return size

    def large(self, part: torch.nn.Module, least: int) -> dict[str, int]:
        """Return the names and bytes of a part's parameters of at least so many bytes."""
        layers = set(part.modules())
        found = {name: owner._parameters[leaf] for name, (owner, leaf) in self._places.items() if owner in layers}
        return {name: weight.nbytes for name, weight in found.items() if weight.nbytes >= least}

    def size_of(self, names: Collection[str]) -> int:
        """Return the bytes of some parameters."""
        return sum(self._parameter(name).nbytes for name in names)

    @property
    def outside(self) -> frozenset[str]:
        """The names of the parameters in main memory."""
        return self._outside

    def outside_parameters(self) -> set[int]:
        """Return the ids of the parameters in main memory."""
        return {id(self._parameter(name)) for name in self._outside}

    def move_out(self, names: Collection[str]) -> None:
        """Keep these parameters in main memory from the next ``sync_from`` on, and all others on the device."""
        moved = self._outside.symmetric_difference(names)
        for name in moved:
            parameter = self._parameter(name)
            self._put(name, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
            self._shared.pop(name, None)
        self._main_memory.free(moved)
        self._outside = frozenset(names)
        if moved:
            self._bound_to = None if self._bound_to is None else ()
            self.generation += 1

    def native_outside(self) -> set[str]:
        """Return the names of the parameters that ComfyUI keeps in main memory now, and not on this GPU."""
        if self.device.type == "cpu":
            return set()
        return {name for name in self._places if self._native_tensor(name).device.type == "cpu"}

    def release(self) -> None:
        """Give the owned memory of the device back and let go of shared tensors.

        Weights in main memory stay: the next ``sync_from`` reads the others again.
        """
        for name, parameter in list(self._parameters()):
            if name not in self._outside:
                self._put(name, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        self._shared = {name: address for name, address in self._shared.items() if name in self._outside}
        self._bound_to = None
        self.generation += 1
        self.version += 1

    def _patchers(self, patcher: ModelPatcher) -> tuple[ModelPatcher, ...]:
        return patchers_of(patcher, None if self._companion is None else self._companion())

    def _state(self, patcher: ModelPatcher) -> tuple:
        model = patcher.model
        own = (version_of(patcher), edition_of(patcher))
        if not self._share or patcher.is_dynamic():
            return own
        return (*own, model.device, model.model_loaded_weight_memory, model.current_weight_patches_uuid)

    def _moved(self) -> bool:
        return any(self._native_tensor(name).data_ptr() != address for name, address in self._shared.items())

    def _bind(self, patchers: Sequence[ModelPatcher]) -> None:
        self._bytes = (-1, 0)  # should this fail half-way
        shareable = self._shareable(patchers)
        moved, patched, shared = False, set(), {}
        before, self._editions = self._editions, tuple(map(edition_of, patchers))
        for (start, prefix), patcher, was, edition in zip(self._parts, patchers, before, self._editions, strict=True):
            for weight in patched_weights(patcher, prefix):
                native = start + weight.key[len(prefix) :]
                names = [name for name in self._names.get(native, ()) if name in self._places]  # a buffer has none
                if shareable.issuperset(names):
                    moved |= self._put_native(names, shared)
                    continue
                fresh = any(self._parameter(name).is_meta or name in self._shared for name in names)
                if fresh:
                    for name in names:
                        self._own(name)
                    moved = True
                if weight.patches:
                    patched.add(native)
                if fresh or was != edition or weight.patches or native in self._patched:
                    self._write(names, weight)
        if (lacking := next((name for name, parameter in self._parameters() if parameter.is_meta), None)) is not None:
            raise Unavailable(Reason.MODEL_PATCHED, f"another node has taken {lacking} out of the model")
        self._patched, self._shared = patched, shared
        self.generation += moved

    def _put_native(self, names: Sequence[str], shared: dict[str, int]) -> bool:
        """Use native parameters and note their addresses in ``shared``. Return True if one is not where it was."""
        moved = False
        for name in names:
            live = self._laid_out(name)
            if self._shared.get(name) != live.data_ptr():
                self._put(name, live)
                moved = True
            shared[name] = live.data_ptr()
        return moved

    def _write(self, names: Sequence[str], weight: PatchedWeight) -> None:
        """Write a native weight, as its layer computes with it, to its parameters here."""
        if is_quantised(weight.stored):
            value = quantised_again(weight, self.device, self.dtype)
        else:
            value = value_of(weight, self.device, rounded_when_called(weight.patcher, weight.key))
        if not self._outside.isdisjoint(names):
            wait_for_copies()
        tensors = tensors_of(weight.key.rpartition(".")[2], value).values()
        for name, tensor in zip(names, tensors, strict=True):
            self._parameter(name).copy_(tensor)

    def _shares(self, patcher: ModelPatcher) -> bool:
        """Tell whether ComfyUI has loaded the model with exactly this patcher's weight patches in place."""
        loaded = patcher.model.current_weight_patches_uuid == patcher.patches_uuid
        return self._share and loaded and not patcher.is_dynamic()

    def _shareable(self, patchers: Sequence[ModelPatcher]) -> set[str]:
        """Return the names of parameters that can be shared; of quantised layers all or none."""
        parts = zip(self._parts, patchers, strict=True)
        starts = tuple(start for (start, _), patcher in parts if self._shares(patcher))
        found = {name for name in self._places if name.startswith(starts) and self._can_share(name)}
        for names in self._names.values():
            if not found.issuperset(names):
                found.difference_update(names)
        return found

    def _can_share(self, name: str) -> bool:
        owner, leaf = self._native_place(name)
        live = self._native_tensor(name)
        place = torch.device("cpu") if name in self._outside else self.device
        if live.device != place or live.dtype != self._dtypes[name] or type(live.data) is not torch.Tensor:
            return False
        if name in self._outside and live.stride() != strides_laid_out(live.shape, self.device):
            return False
        # a weight that is patched at call time and not in place cannot be shared
        return not getattr(owner, f"{leaf}_function", None) and getattr(owner, f"{leaf}_lowvram_function", None) is None

    def _laid_out(self, name: str) -> torch.Tensor:
        """Return the native parameter to share; a convolution's is converted to channels_last in place."""
        owner, leaf = self._native_place(name)
        if is_quantised(owner._parameters[leaf]):
            return self._native_tensor(name)
        live = owner._parameters[leaf]
        ready = lay_out_in_place(live)
        if ready.data_ptr() != live.data_ptr():
            owner._parameters[leaf] = torch.nn.Parameter(ready, requires_grad=False)
        return ready

    def _own(self, name: str) -> torch.Tensor:
        dtype = self._dtypes[name]
        shape = self._native_tensor(name).shape
        if name in self._outside:  # as on the device, where code was compiled for this layout
            owned = self._main_memory.new(name, shape, dtype).as_strided(shape, strides_laid_out(shape, self.device))
        else:
            owned = empty_laid_out(shape, dtype, self.device)
        self._put(name, owned)
        return owned

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        owner, leaf = self._places[name]
        owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)

    def _parameter(self, name: str) -> torch.Tensor:
        owner, leaf = self._places[name]
        return owner._parameters[leaf]

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, owner._parameters[leaf]) for name, (owner, leaf) in self._places.items())

    def _native_place(self, name: str) -> tuple[torch.nn.Module, str]:
        owner, leaf = self._native_places[name]
        return owner(), leaf

    def _native_tensor(self, name: str) -> torch.Tensor:
        """Return the native parameter, or of a quantised weight the tensor with that name here."""
        owner, leaf = self._native_place(name)
        weight = owner._parameters[leaf]
        return tensors_of(leaf, weight)[name.rpartition(".")[2]] if is_quantised(weight) else weight


def _places(module: torch.nn.Module) -> Iterator[tuple[str, tuple[torch.nn.Module, str]]]:
    """Iterate over (name of a parameter, (the layer that holds it, its name there))."""
    for path, layer in module.named_modules():
        for leaf, parameter in layer._parameters.items():
            if parameter is not None:
                yield f"{path}.{leaf}" if path else leaf, (layer, leaf)
