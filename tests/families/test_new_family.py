"""A family of networks is one file: one that the pack has never heard of is served end to end by its file alone."""

from __future__ import annotations

import importlib
import re
import tokenize
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from types import ModuleType

import pack
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy_process import ComfyProcess
from fake_recorder import Recorder
from hybrid_trt.architectures import Role, families
from hybrid_trt.architectures.calls import RequestedCalls
from hybrid_trt.architectures.shapes import RequestedSizes
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import UNET_PREFIX, NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Unavailable
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sessions import cuda_graphs
from scenarios import SETTINGS, Prompt, latent_of, node, relative_difference

ROOT: Path = pack.ROOT
TORCH = backends()["torch"]
LIMIT, HALF = 1e-5, 5e-3
"""Of what torch computes as native does, one layer in float32 and the rest in half precision; of other kernels."""
LIMITS = {"torch": LIMIT, "onnxruntime": HALF}
NETS = {1: (0.8, 0.0, 1.0), 2: (0.5, 0.0, 0.6)}
"""Seed of the control image -> strength, start and end; both on one ControlNet."""


def graph(engines: bool, nets: dict[int, tuple[float, float, float]], backend: str = "onnxruntime") -> Prompt:
    """Sampling with the toy model, its ControlNet once for each image."""
    settings = SETTINGS | {"when_missing": "build now", "min_size": 64, "max_size": 256, "max_tokens": 0,
                           "max_images": 1, "backend": backend}
    built: Prompt = {
        "toy": node("TestToyModel", seed=3),
        "positive": node("TestConditioning", tokens=77, width=16, pooled=0, seed=1),
        "negative": node("TestConditioning", tokens=154, width=16, pooled=0, seed=2),
        "latent": node("EmptyLatentImage", width=136, height=120, batch_size=1),
        "save": node("TestSaveLatent", latent=["sampler", 0], name="toy"),
    }
    model, net = ["toy", 0], ["toy", 1]
    if engines:
        built |= {
            "engine": node("TRTUNetEngine", model=model, **settings),
            "patch": node("TRTSamplerPatch", model=model, engine=["engine", 0]),
            "net_engine": node("TRTControlNetEngine", control_net=net, **settings),
            "report": node("TRTReport", after=["sampler", 0]),
        }
        model, net = ["patch", 0], ["net_engine", 0]
    positive, negative = ["positive", 0], ["negative", 0]
    for seed, (strength, start, end) in nets.items():
        built[f"image_{seed}"] = node("TestImage", seed=seed, width=136, height=120, batch=1, channels=3)
        built[f"apply_{seed}"] = node(
            "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=net,
            image=[f"image_{seed}", 0], strength=strength, start_percent=start, end_percent=end,
        )
        positive, negative = [f"apply_{seed}", 0], [f"apply_{seed}", 1]
    built["sampler"] = node(
        "KSampler", model=model, positive=positive, negative=negative, latent_image=["latent", 0], seed=5, steps=4,
        cfg=4.0, sampler_name="euler", scheduler="normal", denoise=1.0,
    )
    return built


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_a_family_of_one_file_is_built_checked_and_served(comfy: ComfyProcess, backend: str) -> None:
    native = latent_of(comfy.queue(graph(False, NETS)))
    one, none = (latent_of(comfy.queue(graph(False, nets))) for nets in ({1: NETS[1]}, {}))
    effects = relative_difference(native, one), relative_difference(one, none)
    assert min(effects) > 10 * LIMITS[backend], "each ControlNet acts"
    settings = {"when_missing": "use native"} if backend == "torch" else {}
    prompt = graph(True, NETS, backend)
    for name in ("engine", "net_engine"):
        prompt[name]["inputs"] |= settings
    history = comfy.queue(prompt, timeout=300)
    assert relative_difference(latent_of(history), native) <= LIMITS[backend]
    report = history.output("report", "report")[0]
    assert all(row["engine"] > 0 and row["native"] == 0 for row in report["rows"]), report
    assert {row["kind"] for row in report["rows"]} == {"unet", "controlnet"}
    if backend == "onnxruntime":
        assert "rows 64-256 px" in history.output("engine", "text")[0], "told in the family's own words"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The family's file, among those of the pack."""
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(ROOT / "tests/support/families")])
    return importlib.import_module(f"{families.__name__}.toy")


def network(toy: ModuleType) -> NativeNetwork:
    model, cpu = torch.nn.Module(), torch.device("cpu")
    model.diffusion_model = toy.ToyNet().eval().requires_grad_(False)
    patcher = ModelPatcher(model, cpu, cpu)
    return NativeNetwork(patcher, model.diffusion_model, UNET_PREFIX, torch.float16, "toy", Role.BACKBONE)


def error_of_calls(session: LiveSession, net: NativeNetwork, lists: Sequence[str], words: int) -> float:
    """Return the largest error of four calls whose control has the same residual wherever a letter comes again."""
    bind, errors = net.architecture().binding(net.module), []
    for _ in range(4):
        residuals = {letter: torch.randn(2, 8 * 9, 32).half() for found in lists for letter in found}
        control = {kind: [*map(residuals.get, found)] for kind, found in zip(("input", "output"), lists, strict=True)}
        call = {"x": torch.randn(2, 4, 15, 17).half(), "timestep": torch.rand(2),
                "context": torch.randn(2, words, 16).half()}
        native, bound = net.module(**call, control=control), bind({**call, "control": control})
        with torch.inference_mode():
            errors.append(relative_error(bound.finish(session.run(bound.inputs)), native))
    return max(errors)


