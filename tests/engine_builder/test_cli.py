"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import folder_paths  # noqa: F401  (a command finds ComfyUI by it)
import pytest
from builds import ROOT, contents
from drawn_workflows import drawn
from fake_engine import publish
from hybrid_trt.comfy_model import hash_cache
from hybrid_trt.engine_builder.command_line import main as cli_module
from hybrid_trt.engine_library.safe_files import NOTES
from PIL import Image
from PIL.PngImagePlugin import PngInfo


class CommandLine:
    """The commands on one library, in this process, or started as ``python -m engine_builder`` in the pack's folder."""

    def __init__(self, library: Path, comfyui: Path, pack: Path = ROOT):
        self.library, self.comfyui, self.pack = library, comfyui, pack

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "engine_builder", *arguments, "--library", str(self.library)]
        return subprocess.Popen(
            command, cwd=self.pack, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"COMFYUI_PATH": str(self.comfyui), "PYTHONUNBUFFERED": "1"},
        )

    def __call__(self, command: str, *arguments: str, status: int = 0) -> str:
        """Run to the end in this process; returns stdout, or stderr when it has to fail."""
        folders = ("--library", str(self.library), "--comfyui", str(self.comfyui))
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as error:
            try:
                ended = cli_module.main([command, *folders, *arguments])
            except SystemExit as wrong_usage:
                ended = wrong_usage.code
        self.told = error.getvalue()
        assert ended == status, self.told
        return self.told if status else out.getvalue()


@pytest.fixture(autouse=True)
def own_hash_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_cache, "_folder", None)


@pytest.fixture(scope="module")
def build(models: dict[str, Path]) -> tuple[str, ...]:
    return ("build", "--unet", str(models["tiny_sd15_flat_unet"]), "--max-size", "256", "--max-images", "1")


@pytest.fixture(scope="module")
def cli(environment: Any, build: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A library with an engine: ``result`` and ``progress`` are what its build said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_cache, "_folder", None)
        made = CommandLine(tmp_path_factory.mktemp("cli") / "library", environment.comfyui)
        made.result = json.loads(made(*build, "--json"))
        made.progress = made.told
        yield made


@pytest.fixture
def engine(cli: CommandLine) -> str:
    (name,) = contents(cli.library)
    return name


def test_a_build_gives_its_engine_and_tells_its_progress_on_stderr(cli: CommandLine, engine: str) -> None:
    assert cli.result["folder"].endswith(engine)
    phases = re.findall(r"^ *[\d.]+ s +(\d+)%  (.+)$", cli.progress, re.M)
    assert [phase for _, phase in phases][:1] == ["loading the model"]
    assert "building with onnxruntime" in [phase for _, phase in phases]
    percents = [int(percent) for percent, _ in phases]
    assert percents == sorted(percents)


def test_building_again_finds_the_engine(cli: CommandLine, build: tuple[str, ...], engine: str) -> None:
    began = (cli.library / engine / "manifest.json").stat().st_mtime_ns
    assert engine in cli(*build)
    assert (cli.library / engine / "manifest.json").stat().st_mtime_ns == began


def test_list_verify_and_inspect(cli: CommandLine, engine: str) -> None:
    data = json.loads(cli("list", "--json"))
    (listed,) = data["engines"]
    assert listed["state"] == "ready"
    assert listed["label"] == "tiny_sd15_flat_unet.safetensors"
    assert data["bytes"] == listed["bytes"] > 1_000_000
    text = cli("list")
    assert "ready" in text
    assert "1 image, 256 px, 231 tokens" in text
    assert json.loads(cli("verify", "--json")) == {engine: None}
    assert json.loads(cli("inspect", engine))["identity"]["architecture"] == "sd15_unet"


def test_a_damaged_engine_is_told_and_deleted(cli: CommandLine, engine: str) -> None:
    graph = cli.library / engine / "model.onnx"
    data = bytearray(graph.read_bytes())
    data[len(data) // 2] ^= 1
    graph.write_bytes(data)
    with redirect_stdout(io.StringIO()) as out:
        assert cli_module.main(["verify", "--library", str(cli.library)]) == 1
    assert "its content changed" in out.getvalue()
    assert "deleted" in cli("delete", engine)
    assert contents(cli.library) == []


#: A stock workflow in API format, which the page's "Export (API)" writes.
STOCK = {
    "load": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "tiny_sd15.safetensors"}},
    "text": {"class_type": "CLIPTextEncode", "inputs": {"text": "a house", "clip": ["load", 1]}},
    "latent": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
    "sampler": {"class_type": "KSampler", "inputs": {
        "model": ["load", 0], "positive": ["text", 0], "negative": ["text", 0], "latent_image": ["latent", 0],
        "seed": 1, "steps": 2, "cfg": 5.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}},
    "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sampler", 0], "vae": ["load", 2]}},
    "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "x"}},
}
DRAWN = drawn({"load": "Loader", "lora": "LoraLoader", "s": "Sampler"}, "load.0 lora.0, lora.0 s.0")


