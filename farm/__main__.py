"""``python -m farm`` in the pack's folder: ``serve`` starts a farm, ``render`` has it render a batch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .access import VARIABLE, NoToken, token, token_file

INSTALL = "run pip install -r farm/requirements.txt in the pack's folder."
URL = "http://127.0.0.1:8400"


def main(argv: list[str]) -> int:
    """Run a command of the farm and return its exit status."""
    at = argv.index("--") if "--" in argv else len(argv)
    arguments, rest = _parser().parse_args(argv[:at]), argv[at + 1 :]
    try:
        if arguments.command == "serve":
            from .serving import serve_farm  # needs Ray, which a machine that only renders may lack

            return serve_farm(arguments, token(arguments.token_file, make=True), rest)
        from .render import render_batch

        return render_batch(arguments, token(arguments.token_file))
    except (NoToken, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ModuleNotFoundError as error:
        sys.stderr.write(f"{error.name} is not installed for this Python, so nothing is rendered: {INSTALL}\n")
        return 2
    except OSError as error:  # a full disk, for example
        why = f"The farm's {arguments.command} command ends ({error})"
        sys.stderr.write(f"{why}: mend that and start it again; the pictures that are there stay.\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m farm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start workers, and answer POST /render until SIGTERM",
                                epilog="What follows '--' goes to ComfyUI.")  # fmt: skip
    serve.add_argument("--comfyui", type=Path, required=True, help="ComfyUI's folder, with this pack in it")
    serve.add_argument("--python", type=Path, default=Path(sys.executable), help="the Python that runs ComfyUI")
    serve.add_argument("--base", type=Path, help="ComfyUI's --base-directory, if it has one")
    serve.add_argument("--warm", type=Path, action="append", default=[], help="an API workflow that warms workers")
    serve.add_argument("--workers", type=int, help="number of workers; else one per GPU")
    serve.add_argument("--cpu", action="store_true", help="workers take no GPU")
    serve.add_argument("--host", default="127.0.0.1", help="the address that the farm listens at (127.0.0.1)")
    serve.add_argument("--port", type=int, default=8400, help="(8400)")
    serve.add_argument("--metrics-port", type=int, help="show metrics for Prometheus here, on loopback")
    serve.add_argument("--work", type=Path, help="a folder for logs and pictures; else a temporary one")
    serve.add_argument("--drain", type=float, default=600, help="seconds that running prompts get at the end (600)")
    render = commands.add_parser("render", help="render a workflow for many seeds")
    render.add_argument("workflow", type=Path, help="a workflow, saved with Export (API)")
    render.add_argument("--seeds", required=True, help="such as 1-100 or 7,9,20-30")
    render.add_argument("--out", type=Path, required=True, help="the folder for pictures; what is there is kept")
    render.add_argument("--inputs", type=Path, help="a folder with the pictures that the workflow reads; they are sent")
    render.add_argument("--url", default=URL, help=f"the farm's address ({URL})")
    render.add_argument("--at-once", type=int, default=0, help="prompts on their way; else one more than workers")
    render.add_argument("--patience", type=float, default=60, help="seconds to wait for a farm that is away (60)")
    for command in (serve, render):
        command.add_argument("--token-file", type=Path, help=f"else {VARIABLE}, else {token_file()}")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
