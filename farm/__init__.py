"""Farm: Ray Serve hands prompts to ComfyUI processes, one per GPU. It imports nothing of the pack and no CUDA."""
