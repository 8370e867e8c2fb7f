"""TensorRT 8.6, where it differs from 10, 11 and RTX. It is the last version for Pascal and Volta cards.

* Networks are weakly typed: ``float16`` allows half precision, and TensorRT picks per layer. Two things are kept in
  float32 by name: GroupNorm, since its sums would overflow, and what the graph itself computes in float32 of an input,
  which is the sines of the timestep. At t = 900 an angle in half precision is up to 0.25 off, and that alone costs up
  to 4e-2 of a result (at t = 50 up to 3e-3). Before, engines were 7e-3 to
  2.7e-2 from native on an H200, by what TensorRT had picked.
* InstanceNormalization is a plugin that needs cuDNN 8, which torch no longer brings: it is written out instead. For
  the same reason no tactic of cuBLAS or cuDNN is tried.
* Its layer for norms is no way out: an engine for batch 1 to 2 took 36 ms with it and 14 with ours, at twice the error.
  Nor is its plugin GroupNorm: on an H200 two calls were not the same to the bit, so a seed would not give the same
  picture again, and its norms took 0.18 ms of a call's 3.7. With sums of each channel no build had ended in 8 minutes.
* An engine is for one size. For batch 1 to 2 one could not be recorded as a CUDA graph, and a call took 14.1 ms; for
  batch 2 alone 3.7 in another run (a ControlNet of SD1.5 at 512 on H200s: benchmarks/results/tensorrt86_h200.json).
* It takes other weights at about 0.2 GB a second, with 16 threads no faster than with one: a LoRA on a UNet of 5 GB
  takes 20 s. Its bindings keep Python's lock meanwhile, so ComfyUI's server does not answer.
* There is neither a progress monitor nor bfloat16, contexts take their scratch memory in an older way, and weights
  are given as numpy's arrays.
"""

from __future__ import annotations

from importlib import metadata

INSTALL = 'pip install "tensorrt==8.6.0", on Python 3.10'


def is_installed() -> bool:
    """Tell whether the package tensorrt is of version 8, without importing it."""
    try:
        return (metadata.version("tensorrt") or "").startswith("8.")
    except metadata.PackageNotFoundError:
        return False
