"""A network on its way into the child process: its weights in a file, its structure without them through a pipe.

The weights are a snapshot: what is exported is what was hashed, whatever ComfyUI does to the model meanwhile.
"""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ..backends import BuildError
from ..engine_library.native import NativeNetwork
from ..engine_library.plain_copy import ReplacedForward, plain_copy
from ..engine_library.weights import combine, current_weights, digest, hashing_pool
from .onnx_export import ALIGNMENT, Offsets

Step = Callable[[float], None]
"""Called with the fraction done; may raise to cancel."""


def write_weights(network: NativeNetwork, dtype: torch.dtype, path: Path, step: Step) -> tuple[str, dict]:
    """Write a network's current weights (LoRAs applied) in ``dtype`` to a file.

    Returns:
        Their hash, as ``weights.weights_hash`` makes it, and name -> (shape, offset in the file).
    """
    total = max(1, sum(p.numel() for p in network.module.parameters()))
    index, digests, done = {}, {}, 0
    with path.open("wb") as file, hashing_pool() as pool:
        for name, live in current_weights(network.patcher, network.prefix):
            weight = live.clone()  # ComfyUI may change the live one at any time
            pending = pool.submit(digest, name, weight)
            file.seek(-file.tell() % ALIGNMENT, 1)
            index[name] = (list(weight.shape), file.tell())
            if weight.numel():
                file.write(memoryview(weight.to(dtype).contiguous().flatten().view(torch.uint8).numpy()))
            digests[name] = pending.result()
            done += weight.numel()
            step(min(1.0, done / total))
    return combine(digests), index


def write_structure(network: NativeNetwork, dtype: torch.dtype) -> str:
    """A network's module without weights, free of ComfyUI's loading machinery, as text for ``restore``.

    Pickled, since only this process's own child ever reads it; it never lies on disk.

    Raises:
        BuildError: the module has parts that cannot be built again elsewhere.
    """
    try:
        copy = plain_copy(
            network.module,
            dtype,
            parameter=lambda _, p: torch.empty(p.shape, dtype=dtype, device="meta"),
            buffer=lambda _, b: b.detach().cpu(),
            kind_of=_known_class,
        )
    except ReplacedForward as error:
        raise BuildError(
            f"{error}, so none was made and native keeps serving; remove the node that replaced it"
        ) from error
    try:
        return base64.b64encode(pickle.dumps(copy)).decode("ascii")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise BuildError(
            f"{network.label} has a part that cannot be handed to the builder ({error}), so no engine was made and "
            "native keeps serving; remove the node that changes this model, or report it"
        ) from error


def restore(structure: str, index: dict, path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The network from its structure and its weights' file, which it maps and does not copy."""
    module = pickle.loads(base64.b64decode(structure))
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    weights = {}
    for name, (shape, offset) in index.items():
        length = torch.Size(shape).numel() * dtype.itemsize
        weights[name] = data[offset : offset + length].view(dtype).reshape(shape)
    for name, parameter in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        layer = module.get_submodule(owner)
        if name not in weights or tuple(parameter.shape) != tuple(weights[name].shape):
            raise BuildError(
                f"the weights of {name} have another form than its layer, so no engine was made and native keeps "
                "serving; report this model"
            )
        layer._parameters[last] = torch.nn.Parameter(weights[name], requires_grad=False)
    return module


def offsets_of(module: torch.nn.Module, index: dict) -> Offsets:
    """Where the parameters of a restored module begin in its weights' file."""
    return {parameter: index[name][1] for name, parameter in module.named_parameters()}


def _known_class(kind: type) -> type:
    """The class, if any process can import it from ComfyUI or torch.

    For a layer that another pack or ComfyUI made for quantised weights it is the plain layer that it stands for, since
    its weights come dequantised.
    """
    bases = kind.__mro__ if hasattr(kind, "comfy_cast_weights") else (kind,)
    for base in bases:
        if base.__module__.split(".")[0] not in ("comfy", "torch"):
            continue
        found = sys.modules.get(base.__module__)
        for part in base.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is base:
            return base
    raise BuildError(
        f"{kind.__qualname__} is a part of another pack's own, which no engine knows, so none was made and native "
        "keeps serving; remove the node that puts it in"
    )
