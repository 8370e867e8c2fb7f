"""Workflows as files: followed, accelerated, and turned into API prompts, without ComfyUI."""
