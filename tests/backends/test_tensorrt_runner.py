"""TensorRT's runner, as far as it can be held to account without a GPU, and the kernels that RTX keeps."""

from __future__ import annotations

import ast
import inspect
import mmap
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import networks
import pytest
import tensorrt_rtx as trt
import torch
from fake_engine import publish_engine
from hybrid_trt.architectures.shapes import TensorSpec
from hybrid_trt.backends.tensorrt import build as messages
from hybrid_trt.backends.tensorrt import runner as trt_runner
from hybrid_trt.engine_library import Engine, Reason, Unavailable

pytestmark = pytest.mark.tensorrt


def an_engine(folder: Path, contents: bytes = b"an engine") -> Engine:
    return publish_engine(folder, contents, name="engine.trt", backend="tensorrt_rtx")


def test_tensorrt_is_given_the_very_bytes_that_were_checked_and_no_others(tmp_path: Path) -> None:
    engine, runtime = an_engine(tmp_path, b"an engine" * 1000), Mock(spec=trt.Runtime)
    path, (given,) = engine.folder / "engine.trt", (runtime.deserialize_cuda_engine,)

    def change_the_file(contents: bytes) -> bytes:
        path.write_bytes(b"another")
        return contents[:]

    given.side_effect = change_the_file
    assert trt_runner.deserialise(runtime, "TensorRT-RTX", engine, []) == b"an engine" * 1000
    path.write_bytes(b"an engine" * 1000)
    before = path.stat()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[-1] ^= 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    given.reset_mock()
    with pytest.raises(Unavailable, match="its content changed"):
        trt_runner.deserialise(runtime, "TensorRT-RTX", engine, [])
    given.assert_not_called()


def test_a_file_that_is_no_engine_is_told(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, b"this is no engine" * 1000)
    logger = messages.shared_logger(trt)
    with messages.collected_errors(logger) as errors, pytest.raises(Unavailable) as refused:
        trt_runner.deserialise(trt.Runtime(logger), "TensorRT-RTX", engine, errors)
    assert refused.value.fallback.reason in (Reason.BROKEN_ENGINE, Reason.ENGINE_FAILED)
    assert engine.folder.name in refused.value.fallback.detail
    assert "Serialization" in refused.value.fallback.detail


@pytest.mark.parametrize(("told", "reason"), [
    ("Error Code 6: API Usage Error (The engine cannot run on this GPU, which has compute capability 9.0)",
     Reason.WRONG_GPU),
    ("Error Code 1: Cuda Runtime (out of memory)", Reason.ENGINE_FAILED)])
def test_tensorrts_own_refusal_of_a_gpu_is_told_from_other_errors(told: str, reason: Reason, tmp_path: Path) -> None:
    engine, runtime = an_engine(tmp_path), Mock(spec=trt.Runtime)
    runtime.deserialize_cuda_engine.return_value = None  # what an H200 gets, with that error
    with pytest.raises(Unavailable) as refused:
        trt_runner.deserialise(runtime, "TensorRT-RTX", engine, [told])
    assert refused.value.fallback.reason is reason
    assert told in refused.value.fallback.detail


CLASSES = {
    "trt": trt, "self._logger": trt.ILogger, "logger": trt.ILogger,
    "runtime": trt.Runtime, "self._runtime": trt.Runtime,
    "native": trt.ICudaEngine, "self._engine": trt.ICudaEngine, "self._config": trt.IRuntimeConfig,
    "context": trt.IExecutionContext, "self.context": trt.IExecutionContext,
    "self._native.context": trt.IExecutionContext,
    "config": trt.IRuntimeConfig, "self._cache": trt.IRuntimeCache,
}


def test_all_that_the_runner_calls_exists_in_the_bindings() -> None:
    used = set()
    for node in ast.walk(ast.parse(inspect.getsource(trt_runner))):
        if isinstance(node, ast.Attribute) and (owner := CLASSES.get(ast.unparse(node.value))) is not None:
            used.add((owner, node.attr))
    assert len(used) >= 15, used
    assert [(owner, name) for owner, name in used if not hasattr(owner, name)] == []
    text = trt.ICudaEngine.create_execution_context.__doc__
    assert "strategy:" in text
    assert "runtime_config:" in text, "a context is made with one and without"


SPECS_IN = (TensorSpec("x", "float32", (2, 4)), TensorSpec("residual", "float32", (2, 4), optional=True),
            TensorSpec("pruned", "float32", (2, 4)))


class FakeContext:
    """Stands for an IExecutionContext: remembers bindings by name, as the real one does between calls."""

    def __init__(self) -> None:
        self.bound: dict[str, tuple[tuple[int, ...] | None, int]] = {}
        self.memory: tuple[int, int] = (0, 0)
        self.out = (2, 4)
        self.mock = Mock(spec=trt.IExecutionContext, wraps=None)
        self.mock.set_input_shape.side_effect = self._shape
        self.mock.set_tensor_address.side_effect = self._address
        self.mock.infer_shapes.return_value = []
        self.mock.get_tensor_shape.side_effect = lambda _name: self.out
        self.mock.update_device_memory_size_for_shapes.return_value = 1000
        self.mock.set_device_memory.side_effect = lambda address, size: setattr(self, "memory", (address, size))

    def _shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.bound[name] = (shape, 0)
        return shape[0] <= 4

    def _address(self, name: str, address: int) -> bool:
        self.bound[name] = (self.bound.get(name, (None, 0))[0], address)
        return True


