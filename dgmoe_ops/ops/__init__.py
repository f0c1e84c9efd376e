"""The ops, a module a room. Each wrapper calls `torch.ops.dgmoe.<name>`; its fake stands directly
under it."""

from .activation import (
    silu_and_mul,
    silu_and_mul_post_quant_contig,
    silu_and_mul_post_quant_masked,
    situ_and_mul,
    situ_and_mul_post_quant_contig,
    situ_and_mul_post_quant_masked,
)
from .combine import ep_gather, post_reorder_deepgemm
from .gemm import (
    gemm_nt_bf16bf16f32,
    gemm_nt_f8f8bf16,
    gemm_nt_mxfp8_f8f8bf16,
    grouped_gemm_nt_bf16_contig,
    grouped_gemm_nt_bf16_masked,
    grouped_gemm_nt_f8f8bf16_contig,
    grouped_gemm_nt_f8f8bf16_masked,
    grouped_gemm_workspace_bytes,
    tf32_hc_prenorm_gemm,
)
from .permute import ep_scatter, moe_dispatch_index, moe_ep_deepgemm_preprocess, quant_group_fp8
from .route import hash_gate, topk_gate
from .scale import align_scale, pack_ue8m0, unpack_ue8m0
from .weights import (
    dequant_mxfp4_to_fp8,
    quant_block_fp8,
    quant_mxfp4,
    quant_mxfp8,
    requant_block_ue8m0,
)

__all__ = [
    "align_scale",
    "dequant_mxfp4_to_fp8",
    "ep_gather",
    "ep_scatter",
    "gemm_nt_bf16bf16f32",
    "gemm_nt_f8f8bf16",
    "gemm_nt_mxfp8_f8f8bf16",
    "grouped_gemm_nt_bf16_contig",
    "grouped_gemm_nt_bf16_masked",
    "grouped_gemm_nt_f8f8bf16_contig",
    "grouped_gemm_nt_f8f8bf16_masked",
    "grouped_gemm_workspace_bytes",
    "hash_gate",
    "moe_dispatch_index",
    "moe_ep_deepgemm_preprocess",
    "pack_ue8m0",
    "post_reorder_deepgemm",
    "quant_block_fp8",
    "quant_group_fp8",
    "quant_mxfp4",
    "quant_mxfp8",
    "requant_block_ue8m0",
    "silu_and_mul",
    "silu_and_mul_post_quant_contig",
    "silu_and_mul_post_quant_masked",
    "situ_and_mul",
    "situ_and_mul_post_quant_contig",
    "situ_and_mul_post_quant_masked",
    "tf32_hc_prenorm_gemm",
    "topk_gate",
    "unpack_ue8m0",
]
