"""ControlNets of Flux.1."""

from __future__ import annotations

from typing import Any

import torch
from family_contract import Call, Family
from flux_networks import CONTROLS, PIXELS, control_call, control_network

from .flux import PROFILE

CASES: dict[str, dict[str, Any]] = {
    "a picture": {},
    "a hint for the batch, an odd size": {"batch": 2, "size": (13, 11), "prompt": 30},
    "a hint for each": {"batch": 2, "hints": 2},
}
EVEN = {name: {**case, "size": (14, 12)} if "size" in case else case for name, case in CASES.items()}
"""The same for ControlNets of pixels: native cuts their hint into tokens without padding, and fails at odd sizes."""
TYPES: list[list[int]] = [[], [0], [2], [4], [6]]


def call(layout: str, **changes: Any) -> Call:
    return Call(layout, lambda network, seed: control_call(network, seed=seed, **changes))


FAMILY = Family(
    "flux_controlnet",
    network=lambda _models, layout, dtype=torch.float32: control_network(layout, dtype),
    profile=lambda _network: PROFILE,
    calls={f"{layout}: {name}": call(layout, **changes) for layout in CONTROLS
           for name, changes in (EVEN if layout in PIXELS else CASES).items()} | {
        f"union: types {types}": call("union", control_type=types) for types in TYPES},
    unlike={"union: types []": tuple(f"union: types {types}" for types in TYPES if types)},
    any_size={"union": ("union: types [0]", "union: types [4]")},
    refused={
        "union: a picture": [({"control_type": [9]}, "a control type"), ({"control_type": [1, 2]}, "a control type")],
        "instantx: a picture": [({"guidance": None}, "no guidance"), ({"something_new": 1}, "something_new")],
    },
    slow={"test_one_compiled_file_serves_calls_of_all_sizes": ("union",),
          "test_one_engine_of_onnx_runtime_serves_all_calls": ("without_singles", "six_for_19", "inpaint")},
)  # fmt: skip
