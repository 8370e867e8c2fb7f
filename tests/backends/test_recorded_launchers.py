"""Inductor's launchers get plain addresses while a CUDA graph is recorded. Kernels and the recording are mocks."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hybrid_trt.backends.torch_inductor import compiled

if not compiled.can_compile():
    pytest.skip("this torch is too old to compile to a file", allow_module_level=True)

from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.triton_heuristics import CompileResult, StaticTritonCompileResult, TritonCompileResult

STREAM, SIZE = 7, 100


class MockKernel:
    """A kernel as both launchers call it, ``(in_ptr, out_ptr, xnumel, XBLOCK)``; keeps what it is launched with."""

    cubin_path, hash, shared, num_warps, n_regs, n_spills = "a.cubin", "0" * 64, 0, 4, 16, 0
    function, packed_metadata, num_ctas, cluster_dims = 1, (), 1, (1, 1, 1)
    arg_names = ("in_ptr", "out_ptr", "xnumel", "XBLOCK")
    declared_constexprs = full_constexprs = (3,)

    def __init__(self) -> None:
        parameters = [types.SimpleNamespace(num=i, is_constexpr=i == 3) for i in range(4)]
        self.src = types.SimpleNamespace(fn=types.SimpleNamespace(arg_names=list(self.arg_names), params=parameters))
        self.launches: list[tuple[Any, ...]] = []

    def load_kernel(self, _device: int) -> None:
        """Stands for loading the kernel onto the GPU."""

    def _init_handles(self) -> None:
        """Stands for loading the kernel onto the GPU."""

    def launch_metadata(self, *_args: object) -> None:
        """Stands for what profilers are told; there is none."""

    def run(self, *args: object) -> None:
        self.launches.append(args)


def launcher_of(kind: type[CompileResult], kernel: MockKernel):
    config = triton_heuristics.Config({"XBLOCK": 64}, num_warps=4, num_stages=1)
    signature = dict.fromkeys(("in_ptr", "out_ptr"), "*fp16") | {"xnumel": "i32", "XBLOCK": "constexpr"}
    meta = {"constants": {"XBLOCK": 64}, "signature": signature, "device": 0}
    return kind(kernel, config, meta, {"grid_type": "Grid1D"}).make_launcher()


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A mock of a GPU under cudaMallocAsync, and whether its stream is recorded; Inductor is as before afterwards."""
    state = [False]
    monkeypatch.setattr(CompileResult, "_gen_launcher_code", CompileResult._gen_launcher_code)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return state


LAUNCHERS = pytest.mark.parametrize("kind", [StaticTritonCompileResult, TritonCompileResult])


@LAUNCHERS
def test_a_launcher_gets_addresses_while_recording_and_tensors_otherwise(
    kind: type[CompileResult], recording: list[bool]
) -> None:
    compiled.let_kernels_be_recorded()
    launch, x, out = launcher_of(kind, kernel := MockKernel()), torch.zeros(SIZE), torch.zeros(SIZE)
    for recording[0] in (False, True, False):
        launch(x, out, SIZE, stream=STREAM)
    plain, recorded, after = kernel.launches
    given = next(i for i, arg in enumerate(plain) if arg is x)
    assert plain[:4] == (2, 1, 1, STREAM)
    assert plain[given + 1] is out
    assert plain[given + 2] == SIZE
    assert recorded == (*plain[:given], x.data_ptr(), out.data_ptr(), *plain[given + 2 :])
    assert [a is b for a, b in zip(plain, after, strict=True)] == [True] * len(plain)


@LAUNCHERS
def test_a_launcher_that_is_written_without_us_gets_tensors_always(
    kind: type[CompileResult], recording: list[bool]
) -> None:
    launch, x = launcher_of(kind, kernel := MockKernel()), torch.zeros(SIZE)
    recording[0] = True
    launch(x, x, SIZE, stream=STREAM)
    assert any(arg is x for arg in kernel.launches[0])


@pytest.mark.parametrize("allocator", ["cudaMallocAsync", "native"])
def test_launchers_are_changed_once_and_stay_without_cuda_malloc_async(
    allocator: str, recording: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = CompileResult._gen_launcher_code
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    compiled.let_kernels_be_recorded()
    ours = CompileResult._gen_launcher_code
    assert (ours is before) is (allocator == "native")
    compiled.let_kernels_be_recorded()
    assert CompileResult._gen_launcher_code is ours


@pytest.mark.parametrize("lacks", ["the class", "its method"])
def test_a_torch_that_writes_launchers_otherwise_serves_on_and_the_log_tells(
    lacks: str, recording: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if lacks == "the class":
        monkeypatch.delattr(triton_heuristics, "CompileResult")
    else:
        monkeypatch.delattr(CompileResult, "_gen_launcher_code")
    compiled.let_kernels_be_recorded()
    assert "may not be recorded" in caplog.text
