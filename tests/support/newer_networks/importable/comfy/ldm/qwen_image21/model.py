"""Native's module of a network that the pinned ComfyUI lacks; also workers find it here. See ``newer_networks``."""

from pathlib import Path

import comfy.controlnet

_source = Path(__file__).parents[4] / "qwen_image21.py"
# code is known to be ComfyUI's own by its file
__file__ = str(Path(comfy.controlnet.__file__).parent / "ldm" / "qwen_image21" / "model.py")
exec(compile(_source.read_text(encoding="utf-8"), __file__, "exec"))  # noqa: S102
