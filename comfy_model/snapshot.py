"""A network on its way into the child process: its weights go through a file, its structure through a pipe.

The weights are a snapshot: the exported values are the hashed values, whatever ComfyUI does to the model meanwhile. A
network that is compiled for live weights gets random weights.
"""

from __future__ import annotations

import base64
import importlib
import io
import math
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from .. import architectures
from ..engine_library import BuildError
from .changed_layers import layer_classes
from .module_copy import ReplacedForward, plain_copy
from .network import NativeNetwork
from .weight_formats import is_fp8, stored_dtypes
from .weight_hash import combine, digest, hash_of_parts, hashing_pool
from .weight_values import current_weights

ALIGNMENT = 64
"""Alignment of each weight in a data file, in bytes."""

Offsets = Mapping[torch.nn.Parameter, int]
"""Parameter -> offset in a data file, in bytes."""

Step = Callable[[float], None]
"""Called with the fraction done; may raise to cancel."""


def write_weights(network: NativeNetwork, dtype: torch.dtype, path: Path, step: Step) -> tuple[str, dict]:
    """Write a network's current weights (LoRAs applied) in ``dtype`` to a file.

    Returns:
        Their hash, as ``weight_hash.weights_hash`` makes it; and name -> (shape, offset in the file, dtype).
    """
    total = max(1, sum(p.numel() for p in network.module.parameters()))
    index, hashes, done, dtypes = {}, [], 0, _dtypes(network, dtype, live=False)
    with path.open("wb") as file, hashing_pool() as pool:
        for start, part in zip(network.starts, network.parts, strict=True):
            digests = {}
            for own_name, live in current_weights(part.patcher, part.prefix):
                name = start + own_name
                weight = live.clone()  # ComfyUI may change the live one at any time
                pending = pool.submit(digest, own_name, weight)
                file.seek(-file.tell() % ALIGNMENT, 1)
                own = dtypes.get(name, dtype)
                index[name] = (list(weight.shape), file.tell(), str(own).removeprefix("torch."))
                if weight.numel():
                    file.write(memoryview(weight.to(own).contiguous().flatten().view(torch.uint8).numpy()))
                digests[own_name] = pending.result()
                done += weight.numel()
                step(min(1.0, done / total))
            hashes.append(combine(digests))
    return hash_of_parts(hashes), index


