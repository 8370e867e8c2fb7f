"""What of the benchmarks can be tried without a GPU: how a profile's kernels are told apart and summed."""

from __future__ import annotations

import sys

import pytest
from pack import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import profile_kernels
import profile_nodes
import tensorrt86

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
