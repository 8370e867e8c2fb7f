"""NVIDIA's TensorRT in its two flavours: full TensorRT, and TensorRT-RTX."""

from . import full, rtx

BACKENDS = (full.BACKEND, rtx.BACKEND)
