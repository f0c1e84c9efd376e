"""Triton behind the grouped GEMMs of the MX recipes on SM90, for which DeepGEMM has no kernels.

It runs what our own (`sm90_mx_*`, in `csrc/gemm/sm90`) do not take.

Imports Triton at the first call. A kernel is chosen by static data, never by timing at run time.
"""

from __future__ import annotations

from collections.abc import Callable

from ... import _sanity, config
from ...formats.gemm import GroupedGemmSpec
from ...formats.layouts import CONTIG_ALIGNMENT, ScaleLayout
from .. import sanity, scopes
from ..heuristics import gemm_plan
from ..request import Request, check_addresses, refuse
from ..scales import check_scale, with_strides_of
from .tiles import Config, choose

__all__ = ["Config", "choose", "compile_for", "run"]

_ARCH = "SM90"
_ARCH_NUMBER = 90
_launchers: dict[tuple, Callable] = {}


def config_of(spec: GroupedGemmSpec) -> Config:
    """The tile that a grouped GEMM takes."""
    return choose(spec, gemm_plan(spec, _ARCH_NUMBER).expected_rows)


def check(request: Request) -> Request:
    """Check what the kernels do not; return the request with scales of whole columns.

    Raises:
        ValueError: a size, scale layout, granularity or alignment that the kernels do not take.
    """
    op, spec = request.op, request.spec
    scopes.check(request, _ARCH, (CONTIG_ALIGNMENT,), overlaps=False)
    check_addresses(request)
    if spec.k % 128:
        raise refuse(op, "k", f"be a multiple of 128 for MX recipes on {_ARCH}", spec.k)
    if not spec.masked and spec.m % CONTIG_ALIGNMENT:
        must = f"have a multiple of {CONTIG_ALIGNMENT} rows on CUDA"
        raise refuse(op, "a", must, spec.m)
    if spec.fp4 and spec.granularity_a != (1, 128):
        must = f"be (1, 128) for int8 b on {_ARCH}"
        raise refuse(op, "recipe_a", must, spec.granularity_a)
    a_scale = with_strides_of(request.operands.a_scale, ScaleLayout.PACKED_UE8M0)
    b_scale = with_strides_of(request.operands.b_scale, ScaleLayout.PACKED_UE8M0)
    check_scale(op, "a_scale", a_scale, ScaleLayout.PACKED_UE8M0, _ARCH)
    check_scale(op, "b_scale", b_scale, ScaleLayout.PACKED_UE8M0, _ARCH)
    return request.with_operands(a_scale=a_scale, b_scale=b_scale)


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
        ValueError: a size, scale layout, granularity or alignment that the kernels do not take.
        RuntimeError: no Triton, or an overlap, which they do not signal.
    """
    request = check(request)
    spec, operands = request.spec, request.operands
    if config.sanity_check() and _sanity.looks_at(operands.a):
        sanity.check_request(request, exponents=False, alignment=CONTIG_ALIGNMENT)
    device, sms = operands.a.get_device(), scopes.current().num_sms
    key = (spec, device, sms)
    launch = _launchers.get(key)
    if launch is None:
        launch = _compiled().launcher(spec, config_of(spec), device, sms)
        _launchers[key] = launch
    launch(*operands[:6])


def compile_for(spec: GroupedGemmSpec) -> None:
    """Compile the kernel that a grouped GEMM takes into Triton's cache folder. Needs no GPU.

    Raises:
        RuntimeError: no Triton.
    """
    _compiled().compile_kernel(spec, config_of(spec))
