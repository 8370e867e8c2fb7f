"""Lets a build's child find ComfyUI's attention as later versions have it, see ``newer_attention``."""

import importlib.abc
import sys


class _Late(importlib.abc.MetaPathFinder):
    """``newer_attention`` imports torch, so it is imported when ComfyUI's attention is."""

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name != "comfy.ldm.modules.attention":
            return None
        import newer_attention

        sys.meta_path.remove(self)
        return newer_attention.Finder().find_spec(name, path, target)


sys.meta_path.insert(0, _Late())
