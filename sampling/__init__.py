"""The run side: engines from the library serve a sampler's calls, or native does and the call_stats says why.

It knows architectures, backends and the library, never the nodes.
"""
