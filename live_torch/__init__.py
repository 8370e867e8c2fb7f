"""Native networks run from ComfyUI's live weights: a plain copy of the module, compiled by Inductor where built.

It knows architectures and the library; the ``torch`` backend, the builder and the runtime use it.
"""
