"""A stand-in for a backend whose engines have weights of their own: its memory is real, its arithmetic is torch's.

``memory_limit.py`` puts this file into a copy of the pack, because no such engine runs on every GPU that is at hand
(TensorRT-RTX refuses a Hopper). The weights lie in one block that the driver gives, outside torch's allocator, as
TensorRT's do.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import weakref
from pathlib import Path
from typing import Any

import torch

from .file_backend import FileBackend  # of the pack's copy

STRUCTURE, WEIGHTS = "structure.json", "weights.stand_in"
ALIGNMENT = 512


class StandInBackend(FileBackend):
    """Needs nothing but torch."""

    name = "stand_in"
    preference = -1
    measured_on = ()
    builds_on_gpu = False

    def version(self) -> str:
        return "1"

    def target(self, device: torch.device) -> str:
        return "any"

    def unavailable(self, device: torch.device) -> None:
        return None

    def cannot_build(self, device: torch.device) -> None:
        return None

    def refuses(self, manifest: Any, device: torch.device) -> None:
        return None

    def load(self, engine: Any, device: torch.device) -> StandInRunner:
        return StandInRunner(engine, device)


class StandInRunner:
    """The network run plainly, on weights of its own."""

    def __init__(self, engine: Any, device: torch.device):
        from ..architectures import architectures
        from ..comfy_model.snapshot import restore

        structure = json.loads((engine.folder / STRUCTURE).read_text())
        dtype = getattr(torch, structure["precision"])
        with torch.inference_mode(False):
            module = restore(structure["structure"], structure["weights"], engine.folder / WEIGHTS, dtype)
            function = architectures()[structure["architecture"]].function(module)
            self._function = function.eval().requires_grad_(False)
            self.device, self.bytes = device, _move(self._function, device)
        self._inputs = [spec.name for spec in engine.manifest.inputs]
        self._outputs = [spec.name for spec in engine.manifest.outputs]

    def run(self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
        results = self._function(*(inputs[name] for name in self._inputs))
        for name, result in zip(self._outputs, results, strict=True):
            outputs[name].copy_(result)


def _move(function: torch.nn.Module, device: torch.device) -> int:
    """Copy all parameters into one block of the device, which ends with the function; its bytes."""
    parameters = list(function.parameters())
    sizes = [-(-p.numel() * p.element_size() // ALIGNMENT) * ALIGNMENT for p in parameters]
    block = _block(sum(sizes), device, function)
    place = 0
    for parameter, size in zip(parameters, sizes, strict=True):
        count = parameter.numel() * parameter.element_size()
        target = block[place : place + count].view(parameter.dtype).reshape(parameter.shape)
        target.copy_(parameter.data)
        parameter.data = target
        place += size
    for name, buffer in list(function.named_buffers()):
        owner, _, last = name.rpartition(".")
        function.get_submodule(owner)._buffers[last] = buffer.to(device)
    return sum(sizes)


def _block(size: int, device: torch.device, owner: object) -> torch.Tensor:
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        code = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
    if code:
        raise RuntimeError(f"the driver gave no {size / 1e6:.0f} MB: error {code} (2 is out of memory)")
    weakref.finalize(owner, _give_back, driver, address.value, device)

    class Holder:
        __cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address.value, False), "version": 3}

    return torch.as_tensor(Holder(), device=device)


def _give_back(driver: ctypes.CDLL, address: int, device: torch.device) -> None:
    with contextlib.suppress(Exception), torch.cuda.device(device):  # at the interpreter's end there may be no driver
        torch.cuda.synchronize(device)
        driver.cuMemFree_v2(ctypes.c_uint64(address))


def make_files(task: dict) -> dict:
    """Takes the place of a build's export and compile steps: keeps the network and its weights as they are."""
    folder = Path(task["folder"])
    if task["step"] == "build":
        return {"files": [WEIGHTS, STRUCTURE], "seconds": {"build": 0.0}}
    (folder / WEIGHTS).hardlink_to(task["weights_file"])
    names = ("structure", "weights", "architecture", "precision")
    (folder / STRUCTURE).write_text(json.dumps({name: task[name] for name in names}))
    (folder / "parameters.json").write_text("{}")
    return {"onnx": "none.onnx", "seconds": {"export": 0.0}, "parity": {"rel_err": 0.0, "limit": 1.0}}


BACKENDS = (StandInBackend(),)
