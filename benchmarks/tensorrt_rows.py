"""All that is to be shown of TensorRT on this machine: engines built side by side, then measured, and the GPU's tests.

    python benchmarks/tensorrt_rows.py --comfyui ComfyUI --base /tmp/benchmark --out rows --gpus 2
    python benchmarks/tensorrt_rows.py ... --only prompts            # these jobs and what they need

On one GPU what is measured waits for all builds; on two, SD1.5 has the first for itself. A build keeps one core busy
and takes 9 to 13 GB of main memory (SDXL 46), and builds share a GPU badly: six on two had both at 50 to 90 % at times.
SDXL's engines and those that take any weights are built at TensorRT's optimization level 1, which is quicker. The
torch backend's rows are from the same run: ``torch_networks.json`` before the first GPU has any builds,
``torch_prompts.json`` after TensorRT's rows, and what its memory goes to in ``memory.json``. Prompts wait for the host,
so all else is stopped while they are measured.
Writes ``sd15.json``, ``prompts.json``, ``sdxl.json`` and ``replaceable_*.json`` in the form of ``run.py``'s rows,
``build_*.json`` of each build, and a log of each job. Needs Python 3.11.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jobs import Job, run

HERE = Path(__file__).resolve().parent
BACKEND = "tensorrt"
QUICK = ("--level", 1)
SD15 = ("unet", "controlnet_0", "controlnet_1")
TESTS = ("test_tensorrt_gpu", "test_many_prompts_gpu")


def all_jobs(comfyui: Path, base: Path, out: Path, gpus: int) -> list[Job]:
    """The jobs, on the first GPU or the first two."""
    other = min(1, gpus - 1)

    def script(name: str, *words: object) -> list[str]:
        return [sys.executable, str(HERE / name), "--comfyui", str(comfyui), "--base", str(base), *map(str, words)]

    def engines(family: str, file: str, *words: object) -> list[str]:
        return script("file_engines.py", "--family", family, "--backend", BACKEND, "--out", out / file, *words)

    def build(name: str, gpu: int, family: str = "sd15", after: str = "", replaceable: bool = False) -> Job:
        title = f"build_{'any_' * replaceable}{family}_{name}"
        words = ["--build", name, "--controls", 2 if family == "sd15" else 0, *["--replaceable"] * replaceable]
        words += QUICK if replaceable or family == "sdxl" else ()
        needs, later = [f"models_{family}", *[after] * bool(after)], ["torch_networks"] * (gpu == 0)
        return Job(title, engines(family, f"{title}.json", *words), gpu, needs, after=later)

    def rows(part: str, *needs: str) -> Job:
        file = out / f"{part}.json"
        words = script("run.py", "--backend", BACKEND, "--parts", part, "--out", file)
        return Job(part, words, 0, needs, True, still=part == "prompts")

    def torch(name: str, parts: Sequence[str], needs: Sequence[str], after: Sequence[str] = ()) -> Job:
        words = ("--parts", *parts, "--out", out / f"{name}.json", "--logs", out / name)
        return Job(name, script("run.py", *words), 0, needs, True, after=after, still="prompts" in parts)

    def memory() -> Job:
        words = ("--family", "sd15", "--out", out / "memory.json")
        return Job("memory", script("memory_parts.py", *words), 0, ["torch_networks"], True, after=["torch_prompts"])

    def refits(family: str, controls: int, *needs: str) -> Job:
        words = engines(
            family, f"replaceable_{family}.json", "--replaceable", "--built", "--controls", controls, *QUICK
        )
        return Job(f"replaceable_{family}", words, other, needs, True)

    def tests(name: str, gpu: int, alone: bool, *after: str) -> Job:
        # -P: the pack's folder ``nodes`` must not hide ComfyUI's module
        words = [sys.executable, "-P", "-m", "pytest", "-n", "0", "-m", "gpu and tensorrt", "-v", f"tests/{name}.py"]
        given = {"HYBRID_TRT_COMFYUI": str(comfyui), "HYBRID_TRT_BASE": str(out / name)}
        return Job(name, words, gpu, (), alone, given, HERE.parent, after)

    return [
        Job("models_sd15", script("models.py", "full_sd15", "full_sd15_a", "full_sd15_b")),
        Job("models_sdxl", script("models.py", "full_sdxl")),
        torch("torch_networks", ("sd15", "sdxl"), ["models_sd15", "models_sdxl"]),
        build("unet", 0),
        build("controlnet_0", 0),
        build("controlnet_1", 0, after="build_sd15_controlnet_0"),  # the other's tactics are in the cache by then
        build("unet", other, "sdxl"),
        build("unet", other, replaceable=True),
        build("controlnet_0", other, replaceable=True),
        build("unet", other, "sdxl", replaceable=True),
        tests("test_tensorrt_gpu", other, False, *["torch_networks"] * (other == 0)),
        rows("sd15", *(f"build_sd15_{name}" for name in SD15)),
        rows("prompts", "sd15"),
        torch("torch_prompts", ("prompts", "warm"), ["torch_networks"], after=["prompts"]),
        memory(),
        tests("test_many_prompts_gpu", 0, True, "memory"),  # alone: it looks at what is free on the whole GPU
        Job("sdxl", engines("sdxl", "sdxl.json", "--built", "--controls", 0, *QUICK), other, ["build_sdxl_unet"], True),
        refits("sd15", 1, "build_any_sd15_unet", "build_any_sd15_controlnet_0"),
        refits("sdxl", 0, "build_any_sdxl_unet"),
    ]


def with_needs(jobs: Sequence[Job], names: Iterable[str]) -> list[Job]:
    """The jobs of these names and all that they need, in order.

    Raises:
        KeyError: there is no such job.
    """
    by_name, wanted, left = {job.name: job for job in jobs}, set(), list(names)
    while left:
        name = left.pop()
        wanted.add(name)
        left += [need for need in by_name[name].needs if need not in wanted]
    return [job for job in jobs if job.name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="where models and engines go: 40 GB")
    parser.add_argument("--out", type=Path, required=True, help="a folder for figures and logs")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="JOB", help="names as the logs have them")
    options = parser.parse_args()
    comfyui, base, out = (path.resolve() for path in (options.comfyui, options.base, options.out))
    for name in TESTS:  # which take a base directory that is there
        (out / name).mkdir(parents=True, exist_ok=True)
    jobs = all_jobs(comfyui, base, out, options.gpus)
    names = [job.name for job in jobs]
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"no job {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return max(run(with_needs(jobs, options.only or names), out).values(), key=abs)


if __name__ == "__main__":
    sys.exit(main())
