"""A farm renders what one ComfyUI does: every picture once, whatever dies, and only for those who have the token."""

from __future__ import annotations

import base64
import io
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from builds import until
from comfy_process import ComfyProcess, PromptRejected
from farm_process import (
    FARM_PYTHON,
    FarmProcess,
    kill_while_it_renders,
    left_of,
    needs_ray,
    runs_a_prompt,
    work,
)
from PIL import Image
from scenarios import Scenario, node, prompt

SEEDS = range(1, 17)
BUILT = "Hybrid TRT: built "


def pixels(source: Any) -> numpy.ndarray:
    with Image.open(source) as picture:
        return numpy.array(picture)


@pytest.fixture(scope="module")
def farm(comfy: ComfyProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm of two workers, on the folders of a server that runs beside it, without an engine."""
    shutil.rmtree(comfy.base / "models" / "trt_engines", ignore_errors=True)
    with FarmProcess(FARM_PYTHON, comfy, tmp_path_factory.mktemp("farm"), "--workers", "2") as process:
        yield process.until_ready()


@needs_ray
@pytest.mark.fault("a worker of a farm, and the program that asked, are killed while they render a batch",
                   see="each picture once, as one process makes it")
def test_sixteen_prompts_give_the_pictures_of_one_process_though_a_worker_and_the_client_are_killed(
    farm: FarmProcess, comfy: ComfyProcess, tmp_path: Path
) -> None:
    out, workflow = tmp_path / "out", tmp_path / "workflow.json"
    workflow.write_text(json.dumps(work()), encoding="utf-8")
    command = (str(workflow), "--seeds", f"{SEEDS[0]}-{SEEDS[-1]}", "--out", str(out), "--at-once", "4")

    with farm.client(*command) as client:
        if not until(lambda: len(list(out.glob("[0-9]*.json"))) >= 4, 120):
            client.kill()
            pytest.fail(f"{client.communicate()[0]}\n{farm.log.read_text()}")
        client.kill()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("[0-9]*.json")}
    with farm.client(*command) as client:
        assert until(lambda: len(list(out.glob("[0-9]*.json"))) >= len(kept) + 2, 60)
        victim, _ = farm.workers()
        kill_while_it_renders(victim)
        said = client.communicate(timeout=120)[0]
    assert client.returncode == 0, said

    told = {seed: json.loads((out / f"{seed}.json").read_text()) for seed in SEEDS}
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "what is there is not rendered again"
    assert sum(one["attempts"] > 1 for one in told.values()) == 1, "the victim had one prompt"
    rows = [row for one in told.values() for row in one["report"][0]["rows"]]
    assert {(row["engine"], row["native"]) for row in rows} == {(1, 0)}
    assert len(rows) >= 2 * (len(SEEDS) - 4), "only what the killed client had asked for may be in ComfyUI's cache"
    built = [line for log in farm.work.glob("*/comfyui.log") for line in log.read_text().splitlines() if BUILT in line]
    assert len(built) == 2, built

    pictures = [pixels(out / f"{seed}_0.png") for seed in SEEDS]
    for seed, picture in zip(SEEDS, pictures, strict=True):
        (file,) = comfy.queue(work(seed)).output("picture", "images")
        assert (picture == pixels(comfy.base / "output" / file["subfolder"] / file["filename"])).all(), seed
    assert len({picture.tobytes() for picture in pictures}) == len(SEEDS)
    assert len(list(out.glob("*.png"))) == len(SEEDS)
    farm.until_ready(workers=2)


@needs_ray
def test_progress_is_streamed_and_the_answer_ends_with_pictures_and_report(farm: FarmProcess) -> None:
    status, events = farm.ask("POST", "/render", {"workflow": work(7, steps=3)})
    assert status == 200
    steps = [(one["value"], one["max"]) for one in events if one.get("node") == "sampler"]
    assert steps == sorted(set(steps) & {(1, 3), (2, 3), (3, 3)}), "ComfyUI leaves some out where steps are short"
    assert steps[-1] == (3, 3)
    done = events[-1]
    assert (events[0]["event"], done["event"], done["attempts"]) == ("started", "done", 1)
    (picture,) = done["pictures"]
    assert (picture["node"], picture["folder"]) == ("picture", "farm")
    assert pixels(io.BytesIO(base64.b64decode(picture["data"]))).shape == (64, 64, 3)
    assert left_of(farm) == [], "what was sent is deleted"


@needs_ray
def test_a_request_brings_the_pictures_of_its_workflow(farm: FarmProcess, comfy: ComfyProcess, tmp_path: Path) -> None:
    """They replace a ControlNet's image; no worker keeps them, and its input folder has none of them."""
    source = tmp_path / "inputs" / "mine.png"
    source.parent.mkdir()
    Image.effect_noise((64, 64), 80).convert("RGB").save(source)

    def controlled(image: str) -> dict[str, Any]:
        made = work(5)
        (name,) = (name for name, one in made.items() if one["class_type"] == "TestImage")
        return made | {name: node("LoadImage", image=image)}

    carried = {"mine.png": base64.b64encode(source.read_bytes()).decode()}
    status, told = farm.ask("POST", "/render", {"workflow": controlled("mine.png")})
    assert (status, "LoadImage" in json.dumps(told)) == (400, True), "no worker has it"
    status, told = farm.ask("POST", "/render", {"workflow": controlled("mine.png"), "inputs": carried | {"b.png": ""}})
    assert (status, "b.png" in told["error"]["message"]) == (400, True)
    workflow, out = tmp_path / "workflow.json", tmp_path / "out"
    workflow.write_text(json.dumps(controlled("mine.png")), encoding="utf-8")
    with farm.client(str(workflow), "--seeds", "5", "--out", str(out), "--inputs", str(source.parent)) as client:
        said = client.communicate(timeout=120)[0]
    assert client.returncode == 0, said
    shutil.copyfile(source, comfy.base / "input" / "carried.png")
    (file,) = comfy.queue(controlled("carried.png")).output("picture", "images")
    expected = pixels(comfy.base / "output" / file["subfolder"] / file["filename"])
    assert (pixels(out / "5_0.png") == expected).all()
    assert not (comfy.base / "input" / "mine.png").exists()
    assert left_of(farm) == []


@needs_ray
def test_prometheus_gets_prompts_calls_and_seconds(farm: FarmProcess) -> None:
    before = farm.metrics()
    assert [farm.ask("POST", "/render", {"workflow": work(seed)})[0] for seed in (90, 91)] == [200, 200]

    def grown(*key: str) -> float:
        return farm.metrics().get(key, 0) - before.get(key, 0)

    def timed_as_often_as_done() -> bool:
        page = farm.metrics()  # a worker's counts reach the page one by one, a little later
        return page.get(("seconds_count", "")) == page.get(("prompts_total", "done"))

    assert until(lambda: grown("prompts_total", "done") >= 2, 60), farm.metrics()
    assert until(lambda: grown("calls_total", "engine") >= 4, 60), farm.metrics()
    assert until(timed_as_often_as_done, 60), farm.metrics()
    assert grown("calls_total", "native") == 0
    assert grown("seconds_sum", "") > 0


@needs_ray
def test_only_the_ports_between_gate_and_workers_are_open_to_other_machines(farm: FarmProcess) -> None:
    listening = [(process.name(), connection.laddr.ip) for process in farm.family()
                 for connection in process.net_connections() if connection.status == psutil.CONN_LISTEN]  # fmt: skip
    assert len(listening) > 5
    wide = [name for name, ip in listening if ip.rpartition(":")[2] != "127.0.0.1"]
    assert all(name.startswith("ray::ServeReplica") for name in wide), listening


@needs_ray
def test_prompts_go_to_the_worker_that_has_their_models(farm: FarmProcess) -> None:
    def worker(seed: int) -> str:
        alone = prompt(Scenario(controls=(), steps=1, width=64, height=64, seed=seed), False, "")
        alone["vae"], alone["decode"] = work()["vae"], work()["decode"]
        alone["save"] = node("PreviewImage", images=["decode", 0])
        return farm.ask("POST", "/render", {"workflow": alone})[1][-1]["worker"]

    first = worker(1)
    time.sleep(2)  # workers tell the gate of their models a moment later
    assert {worker(seed) for seed in range(2, 10)} == {first}


@needs_ray
def test_a_prompt_whose_asker_goes_away_is_interrupted(farm: FarmProcess) -> None:
    def interrupted() -> int:
        return sum(log.read_text().count("Processing interrupted") for log in farm.work.glob("*/comfyui.log"))

    before = interrupted()
    with farm.asking(work(1, 96, 5000)) as answer:
        while json.loads(answer.readline()).get("node") != "sampler":
            assert farm.ask("GET", "/ready")[1]["rendering"] == 1
    assert until(lambda: farm.ask("GET", "/ready")[1]["rendering"] == 0, 60)
    assert until(lambda: interrupted() == before + 1, 60)
    assert farm.ask("POST", "/render", {"workflow": work(1)})[1][-1]["event"] == "done"


def long_node(color: int) -> dict[str, Any]:
    """A workflow with a node of seconds, which nothing interrupts."""
    return {"made": node("EmptyImage", width=2048, height=2048, batch_size=1, color=color),
            "blur": node("ImageBlur", image=["made", 0], blur_radius=31, sigma=10.0),
            "save": node("PreviewImage", images=["blur", 0])}  # fmt: skip


@needs_ray
@pytest.mark.fault("who asked a farm goes away while a node runs that cannot be interrupted",
                   see="the other prompts go to free workers, with all of their pictures")
def test_the_prompt_of_one_who_left_holds_no_other_up_and_takes_none_of_its_pictures(farm: FarmProcess) -> None:
    data = io.BytesIO()
    Image.effect_noise((16, 16), 80).save(data, "png")
    short = {"workflow": {"mine": node("LoadImage", image="mine.png"),
                          "save": node("PreviewImage", images=["mine", 0])},
             "inputs": {"mine.png": base64.b64encode(data.getvalue()).decode()}}  # fmt: skip

    def end_of_a_short_one() -> str:
        status, told = farm.ask("POST", "/render", short)
        return told[-1]["event"] if status == 200 else str(told)

    farm.until_ready(workers=2)
    workers = farm.workers()
    for color, busy in ((1, 1), (2, 2)):
        with farm.asking(long_node(color)) as answer:
            assert json.loads(answer.readline())["event"] == "started"
            time.sleep(1)  # else it is interrupted before that node
        assert until(lambda: farm.ask("GET", "/ready")[1]["rendering"] == 0, 60)
        assert sum(map(runs_a_prompt, workers)) == busy
        if busy == 1:
            assert [end_of_a_short_one() for _ in range(5)] == ["done"] * 5
            assert sum(map(runs_a_prompt, workers)) == 1, "the others did not wait for it"
    assert end_of_a_short_one() == "done", "it waited until a worker had really ended the one that was left"
    assert sum(map(runs_a_prompt, workers)) <= 1


@needs_ray
def test_without_the_token_nothing_is_rendered(farm: FarmProcess) -> None:
    for token in (None, "wrong", "a-token-for-tests-alone-", ""):
        status, told = farm.ask("POST", "/render", {"workflow": work()}, token)
        assert (status, "token" in told["error"]["message"]) == (401, True)
    assert farm.ask("GET", "/ready", token=None)[0] == 200


@needs_ray
@pytest.mark.fault("a farm gets a workflow that ComfyUI refuses", see="status 400, with ComfyUI's own reason")
def test_a_bad_workflow_is_refused_with_comfyuis_own_reason(farm: FarmProcess, comfy: ComfyProcess) -> None:
    wrong = work()
    wrong["unet"]["inputs"]["unet_name"] = "no_such_model.safetensors"
    with pytest.raises(PromptRejected) as native:
        comfy.submit(wrong)
    status, told = farm.ask("POST", "/render", {"workflow": wrong})
    assert (status, told["error"]) == (400, native.value.error)
    assert told["node_errors"]["unet"]["errors"] == native.value.node_errors["unet"]["errors"]
    lost = {"1": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "x"}}}
    status, told = farm.ask("POST", "/render", {"workflow": lost})
    assert (status, bool(told["error"]["message"])) == (400, True)
    for body in ({"workflow": {"nodes": []}}, {"workflow": []}, {}, [1], {"workflow": {"1": {"class_type": "X"}}}):
        status, told = farm.ask("POST", "/render", body)
        assert (status, "API format" in told["error"]["message"]) == (400, True)


