"""Prompts with TRT Accelerate in the place of the engine nodes and the sampler patch."""

from __future__ import annotations

from scenarios import Prompt, Scenario, prompt

NODE = "accelerate"


def accelerated(scenario: Scenario, name: str = "engine") -> Prompt:
    """A scenario's prompt with engines, all of them by one node."""
    built = prompt(scenario, True, name)
    patch, unet = built.pop("patch"), built.pop("unet_engine")
    settings = {key: value for key, value in unet["inputs"].items() if key != "model"}
    inputs = {"model": patch["inputs"]["model"], **settings}
    links = {"patch": [NODE, 0]}
    nets = [node for node, entry in built.items() if entry["class_type"] == "TRTControlNetEngine"]
    for number, net in enumerate(nets, start=1):
        inputs[f"control_net_{number}"] = built.pop(net)["inputs"]["control_net"]
        links[net] = [NODE, number + 1]
    for entry in built.values():
        for key, value in entry["inputs"].items():
            if isinstance(value, list) and value[0] in links:
                entry["inputs"][key] = links[value[0]]
    return {**built, NODE: {"class_type": "TRTAccelerate", "inputs": inputs}}
