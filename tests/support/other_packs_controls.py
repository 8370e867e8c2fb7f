"""Stand-ins for packs that act on the ControlNets of a step while it is computed, each in a few lines.

All of them compute a picture in tiles that overlap and take the mean, as packs for large pictures do. They differ in
how the ControlNets learn of the tiles.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import comfy.samplers
import torch
from comfy.controlnet import ControlBase, ControlNet
from comfy.patcher_extension import WrappersMP
from comfy.utils import common_upscale

TILE, OVERLAP = 8, 4
"""Of the latent."""

KEY = "test_tiles"
SHARE = 0.5

Box = tuple[slice, slice]
Conds = list[list[dict] | None]
Act = Callable[[ControlBase, Box, int, torch.Tensor], Any]


def boxes(x: torch.Tensor) -> list[Box]:
    """The tiles of a latent, the last of each row and column at the edge."""
    rows, columns = ([*range(0, max(size - TILE, 0), TILE - OVERLAP), max(size - TILE, 0)] for size in x.shape[-2:])
    return [(slice(top, top + TILE), slice(left, left + TILE)) for top in rows for left in columns]


def chain(control: ControlBase | None) -> Iterator[ControlBase]:
    """A ControlNet and those before it."""
    while control is not None:
        yield control
        control = control.previous_controlnet


def tiles(x: torch.Tensor, compute: Callable[[torch.Tensor, Box, int], list[torch.Tensor]]) -> list[torch.Tensor]:
    """The mean of what all tiles give, for each of the results."""
    total, weight = None, torch.zeros_like(x)
    for number, box in enumerate(boxes(x)):
        results = compute(x[(..., *box)], box, number)
        total = total or [torch.zeros_like(x) for _ in results]
        weight[(..., *box)] += 1
        for all_of_it, result in zip(total, results, strict=True):
            all_of_it[(..., *box)] += result
    return [all_of_it / weight for all_of_it in total]


def crop(control: ControlBase, box: Box, x: torch.Tensor) -> torch.Tensor:
    """The part of a ControlNet's image that belongs to a tile."""
    ratio = control.compression_ratio
    size = x.shape[-1] * ratio, x.shape[-2] * ratio
    image = common_upscale(control.cond_hint_original, *size, control.upscale_algorithm, "center")
    rows, columns = (slice(part.start * ratio, part.stop * ratio) for part in box)
    image = image[..., rows, columns]
    return image.to(x.device, getattr(control, "manual_cast_dtype", None) or image.dtype)


@contextmanager
def put(owner: Any, **values: Any) -> Iterator[None]:
    """Other values of attributes for a while."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def with_hint(control: ControlBase, box: Box, _number: int, x: torch.Tensor) -> Iterator[None]:
    """The tile's crop is put where ComfyUI keeps what it made of the image."""
    with put(control, cond_hint=crop(control, box, x)):
        yield


@contextmanager
def with_image(control: ControlBase, box: Box, _number: int, x: torch.Tensor) -> Iterator[None]:
    """The tile's crop is put in the place of the image, and what was made of it is dropped."""
    with put(control, cond_hint=None, cond_hint_original=crop(control, box, x)):
        yield


@contextmanager
def written_in_place(control: ControlBase, box: Box, number: int, x: torch.Tensor) -> Iterator[None]:
    """All tiles' crops are written into one tensor."""
    part = crop(control, box, x)
    if number == 0:
        control.cond_hint = part.clone()
    control.cond_hint.copy_(part)
    yield


@contextmanager
def another_method(control: ControlBase, box: Box, _number: int, x: torch.Tensor) -> Iterator[None]:
    """A method of its own asks ComfyUI's with the crop, and takes a share of what that gives."""
    own, part = control.get_control, crop(control, box, x)

    def get_control(*given: Any) -> dict:
        for one, hint in parts:
            one.cond_hint = hint
        result = own(*given)
        return {name: [SHARE * t for t in places] for name, places in result.items()}

    parts = [(control, part), *((one, crop(one, box, x)) for one in chain(control.previous_controlnet))]
    control.get_control = get_control
    try:
        yield
    finally:
        del control.get_control


@contextmanager
def another_strength(control: ControlBase, box: Box, number: int, x: torch.Tensor) -> Iterator[None]:
    """Each tile has a strength of its own, and every second one nothing of the ControlNets before the last."""
    before = control.previous_controlnet if number % 2 else None
    with put(control, strength=control.strength / (1 + number), previous_controlnet=before):
        with with_hint(control, box, number, x):
            yield


@contextmanager
def another_time(control: ControlBase, box: Box, number: int, x: torch.Tensor) -> Iterator[None]:
    """Every second tile is computed without the ControlNet."""
    bounds = (0.0, 0.0) if number % 2 else control.timestep_range
    with put(control, timestep_range=bounds), with_hint(control, box, number, x):
        yield


