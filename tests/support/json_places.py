"""Every place in some JSON, and the JSON with something else there."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterator
from typing import Any


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield every place in some JSON, the whole of it too."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def changed(data: Any, path: tuple, value: Any) -> Any:
    """Return JSON with another value in a place, and the true key of a manifest."""
    if not path:
        return value
    data = copy.deepcopy(data)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return with_true_key(data)


def with_true_key(data: Any) -> Any:
    """Give a manifest the key of its contents, as whoever lies with care does."""
    if isinstance(data, dict) and isinstance(data.get("identity"), dict):
        with contextlib.suppress(ValueError, TypeError):
            text = json.dumps(data["identity"], sort_keys=True)
            data["key"] = hashlib.sha256(text.encode()).hexdigest()
    return data
