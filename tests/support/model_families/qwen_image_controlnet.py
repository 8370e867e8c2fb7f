"""ControlNets of InstantX for Qwen-Image."""

from __future__ import annotations

from typing import Any

import token_networks
import torch
from family_contract import Call, Family, drawing
from hybrid_trt.comfy_model.network import NativeNetwork
from token_calls import Call as TokenCall

from .qwen_image import WIDTH

FILE = "tiny_qwen_image_control"


def call(hints: int = 1, hint_seed: int = 9, *sizes: Any, **named: Any) -> Call:
    """A call with so many hints."""

    def draw(_network: NativeNetwork, seed: int) -> dict[str, Any]:
        given = TokenCall(*sizes, **named).drawn(WIDTH, seed)
        return given | {"hint": drawing(hint_seed)(hints, *given["x"].shape[1:])}

    return Call(FILE, draw)


FAMILY = Family(
    "qwen_image_controlnet",
    network=lambda models, file: NativeNetwork.of_controlnet(token_networks.load_control(str(models[file])), file),
    calls={
        "plain": call(),
        "another hint": call(hint_seed=8),
        "odd sides, a hint for the batch": call(1, 9, 2, (13, 11), 30),
        "odd sides, a hint for each": call(2, 9, 2, (13, 11), 30),
        "a prompt of one token": call(words=1),
    },
    unlike={"plain": ("another hint",)},
    refused={"plain": [
        ({"attention_mask": torch.ones(1, 9)}, "attention_mask"),
        ({"guidance": torch.ones(1)}, "guidance"),
        ({"x": torch.zeros(1, 16, 3, 8, 6)}, "several frames"),
        ({"hint": torch.zeros(1, 16, 3, 8, 6)}, "several frames"),
    ]},
)  # fmt: skip