@pytest.fixture
def comfyui_with_models(environment: Any, models: dict[str, Path], tmp_path: Path) -> Path:
    """A ComfyUI whose extra_model_paths.yaml names the tiny models."""
    folder = tmp_path / "ComfyUI"
    folder.mkdir()
    for part in environment.comfyui.iterdir():
        if part.name == "folder_paths.py":  # it takes its own place for ComfyUI's, and nothing is to be written there
            shutil.copy(part, folder)
        elif part.name not in ("extra_model_paths.yaml", "custom_nodes", "input", "models", "output", "temp", "user"):
            (folder / part.name).symlink_to(part)
    (folder / "custom_nodes").mkdir()
    base = json.dumps(str(models["tiny_sd15"].parent.parent))
    (folder / "extra_model_paths.yaml").write_text(f"tests:\n  base_path: {base}\n  checkpoints: checkpoints\n")
    return folder


def saved(path: Path, workflow: dict[str, Any]) -> Path:
    path.write_text(json.dumps(workflow), encoding="utf-8")
    return path


def test_a_workflow_is_accelerated_into_a_file_beside_it(environment: Any, tmp_path: Path) -> None:
    cli, source = CommandLine(tmp_path / "library", environment.comfyui), saved(tmp_path / "mine.json", DRAWN)
    beside = tmp_path / "mine (accelerated).json"
    assert "added: TRTAccelerate" in cli("accelerate", str(source))
    assert json.loads(source.read_text()) == DRAWN
    assert [node["type"] for node in json.loads(beside.read_text())["nodes"]][-1] == "TRTAccelerate"
    assert f"{beside} exists" in cli("accelerate", str(source), status=1)
    assert "Nothing to accelerate" in cli("accelerate", str(beside), "--out", str(source))
    assert json.loads(source.read_text()) == DRAWN
    result = json.loads(cli("accelerate", str(source), "--out", str(source), "--json"))
    assert result == {"added": [{"id": 4, "type": "TRTAccelerate"}], "file": str(source), "left": ""}
    assert source.read_text() == beside.read_text()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json"]


@pytest.mark.fault("a workflow has half a character", see="an error in one sentence")
@pytest.mark.parametrize(("text", "words"), [
    ('{"1": "\\ud83d"}', "half a character"), ('{"\\udc00": 1}', "half a character"), ("{", "is no JSON"),
    ("[]", "is no workflow"), ('{"nodes": [1], "links": [], "version": 0.4}', "it is damaged"),
    ('{"nodes": [], "links": [], "version": 1}', "only workflows of version 0.4"), ("[" * 9999, "nested more than 100"),
    ('{"nodes": [], "x": NaN}', "NaN is no JSON"), (" " * (NOTES + 1), "has more than 32 MB; take the pictures out"),
], ids=["half a value", "half a name", "no JSON", "list", "damaged", "version", "nested", "NaN", "huge"])  # fmt: skip
def test_files_that_are_no_workflows_are_told_in_a_sentence(
    environment: Any, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "odd.json").write_text(text)
    message = CommandLine(tmp_path, environment.comfyui)("accelerate", str(tmp_path / "odd.json"), status=1)
    assert words in message
    assert "Traceback" not in message


def picture(path: Path, **texts: str) -> Path:
    """Write a picture with texts where ComfyUI puts them: in a PNG, or in the Exif of a WebP."""
    image, info, exif = Image.new("RGB", (8, 8)), PngInfo(), Image.Exif()
    for tag, (name, text) in zip((0x010F, 0x010E), texts.items(), strict=False):
        info.add_text(name, text)
        exif[tag] = f"{name}:{text}"
    image.save(path, **({"pnginfo": info} if path.suffix == ".png" else {"exif": exif}))
    return path


@pytest.mark.fault("a picture is given where a workflow is expected", see="the workflow in it is taken, or a sentence")
@pytest.mark.parametrize("kind", ["png", "webp"])
def test_the_workflow_of_a_picture_is_accelerated(environment: Any, tmp_path: Path, kind: str) -> None:
    cli, plain = CommandLine(tmp_path / "library", environment.comfyui), json.dumps(DRAWN)
    source = picture(tmp_path / f"mine.{kind}", prompt="{}", workflow=plain)
    assert "added: TRTAccelerate" in cli("accelerate", str(source))
    made = (tmp_path / "mine (accelerated).json").read_text()
    assert cli("accelerate", str(saved(tmp_path / "plain.json", DRAWN)), "--out", str(tmp_path / "plain.json"))
    assert made == (tmp_path / "plain.json").read_text()
    for other, words in ((picture(tmp_path / f"none.{kind}"), "is a picture without a workflow; save the workflow"),
                         (picture(tmp_path / f"odd.{kind}", workflow="{"), "is no JSON")):  # fmt: skip
        assert words in cli("accelerate", str(other), status=1)
    short = tmp_path / f"short.{kind}"
    short.write_bytes(source.read_bytes()[:20])
    message = cli("accelerate", str(short), status=1)
    assert "is a picture that cannot be read" in message
    assert "Traceback" not in message


