"""A file of Inductor's opens to what was compiled, without the copy that torch makes of all it has read."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import SimpleNamespace

import compiling
import pytest
import torch
from hybrid_trt.backends.torch_inductor import compile_blocks, compiled, opened_files
from hybrid_trt.backends.torch_inductor.compile_kinds import contents_of
from hybrid_trt.backends.torch_inductor.kinds import Kind
from hybrid_trt.engine_library import BuildError
from hybrid_trt.nodes.engine_nodes import TRTAccelerate

if not compiled.can_compile():
    pytest.skip("this torch is too old to compile to a file", allow_module_level=True)

from torch._functorch._aot_autograd.aot_autograd_result import BundledAOTAutogradResult


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.nn.functional.silu(self.layer(x)), x + 1


@pytest.fixture(scope="module")
def kind() -> Kind:
    return compiling.compiled(Block(), [torch.randn(2, 8)])


@pytest.fixture(scope="module")
def file(kind: Kind) -> bytes:
    """One of Inductor's files."""
    return kind.contents


def assert_computes_the_same(opened: compiled.Compiled) -> None:
    for _ in range(2):
        bias, weight, x = torch.randn(8), torch.randn(8, 8), torch.randn(2, 8)
        expected = torch.nn.functional.silu(x @ weight.T + bias), x + 1
        with torch.inference_mode():
            torch.testing.assert_close(tuple(opened(bias, weight, x)), expected)


def test_buffers_that_a_forward_reads_are_inputs_as_weights_are() -> None:
    function = Block()
    function.layer.register_buffer("scale", torch.randn(8))
    function.layer.register_buffer("steps", torch.arange(8), persistent=False)
    function.layer.forward = lambda x: x @ function.layer.weight * function.layer.scale + function.layer.steps
    tensors = compiled.lifted(function)
    assert list(tensors) == ["layer.bias", "layer.scale", "layer.steps", "layer.weight"]
    kind = compiling.compiled(function, [torch.randn(2, 8)])
    function.layer.scale += 1
    x = torch.randn(2, 8)
    with torch.inference_mode():
        results = opened_files.open_one(kind.contents)(*compiled.lifted(function).values(), x)
        torch.testing.assert_close(tuple(results), function(x))


def test_a_tensor_of_plain_numbers_is_refused_in_words(caplog: pytest.LogCaptureFixture) -> None:
    function = Block()
    function.layer.forward = lambda x: x @ function.layer.weight * torch.tensor([0.5] * 8)
    told = pytest.raises(BuildError, match=r"^this model cannot be compiled here, .* please report it")
    with told, compile_blocks._inductors_failures():
        compiling.compiled(function, [torch.randn(2, 8)])
    assert "plain numbers, of shape (8,)" in caplog.text, "what its developer needs"


def test_opening_copies_nothing_of_what_it_has_read(
    file: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(*_: object) -> None:
        raise AssertionError("all that was read is copied")

    monkeypatch.setattr(BundledAOTAutogradResult, "__reduce_ex__", copied)
    (tmp_path / "file").write_bytes(file)
    with pytest.raises(AssertionError, match="all that was read is copied"):
        torch._inductor.CompiledArtifact.load(path=str(tmp_path / "file"))
    assert_computes_the_same(opened_files.open_one(file))


@pytest.mark.parametrize("found", [("two", "things"), (None, {1: "kernel"}, {})],
                         ids=["other files", "kernels that have to be put in their place"])  # fmt: skip
def test_where_torch_keeps_its_files_otherwise_it_opens_them_itself(
    file: bytes, found: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_files, "pickle", SimpleNamespace(loads=lambda _: found))
    assert_computes_the_same(opened_files.open_one(file))


def test_a_damaged_file_is_refused(file: bytes) -> None:
    data = file[4:]
    other = data[:-1] + bytes([data[-1] ^ 1])
    with_prefix = zlib.crc32(data).to_bytes(4, "big") + other  # that torch puts before all else
    with pytest.raises(RuntimeError):
        opened_files.open_one(with_prefix)


def test_opening_reads_none_of_the_sources_of_torch(file: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is refused by torch's version, see ``test_fleet_key``."""
    from torch._inductor import codecache

    monkeypatch.setattr(codecache, "torch_key", lambda: pytest.fail("all of torch's sources are hashed"))
    assert_computes_the_same(opened_files.open_one(file))


def test_a_file_that_was_opened_is_not_opened_again_in_this_process(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps what a program loads for good, so each time would take memory."""
    contents, cpu = contents_of([(0,)], [kind]), torch.device("cpu")
    opened = opened_files.open_contents(contents, cpu)
    monkeypatch.setattr(opened_files, "open_one", lambda *_: pytest.fail("it is opened again"))
    assert opened_files.open_contents(contents, cpu) is opened
    assert_computes_the_same(opened.opened[0])
    with pytest.raises(pytest.fail.Exception, match="opened again"):
        opened_files.open_contents(contents_of([(0,), (0,)], [kind]), cpu)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_queued_prompt_has_torchs_compiler_imported_beside_the_loading_of_its_model(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    started: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(opened_files.threading.Thread, "start", lambda thread: started.append(thread.name))
    opened_files.import_ahead.cache_clear()
    for _ in range(2):
        TRTAccelerate.fingerprint_inputs(when_missing="use native")
    assert started == ["hybrid-trt-imports"] * on_gpu
