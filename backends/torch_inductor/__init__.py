"""torch: networks run from their live weights, as CUDA graphs, and where an engine was built from compiled files."""

from .backend import TorchBackend

BACKEND = TorchBackend()
BACKENDS = (BACKEND,)