def _dtypes(network: NativeNetwork, dtype: torch.dtype, live: bool) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter. Only live weights are in fp8: weights in a file are cast once."""
    found = stored_dtypes(network.module, dtype)
    return found if live else {name: dtype if is_fp8(own) else own for name, own in found.items()}


def write_structure(network: NativeNetwork, dtype: torch.dtype, live: bool = False) -> str:
    """Return a network's module as text for ``restore``, as its engine has it: without weights and per-image passes.

    The text is a pickle: only this process's own child reads it, and it never lies on disk.

    Args:
        live: whether it is to be compiled for live weights, which may be in fp8 or quantised.

    Raises:
        BuildError: the module has parts that cannot be built again elsewhere.
        Unavailable: another node's parts are in the module, for example while a prompt samples with them.
    """
    network.unchanged_architecture()
    dtypes = _dtypes(network, dtype, live)
    try:
        copy = plain_copy(
            network.module,
            dtype,
            parameter=lambda name, p: torch.empty(p.shape, dtype=dtypes[name], device="meta"),
            buffer=lambda _, b: b.detach().cpu(),
        )
        network.architecture().passes(copy)  # some have classes that no other process can import
        copy = plain_copy(copy, dtype, lambda _, p: p, lambda _, b: b, _known_class)
    except ReplacedForward as error:
        raise BuildError(
            f"{error}, so none was made and the normal model keeps running; remove the node that replaced it"
        ) from error
    try:
        return base64.b64encode(_pickled(copy)).decode("ascii")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise BuildError(
            f"{network.label} has a part that cannot be handed to the builder ({error}), so no engine was made and "
            "the normal model keeps running; remove the node that changes this model, or report it"
        ) from error


def without_weights(structure: str) -> torch.nn.Module:
    """Return the network from its structure, its parameters on the meta device."""
    return _Unpickler(io.BytesIO(base64.b64decode(structure))).load()


def with_random_weights(structure: str, device: torch.device) -> torch.nn.Module:
    """Return the network from its structure, with random weights on a device; see ``draw_weights``."""
    module = without_weights(structure)
    draw_weights(module, device)
    return module.to(device)


def draw_weights(module: torch.nn.Module, device: torch.device) -> None:
    """Give a network, or a part of it, random weights on a device that keep its results near 1."""
    from ..architectures.quantised_linear import QuantisedLinear

    generator = torch.Generator(device).manual_seed(1)
    for layer in module.modules():
        for leaf, parameter in layer._parameters.items():
            if parameter is not None:
                layer._parameters[leaf] = torch.nn.Parameter(_drawn(leaf, parameter, generator), requires_grad=False)
        if isinstance(layer, QuantisedLinear):
            shape, dtype = layer.weight.shape, layer.weight.dtype
            plain = _drawn("weight", torch.empty(shape, dtype=dtype, device="meta"), generator)
            layer.take(layer.set_weight(plain, seed=0, return_weight=True))


def _drawn(leaf: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw values for a parameter: weights by their number of inputs, scales of norms near 1, biases small."""
    device, shape = generator.device, like.shape
    if not like.dtype.is_floating_point or like.ndim == 0:
        return torch.ones(shape, dtype=like.dtype, device=device)
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    if like.ndim > 1:
        values /= math.sqrt(math.prod(shape[1:]))
    else:
        values = values * 0.05 + (leaf == "weight")
    return values.to(like.dtype)


def restore(structure: str, index: dict, path: Path) -> torch.nn.Module:
    """Return the network from its structure and its weights' file, which it maps and does not copy."""
    module = without_weights(structure)
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    weights = {}
    for name, (shape, offset, own) in index.items():
        dtype = getattr(torch, own)
        length = torch.Size(shape).numel() * dtype.itemsize
        weights[name] = data[offset : offset + length].view(dtype).reshape(shape)
    for name, parameter in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        layer = module.get_submodule(owner)
        if name not in weights or tuple(parameter.shape) != tuple(weights[name].shape):
            raise BuildError(
                f"the weights of {name} have another form than its layer, so no engine was made and the normal "
                "model keeps running; report this model"
            )
        layer._parameters[last] = torch.nn.Parameter(weights[name], requires_grad=False)
    return module


def offsets_of(module: torch.nn.Module, index: dict) -> Offsets:
    """Return where the parameters of a restored module begin in its weights' file."""
    return {parameter: index[name][1] for name, parameter in module.named_parameters()}


_FAMILIES = architectures.__name__
"""The package of the families; its name differs between processes."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[str, str] | None:
        """Our own classes go by their place in the package of the families."""
        if isinstance(obj, type) and obj.__module__.startswith(f"{_FAMILIES}."):
            return obj.__module__.removeprefix(f"{_FAMILIES}."), obj.__qualname__
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, place: tuple[str, str]) -> object:
        module, name = place
        return getattr(importlib.import_module(f"{_FAMILIES}.{module}"), name)


def _pickled(module: torch.nn.Module) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(module)
    return file.getvalue()


def _known_class(kind: type) -> type:
    """Return the class for a copy of a layer, which any process can import; see ``layer_classes``."""
    for base in layer_classes(kind):
        found = sys.modules.get(base.__module__)
        for part in base.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is base:
            return base
    raise BuildError(
        f"{kind.__qualname__} is a part of another pack's own, which no engine knows, so none was made and the "
        "normal model keeps running; remove the node that puts it in"
    )
