"""Workflows as files: followed, accelerated, and turned into API prompts. Nothing of ComfyUI is needed for that."""
