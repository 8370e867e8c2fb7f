"""Prompts and mishaps drawn at random for one server: each picture is held against native's, and memory is read."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy
import psutil
from comfy_process import ComfyProcess, History
from our_routes import ask
from scenarios import Control, Scenario, latent_of, prompt, relative_difference

LIMITS = {"cpu": 1e-4, "cuda": 5e-2}
"""Of a picture. One or two steps of a second-order sampler with guidance enlarge the rounding of each call. A GPU
computes in half precision; without its ControlNets a picture changes by 0.27 at least."""
BUILDS = {"cpu": 0.08, "cuda": 0.02}
"""Share of prompts of a long soak that build what they lack, for half a minute each time on a GPU."""
LORA = "tiny_sd15_lora.safetensors"
SIZES = (48, 64, 64, 72, 96, 128)
"""Engines take 64 px and more."""
TOKENS = (77, 77, 77, 154, 231)
STEADY_SAMPLERS = ("euler", "euler_ancestral", "heun", "dpmpp_2m", "ddim")
SETTINGS: Sequence[dict[str, Any]] = (
    {}, {}, {}, {"max_size": 1024}, {"opt_size": 64, "max_images": 1}, {"precision": "float16"}, {"backend": "torch"},
    {"backend": "onnxruntime"}, {"max_tokens": 77},
)  # fmt: skip
PATCHES: Sequence[tuple[str, dict[str, Any]]] = (
    ("LoraLoaderModelOnly", {"lora_name": LORA, "strength_model": 0.7}),
    ("FreeU_V2", {"b1": 1.1, "b2": 1.2, "s1": 0.9, "s2": 0.8}),
    ("PerturbedAttentionGuidance", {"scale": 2.0}),
    ("ModelSamplingDiscrete", {"sampling": "eps", "zsnr": False}),
    ("RescaleCFG", {"multiplier": 0.7}),
)
FLAT = "tiny_sd15_flat_unet"


@dataclass
class Figures:
    """Record of a soak.

    Attributes:
        worst: the largest difference of a latent from native's, and ``worst_of`` its prompt.
        memory: resident bytes of the server, read at even distances with all models unloaded and freed memory given
            back; ``private``: those of them that are no file's. The system takes pages of files back at any time.
        reserved: bytes that torch has reserved on the GPU, and ``card``: all that is in use there; empty on a CPU.
    """

    seed: int
    prompts: int = 0
    worst: float = 0.0
    worst_of: str = ""
    engine_calls: int = 0
    native_calls: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    mishaps: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    private: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    card: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def growth(readings: Sequence[int]) -> int:
    """Return by how many bytes the last half of readings exceeds the highest one of the first, or less than 0.

    Single readings fall when the system takes pages back, so neither two of them nor a line tells whether memory grows.
    """
    half = len(readings) // 2
    return max(readings[half:]) - max(readings[:half])


class Soak:
    """One server for as many prompts as are asked; the same seed draws the same prompts.

    Args:
        long: with larger pictures and more steps, and engines are damaged, deleted and built again, which takes about
            ten seconds each time. On a GPU that ends with the first quarter of the prompts or of the time.
        readings: how often memory is read.
    """

    def __init__(self, comfy: ComfyProcess, seed: int, long: bool, readings: int):
        self._comfy, self._random, self._long, self._readings = comfy, Random(seed), long, readings
        device = comfy.get("/system_stats")["devices"][0]["type"]
        self._limit, self._builds, self._on_gpu = LIMITS[device], BUILDS[device], device != "cpu"
        self._drawn: list[Scenario] = []
        self._repeats = False
        self.seen = Figures(seed)

    def run(self, count: int, seconds: float = float("inf")) -> Figures:
        """Run prompts with mishaps between them; stop early when the time is over."""
        began, every = time.monotonic(), max(1, count // self._readings)
        while self.seen.prompts < count and (passed := time.monotonic() - began) < seconds:
            # torch and cuDNN keep what they load for a program or a size for good: nothing new is drawn there later
            self._repeats = self._on_gpu and (self.seen.prompts >= count // 4 or passed >= seconds / 4)
            self._mishap()
            self._prompt()
            if self.seen.prompts % every == 0:
                self._measure()
            self.seen.seconds = round(passed, 1)
        return self.seen

    def scenario(self) -> Scenario:
        """Any prompt of the tiny SD1.5 family; later on a GPU one of the first quarter, with another seed."""
        if self._repeats:
            return self._random.choice(self._drawn).but(seed=self._random.randrange(10**6))
        drawn = self._any_scenario()
        if "when_missing" not in drawn.settings:  # those that build are not repeated
            self._drawn.append(drawn)
        return drawn

    def _any_scenario(self) -> Scenario:
        r = self._random
        unet = r.choices(("tiny_sd15_unet", "tiny_sd15_other_unet", FLAT), (6, 1, 2))[0]
        settings = dict(r.choice(SETTINGS))
        if self._long and r.random() < self._builds:
            settings = {"when_missing": r.choice(("build now", "build now", "build in background"))}
        width, height = (r.choice(SIZES if self._long else SIZES[:4]) for _ in range(2))
        return Scenario(
            unet=unet, controls=tuple(self._control() for _ in range(0 if unet == FLAT else r.choice((0, 1, 1, 2, 3)))),
            unet_engine=r.random() < 0.9, width=width, height=height, batch=r.choice((1, 1, 2, 3)),
            tokens=(r.choice(TOKENS), r.choice(TOKENS)), area=r.random() < 0.3 and width == height == 128,
            steps=r.choice((1, 2, 3) if self._long else (1, 1, 2)), cfg=r.choice((1.0, 3.0, 5.0)),
            sampler=r.choice(STEADY_SAMPLERS), seed=r.randrange(10**6),
            patches=(r.choice(PATCHES),) if r.random() < 0.25 else (),
            loras_before=(PATCHES[0],) if r.random() < 0.1 else (), apply=r.choice(("trt", "stock")), settings=settings,
        )  # fmt: skip

    def _control(self) -> Control:
        r = self._random
        start, end = sorted((r.choice((0.0, 0.0, 0.3)), r.choice((1.0, 1.0, 0.5))))
        file = r.choice(("tiny_sd15_a", "tiny_sd15_b"))
        return Control(file, r.randrange(1, 4), r.choice((0.0, 0.4, 0.7, 1.0)), start, end, r.random() < 0.9)

    def _prompt(self) -> None:
        """Compare one prompt with native, whichever of the two comes first."""
        scenario, runs = self.scenario(), {}
        for engines in self._random.sample((True, False), 2):
            runs[engines] = self._comfy.queue(prompt(scenario, engines, "soak"), timeout=900)
            if not runs[engines].ok:
                self._wrong(scenario, f"engines={engines}: {runs[engines].error}")
                return
            runs[engines] = runs[engines], latent_of(runs[engines])
        self.seen.prompts += 1
        self._judge(scenario, *runs[True], runs[False][1])

    def _judge(self, scenario: Scenario, history: History, latent: numpy.ndarray, reference: numpy.ndarray) -> None:
        error = relative_difference(latent, reference)
        if error > self.seen.worst:
            self.seen.worst, self.seen.worst_of = error, str(scenario)
        if not error <= self._limit:
            self._wrong(scenario, f"{error:.1e} from native")
        for row in history.output("report", "report")[0]["rows"]:
            self.seen.engine_calls += row["engine"]
            self.seen.native_calls += row["native"]
            self.seen.reasons.update(row["reasons"])
            if row["native"] != sum(row["reasons"].values()) or set(row["reasons"]) - set(row["details"]):
                self._wrong(scenario, f"native without a reason: {row}")

    def _wrong(self, scenario: Scenario, what: str) -> None:
        self.seen.wrong.append(f"prompt {self.seen.prompts} of seed {self.seen.seed}: {what:.400}: {scenario}")

    def _mishap(self) -> None:
        """Sometimes do what users, other tabs and full cards do between two prompts."""
        drawn: dict[Callable[[], object] | None, float] = {
            None: 60, self._interrupt: 8, self._unload: 4, self._free: 4, self._look: 6,
            **({self._delete: 3, self._damage: 1} if self._long and not self._repeats else {}),
        }  # fmt: skip
        chosen = self._random.choices(list(drawn), list(drawn.values()))[0]
        if chosen is not None and chosen() is not False:
            self.seen.mishaps[chosen.__name__.strip("_")] += 1

    def _interrupt(self) -> None:
        scenario = self.scenario()
        number = self._comfy.submit(prompt(scenario.but(steps=8), True, "soak"))
        time.sleep(self._random.random())
        self._comfy.interrupt(number)
        history = self._comfy.wait(number, timeout=900)
        if history.status not in ("interrupted", "success"):
            self._wrong(scenario, f"interrupted: {history.error}")

    def _unload(self) -> None:
        self._comfy.post("/free", {"unload_models": True})

    def _free(self) -> None:
        self._comfy.post("/free", {"unload_models": True, "free_memory": True})

    def _look(self) -> None:
        """As the page does: look at the engines and their builds."""
        self._comfy.get("/hybrid_trt/engines")
        self._comfy.get("/hybrid_trt/builds")

    def _delete(self) -> bool:
        engines = self._engines()
        if engines:
            ask(self._comfy, "DELETE", f"/engines/{self._random.choice(engines)['name']}")
        return bool(engines)

    def _damage(self) -> bool:
        """Change a byte of an engine in its place; it stays so until it is built again."""
        engines = self._engines()
        if engines:
            folder = self._comfy.base / "models" / "trt_engines" / self._random.choice(engines)["name"]
            with max(folder.iterdir(), key=lambda path: path.stat().st_size).open("r+b") as file:
                file.seek(file.seek(0, os.SEEK_END) // 2)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 0xFF]))
        return bool(engines)

    def _engines(self) -> list[dict[str, Any]]:
        return sorted(self._comfy.get("/hybrid_trt/engines")["engines"], key=lambda engine: engine["name"])

    def _measure(self) -> None:
        """Read what the server holds when no model is loaded and nothing is built; its history is ComfyUI's own.

        What is freed goes back to the system first: glibc keeps much of it for later.
        """
        while any(job["state"] in ("queued", "running") for job in self._comfy.get("/hybrid_trt/builds")):
            time.sleep(0.2)
        self._comfy.post("/history", {"clear": True})
        self._comfy.free()
        self._comfy.post("/comfy_test_nodes/trim", {})
        told = psutil.Process(self._comfy.pid).memory_info()
        self.seen.memory.append(told.rss)
        self.seen.private.append(told.rss - told.shared)
        device = self._comfy.get("/system_stats")["devices"][0]
        if device["type"] == "cuda":
            self.seen.reserved.append(device["torch_vram_total"])
            self.seen.card.append(device["vram_total"] - device["vram_free"])


def tracebacks_of_ours(log: str) -> list[str]:
    """The tracebacks in a server's log that lead through this pack's own files."""
    found = re.findall(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*.*$", log, re.M)
    return [one for one in found if re.search(r"hybrid-trt|hybrid_trt", one)]
