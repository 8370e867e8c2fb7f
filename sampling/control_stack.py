"""A stack of engine-backed ControlNets as one: run side by side on streams of their own, merged in a few launches.

ComfyUI runs one ControlNet after the other. Before each it waits for the GPU to compare a timestep, and it scales and
adds every residual by itself. A stack of sessions that may run at once gives the same result without this. ComfyUI's
own code runs any other stack, and each call that opens engines or has to make a hint. Hints that are known or only
copied are made before (see ``hint_cache``).

Other packs act on the ControlNets of a step: they crop a hint, change a strength or replace a method, and ask for the
residuals themselves. So only ComfyUI's own function sees a stack. Other code sees the ControlNets of the graph,
which a stack reads at each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import comfy.controlnet
import torch
from comfy.controlnet import ControlBase, ControlNet

from ..architectures.calls import AsyncInputs, Binding, Control, EngineCall
from ..comfy_model.whose_code import computes_as_comfyui, has_foreign_methods, is_foreign, is_stock
from ..sessions.cuda_capture import wait_for
from ..sessions.session import Session
from .controlnet import EngineControlModel, chain_of
from .hint_cache import dtype_of, has_hint, hint_for, keep_hints, lacks_hint, make_hints
from .run_context import lent_context

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

    from .engine_handle import EngineHandle

ALWAYS = 999999999.0
"""Lower bound for ComfyUI's sigma that means "from the first step on"."""


def _looking(name: str) -> Callable[..., Any]:
    """Return a method of dict that first waits for all tensors."""
    method = getattr(dict, name)
    return lambda self, *given: method(self._seen(), *given)


class LateControl(dict):
    """A ``Control`` whose tensors another stream still computes.

    Reading it makes the current stream wait, so other nodes and native can use it as a plain dict.
    """

    def __init__(self, control: Control, stream: torch.cuda.Stream, reads: object):
        """
        Args:
            stream: the current stream, which computes ``control``.
            reads: tensors of other streams that it reads; kept as long as this object.
        """
        super().__init__(control)
        self.stream = stream
        self.ready = stream.record_event()
        self._reads = reads
        self._waited: set[torch.cuda.Stream] = set()

    def end(self) -> None:
        """Make the current stream wait: afterwards the memory that was read may be reused."""
        wait_for(self.ready, self.stream, ())

    def unread(self) -> Control:
        """Return the lists without waiting, for a caller that does not read the tensors yet."""
        return dict(super().items())

    def _seen(self) -> LateControl:
        here = torch.cuda.current_stream(self.stream.device)
        if here not in self._waited:
            self._waited.add(here)
            wait_for(self.ready, self.stream, (t for places in super().values() for t in places if t is not None))
        return self

    __getitem__, get, pop, popitem, setdefault = map(_looking, ("__getitem__", "get", "pop", "popitem", "setdefault"))
    keys, values, items, __reversed__ = map(_looking, ("keys", "values", "items", "__reversed__"))
    __iter__ = _looking("__iter__")  # C code calls it to copy subclasses
    __eq__, __repr__ = map(_looking, ("__eq__", "__repr__"))

    def copy(self) -> Control:
        return dict(self.items())

    def __reduce_ex__(self, _protocol: object) -> tuple:  # copies are plain
        return dict, (self.copy(),)


def bound_unread(bind: Binding, given: Mapping[str, Any]) -> EngineCall:
    """Bind a call whose engine need not wait for the residuals at once."""
    control = given["control"]
    call = bind({**given, "control": control.unread()})
    call.late = AsyncInputs(call.residuals, control.stream, control.ready)
    return call


def run_stacks_at_once(
    executor: WrapperExecutor,
    model: Any,
    conds: list[list[dict] | None],
    x_in: torch.Tensor,
    timestep: torch.Tensor,
    model_options: dict,
    backbone: EngineHandle | None = None,
) -> Any:
    """Run stacks of engine-backed ControlNets as one; a CALC_COND_BATCH wrapper.

    The stacks enter the conditionings behind all wrappers, also behind wrappers that come after this.

    Args:
        backbone: its engine starts beside the ControlNets if it can; see ``LateControl``.
    """
    if "multigpu_clones" in model_options:
        with lent_context():
            return executor(model, conds, x_in, timestep, model_options)
    executor.original = partial(_with_stacks, executor.original, backbone)
    return executor(model, conds, x_in, timestep, model_options)


def _with_stacks(
    function: Callable[..., Any], backbone: EngineHandle | None, model: Any, conds: list[list[dict] | None], *rest: Any
) -> Any:
    """Call the function that computes the conditionings of a step, with stacks if it is ComfyUI's own."""
    if not is_stock(function):
        return function(model, conds, *rest)
    stacks: dict[int, ControlStack] = {}
    late: list[LateControl] | None = [] if _takes_late(backbone) else None

    def replaced(cond: dict) -> dict:
        control = cond.get("control")
        if not isinstance(control, ControlBase) or not any(map(has_engine, chain_of(control))):
            return cond
        # one object per control: ComfyUI batches conditionings only when their controls are the same
        return {**cond, "control": stacks.setdefault(id(control), ControlStack(control, late))}

    conds = [None if group is None else [replaced(cond) for cond in group] for group in conds]
    try:
        return function(model, conds, *rest)
    finally:
        for control in late or ():
            control.end()


