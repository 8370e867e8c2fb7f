"""Words of the page on engines before anything runs: whose weights one has, and whether a node's is there already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from built_once import built_once
from comfy_execution.graph import DynamicPrompt
from hybrid_trt.architectures.shapes import Profile, Range, RequestedSizes
from hybrid_trt.backends import AUTO, backends
from hybrid_trt.engine_builder.jobs import BuildQueue
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Manifest
from hybrid_trt.engine_library.manifest import MANIFEST_NAME
from hybrid_trt.page_api import node_states
from hybrid_trt.page_api.outlook import NodeRequest
from hybrid_trt.page_api.workflow_graph import loras_before
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from small_networks import network, with_lora

ORT = "onnxruntime"
PROFILE = Profile({"B": Range(1, 2, 4), "H": Range(8, 16, 64), "W": Range(8, 16, 64), "T": Range(77, 77, 231)})
LOADER = {"class_type": "UNETLoader", "inputs": {"unet_name": "a.safetensors"}}
SIZES = RequestedSizes(min_size=64, opt_size=128, max_size=512, max_images=2, max_tokens=231)


def lora(model: str, name: str, strength: Any = 1.0) -> dict[str, Any]:
    return {"class_type": "LoraLoaderModelOnly",
            "inputs": {"model": [model, 0], "lora_name": name, "strength_model": strength}}  # fmt: skip


STACK = {"class_type": "Power Lora Loader (rgthree)", "inputs": {
    "model": ["1", 0], "clip": ["9", 1], "lora_1": {"on": True, "lora": "x.safetensors", "strength": 0.5},
    "lora_2": {"on": False, "lora": "y.safetensors", "strength": 1}}}  # fmt: skip


@pytest.mark.parametrize(("nodes", "words"), [
    ({"2": lora("1", "style.safetensors", 0.8)}, "LoRA style x 0.8"),
    ({"3": lora("1", "sub/first.safetensors"), "2": lora("3", "second.safetensors", -0.25)},
     "LoRA first x 1, second x -0.25"),
    ({"2": lora("1", "style.safetensors", ["7", 0])}, "LoRA style"),
    ({"2": lora("1", "style.safetensors", 0.0)}, ""),
    ({"2": STACK, "9": lora("8", "for_the_prompt_alone.safetensors")}, "LoRA x x 0.5"),
    ({"2": {"class_type": "ModelMergeSimple", "inputs": {"model1": ["1", 0], "model2": ["8", 0], "ratio": 0.5}}}, ""),
], ids=["one", "two", "wired strength", "strength 0", "stack", "merge"])  # fmt: skip
def test_loras_before_a_node_are_named_with_their_strengths(nodes: dict[str, Any], words: str) -> None:
    engine = {"class_type": "TRTUNetEngine", "inputs": {"model": ["2", 0]}}
    graph = DynamicPrompt({"1": LOADER, "8": LOADER, **nodes, "engine": engine})
    assert loras_before(graph, "engine", "model") == words


@pytest.mark.parametrize(("loras", "replaceable", "words"), [
    ("LoRA style x 0.8", False, "LoRA style x 0.8"), ("", False, "other weights"), ("LoRA style x 0.8", True, ""),
])  # fmt: skip
def test_an_engine_says_whose_weights_it_has_where_these_are_not_the_files(
    tmp_path: Path, loras: str, replaceable: bool, words: str
) -> None:
    plain = network("unet", "one_level")
    order = BuildOrder(with_lora(plain), "float32", PROFILE, backends()[ORT], loras=loras, replaceable=replaceable)
    engine = built_once(order, Library([tmp_path]))
    assert node_states.engine_json(engine)["changes"] == words
    assert Manifest.read(engine.folder / MANIFEST_NAME).changes == words
    assert order.words().endswith(words or "any LoRA"), "the builds in the panel say it too"
    unchanged = built_once(replace(order, network=plain, replaceable=False), Library([tmp_path / "plain"]))
    assert node_states.engine_json(unchanged)["changes"] == ""
    assert "changes" not in unchanged.manifest.to_json(), "engines of before have the digest that was signed"


def test_a_node_that_has_not_run_knows_if_its_engine_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, library = network("unet", "one_level"), Library([tmp_path])
    states = node_states.NodeStates(library, BuildQueue())
    wish = NodeRequest("unet", net.label, False, ORT, SIZES)

    def there(**changes: Any) -> bool | None:
        told = states.state("another node", replace(wish, **changes))
        assert told["state"] == "unknown"
        return told["there"]

    assert there() is False, "the library is empty"
    built_once(BuildOrder(net, "float32", PROFILE, backends()[ORT]), library)
    assert there() is None, "nothing tells the file's weights"
    states.learn("a node", EngineHandle.look_up(net, EngineChoice(PROFILE, AUTO, ORT), library, "1"))
    monkeypatch.setattr(node_states, "known_hashes", lambda source: {net.weights_hash()})
    assert there() is True
    assert there(sizes=replace(SIZES, max_size=1024)) is False, "it would have to be larger"
    for changes in ({"lora": True}, {"precision": "float16"}, {"replaceable": True}, {"patched": True}, {"sizes": None},
                    {"label": ""}):  # fmt: skip
        assert there(**changes) is None, changes
    assert there(label="another.safetensors") is False
    monkeypatch.setattr(node_states, "known_hashes", lambda source: set())
    assert there() is None, "the node that ran had a LoRA"
