"""Run the measurements and the tests that need GPUs on one machine, as many at once as it has GPUs for.

    python benchmarks/measure_all.py --comfyui ~/ComfyUI --base /tmp/benchmark --out /tmp/figures --minutes 25

Each measurement has GPUs, processor cores and a folder below ``--base`` of its own while it runs. What it says goes to
``NAME.txt`` in ``--out``, its figures to ``NAME.json``, and ``ended.txt`` has a line for each that has ended. None
begins that would probably not end within ``--minutes``. ``--list`` shows all of them; ``--only`` chooses some. Names
written to ``again.txt`` in ``--out`` meanwhile are measured once more, before those that wait.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STARTS = ["--comfyui", "{comfyui}", "--base", "{base}", "--out", "{out}"]
TESTS = ["{python}", "-P", "-m", "pytest", "-n", "0", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu or slow"]


def script(name: str, *options: str) -> list[str]:
    """Return the command of a script beside this one."""
    return ["{python}", f"benchmarks/{name}.py", *STARTS, *options]


@dataclass(frozen=True)
class Measurement:
    """Commands that run one after the other on the same GPUs.

    Attributes:
        seconds: a guess of what it takes, for the decision whether it may still begin.
        variables: what its environment has besides; Ray, for one, counts cores that are another measurement's.
    """

    commands: list[list[str]]
    seconds: int
    gpus: int = 1
    variables: dict[str, str] = field(default_factory=dict)


def large(*cases: str, seconds: int = 200, again: bool = False) -> Measurement:
    """Return the measurement of large models, and once more in a new process where ``again``."""
    first = script("large_models", "--profile", "--cases", *cases)
    second = [part.replace("{out}", "{again}") for part in script("large_models", "--again", "--cases", *cases)]
    return Measurement([first, second] if again else [first], seconds)


def versions(family: str, seconds: int) -> Measurement:
    """Return the comparison of this version with the one at ``--before``."""
    return Measurement([script("between_versions", "--before", "{before}", "--after", ".", "--turns", "1", "--family",
                               family)], seconds)  # fmt: skip


SOAK = "seed=5 count=1000 seconds=1150 device=gpu out={out}"
MEASUREMENTS = {
    "soak": Measurement([[*TESTS, "tests/test_soak.py", "-k", "thousand"]], 1320, 1, {"HYBRID_TRT_SOAK": SOAK}),
    "tests_one_gpu": Measurement([[*TESTS, *(f"tests/test_{name}.py" for name in (
        "torch_gpu", "other_gpu", "vae_gpu", "late_control_gpu", "quantised_gpu", "native_weights", "report",
        "changed_while_sampling_gpu"))]], 650),
    "tests_streams": Measurement([[*TESTS, "tests/test_stream_gpu.py"]], 250),
    "tests_many_prompts": Measurement([[*TESTS, "tests/test_many_prompts_gpu.py"]], 300),
    "zimage_512": large("zimage_512", seconds=120),
    "wan22": large("wan22_480", seconds=300),
    "wan22_fp8": large("wan22_480_fp8", seconds=300),
    "live": Measurement([script("live")], 270),
    "zimage_1024": large("zimage_1024", again=True),
    "flux1_1024": large("flux1_1024", again=True, seconds=300),
    "qwen_1328_fp8": large("qwen_1328_fp8", seconds=300),
    "versions_sd15": versions("sd15", 300),
    "versions_sdxl": versions("sdxl", 400),
    "flux1_512": large("flux1_512", seconds=150),
    "zimage_1024_fun": large("zimage_1024_fun", seconds=150),
    "flux1_1024_cn": large("flux1_1024_cn"),
    "krea2_1024_fp8": large("krea2_1024_fp8"),
    "zimage_1024_fp8": large("zimage_1024_fp8", seconds=120),
    "flux1_1024_fp8": large("flux1_1024_fp8", seconds=150),
    "anima": large("anima_1024", "anima_1024_lllite", seconds=250),
    "hunyuan15": large("hunyuan15_480"),
    "text_encoders": Measurement([[part for part in script("text_encoders") if part not in ("--base", "{base}")]], 300),
    "realtime": Measurement([script("realtime")], 600),
    "farm": Measurement([script("farm", "--ray", "{ray}", "--python", "{python}")], 240, 2,
                        {"RAY_OVERRIDE_RESOURCES": "{ray_resources}"}),
    "two_gpus": Measurement([script("two_gpus")], 180, 2),
    "tests_two_gpus": Measurement([[*TESTS, "tests/test_two_gpus_gpu.py"]], 500, 2),
}  # fmt: skip
"""In the order in which they begin where GPUs are free."""


@dataclass
class Run:
    """A measurement that runs, and the GPUs that it has."""

    name: str
    process: subprocess.Popen
    gpus: list[int]
    began: float


class Machine:
    """GPUs and cores of this machine, shared among measurements."""

    def __init__(self, options: argparse.Namespace, gpus: int):
        self._options = options
        self._all, self.free = gpus, list(range(gpus))
        self._cores = sorted(os.sched_getaffinity(0))
        self.running: list[Run] = []

    def start(self, name: str) -> None:
        """Start a measurement on GPUs that are free."""
        wanted = MEASUREMENTS[name]
        gpus, self.free = self.free[: wanted.gpus], self.free[wanted.gpus :]
        share = max(1, len(self._cores) // self._all)
        cores = [self._cores[n % len(self._cores)] for gpu in gpus for n in range(gpu * share, (gpu + 1) * share)]
        base = self._options.base / f"gpu{gpus[0]}"
        for folder in ("models", "input", "output", "user/default", "temp", "custom_nodes"):
            (base / folder).mkdir(parents=True, exist_ok=True)
        words = {"comfyui": self._options.comfyui, "base": base,
                 "before": self._options.before, "python": self._options.python, "ray": self._options.ray,
                 "out": self._options.out / f"{name}.json", "again": self._options.out / f"{name}_again.json",
                 "ray_resources": json.dumps({"CPU": len(cores), "GPU": len(gpus)})}  # fmt: skip
        variables = {key: value.format_map(words) for key, value in wanted.variables.items()}
        variables |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "OMP_WAIT_POLICY": "PASSIVE",
                      "HYBRID_TRT_COMFYUI": str(self._options.comfyui), "HYBRID_TRT_BASE": str(base)}  # fmt: skip
        commands = [[part.format_map(words) for part in command] for command in wanted.commands]
        code = "import json, subprocess, sys; sys.exit(any([subprocess.call(c) for c in json.loads(sys.argv[1])]))"
        with (self._options.out / f"{name}.txt").open("w") as text:
            process = subprocess.Popen([sys.executable, "-c", code, json.dumps(commands)], cwd=ROOT, stdout=text,
                                       stderr=subprocess.STDOUT, env=os.environ | variables,
                                       preexec_fn=lambda: os.sched_setaffinity(0, cores))  # fmt: skip
        self.running.append(Run(name, process, gpus, time.monotonic()))

    def ended(self) -> list[Run]:
        """Return what has ended since the last call; its GPUs are free again."""
        ended = [run for run in self.running if run.process.poll() is not None]
        self.running = [run for run in self.running if run not in ended]
        self.free = sorted([*self.free, *(gpu for run in ended for gpu in run.gpus)])
        return ended


def measure(machine: Machine, names: list[str], until: float, told: Path) -> None:
    """Run measurements side by side until all have ended or the time is over."""
    waiting, left_out = list(names), []
    again = told.with_name("again.txt")
    while waiting or machine.running or again.exists():
        if again.exists():
            waiting[:0] = [name for name in again.read_text().split() if name in MEASUREMENTS]
            again.unlink()
        for run in machine.ended():
            line = f"{run.name} {run.process.returncode} {time.monotonic() - run.began:.0f} s, GPUs {run.gpus}"
            with told.open("a") as file:
                file.write(line + "\n")
        for name in list(waiting):
            wanted = MEASUREMENTS[name]
            if time.monotonic() + wanted.seconds > until:
                waiting.remove(name)
                left_out.append(name)
            elif wanted.gpus <= len(machine.free):
                waiting.remove(name)
                machine.start(name)
        time.sleep(0.5)
    with told.open("a") as file:
        file.write(f"over; left out: {left_out}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, help="ComfyUI's source, its requirements installed")
    parser.add_argument("--base", type=Path, help="where models, engines and outputs go")
    parser.add_argument("--out", type=Path, help="a folder for all figures")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the Python that runs all")
    parser.add_argument("--ray", type=Path, default=Path(sys.executable), help="the Python that has Ray")
    parser.add_argument("--before", type=Path, help="another version of the pack, to compare this one with")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--gpus", type=int, help="use so many of the machine's GPUs")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name}: {one.gpus} GPU, a guess of {one.seconds} s" for name, one in MEASUREMENTS.items()))
        return
    if None in (options.comfyui, options.base, options.out):
        parser.error("--comfyui, --base and --out are needed")
    for name in ("comfyui", "base", "out"):
        setattr(options, name, getattr(options, name).resolve())
    options.out.mkdir(parents=True, exist_ok=True)
    import torch

    gpus = options.gpus or torch.cuda.device_count()
    names = [name for name in options.only if MEASUREMENTS[name].gpus <= gpus
             and (options.before or not name.startswith("versions"))]  # fmt: skip
    measure(Machine(options, gpus), names, time.monotonic() + 60 * options.minutes, options.out / "ended.txt")


if __name__ == "__main__":
    main()