class ControlStack:
    """Stands for a chain of ControlNets in ComfyUI's own function; all except the residuals comes from the chain."""

    def __init__(self, control: ControlBase, late: list[LateControl] | None = None):
        """
        Args:
            late: list for results that other streams still compute; None to wait for all results at once.
        """
        self._control = control
        self._late = late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def get_control(
        self, x_noisy: torch.Tensor, t: torch.Tensor, cond: Mapping, batched_number: int, transformer_options: dict
    ) -> Control | None:
        """Return the chain's residuals, as ComfyUI's ``get_control`` of its last ControlNet does."""
        chain = chain_of(self._control)
        lacking = [control for control in chain if lacks_hint(control, x_noisy)]
        if lacking and any(map(has_foreign_methods, chain)):  # that code may want another hint
            lacking = []
        new = make_hints(_active(lacking, t), x_noisy) if lacking else []
        if new or not all(_can_join(control, x_noisy, batched_number) for control in chain):
            result = self._control.get_control(x_noisy, t, cond, batched_number, transformer_options)
            keep_hints(new, x_noisy)
            _count_apart(chain, x_noisy, t, batched_number)
            return result
        active = _active(chain, t)
        return _run(active, x_noisy, t, cond, self._late, batched_number) if active else None


def has_engine(control: ControlBase) -> bool:
    return isinstance(getattr(control, "control_model", None), EngineControlModel)


def _can_join(control: ControlBase, x_noisy: torch.Tensor, batched_number: int) -> bool:
    """Tell whether ``_run`` can replace a ControlNet's own code, and its hint is made."""
    if not _may_join(control) or type(control) is not ControlNet or not computes_as_comfyui(control):
        return False
    if control.model_sampling_current is None or control.timestep_range is None or not has_hint(control, x_noisy):
        return False
    return hint_for(control, x_noisy, batched_number) is not None


def _may_join(control: ControlBase) -> bool:
    """Tell whether the settings and the engine of a ControlNet let it join; other conditions depend on the run."""
    if not has_engine(control):
        return False
    session = control.control_model.handle.session
    if session is None or not session.joins_stacks or control.control_model.why_not_patched_so() is not None:
        return False
    if control.extra_hooks or control.extra_concat_orig or control.multigpu_clones or control.global_average_pooling:
        return False
    return control.strength_type is comfy.controlnet.StrengthType.CONSTANT


def _count_apart(chain: list[ControlBase], x_noisy: torch.Tensor, t: torch.Tensor, batched_number: int) -> None:
    """Count ControlNets that cannot join even after ComfyUI's own call, unless the graph is the reason."""
    for control in filter(_may_join, chain):
        if _can_join(control, x_noisy, batched_number) or is_foreign(control):
            continue
        if control.timestep_range is None or _active([control], t):
            control.control_model.handle.begin_run().count_apart()


def _active(chain: list[ControlNet], t: torch.Tensor) -> list[ControlNet]:
    """Return the ControlNets whose range holds the timestep. Its value is read, waiting for the GPU, only if needed."""
    if all(c.timestep_range[0] > ALWAYS and c.timestep_range[1] <= 0 for c in chain):
        return chain
    now = t[0].cpu()  # a tensor: ComfyUI compares tensors, which rounds the bounds to their precision
    return [c for c in chain if not (now > c.timestep_range[0] or now < c.timestep_range[1])]


def _run(
    chain: list[ControlNet],
    x_noisy: torch.Tensor,
    t: torch.Tensor,
    cond: Mapping,
    late: list[LateControl] | None,
    batched_number: int = 1,
) -> Control:
    shared: dict[tuple, tuple[torch.Tensor, ...]] = {}
    calls = []
    for control in chain:
        dtype = dtype_of(control)
        sampling = control.model_sampling_current
        key = (id(sampling), dtype)
        if key not in shared:
            prompt = cond.get("crossattn_controlnet", cond["c_crossattn"])
            shared[key] = (
                sampling.calculate_input(t, x_noisy).to(dtype),
                sampling.timestep(t).to(dtype),
                prompt.to(x_noisy.device, dtype),
            )
        extra = dict(control.extra_args)
        for name in control.extra_conds:
            if (value := cond.get(name)) is not None:
                extra[name] = value.to(x_noisy.device, dtype) if isinstance(value, torch.Tensor) else value
        calls.append((control, hint_for(control, x_noisy, batched_number), *shared[key], extra))

    results, joins = [], []
    sessions = [control.control_model.handle.session for control in chain]
    if any(session.stream is None for session in sessions):
        late = None
    start = _start(sessions, x_noisy, at_least=2 if late is None else 1)
    try:
        for control, hint, x, timesteps, context, extra in calls:
            with _own_stream(control.control_model.handle.session, start) as stream:
                result = control.control_model(x=x, hint=hint, timesteps=timesteps, context=context, **extra)
                results.append(result)
                if stream is not None:
                    joins.append((stream.record_event(), stream, _flat(result)))
    except BaseException:  # a capture has to join all streams before it ends, or CUDA breaks it off
        _wait_for_all(joins)
        raise
    if late is None or start is None:
        _wait_for_all(joins)
        return _merged(chain, results)
    with torch.cuda.stream(sessions[-1].stream):
        _wait_for_all(joins[:-1])
        merged = _merged(chain, results)
        late.append(LateControl(merged, sessions[-1].stream, reads=(x_noisy, t, calls)))
    chain[-1].control_model.handle.stats.late += 1
    return late[-1]


