"""Residuals that their ControlNets may still compute: whoever looks at them waits, an engine need not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..architectures.calls import AsyncInputs, Binding, Control, EngineCall
from ..sessions.async_inputs import wait_for


def _looking(name: str) -> Callable[..., Any]:
    """A dict's method that first waits for all tensors."""
    method = getattr(dict, name)
    return lambda self, *given: method(self._seen(), *given)


class LateControl(dict):
    """A ``Control`` whose tensors are computed on a stream that nobody has waited for yet.

    To look at it is to wait, on the current stream: for other nodes and for native it is the dict that it seems to be.
    """

    def __init__(self, control: Control, stream: torch.cuda.Stream, reads: object):
        """
        Args:
            stream: the current one; all that ``control`` depends on is behind it.
            reads: what is read there, of other streams' memory; kept as long as this is.
        """
        super().__init__(control)
        self.stream = stream
        self.ready = stream.record_event()
        self._reads = reads
        self._waited: set[torch.cuda.Stream] = set()

    def end(self) -> None:
        """What the current stream does from here on comes after all this: memory that was read may have other uses."""
        wait_for(self.ready, self.stream, ())

    def unread(self) -> Control:
        """The same lists for who does not read their tensors yet."""
        return dict(super().items())

    def _seen(self) -> LateControl:
        here = torch.cuda.current_stream(self.stream.device)
        if here not in self._waited:
            self._waited.add(here)
            wait_for(self.ready, self.stream, (t for places in super().values() for t in places if t is not None))
        return self

    __getitem__, get, pop, popitem, setdefault = map(_looking, ("__getitem__", "get", "pop", "popitem", "setdefault"))
    keys, values, items, __reversed__ = map(_looking, ("keys", "values", "items", "__reversed__"))
    __iter__ = _looking("__iter__")  # which C code asks for copies of subclasses
    __eq__, __repr__ = map(_looking, ("__eq__", "__repr__"))

    def copy(self) -> Control:
        return dict(self.items())

    def __reduce_ex__(self, _protocol: object) -> tuple:  # copies are plain
        return dict, (self.copy(),)


def bound_unread(bind: Binding, given: Mapping[str, Any]) -> EngineCall:
    """A call with residuals that its engine need not wait for at once."""
    control = given["control"]
    call = bind({**given, "control": control.unread()})
    call.late = AsyncInputs(call.residuals, control.stream, control.ready)
    return call
