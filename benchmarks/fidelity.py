"""Pictures through engines against native's, model by model and case by case, on a CPU in float32.

    python3 tools/environment.py run -- python benchmarks/fidelity.py

Tiny models with random weights in two real ComfyUI servers: one samples natively, the other through engines. A row's
error must be at most 1e-5, or what native's own result changes by when the guidance changes by a millionth: some
samplers amplify the last bit. Writes benchmarks/results/fidelity.json and the tables of docs/fidelity.md. ``--only``
takes models by parts of their names; rows of others are kept. Ten minutes on two cores, 8 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [str(ROOT / name) for name in ("tools", "tests/support", "tests/sampling")]
sys.path[:0] = [name for name in FOLDERS if name not in sys.path]

import numpy
from comfy_process import ComfyProcess
from fidelity_cases import BACKENDS, Case, cases
from scenarios import Prompt, latent_of, relative_difference

RESULTS = ROOT / "benchmarks" / "results" / "fidelity.json"
PAGE = ROOT / "docs" / "fidelity.md"
MARKS = ("<!-- fidelity: made by benchmarks/fidelity.py -->\n", "<!-- end of fidelity -->\n")
FLOOR = 1e-5
NUDGE = 1 + 1e-6
ACTS = 1e-3
"""Least change that a case makes natively: a smaller one proves nothing."""
PATIENCE = 300.0

Row = dict[str, Any]


class WrongCase(RuntimeError):
    """A case that shows nothing."""


class Native:
    """Latents that a server samples with stock nodes alone, each prompt once."""

    def __init__(self, comfy: ComfyProcess) -> None:
        self.comfy = comfy
        self._latents: dict[str, numpy.ndarray] = {}

    def latent(self, graph: Prompt) -> numpy.ndarray:
        """Return the latent of a prompt."""
        key = json.dumps(graph, sort_keys=True)
        if key not in self._latents:
            self._latents[key] = latent_of(self.comfy.queue(named(graph, "native"), timeout=PATIENCE))
        return self._latents[key]


def named(graph: Prompt, name: str) -> Prompt:
    """Return a prompt that saves its latent under a name."""
    save = graph["save"]
    return graph | {"save": {**save, "inputs": save["inputs"] | {"name": name}}}


def measure(comfy: ComfyProcess, native: Native, case: Case) -> Row:
    """Run a case both ways and return its row."""
    running = comfy.submit(named(case.graph(True, 1.0), "engines"))
    reference = native.latent(case.graph(False, 1.0))
    nudged = native.latent(case.graph(False, NUDGE)) if case.guided else None
    plain = native.latent(case.plain(False, 1.0)) if case.plain else None
    history = comfy.wait(running, PATIENCE)
    row = {"model": case.model, "case": case.name, "backend": case.backend, "precision": case.precision,
           **outcome(history, case), "rel_err": rounded(relative_difference(latent_of(history), reference)),
           "native_change": None if nudged is None else rounded(relative_difference(nudged, reference))}
    if plain is not None:
        row["acts"] = rounded(relative_difference(plain, reference))
        if row["acts"] < ACTS:
            raise WrongCase("natively it changes nothing")
    return row


def outcome(history: Any, case: Case) -> Row:
    """Return what served, the calls of all networks, and why some ran native."""
    rows = history.output("report", "report")[0]["rows"]
    reasons = sorted({reason for row in rows for reason in row["reasons"]})
    if case.reason is not None:
        told = [text for shown in history.outputs.values() for text in shown.get("text", ()) if case.reason in text]
        reasons += [case.reason] * bool(told)
    engine, native = (sum(row[kind] for row in rows) for kind in ("engine", "native"))
    backends = {row["backend"] for row in rows if row["engine"]}
    if not engine + native or (bool(reasons), backends or {case.backend}) != (
            bool(native or case.reason), {case.backend}):
        raise WrongCase(f"the report says {rows}")
    return {"outcome": "fallback" if reasons else "served", "reason": ", ".join(reasons) or None,
            "engine_calls": engine, "native_calls": native}


def rounded(value: float) -> float:
    """Return three digits of an error."""
    return float(f"{value:.2e}")


def limit(row: Row) -> float:
    """Return the largest error that a row may have."""
    return max(FLOOR, row["native_change"] or 0.0)


def over_limit(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose picture is not native's."""
    return [row for row in rows if not row["rel_err"] <= limit(row)]


@contextmanager
def servers(comfyui: Path, base: Path) -> Iterator[tuple[ComfyProcess, ComfyProcess]]:
    """Run a server for engines, whose library is empty at first, and one for native."""
    page = base / "page"
    page.mkdir(parents=True, exist_ok=True)
    (page / "index.html").write_text("<html></html>", encoding="utf-8")
    (base / "custom_nodes").mkdir(exist_ok=True)
    for name, target in (("hybrid-trt", ROOT), ("comfy_test_nodes", ROOT / "tests" / "comfy_test_nodes")):
        (base / "custom_nodes" / name).unlink(missing_ok=True)
        (base / "custom_nodes" / name).symlink_to(target, target_is_directory=True)
    shutil.rmtree(base / "models" / "trt_engines", ignore_errors=True)
    made = [str(ROOT / "tools" / "tiny_models.py"), "--comfyui", str(comfyui), "--models", str(base / "models"),
            "--input", str(base / "input")]
    subprocess.run([sys.executable, *made], check=True, stdout=subprocess.DEVNULL)
    key = {"HYBRID_TRT_KEY_FOLDER": str(base / "key")}
    with ExitStack() as stack:
        yield tuple(stack.enter_context(ComfyProcess(
            comfyui, base, arguments=["--front-end-root", str(page)], log=base / f"{name}.log", environment=key))
            for name in ("engines", "native"))


