"""The part of a build that runs in a process of its own; it never sees the live model, and speaks JSON."""