@pytest.fixture
def runner() -> tuple[Any, FakeContext]:
    """A runner on the CPU with a fake context: what it binds can be seen, nothing runs."""
    fake = FakeContext()
    made = trt_runner.TensorRTRunner.__new__(trt_runner.TensorRTRunner)
    made.device, made._title = networks.CPU, "TensorRT-RTX"
    made._native = SimpleNamespace(context=fake.mock)
    made._opened = SimpleNamespace(inputs=frozenset({"x", "residual"}), jit_cache=None)
    return made, fake


def call(batch: int = 2) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {s.name: torch.randn(batch, 4) for s in SPECS_IN}, {"out": torch.empty(batch, 4)}


def test_every_call_binds_every_tensor_anew(runner: tuple[Any, FakeContext]) -> None:
    made, fake = runner
    for batch in (2, 2, 3, 2):
        inputs, outputs = call(batch)
        fake.out = (batch, 4)
        scratch = made._bind(inputs, outputs, [])
        assert fake.bound["x"] == ((batch, 4), inputs["x"].data_ptr())
        assert fake.bound["residual"] == ((batch, 4), inputs["residual"].data_ptr())
        assert fake.bound["out"] == (None, outputs["out"].data_ptr())
        assert fake.memory == (scratch.data_ptr(), 1000)
        assert scratch.numel() >= 1000
    assert "pruned" not in fake.bound


def test_scratch_memory_is_taken_for_one_call_and_kept_by_nobody(runner: tuple[Any, FakeContext]) -> None:
    """So engines that run one after the other get the same bytes from torch's allocator, and none while none runs."""
    scratch = runner[0]._bind(*call(), [])
    kept = weakref.ref(scratch)
    del scratch
    assert kept() is None


@pytest.mark.parametrize(("batch", "left_out", "out", "told", "words"), [
    (2, "residual", (2, 4), [], "was not given residual"),  # and not the last call's tensor
    (5, "", (2, 4), ["not in  range"], r"TensorRT-RTX refused x of shape \(5, 4\) \(not in range\)"),
    (2, "", (2, 5), [], r"gives out of shape \(2, 5\), not \(2, 4\)"),
], ids=["an input that is left out", "a shape outside the profile", "an output of another shape"])  # fmt: skip
def test_a_call_that_does_not_fit_the_engine_is_an_error_with_tensorrts_words(
    runner: tuple[Any, FakeContext], batch: int, left_out: str, out: tuple[int, int], told: list[str], words: str
) -> None:
    made, fake = runner
    made._bind(*call(), [])
    inputs, outputs = call(batch)
    inputs.pop(left_out, None)
    fake.out = out
    with pytest.raises(RuntimeError, match=words):
        made._bind(inputs, outputs, told)


class FakeCache:
    """Stands for an IRuntimeCache: its contents are bytes, and it takes only those that begin with ``mine``."""

    def __init__(self) -> None:
        self.contents = b""

    def deserialize(self, blob: bytes) -> bool:
        fits = blob.startswith(b"mine")
        self.contents = blob if fits else self.contents
        return fits

    def serialize(self) -> bytes:
        return self.contents


def jit_cache(path: Path, engine: str = "an engine") -> tuple[Any, FakeCache]:
    fake = FakeCache()
    config = Mock(spec=trt.IRuntimeConfig)
    config.create_runtime_cache.return_value = fake
    made = trt_runner.JitCache(config, path, engine)
    config.set_runtime_cache.assert_called_once_with(fake)
    return made, fake


def test_kernels_are_kept_beside_the_engine_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "kernels.cache"
    made, fake = jit_cache(path)
    made.save()
    assert not path.exists(), "nothing was compiled yet"
    fake.contents = b"mine 1"
    made.save()
    assert [p.name for p in tmp_path.iterdir()] == ["kernels.cache"]
    stamp = path.stat().st_mtime_ns
    made.save()
    assert path.stat().st_mtime_ns == stamp, "the same again is not written"
    assert jit_cache(path)[1].contents == b"mine 1"


@pytest.mark.fault("TensorRT-RTX's kernel cache is a stranger's", see="nothing: kernels are compiled anew")
def test_kernels_that_this_machine_did_not_sign_for_this_engine_are_not_used(tmp_path: Path) -> None:
    """They are programs."""
    path = tmp_path / "kernels.cache"
    path.write_bytes(b"mine, says somebody")
    assert jit_cache(path)[1].contents == b""
    made, fake = jit_cache(path)
    fake.contents = b"mine 1"
    made.save()
    assert jit_cache(path, "another engine")[1].contents == b""
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + b"2")
    assert jit_cache(path)[1].contents == b""
    path.write_bytes(kept)
    assert jit_cache(path)[1].contents == b"mine 1"


@pytest.mark.parametrize("contents", [b"", b"another GPU's", b"\0" * 1000])
def test_a_kernel_file_that_does_not_fit_is_replaced(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "kernels.cache"
    path.write_bytes(contents)
    made, fake = jit_cache(path)
    assert fake.contents == b""
    fake.contents = b"mine 2"
    made.save()
    assert jit_cache(path)[1].contents == b"mine 2"


def test_a_library_that_cannot_be_written_to_is_no_failure(tmp_path: Path) -> None:
    made, fake = jit_cache(tmp_path / "gone" / "kernels.cache")
    fake.contents = b"mine 3"
    made.save()
    assert list(tmp_path.iterdir()) == []
