"""The hash of a loaded model's weights, and the edits that other nodes make to them.

Other nodes may write to weights or replace them. No patch shows that, and torch counts no versions of tensors that
nodes make. So some values of every weight are compared once per run, which takes a millisecond or two.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from . import hash_cache
from .weight_formats import PLAIN
from .weight_patches import version_of
from .weight_values import current_weights, patched_weights

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

Check = Callable[[], None]
"""Called often during long work; may raise to stop it."""

SMALL = 2048
"""Weights with at most so many elements make the fingerprint: biases and norms, a megabyte in all."""
PLACES, VALUES = 4, 64
"""Number of runs, and of values in each, that make the sample of a weight."""

AHEAD = 16
"""Most weights that wait to be hashed: patched and dequantised weights are copies, which must not pile up."""

_hashes: weakref.WeakKeyDictionary[torch.nn.Module, dict[object, str]] = weakref.WeakKeyDictionary()
_taken: weakref.WeakKeyDictionary[torch.nn.Module, dict[object, str]] = weakref.WeakKeyDictionary()
"""State of a model -> key of its hash on disk, from the first use of that hash until the second."""


def weights_hash(patcher: ModelPatcher, prefix: str = "", check: Check | None = None) -> str:
    """Return the sha256 over names, shapes and values of the weights.

    Values are hashed as float32: a file has the same hash as float16 on a GPU and as float32 on a CPU.
    Computed once per loaded model and set of weight patches, and once ever for a file whose loader is known.
    """
    known = _hashes.setdefault(patcher.model, {})
    state = _state(patcher, prefix)
    taken = _taken.setdefault(patcher.model, {})
    if state in taken and not hash_cache.still_holds(taken.pop(state)):  # at the second use the file has been read
        del known[state]
    if state not in known:
        source = _kept_under(patcher, prefix)
        found = hash_cache.read(source)
        if found is None:
            found = _hash(current_weights(patcher, prefix), check)
            hash_cache.write(source, found)
        else:
            taken[state] = source
        known[state] = found
    return known[state]


def own_hash(patcher: ModelPatcher, prefix: str = "") -> str:
    """Return the hash of the model's own weights, without the patcher's patches."""
    bare = patcher.clone()
    bare.patches = {}
    return weights_hash(bare, prefix)


def known_hash(patcher: ModelPatcher, prefix: str = "") -> str:
    """Return the hash of the weights if it is known already, else ``""``."""
    return _hashes.get(patcher.model, {}).get(_state(patcher, prefix), "")


def forget_hash(patcher: ModelPatcher) -> None:
    """Drop a model's hashes, because they turned out to be wrong."""
    _hashes.pop(patcher.model, None)
    for prefix in ("", "diffusion_model."):
        hash_cache.forget(_kept_under(patcher, prefix))


def _kept_under(patcher: ModelPatcher, prefix: str) -> str | None:
    """Return the key of a model's hash on disk; None where its weights differ from its file's."""
    if edition_of(patcher):
        return None
    return hash_cache.key_of(patcher, prefix, lambda: _sample(patcher, prefix))


def fingerprint(patcher: ModelPatcher, prefix: str = "") -> str:
    """Return the hash of the small weights alone, in milliseconds: where it differs, the weights differ."""
    known = _hashes.setdefault(patcher.model, {})
    state = ("fingerprint", *_state(patcher, prefix))
    if state not in known:
        known[state] = _hash(current_weights(patcher, prefix, lambda weight: weight.numel() <= SMALL))[:16]
    return known[state]


