"""Pictures on a farm's worker are one prompt's: nothing of it stays, and no other prompt sees any of it."""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from comfy_process import ComfyProcess
from farm_process import FARM_PYTHON, FarmProcess, comfyui_of, left_of, needs_ray
from PIL import Image
from scenarios import Prompt, node


@pytest.fixture(scope="module")
def farm(comfy: ComfyProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm of one worker, which so gets all prompts."""
    with FarmProcess(FARM_PYTHON, comfy, tmp_path_factory.mktemp("farm"), "--workers", "1") as process:
        yield process.until_ready(1)


def picture(color: int = 0, **more: dict[str, Any]) -> Prompt:
    """A picture of one color, by the node ``made``, and other nodes."""
    return {"made": node("EmptyImage", width=16, height=16, batch_size=1, color=color), **more}


def save(prefix: Any, **of: Any) -> dict[str, Any]:
    return node("SaveImage", **(of or {"images": ["made", 0]}), filename_prefix=prefix)


def ask(farm: FarmProcess, prompt: Prompt, **inputs: bytes) -> tuple[int, Any]:
    """Return the status of a prompt, and its last event or why it was refused."""
    body = {"workflow": prompt, "inputs": {f"{name}.png": base64.b64encode(data).decode()
                                           for name, data in inputs.items()}}  # fmt: skip
    status, told = farm.ask("POST", "/render", body)
    return status, told[-1] if status == 200 else told


SAVERS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "a preview": ({"see": node("PreviewImage", images=["made", 0])}, [("", ".png")]),
    "a folder": ({"save": save("a/b/c")}, [("a/b", ".png")]),
    "a way back": ({"save": save("a/../b/c")}, [("b", ".png")]),
    "a prefix by a link": ({"text": node("PrimitiveString", value="d/e"), "save": save(["text", 0])}, [("d", ".png")]),
    "today": ({"save": save("%year%/%month%-%width%")}, [(r"\d{4}", ".png")]),
    "moving pictures": ({"save": node("SaveAnimatedWEBP", images=["made", 0], filename_prefix="m", fps=6.0,
                                      lossless=True, quality=80, method="default")}, [("", ".webp")]),
    "a film": ({"film": node("CreateVideo", images=["made", 0], fps=30.0),
                "save": node("SaveVideo", video=["film", 0], filename_prefix="v/x", format="mp4", codec="h264")},
               [("v", ".mp4")]),
    "a latent": ({"latent": node("EmptyLatentImage", width=64, height=64, batch_size=1),
                  "save": node("SaveLatent", samples=["latent", 0], filename_prefix="l/x")}, []),
    "sound": ({"sound": node("EmptyAudio", duration=0.1, sample_rate=44100, channels=2),
               "save": node("SaveAudio", audio=["sound", 0], filename_prefix="s/x")}, []),
    "a node that shows what it makes": (
        {"crop": node("ImageCropV2", image=["made", 0], crop_region={"x": 0, "y": 0, "width": 8, "height": 8}),
         "save": save("x", images=["crop", 0])}, [("", ".png"), ("", ".png")]),
}  # fmt: skip


@needs_ray
@pytest.mark.parametrize("kind", SAVERS)
def test_what_a_prompt_made_is_sent_and_gone_and_the_same_prompt_gets_it_again(farm: FarmProcess, kind: str) -> None:
    nodes, expected = SAVERS[kind]
    before = None
    for _ in range(2):
        status, done = ask(farm, picture(0x2040FF, **nodes))
        assert (status, done["event"]) == (200, "done"), done
        assert left_of(farm) == []
        sent = sorted((one["node"], one["folder"], Path(one["name"]).suffix, one["type"]) for one in done["pictures"])
        assert [(folder, suffix) for _, folder, suffix, _ in sent] == expected or kind == "today"
        assert before in (None, sent)
        before = sent
        for one in done["pictures"]:
            if one["name"].endswith(".png"):
                with Image.open(io.BytesIO(base64.b64decode(one["data"]))) as seen:
                    assert seen.getpixel((0, 0)) == (0x20, 0x40, 0xFF)


@needs_ray
def test_of_a_prompt_that_fails_half_way_nothing_stays(farm: FarmProcess) -> None:
    before = {"see": node("PreviewImage", images=["made", 0]), "first": save("one", images=["see", 0])}
    outside = {"text": node("PrimitiveString", value="/outside/x"), "save": save(["text", 0], images=["first", 0])}
    status, last = ask(farm, picture(**before, **outside))
    assert (status, last["event"], last["node"]) == (200, "failed", "save")
    assert left_of(farm) == []
    status, done = ask(farm, picture(**before))
    assert (status, sorted(one["node"] for one in done["pictures"])) == (200, ["first", "see"])


@needs_ray
def test_no_prompt_reads_the_pictures_of_another(farm: FarmProcess, tmp_path: Path) -> None:
    brought = tmp_path / "brought.png"
    Image.effect_noise((16, 16), 80).convert("RGB").save(brought)
    mine = {"mine": node("LoadImage", image="mine.png"), "save": save("secret", images=["mine", 0]),
            "see": node("PreviewImage", images=["mine", 0]), "text": node("PrimitiveString", value="secret"),
            "linked": save(["text", 0], images=["mine", 0])}  # fmt: skip
    status, done = ask(farm, mine, mine=brought.read_bytes())
    assert (status, done["event"]) == (200, "done"), done
    assert ask(farm, mine)[0] == 400, "it is not brought now"
    names = [f"{one['folder']}/{one['name']} [{one['type']}]".lstrip("/") for one in done["pictures"]]
    assert len(names) == 3
    for path in (*names, f"inputs/{hashlib.sha256(brought.read_bytes()).hexdigest()}.png [temp]"):
        status, told = ask(farm, {"read": node("LoadImage", image=path), "save": save("x", images=["read", 0])})
        assert (status, "Invalid image file" in str(told["node_errors"])) == (400, True), told


@needs_ray
@pytest.mark.fault("a workflow names files of the farm or of another prompt", see="status 400, with the path")
def test_a_path_to_what_the_farm_keeps_is_refused(farm: FarmProcess, tmp_path: Path) -> None:
    (own,) = {log.parent for log in farm.work.glob("*/comfyui.log")}
    other = farm.work / "another"
    (other / "output").mkdir(parents=True)
    Image.new("RGB", (16, 16)).save(other / "output" / "x.png")
    (tmp_path / "link").symlink_to(farm.work)
    try:
        for path in (f"../../{other.name}/output/x.png [output]", f"../../{other.name}/output/x.png", "../comfyui.log",
                     str(other / "output" / "x.png"), f"{own}/comfyui.log [temp]", f"{own}/output/../.farm",
                     f"{tmp_path}/link/{other.name}/output/x.png"):  # fmt: skip
            for prompt in ({"read": node("LoadImage", image=path), "save": save("x", images=["read", 0])},
                           picture(save=save(path)),
                           picture(save=save("x"), deep=node("PrimitiveString", value=[{"a": [path]}]))):  # fmt: skip
                status, told = ask(farm, prompt)
                assert (status, "leads to what the farm or another prompt keeps" in str(told)) == (400, True), told
        assert left_of(farm) == [other / "output" / "x.png"]
    finally:
        shutil.rmtree(other)
    for text in (f"a cat in {own}", "/a cat.", "and/../or", "\0", "\ud83d", "x" * 10_000, "[output]", ""):
        status, done = ask(farm, picture(save=save("x"), text=node("PrimitiveString", value=text)))
        assert (status, done["event"]) == (200, "done"), (text, done)


@needs_ray
@pytest.mark.fault("a farm is killed", see="its workers and their ComfyUIs end")
def test_no_comfyui_outlives_a_farm_that_is_killed(farm: FarmProcess) -> None:
    family, workers = farm.family(), farm.workers()
    ours = [*workers, *map(comfyui_of, workers)]
    assert len(ours) == 2
    farm.kill()
    assert not psutil.wait_procs(ours, timeout=30)[1]
    with socket.create_server(("127.0.0.1", farm.port)):
        pass  # another farm can start there
    for process in family:  # two of Ray's own stay a while
        with suppress(psutil.NoSuchProcess):
            process.kill()
