"""A network whose blocks run compiled, each by what was compiled for its kind, for any size.

Between the blocks ComfyUI's own forward runs as it is; a CUDA graph has all of a step. What was compiled tells for
which sizes it holds. A block of another size, or one that is called otherwise, runs plainly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch

from ...architectures.blocks import Form, put_together, take_apart, words_of
from ...architectures.user_attention import gathers
from ...comfy_model.torch_kernels import laid_out
from ...engine_library.engine import relative_error
from ...sessions.weight_ring import WeightRing, Weights
from .compiled import parameters_of

if TYPE_CHECKING:
    import sympy

    from .free_dimensions import Place

log = logging.getLogger(__name__)

Layout = Callable[[torch.Tensor], torch.Tensor]
"""Lays a tensor out in memory as a block's code takes it."""

MOST_KEPT = 1024
"""Calls of which it is remembered what serves them."""


@dataclass(frozen=True)
class Kind:
    """The compiled code for blocks of one kind, as a file has it.

    Attributes:
        key: the same for blocks that the same code serves, of whatever network.
        contents: Inductor's file.
        called: how its blocks are called, in words; see ``blocks.words_of``.
        dtypes: the inputs' dtypes.
        gives: the form of what a block returns.
        fixed: the sizes that all calls have.
        free: symbol of a condition -> the dimension that tells its size.
        alike: dimensions of one size.
        conditions: hold for the sizes that it serves.
    """

    key: str
    contents: bytes
    called: str
    dtypes: tuple[torch.dtype, ...]
    gives: Form
    fixed: Mapping[Place, int]
    free: Mapping[str, Place]
    alike: Sequence[tuple[Place, Place]]
    conditions: Sequence[sympy.Basic]

    def serves(self, called: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether it holds for a block that is called so, with these inputs. Takes milliseconds."""
        if called != self.called or tuple(t.dtype for t in tensors) != self.dtypes:
            return False

        def size(place: Place) -> int:
            return tensors[place[0]].shape[place[1]]

        if any(size(place) != wanted for place, wanted in self.fixed.items()):
            return False
        if any(size(one) != size(other) for one, other in self.alike):
            return False
        values = {name: size(place) for name, place in self.free.items()}
        return all(_holds(condition, values) for condition in self.conditions)


def _holds(condition: sympy.Basic, values: Mapping[str, int]) -> bool:
    return condition.subs({symbol: values[str(symbol)] for symbol in condition.free_symbols}) == True  # noqa: E712


def layout_of(blocks: Sequence[torch.nn.Module]) -> Layout:
    """Return what lays the inputs of blocks out in memory: as convolutions read them, where blocks have some."""
    convolve = any(weight.ndim in (4, 5) for block in blocks for weight in block.parameters())
    return laid_out if convolve else torch.Tensor.contiguous


@contextmanager
def _having(block: torch.nn.Module, weights: Weights) -> Iterator[None]:
    """Inside, a block's parameters have the data of ``weights``; see ``compiled.lifted``."""
    parameters = parameters_of(block)
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight
        yield
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data


@dataclass(frozen=True)
class Kinds:
    """The kinds of a network's blocks.

    Attributes:
        of: the kinds of each block, in the order of the function's ``blocks``: one for each way to call it.
        kinds: the kinds.
        opened: what runs each.
    """

    of: Sequence[tuple[int, ...]]
    kinds: Sequence[Kind]
    opened: Sequence[Callable[..., Sequence[torch.Tensor]]]


class InBlocks:
    """A network's function with its blocks compiled, as long as it is not closed.

    Attributes:
        kinds: the kinds of its blocks.
        plain: calls of blocks that none of these served.
        judge: takes the distance of the first results to a plain run of the network; None once it has.
    """

    def __init__(
        self, function: torch.nn.Module, kinds: Kinds, weights: Callable[[], tuple[Sequence[Weights], WeightRing]],
        judge: Callable[[float], None] | None = None,
    ):  # fmt: skip
        """
        Args:
            weights: gives the weights of each block, in order, see ``compiled.lifted``; and the ring that lends the
                weights that are in main memory.
        """
        if len(function.blocks) != len(kinds.of):
            raise ValueError(f"it was compiled for {len(kinds.of)} blocks, and the network has {len(function.blocks)}")
        from comfy import model_management  # not with this module, which builders import too

        self._function, self._weights, self._comfyui = function, weights, model_management
        self.kinds, self.plain, self.judge = kinds.kinds, 0, judge
        self._of, self._opened = kinds.of, kinds.opened
        self._on, self._layout = True, layout_of(function.blocks)
        self._chosen: dict[tuple, int | None] = {}
        self._now: Sequence[Weights] = ()
        self._ring: WeightRing | None = None
        self._plainly = [block.forward for block in function.blocks]
        for number, block in enumerate(function.blocks):
            block.forward = partial(self._block, number, self._plainly[number])

    def close(self) -> None:
        """Let the blocks run plainly again."""
        for block, plainly in zip(self._function.blocks, self._plainly, strict=True):
            block.forward = plainly

    def __call__(self, *given: torch.Tensor, compiled: bool = True) -> tuple[torch.Tensor, ...]:
        """Return the network's outputs for its inputs, in order; with ``compiled`` off its blocks run plainly."""
        results = self._run(given, compiled)
        if compiled and self.judge is not None and not gathers():
            self._compare(given, results)
        return results

    def _run(self, given: Sequence[torch.Tensor], compiled: bool) -> tuple[torch.Tensor, ...]:
        self._on, (self._now, self._ring) = compiled, self._weights()
        try:
            with self._ring.call():
                return self._function(*given)
        finally:
            self._now, self._ring = (), None  # between calls the weights may go

    def _compare(self, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Run the network plainly too: a build compares blocks alone. Where memory lacks, the next call is compared."""
        if given[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return
        try:
            error = max(starmap(relative_error, zip(results, self._run(given, compiled=False), strict=True)))
        except torch.OutOfMemoryError:
            return
        judge, self.judge = self.judge, None
        judge(error)

    def _block(self, number: int, plainly: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._ring is None:
            return plainly(*args, **kwargs)
        self._comfyui.throw_exception_if_processing_interrupted()  # its own layers look for a click too
        kind, tensors = None, []
        if self._on:
            form = take_apart((args, kwargs), tensors)
            kind = self._kind(self._of[number], form, tensors)
            self.plain += kind is None
        own = self._now[number]
        with self._ring.weights(number, own) as weights:
            if kind is None:
                with nullcontext() if weights is own else _having(self._function.blocks[number], weights):
                    return plainly(*args, **kwargs)
            results = self._opened[kind](*weights, *map(self._layout, tensors))
        return put_together(self.kinds[kind].gives, iter(results))

    def _kind(self, kinds: tuple[int, ...], form: Form, tensors: Sequence[torch.Tensor]) -> int | None:
        """The one of a block's kinds that serves a call, or None."""
        key = (kinds, form, *((t.shape, t.dtype) for t in tensors))
        if key not in self._chosen:
            if len(self._chosen) >= MOST_KEPT:
                self._chosen.clear()
            words = words_of(form)
            self._chosen[key] = next((kind for kind in kinds if self.kinds[kind].serves(words, tensors)), None)
            if self._chosen[key] is None:
                log.info("Hybrid TRT: blocks run plainly for %s", [tuple(t.shape) for t in tensors])
        return self._chosen[key]
