"""Host time of a GEMM op over the bare call of the library: what our checks and allocation cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.report import Report
from dgmoe_ops.backends.deep_gemm import library
from dgmoe_ops.ops.scale import align_scale

COLUMNS = ("op", "m", "n", "k", "experts", "library us", "op us", "op.out us", "op - library us")
CALLS = 400
BATCH = 20  # calls between two waits, so that the queue never fills


class Case(NamedTuple):
    """One op with its operands, and the library's own call with the same ones."""

    op: str
    sizes: tuple[int, int, int, int]  # m, n, k, experts
    args: tuple
    out: dict[str, torch.Tensor]
    bare: Callable[[], object]


def _fp8(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.float8_e4m3fn)


def _bf16(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def cases(device: torch.device) -> list[Case]:
    """Decode-sized operands: what is timed is the host."""
    module = library.proven(device)
    m, n, k, experts = 128, 512, 1024, 8

    def function(op: str) -> Callable:
        return library.find_function(module, op)

    def scale(*shape: int) -> torch.Tensor:
        return align_scale(torch.rand(shape, device=device) + 0.5)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    groups, rows = k // 128, n // 128
    counts = torch.full((experts,), 3, dtype=torch.int32, device=device)
    owners = torch.zeros(m, dtype=torch.int32, device=device)
    a3, a2 = _fp8(experts, m, k, device=device), _fp8(m, k, device=device)
    a3_scale, a2_scale = scale(experts, m, groups), scale(m, groups)
    b, b_scale = (
        _fp8(experts, n, k, device=device),
        torch.rand(experts, rows, groups, device=device),
    )
    d3, d2, d32 = empty(experts, m, n), empty(m, n), empty(m, n, dtype=torch.float32)
    x3, x2, w = (
        _bf16(experts, m, k, device=device),
        _bf16(m, k, device=device),
        _bf16(experts, n, k, device=device),
    )
    fn = torch.randn(24, k, device=device)
    h, sums = empty(m, 24, dtype=torch.float32), empty(m, dtype=torch.float32)
    whole, one = (m, n, k, experts), (m, n, k, 1)
    f8_masked = function("grouped_gemm_nt_f8f8bf16_masked")
    f8_contig = function("grouped_gemm_nt_f8f8bf16_contig")
    bf16_masked = function("grouped_gemm_nt_bf16_masked")
    bf16_contig = function("grouped_gemm_nt_bf16_contig")
    f8_dense, f32 = function("gemm_nt_f8f8bf16"), function("gemm_nt_bf16bf16f32")
    prenorm = function("tf32_hc_prenorm_gemm")
    return [
        Case(
            "grouped_gemm_nt_f8f8bf16_masked",
            whole,
            (a3, a3_scale, b, b_scale, counts, 4),
            {"out": d3},
            lambda: f8_masked((a3, a3_scale), (b, b_scale), d3, counts, 4),
        ),
        Case(
            "grouped_gemm_nt_f8f8bf16_contig",
            whole,
            (a2, a2_scale, b, b_scale, owners),
            {"out": d2},
            lambda: f8_contig((a2, a2_scale), (b, b_scale), d2, owners),
        ),
        Case(
            "grouped_gemm_nt_bf16_masked",
            whole,
            (x3, w, counts, 4),
            {"out": d3},
            lambda: bf16_masked(x3, w, d3, counts, 4),
        ),
        Case(
            "grouped_gemm_nt_bf16_contig",
            whole,
            (x2, w, owners),
            {"out": d2},
            lambda: bf16_contig(x2, w, d2, owners),
        ),
        Case(
            "gemm_nt_f8f8bf16",
            one,
            (a2, a2_scale, b[0], b_scale[0]),
            {"out": d2},
            lambda: f8_dense((a2, a2_scale), (b[0], b_scale[0]), d2),
        ),
        Case("gemm_nt_bf16bf16f32", one, (x2, w[0]), {"out": d32}, lambda: f32(x2, w[0], d32)),
        Case(
            "tf32_hc_prenorm_gemm",
            (m, 24, k, 1),
            (x2, fn),
            {"out": h, "sqr_sum": sums},
            lambda: prenorm(x2, fn, h, sums, None),
        ),
    ]


def host_times(calls: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Median microseconds of the host in each call, taken in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(3):
            call()
    for _ in range(CALLS // BATCH):
        torch.cuda.synchronize(device)
        for _ in range(BATCH):
            for call, into in zip(calls, times, strict=True):
                begin = time.perf_counter()
                call()
                into.append(time.perf_counter() - begin)
    torch.cuda.synchronize(device)
    return [statistics.median(into) * 1e6 for into in times]


def run(report: Report, device: torch.device) -> None:
    """Time every op after a check that both ways give the same bits."""
    for case in cases(device):
        packet = getattr(torch.ops.dgmoe, case.op)
        result = packet(*case.args)
        first = result[0] if isinstance(result, tuple) else result
        case.bare()
        torch.cuda.synchronize(device)
        given = case.out["out"]
        rows = slice(0, 3)  # masked slabs promise no more
        assert torch.equal(first[..., rows, :], given[..., rows, :]), case.op
        bare, plain, out = host_times(
            [
                case.bare,
                lambda c=case, p=packet: p(*c.args),
                lambda c=case, p=packet: p.out(*c.args, **c.out),
            ],
            device,
        )
        m, n, k, experts = case.sizes
        values = (case.op, m, n, k, experts, bare, plain, out, plain - bare)
        report.add(dict(zip(COLUMNS, values, strict=True)))
    report.note(
        "Median microseconds of the host's clock in one call; the calls take turns. The library's"
        " call writes a given buffer; op allocates its result, op.out writes the same buffer."
    )
