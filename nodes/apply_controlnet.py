"""TRT Apply ControlNet: stacks any number of ControlNets, engine-backed or plain, in one node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from comfy_api.latest import io

from . import schemas

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase

Conditioning = list[list[Any]]


@dataclass(frozen=True)
class Row:
    """One ControlNet of the stack. ``start`` and ``end`` are fractions of the sampling, 0 to 1."""

    number: int
    control_net: ControlBase
    image: torch.Tensor
    strength: float
    start: float
    end: float


class TRTApplyControlNet(io.ComfyNode):
    """Conditioning and rows of (ControlNet, image, strength, start, end) -> conditioning with all of them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.apply_controlnet()

    @classmethod
    def execute(
        cls, positive: Conditioning, negative: Conditioning, rows: Any = None, vae: Any = None, **unknown: Any
    ) -> io.NodeOutput:
        if not isinstance(rows, dict):
            given = cls.hidden.dynprompt.get_node(cls.hidden.unique_id)["inputs"]
            rows = _sorted(given.get("rows") if rows is None else rows, given, unknown)
        stack = _stack(rows)
        copies: dict[tuple[int, ControlBase | None], ControlBase] = {}
        return io.NodeOutput(*(_apply(stack, c, vae, copies) for c in (positive, negative)))


def _sorted(count: Any, given: dict[str, Any], arrived: dict[str, Any]) -> dict[str, Any]:
    """Return the rows from the prompt's inputs, which ComfyUI leaves unsorted if it does not know their number.

    Args:
        count: number of rows, as the prompt has it.
        given: the node's inputs in the prompt.
        arrived: inputs whose values came from other nodes.

    Raises:
        ValueError: the number of rows is not clear; the text is for the user.
    """
    most = schemas.MAX_ROWS
    number = int(count) if isinstance(count, float) and count.is_integer() else count
    number = 0 if isinstance(count, bool) or not str(number).strip().isdecimal() else int(number)
    if not 1 <= number <= most:
        what = "rows is not given" if count is None else f"rows is {count!r}"
        more = " For more ControlNets chain a second TRT Apply ControlNet." if number > most else ""
        raise ValueError(f'{what}; it has to be the text "1" to "{most}". Nothing was applied.{more}')
    defaults = {name: value for n in range(1, number + 1) for name, value in schemas.row_defaults(n).items()}
    values = {name: arrived.get(f"rows.{name}", given.get(f"rows.{name}", value)) for name, value in defaults.items()}
    return {"rows": number, **values}


def _stack(rows: dict[str, Any]) -> list[Row]:
    """Return the rows that act, in order.

    Raises:
        ValueError: a row is surely a mistake; the text is for the user.
    """
    stack = []
    for n in range(1, int(rows["rows"]) + 1):
        control_net, image = rows.get(f"control_net_{n}"), rows.get(f"image_{n}")
        strength, start, end = (rows[f"{name}_{n}"] for name in ("strength", "start", "end"))
        if control_net is None or strength == 0:
            continue
        if image is None:
            raise ValueError(f"Row {n} has a ControlNet but no image, so it cannot act. Connect image_{n}.")
        if start > end:
            raise ValueError(
                f"Row {n} starts at {start:g} and ends at {end:g}, so its ControlNet would never act. "
                f"Swap start_{n} and end_{n}."
            )
        stack.append(Row(n, control_net, _rgb(image, n), strength, start, end))
    return stack


def _rgb(image: torch.Tensor, n: int) -> torch.Tensor:
    """Return an IMAGE (B, H, W, C) as (B, 3, H, W): grey is repeated, alpha dropped.

    Raises:
        ValueError: not an image.
    """
    if image.ndim != 4 or image.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"The image of row {n} has shape {tuple(image.shape)}; a ControlNet wants (batch, height, width, 3). "
            f"Connect an RGB image to image_{n}."
        )
    image = image.expand(-1, -1, -1, 3) if image.shape[-1] == 1 else image[..., :3]
    return image.movedim(-1, 1)


def _apply(
    stack: list[Row],
    conditioning: Conditioning,
    vae: Any,
    copies: dict[tuple[int, ControlBase | None], ControlBase],
) -> Conditioning:
    """Add the stack to every entry, as ComfyUI's own apply node does.

    ``copies`` makes positive and negative share their ControlNets, so that ComfyUI runs both in one batch.
    """
    applied = []
    for tensor, options in conditioning:
        options = dict(options)
        previous = options.get("control")
        for row in stack:
            key = (row.number, previous)
            if key not in copies:
                control = row.control_net.copy().set_cond_hint(row.image, row.strength, (row.start, row.end), vae=vae)
                control.set_previous_controlnet(previous)
                copies[key] = control
            previous = copies[key]
        if stack:
            options["control"] = previous
            options["control_apply_to_uncond"] = False
        applied.append([tensor, options])
    return applied
