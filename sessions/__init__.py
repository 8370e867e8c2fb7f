"""An open engine: the session that serves its calls, its CUDA graphs, per-image passes, and memory on the device."""
