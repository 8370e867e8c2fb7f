"""Compiling a network's blocks: once for each kind, for any size.

The network runs plainly for a few sizes, and each block tells how it is called. Blocks of the same layers and settings
that are called alike are of one kind. Sizes that differ from run to run are left free.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...architectures import user_attention
from ...architectures.blocks import Form, put_together, take_apart, words_of
from ...comfy_model.comfyui_shims import import_comfyui
from ...comfy_model.snapshot import draw_weights
from ...comfy_model.structure_hash import structure_lines
from ...comfy_model.torch_kernels import best_attention, laid_out
from .cache_folder import keep_others_out
from .compiled import KINDS_HEADER, by_inductor, let_kernels_be_recorded, lifted, traced
from .free_dimensions import FreeDimensions
from .kinds import Kind, Layout

_NUMBER = re.compile(r" (layer|block)_id \d+")
"""A setting of a block that is its number; no block computes with it."""


@dataclass(frozen=True)
class Call:
    """A call of a block: its form, and its inputs as tensors without values."""

    form: Form
    inputs: tuple[torch.Tensor, ...]

    @property
    def alike(self) -> tuple:
        return words_of(self.form), tuple((t.dtype, t.ndim) for t in self.inputs)

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(tensor.shape) for tensor in self.inputs)

    def drawn(self, device: torch.device, layout: Layout) -> list[torch.Tensor]:
        """Random inputs; the same whenever they are asked for."""
        generator = torch.Generator(device).manual_seed(1)

        def values(like: torch.Tensor) -> torch.Tensor:
            if not like.is_floating_point():
                return torch.ones(like.shape, dtype=like.dtype, device=device)
            return torch.randn(like.shape, generator=generator, dtype=torch.float32, device=device).to(like.dtype)

        return [layout(values(tensor)) for tensor in self.inputs]


@dataclass(frozen=True)
class Alike:
    """Blocks of one kind.

    Attributes:
        block: the first of them.
        calls: its calls that are alike, for some sizes.
        key: tells all that code for them depends on, but for GPU, torch and our version.
        usual: how many blocks are called so for the usual sizes.
    """

    block: torch.nn.Module
    calls: list[Call]
    key: str
    usual: int

    def drawn(self, device: torch.device, layout: Layout) -> list[torch.Tensor]:
        """Inputs of the first call; see ``Call``."""
        return self.calls[0].drawn(device, layout)


def kinds_of(
    function: torch.nn.Module, calls: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[Alike], list[tuple[int, ...]]]:
    """Return the kinds of a network's blocks, and the numbers of each block's kinds.

    Args:
        function: the network; it may be without weights, on the meta device, as its inputs are then.
        calls: inputs of the network for some sizes, the usual ones first; three for each way to call its blocks.
    """
    seen = [calls_of_blocks(function, given) for given in calls]
    found: dict[tuple, tuple[torch.nn.Module, list[Call]]] = {}
    usual: Counter[tuple] = Counter()
    of = []
    for number, block in enumerate(function.blocks):
        own = _kinds_of(block, [call for run in seen for call in run[number]])
        for key, alike in own.items():
            _, known = found.setdefault(key, (block, alike))
            known += [call for call in alike if not _is_covered(call, known)]
        usual[next(iter(own))] += 1
        of.append(tuple(map(list(found).index, own)))
    return [Alike(*one, _key(key, one[1]), usual[key]) for key, one in found.items()], of


def _is_covered(call: Call, known: Sequence[Call]) -> bool:
    """Tell whether a block's call has each size that all known calls of its kind have: code for them holds for it."""
    for *shapes, own in zip(*(one.sizes for one in known), call.sizes, strict=True):
        if any(set(sizes) == {sizes[0]} and size != sizes[0] for *sizes, size in zip(*shapes, own, strict=True)):
            return False
    return True


def _key(kind: tuple, calls: Sequence[Call]) -> str:
    sizes: list[Any] = [list(call.sizes) for call in calls]
    if user_attention.called() is not None:
        sizes.append("attention is called")  # only then: kinds of earlier builds keep their keys
    return hashlib.sha256(repr((kind, sizes)).encode()).hexdigest()


def contents_of(of: Sequence[tuple[int, ...]], kinds: Sequence[Kind]) -> bytes:
    """A file's contents with the kinds of a network's blocks; ``kinds_in`` reads them."""
    return KINDS_HEADER + pickle.dumps((of, [vars(kind) for kind in kinds]))


