"""Inputs that a session makes: results of per-image passes, and zeros for absent inputs.

A per-image pass is the part of a network that works on its control image or prompt alone. It runs once for all steps.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..architectures.calls import PerImagePass, Unsupported
from ..architectures.shapes import Shape, ShapeMismatch, TensorSpec, bind
from ..architectures.user_attention import gathering
from ..comfy_model.live_weights import LiveWeights
from ..comfy_model.network import NativeNetwork
from ..comfy_model.torch_kernels import laid_out, strides_of
from ..engine_library import Reason, Unavailable
from .cuda_capture import in_larger_graph, read_by_larger_graph
from .gpu_memory import no_room

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

KEPT_SOURCES = 4
"""Sources whose results a cache keeps."""

Results = tuple[torch.Tensor, ...]


@dataclass
class _Entry:
    """The results for a source, with the source's version when they were computed, or its values without versions.

    They may be large, so they go when the source goes.
    """

    source: weakref.ref[torch.Tensor]
    version: int | None
    values: torch.Tensor | None
    extra: Hashable
    weights: Hashable
    held: list[Results]

    def holds(self) -> bool:
        """Return True while the source lives and is unchanged."""
        source = self.source()
        if source is None:
            return False
        return torch.equal(source, self.values) if source.is_inference() else source._version == self.version


class ResultCache:
    """Cache of the results for the latest sources, for example control images.

    The tensor object is the key: ComfyUI makes a tensor per image and size and gives it to every step, and
    ``sampling.run_inputs`` does the same for prompts. An in-place change shows in the tensor's version, or in its
    values if it has no version.
    """

    def __init__(self, compute: Callable[[torch.Tensor, Hashable], Results]):
        self._compute = compute
        self._entries: list[_Entry] = []
        self.computed = 0

    def get(self, source: torch.Tensor, extra: Hashable, weights: Hashable) -> Results:
        """Return the results for a source, computed if they are not known.

        Args:
            extra: value that the results also depend on.
            weights: version of the weights; another version computes the results again.
        """
        for entry in self._entries:
            if entry.source() is source and entry.weights == weights and entry.extra == extra and entry.holds():
                (results,) = entry.held
                read_by_larger_graph(results)
                return results
        if in_larger_graph():  # the source belongs to the graph: each replay has other values in it
            return self._compute(source, extra)
        alive = (entry for entry in self._entries if entry.weights == weights and entry.source() is not None)
        self._entries = [entry for entry in alive if entry.source() is not source or entry.holds()]
        results = self._compute(source, extra)
        self.computed += 1
        counts = not source.is_inference()
        as_it_was = (source._version, None) if counts else (None, source.clone())
        held = [results]
        entry = _Entry(weakref.ref(source, lambda _: held.clear()), *as_it_was, extra, weights, held)
        self._entries = [*self._entries[1 - KEPT_SOURCES :], entry]
        return results

    def clear(self) -> None:
        self._entries.clear()


class PerImagePasses:
    """The per-image passes of a network, on weights that another object keeps up to date.

    Attributes:
        steady: names of the engine inputs that the passes give: the same tensor objects for the same image.
    """

    def __init__(
        self,
        passes: Sequence[PerImagePass],
        device: torch.device,
        dtype: torch.dtype,
        layout: Callable[[torch.Tensor], torch.Tensor] = laid_out,
    ):
        """
        Args:
            layout: puts results into the memory layout that the engine takes.
        """
        self._parts = list(passes)
        self._device, self._dtype, self._layout = device, dtype, layout
        self._caches = {part.name: ResultCache(self._computing(part)) for part in self._parts}
        self.steady = tuple(name for part in self._parts for name in part.gives)

    def __iter__(self) -> Iterator[PerImagePass]:
        return iter(self._parts)

    @property
    def computed(self) -> int:
        """Number of passes that ran."""
        return sum(cache.computed for cache in self._caches.values())

    def clear(self) -> None:
        """Drop all results."""
        for cache in self._caches.values():
            cache.clear()

    def run(
        self, given: Mapping[str, torch.Tensor], extras: Mapping[str, Hashable], weights: Hashable
    ) -> dict[str, torch.Tensor]:
        """Return a call's tensors, with the results of the passes in the place of their sources.

        Raises:
            Unavailable: a source has a shape that native does not take.
        """
        found = dict(given)
        for part in self._parts:
            if part.name in given:
                source = found.pop(part.name)
                results = self._caches[part.name].get(source, extras.get(part.name), weights)
                found.update(zip(part.gives, results, strict=True))
        return found

    def _computing(self, part: PerImagePass) -> Callable[[torch.Tensor, Hashable], Results]:
        def compute(source: torch.Tensor, extra: Hashable) -> Results:
            try:
                bind([part.takes], {part.name: tuple(source.shape)})
                ready = laid_out(source.to(self._device, self._dtype))
                with gathering(None):  # GPUs that share a call divide no image and no prompt
                    results = part.function(ready) if extra is None else part.function(ready, extra)
            except (ShapeMismatch, Unsupported) as error:
                raise Unavailable(Reason.UNSUPPORTED_INPUT, str(error)) from None
            return tuple(self._layout(result) for result in results)

        return compute


class LivePerImagePasses:
    """The per-image passes of a network whose engine has weights of its own, run by torch with the live weights."""

    def __init__(self, network: NativeNetwork, precision: str):
        """
        Raises:
            ReplacedForward: another node replaced a part of the network.
        """
        dtype = getattr(torch, precision)
        self._weights = LiveWeights(network, dtype, share=False)
        parts = network.architecture().passes(self._weights.module)
        self.passes = PerImagePasses(parts, network.device, dtype, torch.Tensor.contiguous)
        self._weights.only(torch.nn.ModuleList(part.function for part in self.passes))

    def release(self) -> None:
        """Drop weights and results; the next call makes them again."""
        self.passes.clear()
        self._weights.release()

    def sync_from(self, patcher: ModelPatcher) -> None:
        """Compute with a patcher's weights; cheap if it has the patches of the last call.

        Raises:
            Unavailable: memory is short.
        """
        with _explained():
            self._weights.sync_from(patcher)

    def run(self, given: Mapping[str, torch.Tensor], extras: Mapping[str, Hashable]) -> dict[str, torch.Tensor]:
        """Run as ``PerImagePasses.run``.

        Raises:
            Unavailable: also if memory is short.
        """
        with _explained():
            return self.passes.run(given, extras, self._weights.version)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn torch's error of memory into Unavailable."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise no_room("to encode the control image") from error


def _contiguous(shape: Shape) -> tuple[int, ...]:
    return strides_of(shape, torch.contiguous_format)


class Zeros:
    """Zeros of any shape on a device, which nobody writes to. All zeros of a dtype share the memory of the largest."""

    def __init__(self, device: torch.device, strides: Callable[[Shape], tuple[int, ...]] = _contiguous):
        """
        Args:
            strides: gives the layout for a shape.
        """
        self._device = device
        self._strides = strides
        self._memory: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[Shape, str], torch.Tensor] = {}

    def of(self, absent: Sequence[TensorSpec], symbols: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return zeros for these inputs in a call of these sizes, by name."""
        wanted = [(spec.shape(symbols), spec.dtype) for spec in absent]
        new = {key for key in wanted if key not in self._views}
        for shape, dtype in sorted(new, key=lambda key: math.prod(key[0]), reverse=True):  # the largest takes memory
            size, memory = math.prod(shape), self._memory.get(dtype)
            if memory is None or memory.numel() < size:
                memory = self._memory[dtype] = torch.zeros(size, dtype=getattr(torch, dtype), device=self._device)
            self._views[shape, dtype] = memory.as_strided(shape, self._strides(shape))
        return {spec.name: self._views[key] for spec, key in zip(absent, wanted, strict=True)}

    def clear(self) -> None:
        """Let go of the memory."""
        self._memory.clear()
        self._views.clear()
