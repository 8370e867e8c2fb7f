"""Mistakes and damage: a clear message or a defined result, the server lives, nobody's files are touched."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from comfy_process import ComfyProcess
from scenarios import A, B, Control, Scenario, compare, latent_of, native_latent, prompt, relative_difference

LIMIT = 1e-5
ENGINES = Scenario(width=64, height=64)
UNET_ONLY = ENGINES.but(controls=())


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Relative path -> size and modification time of every engine's file in a library (caches begin with a dot)."""
    files = (p for p in folder.glob("[!.]*/*") if p.is_file())
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}


@pytest.fixture(scope="module")
def names(sd15: ComfyProcess) -> list[str]:
    """The plain SD1.5 engines."""
    return [row["engine_name"] for row in compare(sd15, ENGINES).report["rows"]]


@pytest.fixture
def library(sd15: ComfyProcess, names: list[str]) -> Iterator[Path]:
    """The server's library with the plain SD1.5 engines only, given back as it was."""
    folder = sd15.base / "models" / "trt_engines"
    keep = folder.with_name("trt_engines.kept")
    folder.rename(keep)
    folder.mkdir()
    for name in names:
        shutil.copytree(keep / name, folder / name, copy_function=shutil.copy2)
    yield folder
    shutil.rmtree(folder)
    keep.rename(folder)
    sd15.free()


def unets_engine(library: Path) -> Path:
    """The folder of the UNet's engine."""
    (folder,) = library.glob("sd15_unet-*")
    return folder