def test_rotary_embeddings_are_copied_once_and_each_residual_once_in_a_step(
    toy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, copied, copy_all = network(toy), [], cuda_graphs._copy_all
    monkeypatch.setattr(cuda_graphs, "_copy_all", lambda targets, sources: (
        copied.append(len(targets)), copy_all(targets, sources)))
    session = LiveSession(net, TORCH, "float16", Recorder())
    for lists, tensors in ((("aa", "bb"), 5), (("", ""), 3), (("ab", "cd"), 7)):
        assert error_of_calls(session, net, lists, words=77) <= LIMIT
        assert copied == [tensors + 1, tensors, tensors]
        copied.clear()


def test_a_family_without_blocks_runs_uncompiled_and_a_build_of_it_is_refused_in_words(
    toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(TORCH), "cannot_build", lambda *_: None)
    net = network(toy)
    profile = net.architecture().profile(RequestedSizes(64, 128, 256, 1))
    assert TORCH.to_build(net, RequestedCalls(profile), []) == []
    session = LiveSession(net, TORCH, "float16", Recorder())
    assert error_of_calls(session, net, ("ab", "ba"), words=77) <= LIMIT
    assert session.uncovered is None
    assert "build" not in session.status(profile)
    with pytest.raises(Unavailable, match="torch compiles no networks of its family"):
        build_engine(BuildOrder(net, "float16", profile, TORCH), Library([tmp_path]), lambda *_: None)


ROOMS = ("backends", "engine_builder", "engine_library", "sampling", "sessions", "comfy_model", "nodes", "page_api",
         "saved_workflows", "streaming", "farm", "js")
WORDS_OF_WORKFLOWS = "notes_zh.mjs"
"""Notes of the workflows that are shipped, in Chinese: these name the models that they are for."""

NAMES = re.compile(
    r"sd15|sd 1\.5|sdxl|UNetModel|cldm\.cldm|input_blocks|\"control_(output|input|middle)", re.IGNORECASE)
NUMBERS = re.compile(r"""
    (?<![\w.])(77|154|231)\b(?!\.)                        # tokens of CLIP's prompts
    | (?<!\*)[*/%]\ ?8\b | (?<![\w.])8\ ?\*[^*]           # pixels of a latent element
    | (?<![\w.])2\ ?\*\ ?\w*(images|batch)                # the batch of CFG
    | (images|batch)\w*\ ?(\*|==|!=)\ ?2\b
    | (\.get\(|\[)["'](B|H|W|T|HB)["']                     # symbols of still images
""", re.VERBOSE)


def code_of(path: Path) -> str:
    """Return a file's code, line by line, without comments, docstrings and lines of text."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.sub(r"/\*.*?\*/|//[^\n]*", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    lines = text.splitlines()
    for token in tokenize.generate_tokens(StringIO(text).readline):
        (first, start), (last, _) = token.start, token.end
        if token.type == tokenize.COMMENT:
            lines[first - 1] = lines[first - 1][:start]
        elif token.type == tokenize.STRING and not token.line[:start].strip():
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(lines)


@pytest.mark.parametrize(("what", "read"), [(NAMES, Path.read_text), (NUMBERS, code_of)], ids=["names", "numbers"])
def test_no_room_but_the_families_own_counts_on_a_family(what: re.Pattern, read: Callable[[Path], str]) -> None:
    """So that adding one changes nothing else.

    It looks for names of architectures and of ComfyUI's network classes anywhere; and in code for a factor of 8, as
    pixels of a latent element are, 77 tokens and its multiples, twice the images, and symbols of a family's dimensions.
    """
    kinds = {".py", ".js", ".mjs"}
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*")) if path.suffix in kinds]
    assert {path.suffix for path in files} == kinds
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files if path.name != WORDS_OF_WORKFLOWS
        for number, line in enumerate(read(path).splitlines(), start=1) if what.search(line)
    ]  # fmt: skip
    assert found == []


@pytest.mark.parametrize("line", [
    "low = size // 8", "pixels = 8 * width", "step=77,", "{ max_tokens: 231 }", "batches = (2 * images,)",
    "if batch == 2:", "images*2", "sizes.get('B', 1)", 'call["HB"]', "# 8 px\nx = 8*y",
])  # fmt: skip
def test_numbers_of_a_family_would_be_found(line: str, tmp_path: Path) -> None:
    for name in ("some.py", "some.mjs"):
        (tmp_path / name).write_text(line if name.endswith("py") else line.replace("//", "/").replace("#", "//"))
        assert NUMBERS.search(code_of(tmp_path / name))


@pytest.mark.parametrize("line", [
    "x = 1 << 8", "n * 80", "most=8", "2 ** 8", "room = WIDTH - 2 * MARGIN", 'memoryview(x).cast("B")', "a = b / 2",
    "x = 1  # 77 tokens", '"""Cut 8 * 8 patches.\n\n77 of them.\n"""', "1770 / 77.5", "0.8 * i",
])  # fmt: skip
def test_other_numbers_are_no_alarm(line: str, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(line)
    assert not NUMBERS.search(code_of(tmp_path / "some.py"))
