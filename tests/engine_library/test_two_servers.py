"""Two servers with one library: what one of them does to an engine changes no picture of the other."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from builds import until
from comfy_process import ComfyProcess
from our_routes import ask
from scenarios import Scenario, compare, latent_of, native_latent, prompt, relative_difference

LIMIT = 1e-5
BUILD_NOW = {"when_missing": "build now", "max_size": 256, "max_images": 1}
FLAT = Scenario(unet="tiny_sd15_flat_unet", controls=(), settings=BUILD_NOW | {"when_missing": "use native"})


@pytest.fixture
def other(comfy: ComfyProcess) -> Iterator[ComfyProcess]:
    """A second server on the folders of the first."""
    with ComfyProcess(comfy.comfyui, comfy.base, log=comfy.base / "other.log") as process:
        yield process


@pytest.mark.fault("two servers share a library: one samples, the other deletes the engine and builds it again",
                   see="nothing, or normal speed with a reason")
@pytest.mark.slow
def test_an_engine_that_the_other_server_deletes_and_builds_again_gives_natives_pictures(
    comfy: ComfyProcess, other: ComfyProcess
) -> None:
    built = compare(other, FLAT.but(settings=BUILD_NOW))
    assert built.unet["engine"] == 4
    name = built.report["rows"][0]["engine_name"]
    assert compare(comfy, FLAT.but(seed=1)).unet["engine"] == 4, "a library for both"
    long = FLAT.but(seed=2, steps=100)
    reference = native_latent(other, long)

    number = comfy.submit(prompt(long, engines=True, name="long"))
    assert until(lambda: comfy.get("/queue")["queue_running"], 60)
    time.sleep(0.5)
    assert ask(other, "DELETE", f"/engines/{name}")[0] == 200
    assert comfy.get("/queue")["queue_running"], "it is sampling meanwhile"
    number_of_build = other.submit(prompt(FLAT.but(seed=3, settings=BUILD_NOW), engines=True, name="again"))
    history = comfy.wait(number)
    assert relative_difference(latent_of(history), reference) <= LIMIT
    row = history.output("report", "report")[0]["unet"]
    assert row["engine"] + row["native"] == 100
    assert sum(row["reasons"].values()) == row["native"]

    again = other.wait(number_of_build, timeout=120)
    assert again.output("report", "report")[0]["unet"]["engine"] == 4
    for server in (comfy, other):
        after = compare(server, FLAT.but(seed=4))
        assert after.error <= LIMIT
        assert after.unet == {"engine": 4, "native": 0, "reasons": {}}
        assert "hybrid" not in "".join(t for t in server.log_text().split("Traceback")[1:])