def _sample(patcher: ModelPatcher, prefix: str) -> str:
    """Return the hash of a few values from every weight as it was loaded, in milliseconds.

    Training, merging and LoRAs change nearly all values of a weight, but often leave biases and norms alone.
    """
    h = hashlib.sha256()
    for weight in patched_weights(patcher, prefix):
        flat = getattr(weight.stored, "_qdata", weight.stored).detach().flatten()
        step = max(1, flat.numel() // PLACES)
        parts = [flat[i : i + VALUES] for i in range(0, flat.numel(), step)][: PLACES + 1]
        values = torch.cat(parts).to("cpu").to(torch.float32) if parts else flat
        h.update(f"{weight.key} {tuple(weight.stored.shape)} {weight.cast or ''}".encode())
        h.update(values.numpy().tobytes())
    return h.hexdigest()[:16]


def digest(name: str, tensor: torch.Tensor) -> bytes:
    """Return the sha256 of a weight."""
    values = tensor.to(torch.float32).contiguous()
    h = hashlib.sha256(f"{name} {tuple(values.shape)} ".encode())
    h.update(memoryview(values.numpy()).cast("B") if values.numel() else b"")
    return h.digest()


def combine(digests: Mapping[str, bytes]) -> str:
    """Return the hash of a model from the digests of its weights by name."""
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(digests[name])
    return total.hexdigest()


def hash_of_parts(hashes: Sequence[str]) -> str:
    """Return the hash of a network from its parts' hashes; ``""`` unless all are known."""
    if len(hashes) == 1 or not all(hashes):
        return hashes[0] if len(hashes) == 1 else ""
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def hashing_pool() -> ThreadPoolExecutor:
    """Return threads to call ``digest`` in: hashing releases the GIL."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def _hash(weights: Iterable[tuple[str, torch.Tensor]], check: Check | None = None) -> str:
    digests: dict[str, bytes] = {}
    pending: deque[tuple[str, Future[bytes]]] = deque()

    def take() -> None:
        name, future = pending.popleft()
        digests[name] = future.result()
        if check is not None:
            check()

    with hashing_pool() as pool:
        try:
            for name, weight in weights:
                pending.append((name, pool.submit(digest, name, weight)))
                if len(pending) > AHEAD:
                    take()
            while pending:
                take()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return combine(digests)


def _state(patcher: ModelPatcher, prefix: str) -> tuple:
    return (version_of(patcher), prefix, edition_of(patcher))


COMPARED = 4
"""Values compared of each weight. They are few: each may be in a page of a file that is not in memory."""

Place = tuple[str, dict, str, torch.dtype | None]


@dataclass
class _Noted:
    """A model's weights as they were looked at last.

    Attributes:
        places: each weight's name, with the dict of the layer that holds it, its name there, and the dtype that ComfyUI
            gives it once it is loaded, if known.
        edition: number of edits found so far.
    """

    places: list[Place]
    values: bytes
    edition: int = 0


_noted: weakref.WeakKeyDictionary[torch.nn.Module, _Noted] = weakref.WeakKeyDictionary()


def edition_of(patcher: ModelPatcher) -> int:
    """Return the edition that ``look_for_edits`` found last. Cheap."""
    known = _noted.get(patcher.model)
    return 0 if known is None else known.edition


def look_for_edits(patcher: ModelPatcher) -> int:
    """Return the edition of a model's own weights, without patches: a new number after each edit."""
    known = _noted.get(patcher.model)
    if known is None:
        places = [
            (f"{path}.{leaf}".removeprefix("."), layer._parameters, leaf,
             getattr(layer, f"{leaf}_comfy_model_dtype", None))
            for path, layer in patcher.model.named_modules() for leaf in layer._parameters]  # fmt: skip
        known = _noted[patcher.model] = _Noted(places, _values_of(patcher, places))
    elif (values := _values_of(patcher, known.places)) != known.values:
        known.values, known.edition = values, known.edition + 1
    return known.edition


def forget_places(patcher: ModelPatcher) -> None:
    """Note a model's weights anew and count an edit, because some of its layers were replaced."""
    before = edition_of(patcher)
    _noted.pop(patcher.model, None)
    look_for_edits(patcher)
    _noted[patcher.model].edition = before + 1


def _values_of(patcher: ModelPatcher, places: list[Place]) -> bytes:
    """Return some values of every weight, wherever it lies; of patched weights from ComfyUI's backup."""
    parts: dict[tuple, dict[int, torch.Tensor]] = {}
    aside, by_hooks = getattr(patcher, "backup", {}), getattr(patcher, "hook_backup", {})
    with torch.inference_mode():
        for number, (name, parameters, leaf, dtype) in enumerate(places):
            weight = parameters.get(leaf)
            if name in aside:
                weight = aside[name].weight
            if name in by_hooks:
                weight = by_hooks[name][0]
            if type(weight) not in PLAIN:
                weight = getattr(weight, "_qdata", weight)
            if type(weight) in PLAIN and not weight.is_meta and weight.numel():
                wanted = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
                parts.setdefault((weight.device, weight.dtype, wanted), {})[number] = _some(weight)
        values: dict[int, bytes] = {}
        for (*_, wanted), found in parts.items():
            joined = torch.cat(list(found.values())).cpu().to(wanted).view(torch.uint8).numpy().tobytes()
            end = 0
            for number, some in found.items():
                start, end = end, end + some.numel() * wanted.itemsize
                values[number] = joined[start:end]
    return b"".join(values[number] for number in sorted(values))


def _some(weight: torch.Tensor) -> torch.Tensor:
    """Return values from the middle column of rows at equal distances, for any strides of the weight."""
    shape, strides = weight.shape, weight.stride()
    if not shape:
        return weight.reshape(1)
    count = min(COMPARED, shape[0])
    start = weight.storage_offset() + (shape[1] // 2 * strides[1] if len(shape) > 1 else 0)
    return weight.as_strided((count,), (shape[0] // count * strides[0],), start)
