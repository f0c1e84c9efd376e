"""One GEMM on its way to the library: which op, its operands and sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: The ops, in the order in which the C++ side numbers them (`csrc/gemm/deep_gemm/deep_gemm.cuh`).
OPS = (
    "grouped_gemm_nt_f8f8bf16_masked",
    "grouped_gemm_nt_f8f8bf16_contig",
    "grouped_gemm_nt_bf16_masked",
    "grouped_gemm_nt_bf16_contig",
    "gemm_nt_f8f8bf16",
    "gemm_nt_mxfp8_f8f8bf16",
    "gemm_nt_bf16bf16f32",
    "tf32_hc_prenorm_gemm",
)


class Request(NamedTuple):
    """Operands that the op's contract has checked, and a result to write.

    Nothing here is empty: the empty cases are answered before.
    """

    op: str
    a: torch.Tensor  #: x of tf32_hc_prenorm_gemm
    a_scale: torch.Tensor | None
    b: torch.Tensor  #: fn of tf32_hc_prenorm_gemm
    b_scale: torch.Tensor | None
    info: torch.Tensor | None  #: masked_m or m_indices
    expected_m: int
    recipe_a: tuple[int, int] | None
    recipe_b: tuple[int, int] | None
    num_splits: int | None
    d: torch.Tensor
    sqr_sum: torch.Tensor | None

    @property
    def masked(self) -> bool:
        return self.op.endswith("_masked")

    @property
    def grouped(self) -> bool:
        return self.op.startswith("grouped")

    @property
    def m(self) -> int:
        return self.a.shape[-2]

    @property
    def n(self) -> int:
        return self.b.shape[-2]

    @property
    def k(self) -> int:
        return self.a.shape[-1]

    @property
    def fp4(self) -> bool:
        """Whether b holds two e2m1 codes a byte, so half as many columns as k."""
        return self.b.dtype == torch.int8

    @property
    def experts(self) -> int:
        return self.b.shape[0] if self.grouped else 1


def refuse(op: str, arg: str, must: str, got: object) -> ValueError:
    return ValueError(f"dgmoe::{op}: {arg} must {must}, got {got}")
