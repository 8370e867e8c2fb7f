"""One engine, open: what serves its calls, its CUDA graphs, what runs before them, and room for it on the device."""
