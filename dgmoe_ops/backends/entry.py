"""The op through which the CUDA kernels of the GEMMs (`csrc/gemm/*.cu`) reach a library.

They check and allocate. A call of a shape that has not run yet, or whose library C++ cannot call,
comes here: MX recipes on SM90, of which they keep almost all (`run_mx_product`), go to
Triton, everything else to DeepGEMM.
"""

from __future__ import annotations

import torch

from . import deep_gemm, triton
from .deep_gemm import library
from .heuristics import Kernel, gemm_plan
from .request import OPS, Operands, Request, request_of

_library: torch.library.Library | None = None


def run(request: Request) -> None:
    """Run one GEMM by the library that has it on this architecture.

    Raises:
        ValueError: a size, scale layout or granularity that does not run there.
        RuntimeError: no library that fits.
    """
    arch = 10 * library.arch_major(request.operands.a.get_device())
    # What our own kernels would run came here because of its operands, or to be looked at.
    if gemm_plan(request.spec, arch).kernel in (Kernel.DEEP_GEMM, Kernel.NONE):
        deep_gemm.run(request)
    else:
        triton.run(request)


def _report(error: Exception) -> torch.Tensor:
    """An error as bytes: its kind, then its text. Exceptions do not cross a call from C++ over the
    stable ABI, whose message is lost."""
    kind = b"V" if isinstance(error, ValueError) else b"R"
    if isinstance(error, torch.OutOfMemoryError):
        kind = b"M"
    text = kind + str(error).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _run(
    op,
    a,
    a_scale,
    b,
    b_scale,
    info,
    expected_m,
    recipe_a_columns,
    recipe_b_rows,
    recipe_b_columns,
    num_splits,
    d,
    sqr_sum,
):
    """The private op that C++ calls; empty bytes mean that all went well."""
    try:
        given = recipe_a_columns > 0
        run(
            request_of(
                OPS[op],
                Operands(a, a_scale, b, b_scale, info, d, sqr_sum),
                expected_m=expected_m,
                granularity_a=(1, recipe_a_columns) if given else None,
                granularity_b=(recipe_b_rows, recipe_b_columns) if given else None,
                num_splits=num_splits if num_splits > 0 else None,
            )
        )
    except Exception as error:
        return _report(error)
    return torch.empty(0, dtype=torch.uint8)


def register() -> None:
    """Register the op, once. The libraries are imported by their first call."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("dgmoe", "FRAGMENT")
    _library.define(
        "_gemm_run(int op, Tensor a, Tensor? a_scale, Tensor b, Tensor? b_scale, Tensor? info,"
        " int expected_m, int recipe_a_columns, int recipe_b_rows, int recipe_b_columns,"
        " int num_splits, Tensor(a!) d, Tensor(b!)? sqr_sum) -> Tensor"
    )
    _library.impl("_gemm_run", _run, "CompositeExplicitAutograd")
