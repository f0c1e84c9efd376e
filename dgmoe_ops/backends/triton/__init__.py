"""Triton behind the grouped GEMMs of the MX recipes on SM90, for which DeepGEMM has no kernels.

It runs what our own (`few_rows*`, `some_rows*` and `many_rows*` in `csrc/gemm/sm90`) do not take.

Imports Triton at the first call. A kernel is chosen by static data, never by timing at run time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import _sanity, config
from ...formats.layouts import CONTIG_ALIGNMENT
from ..deep_gemm import overlap, rules, sanity, scopes
from ..request import Request, refuse
from .tiles import Config, Product, choose, expected_rows

__all__ = ["Config", "Product", "choose", "compile_for", "expected_rows", "run", "takes"]

ARCH_MAJOR = 9
_ARCH = "SM90"
_MX_B = (1, 32)
_launchers: dict[tuple, Callable] = {}


def takes(request: Request, arch_major: int) -> bool:
    """Tell whether a request that our kernels left is Triton's: a grouped GEMM of an MX recipe on
    SM90."""
    return (
        arch_major == ARCH_MAJOR
        and request.recipe_b == _MX_B
        and request.grouped
        and request.b_scale is not None
        and request.b_scale.dtype == torch.int32
    )


def product_of(request: Request) -> Product:
    """What the kernel for a request is compiled for."""
    return Product(
        request.masked,
        request.fp4,
        request.experts,
        request.n,
        request.k,
        request.recipe_a[1],
    )


def check(request: Request) -> Request:
    """Check what the kernels do not; return the request with scales of whole columns.

    Raises:
        ValueError: a size, form or recipe that the kernels do not take.
    """
    op, settings = request.op, scopes.current()
    if settings.alignment not in (None, CONTIG_ALIGNMENT):
        raise refuse(op, "alignment", f"be one of 128 on {_ARCH}", settings.alignment)
    for name, tensor in (("a", request.a), ("b", request.b), ("out", request.d)):
        if tensor.data_ptr() % 16:
            raise refuse(op, name, "start on 16 bytes on CUDA", "another address")
    if request.k % 128:
        raise refuse(op, "k", f"be a multiple of 128 for MX recipes on {_ARCH}", request.k)
    if not request.masked and request.m % CONTIG_ALIGNMENT:
        must = f"have a multiple of {CONTIG_ALIGNMENT} rows on CUDA"
        raise refuse(op, "a", must, request.m)
    if request.fp4 and request.recipe_a != (1, 128):
        raise refuse(op, "recipe_a", f"be (1, 128) for int8 b on {_ARCH}", request.recipe_a)
    form = rules.Form.PACKED_MN_MAJOR
    a_scale = rules.with_tma_strides(request.a_scale)
    b_scale = rules.with_tma_strides(request.b_scale)
    rules.check_scale(op, "a_scale", a_scale, form, _ARCH)
    rules.check_scale(op, "b_scale", b_scale, form, _ARCH)
    return request._replace(a_scale=a_scale, b_scale=b_scale)


def _compiled():
    """The module that compiles.

    Raises:
        RuntimeError: Triton is missing or its import fails.
    """
    try:
        from . import compiled
    except ImportError as error:
        raise RuntimeError(
            f"dgmoe_ops: this grouped GEMM of an MX recipe on {_ARCH}, which our own kernels do not"
            f" take, needs Triton, whose import fails ({error}): pip install triton"
        ) from error
    return compiled


def run(request: Request) -> None:
    """Check a request and run it.

    Raises:
        ValueError: a size, form or recipe that the kernels do not take.
        RuntimeError: no Triton, or a scope that they do not know.
    """
    if overlap.active() and request.masked:
        raise RuntimeError(
            "dgmoe_ops: overlap of the down GEMM is not available for MX recipes on"
            f" {_ARCH}, which Triton runs"
        )
    request = check(request)
    if config.sanity_check() and _sanity.looks_at(request.a):
        sanity.check_request(request, exponents=False, alignment=CONTIG_ALIGNMENT)
    sms = scopes.current().num_sms
    product = product_of(request)
    key = (*product, request.m, request.expected_m, request.a.get_device(), sms)
    launch = _launchers.get(key)
    if launch is None:
        device = request.a.get_device()
        rows = expected_rows(product, request.m, request.expected_m)
        launch = _compiled().launcher(product, choose(product, rows), request.m, device, sms)
        _launchers[key] = launch
    launch(request.a, request.a_scale, request.b, request.b_scale, request.info, request.d)


def compile_for(product: Product, rows: float) -> None:
    """Compile the kernel that a product takes where an expert is expected to have `rows` rows, into
    Triton's cache folder. Needs no GPU.

    Raises:
        RuntimeError: no Triton.
    """
    _compiled().compile_kernel(product, choose(product, rows))
