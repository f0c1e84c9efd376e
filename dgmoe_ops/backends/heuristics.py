"""Which kernel runs a GEMM: what `csrc/gemm/heuristics.h` says, by which the ops themselves go."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import torch

from ..formats.gemm import GroupedGemmSpec
from ..formats.layout import Layout

_LAYOUTS = {None: 0, Layout.CONTIG: 1, Layout.MASKED: 2}  # GemmLayout
_UNNAMED = (0, 0)


class Kernel(enum.IntEnum):
    """Who runs a GEMM, in the order of `GemmKernel` in C++; `str` names it for people."""

    NONE = 0  #: nothing is multiplied
    CPU = 1
    DEEP_GEMM = 2  #: it has the GEMM, or refuses it
    SM90_MX_SMALL_M = 3
    SM90_MX_MEDIUM_M = 4
    SM90_MX_LARGE_M = 5
    TRITON = 6  #: likewise

    def __str__(self) -> str:
        return _NAMES.get(self, self.name.lower())


_NAMES = {
    Kernel.NONE: "none",
    Kernel.CPU: "dgmoe_ops CPU kernel",
    Kernel.DEEP_GEMM: "DeepGEMM",
    Kernel.TRITON: "Triton",
}


@dataclass(frozen=True)
class GemmPlan:
    """What a GEMM runs by.

    Attributes:
        kernel: who runs it.
        expected_rows: of an expert, by what is known without the device.
        block_m: rows of a tile of our kernels on SM90; 0 of others.
        m_blocks: blocks of 128 rows that one launch of a cluster kernel takes.
        experts_per_launch: slabs that it takes; a masked GEMM of more is launched in equal parts.
        rows_bytes, flags_bytes, tiles_bytes: of its workspace: prepared rows of `a`, flags and the
            list of tiles.
    """

    kernel: Kernel
    expected_rows: int
    block_m: int = 0
    m_blocks: int = 0
    experts_per_launch: int = 0
    rows_bytes: int = 0
    flags_bytes: int = 0
    tiles_bytes: int = 0

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the op allocates for the kernel, or takes as `workspace=`."""
        return self.rows_bytes + self.flags_bytes + self.tiles_bytes


@functools.lru_cache(maxsize=4096)
def gemm_plan(spec: GroupedGemmSpec, arch: int | str) -> GemmPlan:
    """Say which kernel runs a GEMM on an architecture, and the workspace that it takes.

    Our kernels on SM90 take operands on 16 bytes and do not run under `DGMOE_SANITY_CHECK=1`; what
    they leave, Triton runs.

    Args:
        spec: the GEMM; MX weights are known by their granularities.
        arch: compute capability major * 10 + minor, or "cpu".

    Raises:
        ValueError: a size is below 0, or a masked GEMM has no hint.
    """
    _, columns = spec.granularity_a or _UNNAMED
    found = torch.ops.dgmoe._gemm_plan(
        _LAYOUTS[spec.layout],
        spec.experts,
        spec.m,
        spec.n,
        spec.k,
        spec.expected_m,
        columns,
        *(spec.granularity_b or _UNNAMED),
        spec.fp4,
        0 if arch == "cpu" else arch,
    )
    return GemmPlan(Kernel(found[0]), *found[1:])
