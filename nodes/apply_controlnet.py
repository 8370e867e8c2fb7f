"""TRT Apply ControlNet: stacks any number of ControlNets, engine-backed or plain, in one node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from comfy.controlnet import ControlBase
from comfy_api.latest import io

from .engine_node import CATEGORY

MAX_ROWS = 16

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
        options = [
            io.DynamicCombo.Option(str(count), [i for n in range(1, count + 1) for i in _row_inputs(n)])
            for count in range(1, MAX_ROWS + 1)
        ]
        return io.Schema(
            node_id="TRTApplyControlNet",
            display_name="TRT Apply ControlNet",
            category=CATEGORY,
            description="Applies several ControlNets at once, each with its own image, strength and range. Rows may be "
            "engine-backed (TRT ControlNet Engine) or plain. For more rows, chain a second node.",
            search_aliases=["controlnet stack", "multi controlnet", "tensorrt controlnet apply"],
            inputs=[
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                io.DynamicCombo.Input("rows", options=options, tooltip="How many ControlNets to stack."),
                io.Vae.Input("vae", optional=True, tooltip="Only for ControlNets that need one."),
            ],
            outputs=[
                io.Conditioning.Output("positive_out", display_name="positive"),
                io.Conditioning.Output("negative_out", display_name="negative"),
            ],
        )

    @classmethod
    def execute(
        cls, positive: Conditioning, negative: Conditioning, rows: Any = None, vae: Any = None, **unknown: Any
    ) -> io.NodeOutput:
        if not isinstance(rows, dict):
            # ComfyUI lets an unknown value through and hands its rows on unsorted
            raise ValueError(f'rows is {rows!r}; it has to be the text "1" to "{MAX_ROWS}". Nothing was applied.')
        stack = _stack(rows)
        copies: dict[tuple[int, ControlBase | None], ControlBase] = {}
        return io.NodeOutput(*(_apply(stack, c, vae, copies) for c in (positive, negative)))


def _row_inputs(n: int) -> list[io.Input]:
    part = {"min": 0.0, "max": 1.0, "step": 0.001}
    return [
        io.ControlNet.Input(f"control_net_{n}", optional=True, tooltip="Leave it open to skip this row."),
        io.Image.Input(f"image_{n}", optional=True, tooltip="The control image (edges, depth, pose ...)."),
        io.Float.Input(f"strength_{n}", default=1.0, min=0.0, max=10.0, step=0.01, tooltip="0 switches the row off."),
        io.Float.Input(f"start_{n}", default=0.0, **part, tooltip="Where in the sampling it starts to act, 0 to 1."),
        io.Float.Input(f"end_{n}", default=1.0, **part, tooltip="Where in the sampling it stops acting, 0 to 1."),
    ]


def _stack(rows: dict[str, Any]) -> list[Row]:
    """The rows that act, in order.

    Raises:
        ValueError: a row that can only be a mistake; the text is for the user.
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
    """An IMAGE (B, H, W, C) as (B, 3, H, W): grey is repeated, alpha dropped.

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
    """Hang the stack onto every entry, as ComfyUI's own apply node does.

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