@needs_ray
@pytest.mark.fault("a farm is told to end while it renders", see="it renders what it has, takes no more, and ends")
def test_a_farm_that_ends_renders_what_it_has_and_takes_no_more(farm: FarmProcess) -> None:
    family = farm.family()
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(farm.ask, "POST", "/render", {"workflow": work(seed, 96, 12)}) for seed in (1, 2, 3)]
        assert until(lambda: farm.ask("GET", "/ready")[1]["rendering"] == 3, 60)
        farm.end()
        assert until(lambda: farm.ask("GET", "/ready")[0] == 503, 60), farm.log.read_text()
        assert farm.ask("POST", "/render", {"workflow": work()})[0] == 503
        assert [one.result()[1][-1]["event"] for one in running] == ["done"] * 3
    assert farm.wait(60) == 0, farm.log.read_text()
    assert until(lambda: not any(process.is_running() for process in family), 60)


@needs_ray
@pytest.mark.slow
@pytest.mark.fault("others take nearly all memory of a farm's machine, or a worker is killed for it",
                   see="no worker ends; for one that is killed another one starts")
def test_memory_that_others_take_ends_no_worker_and_one_that_is_killed_comes_back_once(
    comfy: ComfyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")  # so little is taken on any machine
    with FarmProcess(FARM_PYTHON, comfy, tmp_path, "--workers", "1") as farm:
        (worker,) = farm.until_ready(1).workers()
        time.sleep(5)
        assert farm.workers() == [worker]
        worker.kill()
        assert until(lambda: farm.workers() not in ([], [worker]), 60)
        farm.until_ready(1)
        time.sleep(5)
        assert len(farm.workers()) == 1
        assert len(list(farm.work.glob("*/comfyui.log"))) == 2, "one that was killed, and one in its place"


@needs_ray
@pytest.mark.slow
@pytest.mark.fault("a workflow that shall warm a farm cannot run", see="the farm ends, with ComfyUI's reason")
def test_a_farm_that_cannot_be_warm_ends_with_comfyuis_reason(comfy: ComfyProcess, tmp_path: Path) -> None:
    wrong = work()
    wrong["unet"]["inputs"]["unet_name"] = "no_such_model.safetensors"
    (tmp_path / "wrong.json").write_text(json.dumps(wrong), encoding="utf-8")
    with FarmProcess(FARM_PYTHON, comfy, tmp_path, "--workers", "1", "--warm", str(tmp_path / "wrong.json")) as process:
        assert process.wait(180) == 1
    told = process.log.read_text().rpartition("The farm cannot start: ")[2]
    assert "no_such_model.safetensors is missing: put it where UNETLoader (node unet) looks" in told