def edit(path: Path, change: Callable[[dict], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def as_another_version(data: dict) -> None:
    data["identity"]["export_format"] = 0
    data["key"] = hashlib.sha256(json.dumps(data["identity"], sort_keys=True).encode()).hexdigest()


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "engine_file_missing": (lambda f: (f / "model.onnx").unlink(), "damaged engine", "missing"),
    "engine_file_truncated": (
        lambda f: (f / "model.onnx").open("r+b").truncate(5000), "damaged engine", "5000 bytes"),
    "engine_file_flipped": (lambda f: flip_a_byte(f / "model.onnx"), "damaged engine", "damaged"),
    "manifest_of_another_version": (
        lambda f: edit(f / "manifest.json", as_another_version), "outdated engine", "export format 0"),
    "manifest_edited": (
        lambda f: edit(f / "manifest.json", lambda d: d["identity"].update(precision="float16")), "no engine",
        "changed after the build"),
}


@pytest.mark.fault("a file of an engine is missing, cut short or changed, or its manifest is of another version",
                   see="normal speed: *damaged engine*, *outdated engine* or *no engine*")
@pytest.mark.parametrize(("damage", "reason", "word"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_engine_means_natives_image_and_a_reason(
    sd15: ComfyProcess, library: Path, damage: Callable[[Path], object], reason: str, word: str
) -> None:
    damage(unets_engine(library))
    before = snapshot(library)
    sd15.free()  # so that the engine has to be opened again
    result = compare(sd15, UNET_ONLY)
    assert result.error == 0
    assert result.unet == {"engine": 0, "native": 4, "reasons": {reason: 4}}
    told = result.report["rows"][0]["details"][reason]
    if word not in told:  # whose engine it is cannot be read: no node is told, and the panel is
        assert told == "no engine: not built yet"
        listed = sd15.get("/hybrid_trt/engines")["engines"]
        told = next(engine["reason"] for engine in listed if engine["state"] == "broken")
    assert word in told
    assert snapshot(library) == before


@pytest.mark.fault("an engine's file is emptied between two prompts", see="normal speed: *damaged engine*")
def test_an_engine_damaged_while_in_use_is_noticed_at_the_next_prompt(sd15: ComfyProcess, library: Path) -> None:
    folder = unets_engine(library)
    native_latent(sd15, UNET_ONLY.but(seed=42))  # beforehand, so that no other prompt comes between the two
    first = compare(sd15, UNET_ONLY.but(seed=41))
    assert first.unet["engine"] == 4
    (folder / "model.onnx").write_bytes(b"")
    second = compare(sd15, UNET_ONLY.but(seed=42))
    assert second.error == 0
    assert "unet_engine" in second.history.cached, "the engine node had no reason to run again"
    assert second.unet["reasons"] == {"damaged engine": 4}


@pytest.mark.parametrize(("scenario", "lost", "words"), [
    (ENGINES.but(controls=(A, Control(B.file, 2, 0.4, 0.8, 0.3))), "", "Row 2 starts at 0.8 and ends at 0.3"),
    (ENGINES, "rows.image_2", "Row 2 has a ControlNet but no image"),
    (ENGINES.but(image_options={"channels": 2}), "", "image of row 1"),
], ids=["start after end", "no image", "two channels"])
def test_a_mistake_in_a_row_is_told_on_the_node_and_the_server_samples_on(
    sd15: ComfyProcess, scenario: Scenario, lost: str, words: str
) -> None:
    graph = prompt(scenario, engines=True, name="bad")
    graph["apply"]["inputs"].pop(lost, None)
    history = sd15.queue(graph)
    assert (history.status, history.error_type) == ("error", "TRTApplyControlNet")
    assert words in history.error
    assert compare(sd15, ENGINES).error <= LIMIT


def test_rows_without_a_controlnet_are_skipped(sd15: ComfyProcess) -> None:
    graph = prompt(ENGINES, engines=True, name="engine")
    for name in ("rows.control_net_1", "rows.image_1"):
        del graph["apply"]["inputs"][name]
    one = relative_difference(latent_of(sd15.queue(graph)), native_latent(sd15, ENGINES.but(controls=(B,))))
    assert one <= LIMIT
    for name in ("rows.control_net_2", "rows.image_2"):
        del graph["apply"]["inputs"][name]
    none = relative_difference(latent_of(sd15.queue(graph)), native_latent(sd15, UNET_ONLY))
    assert none <= LIMIT


def test_strength_zero_is_no_controlnet(sd15: ComfyProcess) -> None:
    history = sd15.queue(prompt(ENGINES.but(controls=(Control(A.file, 1, 0.0), B)), engines=True, name="engine"))
    expected = native_latent(sd15, ENGINES.but(controls=(B,)))
    assert relative_difference(latent_of(history), expected) <= LIMIT
    assert len(history.output("report", "report")[0]["controlnets"]) == 1


@pytest.mark.parametrize("channels", [1, 4], ids=["grey", "with_alpha"])
def test_grey_and_alpha_images_act_as_their_rgb(sd15: ComfyProcess, channels: int) -> None:
    scenario = ENGINES.but(controls=(A,), image_options={"channels": channels})
    history = sd15.queue(prompt(scenario, engines=True, name="engine"))
    assert history.ok
    assert history.output("report", "report")[0]["controlnets"][0]["engine"] == 4
    assert relative_difference(latent_of(history), native_latent(sd15, UNET_ONLY)) > 0.01


@pytest.mark.parametrize("rows", [17, 0, "abc", None])
def test_an_unknown_number_of_rows_is_told_on_the_node(sd15: ComfyProcess, rows: object) -> None:
    graph = prompt(ENGINES, engines=True, name="bad")
    graph["apply"]["inputs"]["rows"] = rows
    if rows is None:
        del graph["apply"]["inputs"]["rows"]
    history = sd15.queue(graph)
    assert (history.status, history.error_type) == ("error", "TRTApplyControlNet")
    given = "rows is not given" if rows is None else f"rows is {rows!r}"
    assert f'{given}; it has to be the text "1" to "16"' in history.error
    assert ("chain a second" in history.error) == (rows == 17)


@pytest.mark.parametrize("rows", [2.0, " 2"])
def test_a_number_of_rows_that_is_no_text_is_taken_as_it_is_meant(sd15: ComfyProcess, rows: object) -> None:
    graph = prompt(ENGINES, engines=True, name="engine")
    graph["apply"]["inputs"]["rows"] = rows
    del graph["apply"]["inputs"]["rows.end_1"]  # which is 1 where nothing is given
    history = sd15.queue(graph)
    assert history.ok, history.error
    assert relative_difference(latent_of(history), native_latent(sd15, ENGINES)) <= LIMIT


def test_an_engine_backed_controlnet_may_pass_an_engine_node_again(sd15: ComfyProcess) -> None:
    graph = prompt(ENGINES.but(seed=51), engines=True, name="engine")
    first = f"engine_{A.file}"
    graph["again"] = {**graph[first], "inputs": {**graph[first]["inputs"], "control_net": [first, 0]}}
    graph["apply"]["inputs"]["rows.control_net_1"] = ["again", 0]
    history = sd15.queue(graph)
    assert relative_difference(latent_of(history), native_latent(sd15, ENGINES.but(seed=51))) <= LIMIT
    rows = history.output("report", "report")[0]["controlnets"]
    assert {row["engine_node"]: row["engine"] for row in rows} == {"again": 4, f"engine_{B.file}": 4}
