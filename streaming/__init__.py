"""Streaming: frames go in one by one, pictures come out, inside one execution."""
