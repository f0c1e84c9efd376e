"""Oracles in plain torch: slow, derived from the contracts, sharing no code with what they judge.

`<op>_ref` takes the arguments of `dgmoe::<op>` and returns its outputs with the same shapes, dtypes
and strides, on the device of its input. Where the contract promises nothing the outputs hold poison
(NaN, bytes 0x7f, all bits set), and `defined(op)` says which positions are promised. This package
imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import activation as _activation
from . import gemm as _gemm
from . import permute as _permute
from . import route as _route
from .activation import (
    flushed_activation,
    silu_and_mul_post_quant_contig_ref,
    silu_and_mul_post_quant_masked_ref,
    silu_and_mul_ref,
    situ_and_mul_post_quant_contig_ref,
    situ_and_mul_post_quant_masked_ref,
    situ_and_mul_ref,
)
from .combine import ep_gather_ref, post_reorder_deepgemm_ref
from .gemm import (
    gemm_nt_bf16bf16f32_ref,
    gemm_nt_f8f8bf16_ref,
    gemm_nt_mxfp8_f8f8bf16_ref,
    gemm_terms,
    grouped_gemm_nt_bf16_contig_ref,
    grouped_gemm_nt_bf16_masked_ref,
    grouped_gemm_nt_f8f8bf16_contig_ref,
    grouped_gemm_nt_f8f8bf16_masked_ref,
    tf32_hc_prenorm_gemm_ref,
)
from .layer import dequantized_weight, fused_moe_quantized_ref, fused_moe_ref
from .permute import (
    ep_scatter_ref,
    moe_dispatch_index_ref,
    moe_ep_deepgemm_preprocess_ref,
    quant_group_fp8_ref,
)
from .route import hash_gate_bound, hash_gate_ref, topk_gate_bound, topk_gate_ref
from .scale import align_scale_ref, pack_ue8m0_ref, unpack_ue8m0_ref
from .weights import (
    dequant_mxfp4_to_fp8_ref,
    quant_block_fp8_ref,
    quant_mxfp4_ref,
    quant_mxfp8_ref,
    requant_block_ue8m0_ref,
)

__all__ = [
    "align_scale_ref",
    "defined",
    "dequant_mxfp4_to_fp8_ref",
    "dequantized_weight",
    "ep_gather_ref",
    "ep_scatter_ref",
    "flushed_activation",
    "fused_moe_quantized_ref",
    "fused_moe_ref",
    "gemm_nt_bf16bf16f32_ref",
    "gemm_nt_f8f8bf16_ref",
    "gemm_nt_mxfp8_f8f8bf16_ref",
    "gemm_terms",
    "grouped_gemm_nt_bf16_contig_ref",
    "grouped_gemm_nt_bf16_masked_ref",
    "grouped_gemm_nt_f8f8bf16_contig_ref",
    "grouped_gemm_nt_f8f8bf16_masked_ref",
    "hash_gate_bound",
    "hash_gate_ref",
    "moe_dispatch_index_ref",
    "moe_ep_deepgemm_preprocess_ref",
    "pack_ue8m0_ref",
    "post_reorder_deepgemm_ref",
    "quant_block_fp8_ref",
    "quant_group_fp8_ref",
    "quant_mxfp4_ref",
    "quant_mxfp8_ref",
    "reference",
    "requant_block_ue8m0_ref",
    "silu_and_mul_post_quant_contig_ref",
    "silu_and_mul_post_quant_masked_ref",
    "silu_and_mul_ref",
    "situ_and_mul_post_quant_contig_ref",
    "situ_and_mul_post_quant_masked_ref",
    "situ_and_mul_ref",
    "tf32_hc_prenorm_gemm_ref",
    "topk_gate_bound",
    "topk_gate_ref",
    "unpack_ue8m0_ref",
]


def reference(op: str) -> Callable:
    """Return the oracle of `dgmoe::<op>`; KeyError where there is none."""
    return globals()[f"{op}_ref"]


def defined(op: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function of the op's arguments that returns a mask an output: True is promised."""
    for room in (_permute, _activation, _gemm, _route):
        if hasattr(room, f"{op}_defined"):
            return getattr(room, f"{op}_defined")

    def everywhere(*args, **kwargs) -> tuple[torch.Tensor, ...]:
        outputs = reference(op)(*args, **kwargs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(torch.ones_like(o, dtype=torch.bool).contiguous() for o in outputs)

    return everywhere
