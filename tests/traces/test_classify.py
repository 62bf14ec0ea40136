# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (lines and names as other programs write them)
"""Names as CUDA libraries and PyTorch give them."""

from pathlib import Path

import pytest

from llmb.catalogue.data_files import CatalogueError
from llmb.traces.classify import Rules

KERNELS = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN": "matrix_product",
    "nvjet_qqtst_128x256_128x6_2x1_v_bz_coopB_TNN": "matrix_product",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "matrix_product",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_nn_align8>(Params)": "matrix_product",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasSplitKParams)": "matrix_product",
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn": "matrix_product",
    "triton_tem_fused_addmm_2": "matrix_product",
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>()": "attention",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>()": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "triton_red_fused__to_copy_mean_mul_pow_rsqrt_scaled_dot_product_attention_3": "other",
    "triton_poi_fused_mm_silu_4": "other",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>()": "other",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication all_gather",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL()": "communication reduce_scatter",
    "ncclDevKernel_Reduce_Sum_f32_RING_LL()": "communication reduce",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "communication send_recv",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "communication all_reduce",
    "ncclSymkDevKernel_AllGather_LLMC()": "communication all_gather",
}
OPERATORS = {
    "aten::mm": "matrix_product",
    "aten::_scaled_mm": "matrix_product",
    "aten::_grouped_mm": "matrix_product",
    "aten::mmm": "other",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::gelu_backward": "other",
    "aten::copy_": "memory_copy",
    "c10d::_allgather_base_": "communication enqueue",
    "_c10d_functional::wait_tensor": "communication wait",
    "gloo:all_gather": "communication all_gather",
    "MmBackward0": "nothing",
    "CompiledFunctionBackward": "other",
    "autograd::engine::evaluate_function: MmBackward0": "nothing",
}


def text(label: object) -> str:
    return " ".join(str(item) for item in label if item) if label else "nothing"


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    assert text(Rules().kernel(name)) == KERNELS[name]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    assert text(Rules().operator(name)) == OPERATORS[name]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("send", "send_recv"),
        ("what is this", None),
    ],
)
def test_collectives(name: str, kind: str | None) -> None:
    assert Rules().collective(name) == kind


@pytest.mark.parametrize("rule", ["{pattern: '(', activity: other}", "{pattern: x, activity: dancing}", "{patern: x}"])
def test_a_wrong_rule_names_file_and_line(tmp_path: Path, rule: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(f"kernels:\n  - {rule}\noperators: []\ncollectives: []\n")
    with pytest.raises(CatalogueError, match=r"rules.yaml:2"):
        Rules(path).kernel("a")