def measure_all(found: Sequence[Case], engines: ComfyProcess, native: ComfyProcess) -> tuple[list[Row], list[str]]:
    """Run cases and print each row; return the rows and what went wrong."""
    rows, failures, reference, model = [], [], Native(native), ""
    for case in found:
        if case.model != model:  # what the models before need is given back
            reference, model = Native(native), case.model
            for comfy in (engines, native):
                comfy.free()
        start = time.monotonic()
        try:
            rows.append(measure(engines, reference, case))
        except (RuntimeError, AssertionError) as error:
            failures.append(f"{case.model}, {case.name}, {case.backend}: {error}")
            print(failures[-1], flush=True)
            continue
        wrong = " WRONG" * bool(over_limit(rows[-1:]))
        print(f"{time.monotonic() - start:5.1f} s {json.dumps(rows[-1])}{wrong}", flush=True)
    return rows, failures


def meta(comfyui: ComfyProcess) -> dict[str, Any]:
    """Return how, when and with what the rows were made."""
    return {
        "command": "python benchmarks/fidelity.py",
        "machine": "a CPU, float32; nothing is compiled for the backend torch",
        "cpu_cores": os.cpu_count(), "python": platform.python_version(),
        "comfyui": comfyui.get("/system_stats")["system"]["comfyui_version"],
        **{name: metadata.version(name) for name in ("torch", "onnxruntime", "numpy")},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }  # fmt: skip


def tables(data: dict[str, Any]) -> str:
    """Return the tables of docs/fidelity.md."""
    about, rows = data["meta"], data["rows"]
    parts = [
        f"{len(rows)} cases, ComfyUI {about['comfyui']}, torch {about['torch']}, onnxruntime {about['onnxruntime']}, "
        f"{about['date']}.", "",
        f"| model | cases | at normal speed | largest error: {' | '.join(BACKENDS)} | of its limit |",
        "|---" * (len(BACKENDS) + 4) + "|"]
    for model, own in grouped(rows, lambda row: row["model"]).items():
        fallbacks = [row for row in own if row["outcome"] == "fallback"]
        errors = [[row["rel_err"] for row in own if row["backend"] == name] for name in BACKENDS]
        largest = " | ".join(f"{max(found):.1e}" if found else "" for found in errors)
        share = max(row["rel_err"] / limit(row) for row in own)
        parts.append(f"| {model} | {each_backend(own)} | {each_backend(fallbacks)} | {largest} | {share:.0%} |")
    parts += ["", "| reason for normal speed | cases |", "|---|---|"]
    reasons = grouped([row for row in rows if row["reason"]], lambda row: row["reason"])
    parts += [f"| {reason} | {len(own)} |" for reason, own in sorted(reasons.items())]
    moved = [row for row in rows if limit(row) > FLOOR]
    if moved:
        parts += ["", "| limit above 1e-5 | backend | error | the normal model's own change |", "|---" * 4 + "|"]
    parts += [f"| {row['model']}, {row['case']} | {row['backend']} | {row['rel_err']:.1e} | "
              f"{row['native_change']:.1e} |" for row in moved]
    return "\n".join(parts) + "\n"


def each_backend(rows: Sequence[Row]) -> str:
    """Return the number of rows of each backend, or nothing where there are none."""
    return " + ".join(str(sum(row["backend"] == name for row in rows)) for name in BACKENDS) if rows else ""


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Return rows by what they have in common."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def write_page(data: dict[str, Any]) -> None:
    """Put the tables between the page's marks."""
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    PAGE.write_text(before + MARKS[0] + tables(data) + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


def key(row: Row) -> tuple[str, str, str]:
    """Name a row, as ``Case.key`` does."""
    return row["model"], row["case"], row["backend"]


def merged(out: Path, every: Sequence[Case], run: Sequence[Case], rows: Sequence[Row]) -> list[Row]:
    """Return the rows in the order of all cases; those of cases that were not run are an older file's."""
    older = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    found = {key(row): row for row in older} | {key(row): row for row in rows}
    failed = {case.key for case in run} - {key(row) for row in rows}
    return [found[case.key] for case in every if case.key in found and case.key not in failed]


def run(chosen: argparse.Namespace) -> list[str]:
    """Measure the cases that are asked for, write the file, and return what went wrong."""
    with servers(chosen.comfyui.resolve(), chosen.base.resolve()) as (engines, native):
        every = cases(engines.object_info())
        models = chosen.only or [""]
        found = [case for case in every if chosen.cases in case.name and any(part in case.model for part in models)]
        rows, failures = measure_all(found, engines, native)
        told = meta(native)
    data = {"meta": told, "rows": merged(chosen.out, every, found, rows)}
    temporary = chosen.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, chosen.out)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=os.environ.get("HYBRID_TRT_COMFYUI"))
    parser.add_argument("--base", type=Path, default=ROOT / "build" / "fidelity", help="ComfyUI's folder, 4 GB")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="parts of models' names")
    parser.add_argument("--cases", default="", help="a part of cases' names")
    parser.add_argument("--tables", action="store_true", help="run nothing: put a file's tables on the page")
    chosen = parser.parse_args()
    failures = [] if chosen.tables else run(chosen)
    data = json.loads(chosen.out.read_text(encoding="utf-8"))
    failures += [f"not native's picture: {row}" for row in over_limit(data["rows"])]
    sys.stdout.write(tables(data) + "\n".join(failures))
    write_page(data)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
