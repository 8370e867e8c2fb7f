"""``python -m engine_builder``: builds and looks after engines without ComfyUI's server."""
