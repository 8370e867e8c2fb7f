"""The full TensorRT 8.6.0 for a Python that its wheel does not know: its open-source bindings, compiled for it.

    python benchmarks/workshop/tensorrt86.py sources --tensorrt DIR --onnx-tensorrt DIR --out bindings.tar.xz
    python benchmarks/workshop/tensorrt86.py install --wheel tensorrt-8.6.0-*.whl --bindings bindings.tar.xz --site site

The first needs clones of NVIDIA/TensorRT and onnx/onnx-tensorrt, the second a C++ compiler, binutils and headers of
CUDA; then ``LD_LIBRARY_PATH=site/tensorrt PYTHONPATH=site``. On Python 3.8 to 3.10 ``pip install tensorrt==8.6.0`` is
all that is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VERSION = "8.6.0"
PARSER_COMMIT = "6872a9473391a73b96741711d52b98c2c3e25146"
"""Of onnx-tensorrt, whose header belongs to that TensorRT's parser."""
PYBIND = "pybind11==2.13.6"
OLD_PARSERS = ("Caffe", "Uff")
"""Bindings that are left out: nothing here reads such models."""
LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin")
STUBS = {"libcudnn.so.8": "cudnn", "libcublasLt.so.12": "cublasLt", "libcublas.so.12": "cublas"}
"""Libraries that the plugins want and nobody brings, and how the names of their functions begin."""


def make_sources(tensorrt: Path, onnx_tensorrt: Path, out: Path) -> None:
    """An archive with all that ``install`` compiles."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "bindings"
        root.mkdir()
        tar = subprocess.run(["git", "-C", str(tensorrt), "archive", f"v{VERSION}", "python", "include"],
                             check=True, capture_output=True).stdout  # fmt: skip
        subprocess.run(["tar", "-x", "-C", str(root)], input=tar, check=True)
        header = subprocess.run(["git", "-C", str(onnx_tensorrt), "show", f"{PARSER_COMMIT}:NvOnnxParser.h"],
                                check=True, capture_output=True).stdout  # fmt: skip
        for folder in (root / "include", root / "include" / "onnxOpenSource"):
            folder.mkdir(exist_ok=True)
            (folder / "NvOnnxParser.h").write_bytes(header)
        shutil.rmtree(root / "python" / "packaging")
        module = root / "python" / "src" / "pyTensorRT.cpp"
        code = module.read_text()
        for name in OLD_PARSERS:
            (root / "python" / "src" / "parsers" / f"py{name}.cpp").unlink()
            code = code.replace(f"    bind{name}(m);", "")
        module.write_text(code)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", temporary, PYBIND]
        subprocess.run(pip, check=True)
        zipfile.ZipFile(next(Path(temporary).glob("pybind11-*.whl"))).extractall(root)
        with tarfile.open(out, "w:xz") as archive:
            archive.add(root, root.name)


def lay_out(wheel: Path, package: Path) -> None:
    """The wheel's libraries and its Python, less what it says of the old parsers, in the folder ``package``."""
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.endswith(".so.8") or "builder_resource" in name:
                with files.open(name) as source, (package / Path(name).name).open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 24)
        code = files.read("tensorrt/__init__.py").decode()
    (package / "__init__.py").write_text(without_old_parsers(code))
    info = package.parent / f"tensorrt-{VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {VERSION}\n")


def without_old_parsers(code: str) -> str:
    """The package's ``__init__`` without the lines that make context managers of parsers that are not there."""
    return re.sub(rf"^ *(?:{'|'.join(OLD_PARSERS)})Parser\.__.*\n", "", code, flags=re.MULTILINE)


def wanted_of(symbols: Iterable[str], library: str) -> list[str]:
    """The functions of a library among the undefined symbols, as ``nm`` prints them, of another."""
    names = {line.split()[-1].split("@")[0] for line in symbols if line.strip()}
    mine = {name for name in names if name.startswith(STUBS[library])}
    longer = [prefix for prefix in STUBS.values() if prefix.startswith(STUBS[library]) and prefix != STUBS[library]]
    return sorted(name for name in mine if not any(name.startswith(prefix) for prefix in longer))


def make_stubs(package: Path) -> None:
    """Libraries whose functions all fail: TensorRT loads, and tactics that would need the real ones must be off."""
    plugin = package / "libnvinfer_plugin.so.8"
    symbols = subprocess.run(["nm", "-D", "--undefined-only", plugin], check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as temporary:
        code, versions = Path(temporary) / "stub.c", Path(temporary) / "stub.map"
        for library in STUBS:
            functions = wanted_of(symbols.stdout.splitlines(), library)
            code.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in functions))
            versions.write_text(f"{library} {{ global: *; }};\n")
            subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", package / library, code,
                            f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}"], check=True)  # fmt: skip


def compile_bindings(root: Path, package: Path, cuda: Path) -> None:
    """The extension module of the running Python, in ``package``, from the sources below ``root``.

    They are C++14: since C++17 ``noexcept`` is part of a type, which pybind11's constructors do not take.
    """
    includes = [root / "include", root / "python" / "include", root / "python" / "docstrings",
                root / "pybind11" / "include", sysconfig.get_paths()["include"], cuda / "include"]  # fmt: skip
    flags = ["-O1", "-fPIC", "-fvisibility=hidden", "-std=c++14", "-w", "-DTENSORRT_MODULE=tensorrt",
             "-Dtensorrt_EXPORTS", *(f"-I{folder}" for folder in includes)]  # fmt: skip
    sources = sorted((root / "python" / "src").rglob("*.cpp"))
    objects = [root / f"{source.stem}.o" for source in sources]

    def compiled(pair: tuple[Path, Path]) -> None:
        subprocess.run(["g++", *flags, "-c", pair[0], "-o", pair[1]], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiled, zip(sources, objects, strict=True)))
    module = package / f"tensorrt{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["g++", "-shared", "-o", module, *objects, f"-L{package}", *(f"-l:lib{n}.so.8" for n in LIBRARIES),
                    "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"], check=True)  # fmt: skip


def install(wheel: Path, bindings: Path, site: Path, cuda: Path) -> None:
    """Make ``site/tensorrt``, to be put on ``PYTHONPATH`` and ``LD_LIBRARY_PATH``."""
    package = site / "tensorrt"
    package.mkdir(parents=True, exist_ok=True)
    lay_out(wheel, package)
    make_stubs(package)
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(bindings) as archive:
            archive.extractall(temporary, filter="data")
        compile_bindings(Path(temporary) / "bindings", package, cuda)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sources = commands.add_parser("sources", help="pack the bindings' sources")
    sources.add_argument("--tensorrt", type=Path, required=True, help="clone of NVIDIA/TensorRT")
    sources.add_argument("--onnx-tensorrt", type=Path, required=True, help="clone of onnx/onnx-tensorrt")
    sources.add_argument("--out", type=Path, required=True)
    there = commands.add_parser("install", help="compile them for this Python")
    there.add_argument("--wheel", type=Path, required=True)
    there.add_argument("--bindings", type=Path, required=True)
    there.add_argument("--site", type=Path, required=True)
    there.add_argument("--cuda", type=Path, default=Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")))
    options = parser.parse_args()
    if options.command == "sources":
        make_sources(options.tensorrt, options.onnx_tensorrt, options.out)
    else:
        install(options.wheel, options.bindings, options.site, options.cuda)


if __name__ == "__main__":
    main()
