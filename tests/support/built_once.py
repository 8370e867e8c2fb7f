"""Engines that a process builds once: the same order again gets a copy."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library

_kept: dict[tuple[str, ...], Path] = {}


def built_once(order: BuildOrder, library: Library) -> Engine:
    """Return the engine of an order in a library, built in this process the first time only.

    A network with patches always has an engine built: nothing here tells its patches from others.
    """
    key, target = None, library.roots[0] / builder._identity(order, lambda *_: None).folder_name
    if not order.network.patcher.patches:
        weights = hashlib.sha256()  # an engine for any weights keeps some of those that it was built with
        for tensor in order.network.module.state_dict().values():
            weights.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
        key = (type(order.backend).__name__, target.name, weights.hexdigest(), os.environ["HYBRID_TRT_KEY_FOLDER"])
    if key in _kept and not target.exists():
        shutil.copytree(_kept[key], target, copy_function=shutil.copy2)
    engine = builder.build_engine(order, library, lambda *_: None, run=builder.run_here)
    if key is not None and key not in _kept:
        folder = Path(tempfile.mkdtemp(prefix="hybrid-trt-engines-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _kept[key] = shutil.copytree(engine.folder, folder / "engine", copy_function=shutil.copy2)
    return engine