WAYS: dict[str, Act] = {
    "hint": with_hint, "image": with_image, "in place": written_in_place, "method": another_method,
    "strength": another_strength, "time": another_time,
}  # fmt: skip


class Tiles:
    """A CALC_COND_BATCH wrapper that lets ComfyUI compute tile by tile, and acts on the ControlNets for each."""

    def __init__(self, act: Act):
        self._act = act

    def __call__(self, executor: Any, model: Any, conds: Conds, x: torch.Tensor, t: torch.Tensor, options: dict) -> Any:
        lasts = {id(cond["control"]): cond["control"] for group in conds for cond in group or () if "control" in cond}
        acts_on_all = self._act is not another_method and self._act is not another_strength

        def compute(tile: torch.Tensor, box: Box, number: int) -> list[torch.Tensor]:
            with ExitStack() as stack:
                for last in lasts.values():
                    for control in chain(last) if acts_on_all else [last]:
                        if isinstance(control, ControlBase):
                            stack.enter_context(self._act(control, box, number, x))
                    if self._act is another_strength:
                        for control in chain(last.previous_controlnet):
                            stack.enter_context(with_hint(control, box, number, x))
                return executor(model, conds, tile, t, options)

        return tiles(x, compute)


def copied(executor: Any, model: Any, conds: Conds, x: torch.Tensor, t: torch.Tensor, options: dict) -> Any:
    """A CALC_COND_BATCH wrapper: each tile gets copies of its own, made in turn as Python and as ComfyUI copies."""

    def own(control: ControlBase, box: Box, number: int) -> ControlBase:
        made = copy.copy(control) if number % 2 else control.copy()
        made.timestep_range = control.timestep_range
        made.model_sampling_current = control.model_sampling_current
        made.cond_hint = crop(control, box, x)
        before = control.previous_controlnet
        return made.set_previous_controlnet(None if before is None else own(before, box, number))

    def compute(tile: torch.Tensor, box: Box, number: int) -> list[torch.Tensor]:
        made: dict[int, ControlBase] = {}

        def its(cond: dict) -> dict:
            if type(control := cond.get("control")) is not ControlNet:
                return cond
            return {**cond, "control": made.setdefault(id(control), own(control, box, number))}

        given = [None if group is None else [its(cond) for cond in group] for group in conds]
        return executor(model, given, tile, t, options)

    return tiles(x, compute)


class HeldBack:
    """Tiles inside ComfyUI's batch of conditionings, as TiledDiffusion makes them.

    A function of ComfyUI's that sees each conditioning is replaced. There ``get_control`` gives the ControlNet itself,
    so a ``model_function_wrapper`` gets it and asks the method that was kept, once for each tile with its crop.
    """

    def sample(self, executor: Any, *args: Any, **options: Any) -> Any:
        """An OUTER_SAMPLE wrapper: the function is replaced while this model is sampled."""
        own, touched = comfy.samplers.get_area_and_mult, []

        def get_area_and_mult(conds: dict, *rest: Any) -> Any:
            if (control := conds.get("control")) is not None:
                if not hasattr(control, "kept_get_control"):
                    control.kept_get_control = control.get_control
                control.get_control = lambda *_: control
                touched.append(control)
            return own(conds, *rest)

        comfy.samplers.get_area_and_mult = get_area_and_mult
        try:
            return executor(*args, **options)
        finally:
            comfy.samplers.get_area_and_mult = own
            for control in touched:
                control.get_control = control.kept_get_control

    def __call__(self, apply_model: Callable, args: dict) -> torch.Tensor:
        """A model_function_wrapper."""
        x, t, given = args["input"], args["timestep"], args["c"]
        last = given.get("control")

        def compute(tile: torch.Tensor, box: Box, _number: int) -> list[torch.Tensor]:
            its = dict(given)
            if last is not None:
                for control in chain(last):
                    control.cond_hint = crop(control, box, x)
                its["control"] = last.kept_get_control(
                    tile, t, its, len(args["cond_or_uncond"]), given["transformer_options"])  # fmt: skip
            return [apply_model(tile, t, **its)]

        return tiles(x, compute)[0]


def in_tiles(model: Any, way: str) -> Any:
    """A model that is sampled in tiles."""
    model = model.clone()
    if way == "held back":
        held = HeldBack()
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, held.sample)
        model.set_model_unet_function_wrapper(held)
    else:
        wrapper = copied if way == "copies" else Tiles(WAYS[way])
        model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, wrapper)
    return model


ALL_WAYS = ["held back", "copies", *WAYS]
