# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (lines and names as other programs write them)
"""Names as CUDA libraries and PyTorch give them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.catalogue.data_files import CatalogueError
from llmb.engine import kernels
from llmb.readers.profiles.classify import Rules

ELEMENTWISE = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}>(int)>(int, long)"
)
KERNELS = {
    # A library whose namespace speaks of products has other kernels too.
    "void transformer_engine::gemm::swizzle::quantize_mxfp8_kernel<32, 32>(CUtensorMap, float*)": "other",
    "void gemm_tools::quantize_rows_kernel<__nv_bfloat16>(float const*)": "unclassified",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<2048u, 7168u, 128u>(float*, int*)": "matrix_product",
    "void deep_gemm::transpose_fp32<512u, 64u, 28u>(float const*, float*, unsigned int)": "other",
    "quantize_for_gemm": "unclassified",
    "void my_library::flash::attention::dropout_mask_kernel<float>(int)": "unclassified",
    "void cutlass::device_kernel<quantization::RowQuantizer<cutlass::gemm::GemmShape<128, 128, 64>>>(P)": "unclassified",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>, X>>(P)": "matrix_product",
    "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiEEEEEEEvNT_6ParamsE": "matrix_product",
    "_ZN7cutlass13device_kernelIN5flash16FlashAttnFwdSm90INS1_1XEEEEEvNT_6ParamsE": "attention",
    # Communication that is not NCCL's.
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int, int)": "communication reduce_scatter",
    "void userbuffers_fp16_sum_inplace_gpu_mc_ag<4>(int, int)": "communication all_gather",
    "void userbuffers_fp16_sum_inplace_gpu_mc<8>(int, int)": "communication all_reduce",
    "kuserbuffers_pushsendrecv(int, int, int, int*)": "communication send_recv",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)": "communication dispatch",
    "void deep_ep::legacy::internode_ll::combine<true, 7168, 9, 9>(void*)": "communication combine",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)": "other",
    "void deep_ep::elastic::hybrid_dispatch_impl<8, 4>(void*)": "communication dispatch",
    "_ZN7deep_ep9intranode8dispatchILi8ELi768EEEvP4int4": "communication dispatch",
    "void hybrid_ep::dispatch_kernel<__nv_bfloat16, 512>(P)": "communication dispatch",
    "void hybrid_ep::combine_kernel<512>(P)": "communication combine",
    "void hybrid_ep::scan<32, 8>(bool const*)": "other",
    "mscclKernel_Sum_hip_bfloat16_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)": "communication other",
    "void mscclpp::collective::(anonymous namespace)::allgatherFullmesh<false>(void*, void*)": "communication all_gather",
    "void mscclpp::executionKernel<__half, mscclpp::LL16Packet, false>(int, __half*)": "communication other",
    "void nvshmemi_transfer_kernel<1>(int)": "communication other",
    "void one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**, int)": "communication all_reduce",
    # Old and new NCCL, RCCL.
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "communication all_reduce",
    "ncclReduceScatterRingLLKernel_sum_f16(ncclColl)": "communication reduce_scatter",
    "ncclReduceRingLLKernel_sum_f32(ncclColl)": "communication reduce",
    "ncclSendRecvKernel_copy_i8(ncclColl)": "communication send_recv",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "communication send_recv",
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)": "communication other",
    "ncclDevKernelDebug_Generic(ncclDevComm*, channelMasks, ncclWork*)": "communication other",
    # ROCm.
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x208x64_MI16x16x1_SN": "matrix_product",
    "Custom_Cijk_Alik_Bljk_F8BS_gfx950": "matrix_product",
    "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm, true>(Argument)": "matrix_product",
    "void ck_tile::kentry<1, ck_tile::GroupedGemmKernel<ck_tile::GemmSpatiallyLocalTilePartitioner>>(K)": "matrix_product",
    "void ck_tile::kentry<256, 1, ck_tile::FmhaBwdDQDKDVKernel<ck_tile::X>>(K)": "attention",
    "void ck_tile::kentry<1, ck_tile::Rmsnorm2dFwd<ck_tile::P>>(K)": "other",
    "aiter::fmha_bwd_hd128_bf16_causal_a16_psskddv": "attention",
    "_ZN5aiter35fmha_bwd_hd128_bf16_causal_a16_psskE": "attention",
    "aiter::bf16gemm_fp32bf16_tn_96x64_splitk": "matrix_product",
    "__amd_rocclr_copyBuffer": "memory_copy",
    # cuBLAS, cuDNN, PyTorch.
    "ampere_sgemm_128x64_nn": "matrix_product",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, float>(P)": "matrix_product",
    "void gemmSN_TN_kernel<float, 128, 16, 2>(P)": "matrix_product",
    "cudnn_generated_fort_native_sm120_matMul_pointwise_pointwise_knob_20_32x32x128_0_0": "matrix_product",
    ELEMENTWISE: "other",
    "void (anonymous namespace)::kernel_with_index<int>(int)": "unclassified",
    "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(at::Tensor&)>(int)": "other",
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
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void*)": "attention",
    "void cudnn::fusion::fmha_reduce_head<true>(void const*, void*)": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "triton_red_fused__to_copy_mean_mul_pow_rsqrt_scaled_dot_product_attention_3": "other",
    "triton_poi_fused_mm_silu_4": "other",
    "my_triton_kernel": "unclassified",
    "": "unclassified",
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


def test_the_engines_own_kernels_are_known() -> None:
    sources = Path(kernels.__file__).parent.glob("*_triton.py")
    names = [
        name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.MULTILINE)
    ]
    assert len(names) > 2
    assert {text(Rules().kernel(name)) for name in names} == {"other"}


def test_every_rule_of_kernels_has_a_source_and_a_pattern() -> None:
    rules = Rules().file.kernels
    assert [rule for rule in rules if not rule.source or not (rule.function or rule.namespace or rule.argument)] == []


@given(st.text() | st.text("_ZNLIEvS0123456789<>():, abc", max_size=60))
def test_any_name_has_a_class(name: str) -> None:
    assert Rules().kernel(name)


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
