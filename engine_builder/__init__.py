"""The build side: a loaded native network becomes an engine in the library.

It knows architectures, backends and the library, never the nodes.
"""
