"""What of the benchmarks can be tried without a GPU: how a profile's kernels are told apart, which job runs when."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from pack import ROOT, import_comfy

import_comfy()

sys.path.append(str(ROOT / "benchmarks"))

import jobs
import profile_kernels
import profile_nodes
import prompts
import tensorrt86
import tensorrt_rows
import torch._inductor.config
from hybrid_trt.backends.torch_inductor import inductor_tuning

KERNELS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x64_kernel0_0": "attention",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>": "attention",
    "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_cudnn": "convolution",
    "void cudnn::ops::nchwToNhwcKernel<__half, __half, float>": "convolution",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_bias_TNN": "product",
    "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x128>": "product",
    "triton_tem_fused_addmm_12": "product",
    "triton_red_fused__to_copy_native_group_norm_silu_7": "norm",
    "triton_per_fused_add_native_layer_norm_41": "norm",
    "triton_poi_fused_add_convolution_silu_3": "pointwise",
    "triton_poi_fused__to_copy_add_silu_17": "pointwise",
    "triton_poi_fused__to_copy_add_mul_silu_var_mean_view_131": "norm",
    "Memcpy DtoD (Device -> Device)": "copy",
    "void at::native::CatArrayBatchedCopy_vectorized<...>": "copy",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>>": "pointwise",
    "something_new": "other",
}


@pytest.mark.parametrize(("kernel", "family"), KERNELS.items(), ids=list(KERNELS.values()))
def test_a_kernel_is_known_by_its_name(kernel: str, family: str) -> None:
    assert profile_kernels.family_of(kernel) == family


def test_a_profile_is_of_one_replay_and_the_longest_come_first() -> None:
    seen = [("nvjet_a", 300.0), ("Memcpy DtoD", 10.0), ("nvjet_b", 500.0), ("triton_poi_x", 2000.0)] * 2
    families = profile_kernels.grouped(seen, replays=2)
    assert list(families.items()) == [
        ("pointwise", {"launches": 1.0, "ms": 2.0}),
        ("product", {"launches": 2.0, "ms": 0.8}),
        ("copy", {"launches": 1.0, "ms": 0.01}),
    ]
    assert [row["kernel"] for row in profile_kernels.longest(seen, replays=2, most=2)] == ["triton_poi_x", "nvjet_b"]


def test_a_pause_is_where_nothing_runs_on_any_stream() -> None:
    spans = [(0.0, 100.0, "a"), (50.0, 90.0, "beside"), (95.0, 130.0, "b"), (180.0, 200.0, "c"), (215.0, 220.0, "d")]
    assert profile_nodes.busy(reversed(spans)) == 130 + 20 + 5
    assert profile_nodes.pauses(spans) == [(50.0, "b", "c")]
    assert profile_nodes.pauses(spans, shortest=10) == [(50.0, "b", "c"), (15.0, "c", "d")]


def test_lines_that_wait_for_the_gpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of torch's mode, which needs a GPU: what it warns of is what torch 2.11 says."""
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with profile_nodes.waits(on_gpu=True) as found:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    ((line, count),) = found.items()
    assert line.startswith("tests/test_benchmarks.py:")
    assert count == 3
    assert modes == ["warn", 0]


def test_tensorrts_package_is_freed_of_parsers_that_were_not_compiled() -> None:
    kept = "    Builder.__enter__ = common_enter\n"
    code = f"{kept}    UffParser.__enter__ = common_enter\n    CaffeParser.__exit__ = common_exit\n"
    assert tensorrt86.without_old_parsers(code) == kept


def test_a_missing_library_gets_what_is_wanted_of_it_and_nothing_of_the_others() -> None:
    symbols = ["  U cublasCreate_v2@libcublas.so.12", "  U cublasLtCreate@libcublasLt.so.12",
               "  U cudnnCreate@libcudnn.so.8", "  w __cxa_finalize", ""]  # fmt: skip
    found = {library: tensorrt86.wanted_of(symbols, library) for library in tensorrt86.STUBS}
    assert found == {"libcudnn.so.8": ["cudnnCreate"], "libcublasLt.so.12": ["cublasLtCreate"],
                     "libcublas.so.12": ["cublasCreate_v2"]}  # fmt: skip


