"""The shipped workflows without the page: what their files hold, how they convert, and that they run on engines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import slow
from comfy_process import ComfyProcess
from make_workflows import pack_version
from scenarios import latent_of, relative_difference
from shipped_workflows import FOLDER, NAMES, TITLES, TRANSFORMERS, shipped
from tiny_prompts import without_text_encoders
from workflow_recipes import with_tiny_models
from workflow_to_prompt import VIRTUAL, Prompt, bypass, set_widget, to_prompt

#: Calls in four steps: of the UNet, and of all ControlNets together, each in its range.
CALLS = {
    "sd15_two_controlnets": (4, 8),
    "sd15_advanced": (4, 8),
    "sd15_img2img_controlnet": (4, 4),
}
ENCODES_TEXT = ("CLIPTextEncode", "TextEncodeQwenImageEditPlus", "MiniMaxH3ImageToVideo")
SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustom")


def test_the_folder_holds_workflows_that_comfyui_can_list() -> None:
    """ComfyUI lists every JSON in it as a template; one in API format would open as an empty page."""
    files = sorted(path.name for path in FOLDER.iterdir())
    assert [name for name in files if not name.endswith((".json", ".jpg"))] == []
    assert [Path(name).stem for name in files if name.endswith(".json")] == sorted(TITLES.values())
    assert [Path(name).stem for name in files if name.endswith(".jpg")] == sorted(TITLES.values())


@pytest.mark.parametrize("name", NAMES)
def test_files_say_where_their_nodes_come_from(name: str) -> None:
    workflow = shipped(name)
    assert workflow["version"] == 0.4
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert len(nodes) == len(workflow["nodes"])
    for node in nodes.values():
        if node["type"] not in VIRTUAL:
            ours = node["type"].startswith("TRT")
            assert node["properties"]["Node name for S&R"] == node["type"]
            assert node["properties"]["cnr_id"] == ("hybrid-trt" if ours else "comfy-core")
            assert re.fullmatch(r"\d+\.\d+\.\d+", node["properties"]["ver"])
            assert not ours or node["properties"]["ver"] == pack_version()
    for number, origin, output, target, socket, _ in workflow["links"]:
        assert number in nodes[origin]["outputs"][output]["links"]
        assert nodes[target]["inputs"][socket]["link"] == number


@pytest.mark.parametrize("name", NAMES)
def test_nodes_without_room_to_fill_are_as_high_as_their_widgets(name: str) -> None:
    """The page gives a node of a second workflow in one graph the height of an earlier node of the same number."""
    least = {"CheckpointLoaderSimple": 98, "ControlNetLoader": 58, "LoraLoader": 126, "EmptyLatentImage": 106,
             "VAEDecode": 46, "VAEEncode": 46, "LatentUpscaleBy": 82}  # fmt: skip
    found = {(node["type"], node["size"][1]) for node in shipped(name)["nodes"] if node["type"] in least}
    assert found == {(kind, least[kind]) for kind, _ in found}


@pytest.mark.parametrize("name", NAMES)
def test_app_mode_shows_the_prompt_the_pictures_and_what_is_saved(name: str, object_info: dict[str, Any]) -> None:
    """The file names nodes and widgets that are there; a template opens as a graph all the same."""
    workflow = shipped(name)
    kinds = {str(node["id"]): node["type"] for node in workflow["nodes"]}
    sent = to_prompt(workflow, object_info)
    assert workflow["extra"]["linearMode"] is False
    data = workflow["extra"]["linearData"]
    assert all(widget in sent[node]["inputs"] for node, widget, *_ in data["inputs"])
    shown = [(kinds[node], widget) for node, widget, *_ in data["inputs"]]
    texts = [(kind, widget) for kind, widget in shown if kind in ENCODES_TEXT and widget in ("text", "prompt")]
    assert len(texts) == sum(kind in ENCODES_TEXT for kind in kinds.values()) >= 1
    assert shown.count(("LoadImage", "image")) == list(kinds.values()).count("LoadImage")
    (saved,) = data["outputs"]
    assert kinds[saved] in ("SaveImage", "SaveVideo")


@pytest.mark.parametrize("text", ["/home/", "/root/", "/tmp/", "C:\\\\", "127.0.0.1"])
@pytest.mark.parametrize("name", NAMES)
def test_files_name_nothing_of_the_machine_that_made_them(name: str, text: str) -> None:
    assert text not in (FOLDER / f"{TITLES[name]}.json").read_text(encoding="utf-8")


IN_THE_PAGE = ("sd15_two_controlnets", "sd15_advanced")
"""``test_workflows_in_page.py`` runs them there."""


@pytest.mark.parametrize("name", slow.cases({name: name for name in CALLS}, IN_THE_PAGE))
def test_they_run_on_engines(sd15: ComfyProcess, object_info: dict[str, Any], name: str) -> None:
    prompt = to_prompt(with_tiny_models(shipped(name), object_info), object_info)
    history = sd15.queue(prompt, timeout=300)
    ids = {entry["class_type"]: node for node, entry in prompt.items()}
    report = history.output(ids["TRTReport"], "report")[0]
    unet, nets = CALLS[name]
    assert (report["unet"]["engine"], report["unet"]["native"]) == (unet, 0)
    assert sum(row["engine"] for row in report["controlnets"]) == nets
    assert not any(row["native"] for row in report["controlnets"])
    assert history.output(ids["SaveImage"], "images")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_on_engines_make_the_picture_of_the_normal_model(
    comfy: ComfyProcess, object_info: dict[str, Any], name: str
) -> None:
    workflow = with_tiny_models(shipped(name), object_info)
    sampler = last_sampler(to_prompt(workflow, object_info))

    def prompt(engines: bool) -> Prompt:
        workflow = with_tiny_models(shipped(name), object_info)
        for widget, value in {"backend": "torch", "when_missing": "use native"}.items():
            set_widget(workflow, "TRTAccelerate", widget, value, object_info)
        if not engines:
            ours = {"TRTAccelerate", "TRTReport", "TRTCompare", "PreviewImage"}
            bypass(workflow, ours & {node["type"] for node in workflow["nodes"]})
        made = without_text_encoders(to_prompt(workflow, object_info))
        return made | {"save": {"class_type": "TestSaveLatent", "inputs": {"latent": [sampler, 0], "name": name}}}

    native = latent_of(comfy.queue(prompt(False)))
    assert native.std() > 0.1
    engines = prompt(True)
    history = comfy.queue(engines, timeout=120)
    (node,) = (node for node, entry in engines.items() if entry["class_type"] == "TRTReport")
    report = history.output(node, "report")[0]
    assert relative_difference(latent_of(history), native) <= 1e-5
    rows = [row for row in report["rows"] if not row["name"].startswith("VAE")]  # that has one after a build alone
    assert all(row["engine"] > 0 and row["native"] == 0 for row in rows), report
    assert len(report["controlnets"]) == (name == "flux1_controlnet")
    assert len(rows) == (2 if name == "flux1_controlnet" or name.startswith("wan") else 1)
    for numbers in (history.output(node, "numbers")[0] for node, entry in engines.items()
                    if entry["class_type"] == "TRTCompare"):  # fmt: skip
        assert numbers["same"] or numbers["psnr"] > 60


def last_sampler(prompt: Prompt) -> str:
    """Return the node that samples what the report comes after."""
    (node,) = (entry["inputs"]["after"][0] for entry in prompt.values() if entry["class_type"] == "TRTReport")
    while prompt[node]["class_type"] not in SAMPLERS:
        inputs = prompt[node]["inputs"]
        node = (inputs.get("samples") or inputs["av_latent"])[0]
    return node
