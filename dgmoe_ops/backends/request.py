"""One GEMM on its way to a backend: which op, its sizes and its operands."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ..formats.gemm import GroupedGemmSpec
from ..formats.layout import Layout
from ..formats.recipes import Granularity

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


class Operands(NamedTuple):
    """Operands that the op's contract has checked, and a result to write."""

    a: torch.Tensor  #: x of tf32_hc_prenorm_gemm
    a_scale: torch.Tensor | None
    b: torch.Tensor  #: fn of tf32_hc_prenorm_gemm
    b_scale: torch.Tensor | None
    info: torch.Tensor | None  #: masked_m or m_indices
    d: torch.Tensor
    sqr_sum: torch.Tensor | None = None  #: of tf32_hc_prenorm_gemm


class Request(NamedTuple):
    """One GEMM. Nothing here is empty: the empty cases are answered before."""

    op: str
    spec: GroupedGemmSpec
    operands: Operands
    num_splits: int | None = None  #: of tf32_hc_prenorm_gemm, where the call names it

    def with_operands(self, **changes: torch.Tensor) -> Request:
        """The request with other operands."""
        return self._replace(operands=self.operands._replace(**changes))

    def with_spec(self, **changes: object) -> Request:
        """The request with other facts of its spec."""
        return self._replace(spec=replace(self.spec, **changes))


def layout_of(op: str) -> Layout | None:
    """The layout of an op's rows; None of a dense GEMM."""
    return Layout(op.rsplit("_", 1)[1]) if op.startswith("grouped") else None


def request_of(
    op: str,
    operands: Operands,
    *,
    expected_m: int = 0,
    granularity_a: Granularity | None = None,
    granularity_b: Granularity | None = None,
    num_splits: int | None = None,
) -> Request:
    """Make a request of operands, whose shapes give the sizes; the granularities where the call
    names them."""
    a, b = operands.a, operands.b
    layout = layout_of(op)
    spec = GroupedGemmSpec(
        layout,
        1 if layout is None else b.shape[0],
        a.shape[-2],
        b.shape[-2],
        a.shape[-1],
        expected_m,
        granularity_a,
        granularity_b,
        b.dtype == torch.int8,
    )
    return Request(op, spec, operands, num_splits)


def refuse(op: str, arg: str, must: str, got: object) -> ValueError:
    return ValueError(f"dgmoe::{op}: {arg} must {must}, got {got}")


def check_addresses(request: Request) -> None:
    """Check that the operands start where 16-byte and bulk copies can.

    Raises:
        ValueError: one does not.
    """
    a, b, d = request.operands.a, request.operands.b, request.operands.d
    for name, tensor in (("a", a), ("b", b), ("out", d)):
        if tensor.data_ptr() % 16:
            raise refuse(request.op, name, "start on 16 bytes on CUDA", "another address")