@pytest.fixture
def sweep_flags(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The script, with a mock of the networks that it measures: theirs would choose an allocator for this process."""
    monkeypatch.setitem(sys.modules, "networks", types.ModuleType("networks"))
    monkeypatch.delitem(sys.modules, "sweep_flags", raising=False)
    return importlib.import_module("sweep_flags")


def test_inductor_knows_all_settings_of_the_sweep_and_has_its_own_again_afterwards(
    sweep_flags: types.ModuleType,
) -> None:
    before, ours = torch._inductor.config.save_config_portable(), dict(inductor_tuning.TABLE)
    for flags in sweep_flags.VARIANTS.values():
        with sweep_flags.settings(flags):
            for name in flags.keys() - set(sweep_flags.OURS):
                assert functools.reduce(getattr, name.split("."), torch._inductor.config) == flags[name]
    assert torch._inductor.config.save_config_portable() == before
    assert inductor_tuning.TABLE == ours


class FixedClock:
    """Stands for a server that takes 70 ms a prompt, 10 ms a step, and 100 ms to decode and save a picture."""

    def __init__(self, latent: Path):
        self.latent = latent

    def queue(self, prompt: prompts.Prompt, timeout: float = 60.0) -> SimpleNamespace:
        taken = 0.07 + 0.01 * prompt["sampler"]["inputs"]["steps"] + 0.1 * ("image" in prompt)
        return SimpleNamespace(ok=True, error=None, seconds=taken, output=lambda *_: (self.latent, None))


def test_a_prompts_time_is_told_apart_from_that_of_its_steps(tmp_path: Path) -> None:
    numpy.save(tmp_path / "latent.npy", numpy.zeros(1))
    memory = contextlib.nullcontext()
    memory.peak = 5.0
    run = prompts.measure(FixedClock(tmp_path / "latent.npy"), memory, 2, None, "native", runs=3)
    assert (run.median_ms, run.sampling_ms, run.step_ms) == (370.0, 270.0, 10.0)
    assert run.to_json()["step_ms"] == 10.0


def test_jobs_wait_for_what_they_need_see_one_gpu_and_have_it_alone_if_they_say_so(tmp_path: Path) -> None:
    def job(name: str, gpu: int, *needs: str, alone: bool = False, ends_with: int = 0) -> jobs.Job:
        code = f"import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], time.time()); time.sleep(0.7); " \
               f"print(0, time.time()); raise SystemExit({ends_with})"  # fmt: skip
        return jobs.Job(name, [sys.executable, "-c", code], gpu, needs, alone)

    given = [job("first", 1, ends_with=3), job("after", 1, "first"), job("alone", 0, alone=True), job("other", 0)]
    assert jobs.run(given, tmp_path) == {"first": 3, "after": 0, "alone": 0, "other": 0}
    seen = {one.name: [line.split() for line in (tmp_path / f"{one.name}.log").read_text().splitlines()]
            for one in given}  # fmt: skip
    spans = {name: (float(begin[1]), float(end[1])) for name, (begin, end) in seen.items()}
    assert [seen[one.name][0][0] for one in given] == ["1", "1", "0", "0"]
    assert spans["first"][1] <= spans["after"][0]
    assert spans["alone"][1] <= spans["other"][0] or spans["other"][1] <= spans["alone"][0]
    assert spans["first"][0] < spans["alone"][1]  # another GPU's: side by side


def test_a_job_that_needs_what_is_not_there_is_told_before_any_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="second needs frist"):
        jobs.run([jobs.Job("first", ["true"]), jobs.Job("second", ["true"], needs=["frist"])], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_job_waits_for_one_it_comes_after_and_does_without_one_that_is_not_there(tmp_path: Path) -> None:
    def job(name: str, *after: str) -> jobs.Job:
        return jobs.Job(name, [sys.executable, "-c", "import time; print(time.time())"], after=after)

    assert jobs.run([job("late", "early", "never"), job("early")], tmp_path) == {"early": 0, "late": 0}
    times = {name: float((tmp_path / f"{name}.log").read_text()) for name in ("early", "late")}
    assert times["early"] < times["late"]


def test_all_else_and_what_it_started_is_stopped_while_a_still_job_runs(tmp_path: Path) -> None:
    ticks = "import time\nfor _ in range(40): print(time.time(), flush=True); time.sleep(0.1)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ticks!r}], start_new_session=True)"
    measures = "import time; print(time.time()); time.sleep(1.5); print(time.time())"
    short = "import time; time.sleep(0.7)"
    given = [
        jobs.Job("busy", [sys.executable, "-c", starts], 1),
        jobs.Job("short", [sys.executable, "-c", short]),
        jobs.Job("still", [sys.executable, "-c", measures], needs=["short"], still=True),
    ]
    assert jobs.run(given, tmp_path) == {"busy": 0, "short": 0, "still": 0}
    begin, end = map(float, (tmp_path / "still.log").read_text().split())
    seen = [float(line) for line in (tmp_path / "busy.log").read_text().split()]
    assert len(seen) == 40
    assert any(time < begin for time in seen), "it ran before"
    assert not [time for time in seen if begin <= time <= end]
    assert any(time > end for time in seen), "it went on"


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_all_rows_of_tensorrt_are_jobs_whose_needs_are_among_them_and_whose_scripts_are_there(
    tmp_path: Path, gpus: int
) -> None:
    made = tensorrt_rows.all_jobs(Path("ComfyUI"), tmp_path, tmp_path, gpus)
    names = [job.name for job in made]
    assert len(set(names)) == len(names)
    assert {need for job in made for need in job.needs} <= set(names)
    assert {job.gpu for job in made} == set(range(min(gpus, 2)))
    for script in {job.command[1] for job in made if job.command[1].endswith(".py")}:
        assert Path(script).exists()


def test_some_rows_come_with_all_that_they_need_and_nothing_else(tmp_path: Path) -> None:
    made = tensorrt_rows.all_jobs(Path("ComfyUI"), tmp_path, tmp_path, 2)
    chosen = [job.name for job in tensorrt_rows.with_needs(made, ["prompts"])]
    builds = [f"build_sd15_{name}" for name in tensorrt_rows.SD15]
    assert chosen == ["models_sd15", *builds, "sd15", "prompts"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_torch_backends_networks_are_measured_before_their_gpu_has_any_build(tmp_path: Path, gpus: int) -> None:
    made = {job.name: job for job in tensorrt_rows.all_jobs(Path("ComfyUI"), tmp_path, tmp_path, gpus)}
    beside = [job for job in made.values() if job.gpu == 0 and not job.alone and not job.name.startswith("models")]
    assert all("torch_networks" in job.after for job in beside)
    assert len(beside) == (3 if gpus == 2 else 8)