def calls_of_blocks(function: torch.nn.Module, given: Sequence[torch.Tensor]) -> list[list[Call]]:
    """Return each block's calls in one call of the network, the latest first. Of alike calls only the last counts.

    On the meta device a block that is called as one like it before does not run: its results have the same shapes.
    """
    found: list[dict[tuple, Call]] = [{} for _ in function.blocks]
    known: dict[tuple, Any] = {}

    def noted(number: int, structure: tuple, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        form = take_apart((args, kwargs), tensors)
        call = Call(form, tuple(t.contiguous().to("meta") for t in tensors))
        found[number].pop(call.alike, None)
        found[number][call.alike] = call
        if not all(t.is_meta for t in tensors):
            return forward(*args, **kwargs)
        key = structure, words_of(form), tuple((t.shape, t.stride(), t.dtype) for t in tensors)
        if key not in known:
            known[key] = forward(*args, **kwargs)
        return known[key]

    own = [vars(block).get("forward") for block in function.blocks]
    for number, block in enumerate(function.blocks):
        block.forward = partial(noted, number, _layers_of(block), block.forward)
    try:
        with torch.inference_mode():
            function(*given)
    finally:
        for block, forward in zip(function.blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward
    return [list(calls.values())[::-1] for calls in found]


def _layers_of(block: torch.nn.Module) -> tuple:
    """Return what tells a block's layers, their settings and weights, but for its number, and who computes it."""
    structure = tuple(line for line in structure_lines(block) if not _NUMBER.fullmatch(line))
    return structure, tuple((name, weight.dtype) for name, weight in lifted(block).items()), _computed_by(block)


def _computed_by(block: torch.nn.Module) -> str:
    """Return the name of the family's function that computes a block; "" for its own forward."""
    forward = vars(block).get("forward")
    if not isinstance(forward, partial):
        return ""
    return f"{forward.func.__module__.rpartition('.')[2]}.{forward.func.__qualname__}"


def _kinds_of(block: torch.nn.Module, calls: Sequence[Call]) -> dict[tuple, list[Call]]:
    """The kinds of a block, which its layers and the ways to call it tell, and the calls of each."""
    layers = _layers_of(block)
    found: dict[tuple, dict[tuple, Call]] = {}
    for call in calls:
        found.setdefault((*layers, call.alike), {}).setdefault(call.sizes, call)
    return {key: list(alike.values()) for key, alike in found.items()}


class BlockFunction(torch.nn.Module):
    """A block as a function of tensors. It writes to none of them, though ComfyUI's code does."""

    def __init__(self, block: torch.nn.Module, form: Form):
        super().__init__()
        self.block = block
        self.gives: Form = None
        self._form = form

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = put_together(self._form, (tensor.clone() for tensor in tensors))
        results: list[torch.Tensor] = []
        self.gives = take_apart(self.block.forward(*args, **kwargs), results)
        return tuple(results)


@contextmanager
def with_weights(block: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a block has random weights on a device."""
    draw_weights(block, device)
    for parameter in block.parameters():
        parameter.data = laid_out(parameter.data)
    try:
        yield
    finally:
        block.to("meta")


def packed(alike: Alike, *more: Any) -> tuple[str, bytes]:
    """Return the arguments of ``compile_apart`` for those of ``compile_alone``."""
    import comfy

    return str(Path(next(iter(comfy.__path__))).parent), pickle.dumps((alike, *more))


def compile_apart(comfyui: str, contents: bytes) -> Kind:
    """Compile what ``packed`` has packed, in a helper process.

    Args:
        comfyui: the folder of ComfyUI.
    """
    import_comfyui(comfyui)
    return compile_alone(*pickle.loads(contents))


def compile_alone(
    alike: Alike, attention: str | None, device: torch.device, layout: Layout, calls_attention: bool
) -> Kind:
    """Compile what serves the blocks of a kind.

    Args:
        attention: the kernel that attention takes; None for the usual one.
        layout: of the inputs in memory.
        calls_attention: whether attention is called as an operation.
    """
    exact = user_attention.calling_exact() if calls_attention else nullcontext()
    with exact, with_weights(alike.block, device):
        function = BlockFunction(alike.block, alike.calls[0].form)
        return compiled(alike, function, alike.drawn(device, layout), attention)


def compiled(alike: Alike, function: BlockFunction, inputs: Sequence[torch.Tensor], attention: str | None) -> Kind:
    """Compile a block that has weights, for the call of these inputs; see ``compile_alone``."""
    keep_others_out()
    let_kernels_be_recorded()
    weights, free = lifted(function), FreeDimensions([call.inputs for call in alike.calls])
    with torch.inference_mode(False), torch.no_grad(), best_attention(inputs[0].device, attention):
        graph, given = traced(function, list(weights.values()), list(weights), inputs, free)
        made = by_inductor(graph, given, free)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compiled"
        made.save(path=str(path))
        contents = path.read_bytes()
    return Kind(
        key=f"{alike.key} {attention}",
        contents=contents,
        called=words_of(alike.calls[0].form),
        dtypes=tuple(t.dtype for t in inputs),
        gives=function.gives,
        fixed=free.fixed,
        free=free.free,
        alike=free.alike,
        conditions=free.conditions,
    )
