"""The command line: builds engines and looks after the library with the same code as the nodes.

    python -m engine_builder build --unet model.safetensors --max-size 768
    python -m engine_builder accelerate workflow.json
    python -m engine_builder list --json

Exit status: 0 done; 1 failed, with one sentence on stderr; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing, redirect_stdout
from pathlib import Path
from types import TracebackType

from ...architectures import profile_words
from ...architectures.shapes import PRECISIONS, SIZE_NAMES, RequestedSizes
from ...backends import AUTO, backends
from ...backends.lookup import backends_for, refusals
from ...comfy_model.hash_cache import source_changed
from ...engine_library import BuildError, Library, LibraryError, Unavailable, fleet_key, measurements
from ...engine_library.disk import free_bytes, gigabytes
from ...engine_library.gpu import gpu_of
from ...engine_library.inventory import Entry, delete, entries, select, verify
from ..doctor import KeptWarnings, Place, report
from . import comfyui, workflows

BAR_WIDTH = 24
REDRAW_SECONDS = 0.1


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that a Windows code page does not have
    options = _parser().parse_args(arguments)
    try:
        status = options.command(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has closed the pipe, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (BuildError, LibraryError, Unavailable, comfyui.Unusable, OSError, ValueError) as error:
        text = f"{error}; the command stopped there" if isinstance(error, OSError) else str(error)
        sys.stderr.write(f"{text}\n")
        if options.json:
            _print_json({"error": text})
        return 1
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"{error.name} is not installed for {sys.executable}, so nothing was done; run this with the Python that "
            "runs ComfyUI, where 'pip install -r requirements.txt' adds what this pack needs\n"
        )
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; nothing was changed.\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--library", type=Path, metavar="DIR", help="engines' folder (default: ComfyUI's trt_engines)")
    common.add_argument("--comfyui", type=Path, metavar="DIR", help="ComfyUI's folder (default: where this pack is "
                        "installed, or COMFYUI_PATH)")  # fmt: skip
    common.add_argument("--device", help="cpu, cuda or cuda:N to judge and build for (default: the first GPU, or cpu)")
    common.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    parser = argparse.ArgumentParser(prog="python -m engine_builder", description="Builds and manages engines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, parents=[common], help=text, description=text)
        added.set_defaults(command=command)
        return added

    build = add("build", _build, "Build the engine of a model, or all engines that a workflow needs; or check one that "
                                 "was built without this GPU.")  # fmt: skip
    source = build.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", metavar="FILE", help="the UNet of a checkpoint")
    source.add_argument("--unet", metavar="FILE", help="a diffusion model")
    source.add_argument("--controlnet", metavar="FILE", help="a ControlNet")
    source.add_argument("--workflow", type=Path, metavar="FILE", help="a workflow of ComfyUI, saved or exported (API); "
                        "sizes are those of its nodes and pictures; one without this pack's nodes is built as "
                        "'accelerate' would change it")  # fmt: skip
    for name in SIZE_NAMES:
        build.add_argument("--" + name.replace("_", "-"), type=int, default=0, metavar="N",
                           help="default: what fits the model")  # fmt: skip
    build.add_argument("--precision", choices=(AUTO, *PRECISIONS), default=AUTO, help="default: what ComfyUI uses")
    build.add_argument("--backend", type=_backend_name, default=AUTO, metavar="NAME",
                       help="default: as on the node; 'doctor' lists them")  # fmt: skip
    build.add_argument("--replaceable", action="store_true",
                       help="an engine for every checkpoint of this kind with any LoRA")  # fmt: skip
    build.add_argument("--force", action="store_true", help="build although the engine is there")
    accelerate = add("accelerate", _accelerate, "Put acceleration into a copy of a workflow.")
    accelerate.add_argument("workflow", type=Path, metavar="FILE", help="a workflow, saved or exported (API)")
    accelerate.add_argument("--out", type=Path, metavar="FILE", help="where to write it, over what is there (default: "
                            "beside it, as 'NAME (accelerated).json')")  # fmt: skip
    add("list", _list, "List the engines, their state and when they were last used.")
    add("verify", _verify, "Read all files of engines and compare their hashes.").add_argument("engine", nargs="*")
    add("delete", _delete, "Delete engines.").add_argument("engine", nargs="+")
    add("inspect", _inspect, "Show the manifest of an engine.").add_argument("engine")
    add("doctor", _doctor, "Report for support: versions, card, backends and why not, library, last errors.")
    key = add("fleet-key", _fleet_key, "Make a key for workers that accept each other's engines; who has it can run "
                                       "programs on each of them.")  # fmt: skip
    key.add_argument("file", type=Path, metavar="FILE", help=f"a new file, for {fleet_key.VARIABLE} to name")
    return parser


def _backend_name(text: str) -> str:
    if text != AUTO and text not in backends():
        raise argparse.ArgumentTypeError(f"there is no backend {text}; choose {AUTO} or {', '.join(backends())}")
    return text


def _build(options: argparse.Namespace) -> int:
    asked = RequestedSizes(**{name: getattr(options, name) for name in SIZE_NAMES})
    asked.check()  # wrong sizes fail before a model is loaded
    if options.workflow:
        with Bar() as bar, redirect_stdout(sys.stderr):  # ComfyUI and other packs print there
            data, text, whole = workflows.built(options, bar)
        return _done(options, data, text) or int(not whole)
    library = _library(options)
    from ..build import build_engine
    from ..order import BuildOrder

    kind = next(name for name in ("checkpoint", "unet", "controlnet") if getattr(options, name))
    with Bar() as bar:
        bar("loading the model", 0.0)
        device = comfyui.device(options.device)
        network = comfyui.load(kind, getattr(options, kind), options.precision, device)
        precision = network.precision if options.precision == AUTO else options.precision
        profile = network.architecture().profile(asked)
        backend = backends_for(network, AUTO)[0] if options.backend == AUTO else backends()[options.backend]
        order = BuildOrder(network, precision, profile, backend, device, options.replaceable)
        lines: list[str] = []
        try:
            engine = build_engine(order, library, bar, lines.append, again=options.force)
        except BuildError:
            sys.stderr.write("".join(f"  {line}\n" for line in lines[-20:]))
            raise
    manifest = engine.manifest
    text = f"{engine.folder}\n{gigabytes(manifest.bytes)}, {measurements.error_words(measurements.figures(engine))}"
    return _done(options, {"folder": str(engine.folder), **manifest.to_json()}, text)


def _accelerate(options: argparse.Namespace) -> int:
    with redirect_stdout(sys.stderr):
        data, text = workflows.accelerated(options)
    return _done(options, data, text)


def _list(options: argparse.Namespace) -> int:
    library, found = _found(options)
    total, free = sum(entry.bytes for entry in found), free_bytes(library.roots[0])
    lines = []
    for entry in found:
        label = entry.engine.manifest.label if entry.engine else "?"
        lines.append(f"{entry.state:10}{gigabytes(entry.bytes):>10}  {entry.name}  {label}")
        if entry.engine:
            identity = entry.engine.manifest.identity
            used = f", last used {entry.last_used[:10]}" if entry.last_used else ""
            lines.append(f"{'':22}{profile_words(identity.architecture, identity.profile)}{used}")
        if entry.reason:
            lines.append(f"{'':22}{entry.reason}")
    lines.append(f"{len(found)} engines, {gigabytes(total)} in {library.roots[0]}, {gigabytes(free)} free")
    data = {"engines": [entry.to_json() for entry in found], "bytes": total, "free_bytes": free}
    return _done(options, {**data, "folders": [str(root) for root in library.roots]}, "\n".join(lines))


def _verify(options: argparse.Namespace) -> int:
    _, found = _found(options)
    chosen = [select(found, name) for name in options.engine] or found
    results = {}
    with Bar() as bar:
        for number, entry in enumerate(chosen):
            progress = (f"verifying {entry.name}", number / len(chosen))
            results[entry.name] = verify(entry, lambda progress=progress: bar(*progress))
    lines = [f"{name}: {'intact' if fault is None else fault}" for name, fault in results.items()]
    data = {name: None if fault is None else str(fault) for name, fault in results.items()}
    _done(options, data, "\n".join(lines) or "The library is empty.")
    return 1 if any(results.values()) else 0


def _delete(options: argparse.Namespace) -> int:
    _, found = _found(options)
    chosen = list({entry.folder: entry for entry in (select(found, name) for name in options.engine)}.values())
    for entry in chosen:
        delete(entry)
    names, size = [entry.name for entry in chosen], sum(entry.bytes for entry in chosen)
    return _done(options, {"deleted": names, "bytes": size}, f"deleted {', '.join(names)}; {gigabytes(size)} freed")


def _inspect(options: argparse.Namespace) -> int:
    entry = select(_found(options)[1], options.engine)
    if entry.engine is None:
        raise LibraryError(entry.reason)
    _print_json({**entry.engine.manifest.to_json(), "state": entry.state, "reason": entry.reason})
    return 0


def _fleet_key(options: argparse.Namespace) -> int:
    fleet_key.make(options.file)
    text = f"{options.file} is the key; let {fleet_key.VARIABLE} name it on each worker, where only ComfyUI may read it"
    return _done(options, {"file": str(options.file)}, text)


def _doctor(options: argparse.Namespace) -> int:
    """Print the report for support, whatever is missing: ComfyUI, torch, a GPU or the library."""
    root = library = None
    lost: list[str] = []
    with redirect_stdout(sys.stderr), closing(KeptWarnings()) as warnings:
        try:
            root = comfyui.find(options.comfyui)
            library = comfyui.library(options.library, root)
        except Exception as error:  # also what ComfyUI raises where its packages are missing
            lost.append(f"{error}" if isinstance(error, comfyui.Unusable) else f"{type(error).__name__}: {error}")
            library = None if options.library is None else Library([options.library])
        limits = None if root is None or lost else comfyui.limits
        place = Place(root, library, lambda: comfyui.device(options.device), limits=limits, lost=lost)
        found = report(place, lambda: warnings.lines)
    _print_json(found)
    return 0


def _library(options: argparse.Namespace) -> Library:
    return comfyui.library(options.library, options.comfyui)


def _found(options: argparse.Namespace) -> tuple[Library, list[Entry]]:
    library = _library(options)
    device = comfyui.device(options.device)
    return library, entries(library, refusals(device), source_changed, gpu_of(device))


def _done(options: argparse.Namespace, data: dict, text: str) -> int:
    if options.json:
        _print_json(data)
    else:
        sys.stdout.write(text + "\n")
    return 0


def _print_json(data: dict) -> None:
    sys.stdout.write(json.dumps(data, indent=1) + "\n")


class Bar:
    """Progress on stderr: one line that is redrawn on a terminal, else a line for each phase."""

    def __init__(self) -> None:
        self._out = sys.stderr
        self._terminal = self._out.isatty()
        self._started = time.monotonic()
        self._drawn = 0.0
        self._phase = ""
        self._length = 0

    def __call__(self, phase: str, fraction: float) -> None:
        """Show a phase and the fraction done, 0 to 1."""
        now = time.monotonic()
        new, self._phase = phase != self._phase, phase
        if not new and (not self._terminal or now - self._drawn < REDRAW_SECONDS):
            return
        self._drawn = now
        seconds = now - self._started
        if self._terminal:
            filled = round(BAR_WIDTH * fraction)
            line = f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {fraction:4.0%} {seconds:5.0f} s  {phase}"
            self._out.write("\r" + line.ljust(self._length))
            self._length = len(line)
        else:
            self._out.write(f"{seconds:6.1f} s {fraction:4.0%}  {phase}\n")
        self._out.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and self._length:
            self._out.write("\r" + " " * self._length + "\r")
