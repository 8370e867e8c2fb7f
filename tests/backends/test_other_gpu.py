"""A file that Inductor compiled on one GPU names another one where it is read for that.

Files of a GPU cannot be compiled here: the object that is read is a double with torch's own classes in it, and has what
torch writes. ``test_two_gpus_gpu.py`` runs real ones on two GPUs.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch
from hybrid_trt.backends.torch_inductor import opened_files
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.triton_bundler import StaticallyLaunchedAutotuner, TritonBundle, TritonKernelArtifacts
from torch.utils._ordered_set import OrderedSet

KERNEL = "\n@triton_heuristics.pointwise(triton_meta={'device': DeviceProperties(type='cuda', index=0, cc=90)})\n"
PROGRAM = f"""
kept = async_compile.triton('kept', '''{KERNEL}''', device_str='cuda')
other = async_compile.triton('other', '''{KERNEL}# {{}}''', device_str='cuda')

def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((1280, 10), (10, 1), torch.float16)
        buf1 = torch.full([2], 0, device=device(type='cuda', index=0))
        stream0 = get_raw_stream(0)
        kept.run(buf0, 12800, stream=stream0)
    return (buf0, rand_strided((2,), (1,), device='cuda:0'))
"""


def written() -> bytes:
    """The pickle that torch writes on the first GPU, as far as it names that."""
    properties = DeviceProperties("cuda", 0, 132, 90)
    compiled = SimpleNamespace(compile_meta={"device": 0, "cc": 90})
    kernel = SimpleNamespace(device_props=properties, triton_meta={"device": 0}, compile_results=[compiled])
    tuner = StaticallyLaunchedAutotuner(CompiledTritonKernels.key(KERNEL), "kept", kernel)
    bundle = TritonBundle([TritonKernelArtifacts("hash", 0, [])], [tuner])
    graph = SimpleNamespace(source_code=PROGRAM, cache_key="fkey", device_idxs=OrderedSet([0]), _triton_bundle=bundle,
                            constants={"step": torch.ones(2)})  # fmt: skip
    places = [torch.device("cuda", 0), torch.device("cpu"), torch.device("cuda")]
    return pickle.dumps((SimpleNamespace(compiled_fw=SimpleNamespace(result=graph), places=places), {}, {}))


def read(gpu: int) -> tuple[Any, Any]:
    entry = opened_files._read_for(written(), gpu)
    return entry, entry.compiled_fw.result


def test_a_program_launches_everything_on_the_gpu_that_it_is_read_for() -> None:
    _, graph = read(3)
    _, kept, _, other, launches = graph.source_code.split("'''")
    assert "index=0" in kept, "its source is the name of a kernel that is there already"
    assert "index=3, cc=90" in other
    for wanted in ("_DeviceGuard(3)", "set_device(3)", "get_raw_stream(3)", "index=3)", "'cuda:3'", "(1280, 10), (10,"):
        assert wanted in launches
    assert graph.cache_key != "fkey", "programs of two GPUs do not share a file"
    assert list(graph.device_idxs) == [3]
    torch.testing.assert_close(graph.constants["step"], torch.ones(2))


def test_kernels_and_devices_are_those_of_the_gpu_that_a_file_is_read_for() -> None:
    entry, graph = read(1)
    (tuner,), (artifacts,) = graph._triton_bundle.static_autotuners, graph._triton_bundle.kernel_artifacts
    assert artifacts.device == tuner.kernel.triton_meta["device"] == 1
    assert tuner.kernel.compile_results[0].compile_meta == {"device": 1, "cc": 90}
    assert tuner.kernel.device_props == DeviceProperties("cuda", 1, 132, 90)
    assert type(tuner.kernel.device_props) is DeviceProperties
    assert entry.places == [torch.device("cuda", 1), torch.device("cpu"), torch.device("cuda")]


def test_a_file_of_the_same_gpu_is_read_as_it_is() -> None:
    entry = pickle.loads(written())[0]
    assert not opened_files._is_of_another(entry, 0)
    assert opened_files._is_of_another(entry, 1)
    entry.compiled_fw.result.source_code = "def call(args):\n    return args"
    assert not opened_files._is_of_another(entry, 1), "a program of the CPU names no GPU"