@pytest.mark.slow
def test_all_that_a_stock_workflow_needs_is_built_in_the_sizes_of_its_picture(
    comfyui_with_models: Path, tmp_path: Path
) -> None:
    cli, source = CommandLine(tmp_path / "library", comfyui_with_models), saved(tmp_path / "api.json", STOCK)
    process = cli.start("build", "--workflow", str(source), "--device", "cpu", "--json")
    out, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    built, vae = json.loads(out)["engines"]
    assert (built["label"], built["state"]) == ("tiny_sd15.safetensors", "ready")
    assert (vae["label"], vae["state"]) == ("VAE decode: tiny_sd15.safetensors", "ready")
    assert "tiny_sd15.safetensors: building with onnxruntime" in told
    assert contents(cli.library) == sorted(built["engines"] + vae["engines"])
    manifest = json.loads((cli.library / built["engines"][0] / "manifest.json").read_text())
    assert manifest["identity"]["profile"]["H"][0] == 8  # 64 pixels; 256 where the picture asks for no less
    assert json.loads(source.read_text()) == STOCK


BARE = (sys.executable, "-S", "-m", "engine_builder")
"""In a Python without any package: none of ComfyUI's, not even torch."""


@pytest.mark.parametrize("command", [(), ("build",), ("accelerate",)], ids=" ".join)
def test_help_needs_no_package(command: tuple[str, ...]) -> None:
    helped = subprocess.run([*BARE, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert helped.returncode == 0, helped.stderr
    assert "usage: python -m engine_builder" in helped.stdout
    if command == ("build",):
        assert "'doctor' lists them" in " ".join(helped.stdout.split())


def test_a_graph_that_fails_without_a_word_is_told_by_the_kind_of_its_error() -> None:
    from hybrid_trt.page_api.own_prompts import failure

    told = {"node_type": "UNETLoader", "node_id": "3", "exception_type": "AssertionError", "exception_message": "\n"}
    assert failure([("execution_error", told)]) == "UNETLoader (node 3): AssertionError."


def test_a_python_without_torch_is_told_in_a_sentence(tmp_path: Path) -> None:
    command = [*BARE, "list", "--library", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert re.fullmatch("torch is not installed for .* run this with the Python that runs ComfyUI.*\n", ended.stderr)


def test_the_documented_commands_are_ones_that_the_command_line_takes() -> None:
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m engine_builder ([^#\n]+)", text, re.M)
    assert len(commands) >= 4
    for command in commands:
        if "--help" not in command:
            assert callable(cli_module._parser().parse_args(shlex.split(command)).command), command


@pytest.mark.parametrize(("arguments", "status", "says"), [
    (("build",), 2, "one of the arguments --checkpoint --unet --controlnet --workflow is required"),
    (("build", "--workflow", "nope.json"), 1, "nope.json"),
    (("build", "--workflow", "x", "--force"), 1, "--force builds the engine of one model again"),
    (("accelerate", "nope.json"), 1, "nope.json"),
    (("build", "--unet", "nope.safetensors"), 1, "There is no file nope.safetensors"),
    (("build", "--unet", "x", "--min-size", "512", "--opt-size", "256"), 1, "smallest (512), best (256)"),
    (("build", "--unet", "x", "--max-tokens", "10000000000"), 1, "must lie between 0 and 4928"),
    (("build", "--unet", "x", "--max-images=-1"), 1, "max_images (-1) must lie between 0 and 64"),
    (("build", "--unet", "x", "--max-size", "8200"), 1, "max_size (8200) must lie between 0 and 8192"),
    (("build", "--unet", "x", "--backend", "y"), 2, "there is no backend y; choose auto or tensorrt"),
    (("delete", "nope"), 1, "no engine is called 'nope'"),
    (("list", "--comfyui", "/nowhere"), 1, "/nowhere holds no ComfyUI"),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")  # fmt: skip
def test_mistakes_are_told_in_a_sentence(
    environment: Any, tmp_path: Path, arguments: tuple[str, ...], status: int, says: str
) -> None:
    message = CommandLine(tmp_path / "library", environment.comfyui)(*arguments, status=status)
    assert says in message
    assert "Traceback" not in message


def test_names_that_the_output_cannot_hold_are_escaped_and_one_given_twice_is_one(
    environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    engine = publish(tmp_path, label="\u6a21\u578b.safetensors")
    cli = CommandLine(tmp_path, environment.comfyui)
    assert "\\u6a21\\u578b.safetensors" in cli.start("list").communicate(timeout=240)[0]
    assert cli("delete", engine, engine).count(engine) == 1
    assert contents(tmp_path) == []


def test_a_reader_that_has_had_enough_is_no_error_to_tell(environment: Any, tmp_path: Path) -> None:
    process = CommandLine(tmp_path, environment.comfyui).start("list")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