def _wait_for_all(joins: Sequence[tuple]) -> None:
    """Make the current stream wait for other streams, each an (event, stream, tensors)."""
    for event, stream, tensors in joins:
        wait_for(event, stream, tensors)


def _takes_late(backbone: EngineHandle | None) -> bool:
    """Tell whether calls of a backbone may have inputs that another stream still computes."""
    return backbone is not None and backbone.session is not None and backbone.session.takes_late


def _start(sessions: list[Session], x_noisy: torch.Tensor, at_least: int = 2) -> torch.cuda.Event | None:
    """Return an event on the current stream from which sessions run side by side; None if they run in turn.

    They run in turn if a session comes twice, also as a part of another session, because it has one set of buffers; and
    if there are fewer than ``at_least``.
    """
    parts = [part for session in sessions for part in session.parts]
    if not x_noisy.is_cuda or len(sessions) < at_least or len(set(parts)) < len(parts):
        return None
    return torch.cuda.current_stream(x_noisy.device).record_event()


@contextlib.contextmanager
def _own_stream(session: Session, start: torch.cuda.Event | None) -> Iterator[torch.cuda.Stream | None]:
    """Use the session's stream from ``start`` on; without a start, stay on the current stream.

    Inputs need no further care: the current stream goes on after the session's stream has ended.
    """
    stream = session.stream
    if start is None or stream is None:
        yield None
        return
    here = torch.cuda.current_stream(stream.device)
    stream.wait_event(start)
    try:
        with torch.cuda.stream(stream):
            yield stream
    except BaseException:
        here.wait_stream(stream)
        raise


def _merged(chain: list[ControlNet], results: list[Control]) -> Control:
    """Return the residuals scaled by their strengths and summed, in tensors that no session writes to."""
    if len({_layout(result) for result in results}) > 1:  # different layouts: one by one, as ComfyUI does
        merged = None
        for control, result in zip(chain, results, strict=True):
            merged = control.control_merge(_with(result, [t.clone() for t in _flat(result)]), merged, None)
        return merged
    flat = [_flat(result) for result in results]
    for control, tensors in zip(chain, flat, strict=True):
        _scale(tensors, control.strength)
    # a single result may be written to; several results may be lent by their sessions
    total = flat[0] if len(flat) == 1 else torch._foreach_add(flat[0], flat[1])
    for tensors in flat[2:]:
        torch._foreach_add_(total, tensors)
    return {"input": [], "middle": [], "output": [], **_with(results[0], total)}


def _scale(tensors: list[torch.Tensor], strength: float | torch.Tensor) -> None:
    """Multiply tensors by a strength in place; a tensor (float32, no dimensions) multiplies in float32."""
    if not isinstance(strength, torch.Tensor):
        if strength != 1.0:
            torch._foreach_mul_(tensors, strength)
    elif all(tensor.dtype == strength.dtype for tensor in tensors):
        torch._foreach_mul_(tensors, strength)
    else:
        wide = [tensor.to(strength.dtype) for tensor in tensors]
        torch._foreach_mul_(wide, strength)
        torch._foreach_copy_(tensors, wide)


def _with(result: Control, tensors: list[torch.Tensor]) -> Control:
    """Return the residuals with other tensors, given in the order of ``_flat``."""
    replaced = {id(tensor): other for tensor, other in zip(_flat(result), tensors, strict=True)}
    return {kind: [replaced[id(tensor)] for tensor in places] for kind, places in result.items()}


def _flat(result: Control) -> list[torch.Tensor]:
    """Return the residuals of a ControlNet, each once: a tensor may be in several places."""
    return list({id(tensor): tensor for places in result.values() for tensor in places}.values())


def _layout(result: Control) -> tuple:
    """Return the structure of a result: residuals with the same structure can be added one by one."""
    numbers = {id(tensor): number for number, tensor in enumerate(_flat(result))}
    return tuple(
        (kind, *((numbers[id(tensor)], tensor.shape, tensor.dtype) for tensor in places))
        for kind, places in result.items()
    )
