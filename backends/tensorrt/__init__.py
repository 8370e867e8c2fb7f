"""NVIDIA's TensorRT in its two flavours: full TensorRT, and TensorRT-RTX."""

from . import full, rtx, version8

if version8.is_installed():
    from .version8.backend import BACKEND
else:
    BACKEND = full.BACKEND

BACKENDS = (BACKEND, rtx.BACKEND)
