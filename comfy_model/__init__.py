"""Reading ComfyUI's models: which network they hold, its weights as they are sampled with, copies of its structure."""
