"""The workspace of a grouped GEMM with MX weights on SM90: which kernel takes it, and what that
allocates.

Mirrors `run_mx_grouped_gemm` (csrc/gemm/sm90/mx_grouped_gemm.cu) and the kernels that it chooses
from: `sm90_mx_small_m`, which allocates nothing, `sm90_mx_medium_m` and `sm90_mx_large_m`; for
operands on 16 bytes and without `DGMOE_SANITY_CHECK`. Triton takes what all refuse, and allocates
nothing either. A test holds the numbers against those sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..formats.layouts import CONTIG_ALIGNMENT, TILE_ROWS, ceil_div

ARCH = 90
K_MULTIPLE = 128
INT32_MAX = 2**31 - 1

SMALL_M_MAX_ROWS = 14  #: kSmallMMaxRows
MEDIUM_M_MAX_ROWS = 72  #: kMediumMMaxRows
SMALL_M_MAX_EXPERTS = 65535  #: kSmallMMaxExperts
SMALL_M_MAX_SEGMENTS = 1024  #: kSmallMMaxSegments: experts, or segments
SMALL_M_BLOCK_N = 64  #: kSmallMBlockN

MAX_EXPERTS_PER_LAUNCH = 2048  #: kMaxExpertsPerLaunch: of slabs, multiplied at once
MAX_WORKSPACE_BYTES = 8 << 30  #: kMaxWorkspaceBytes
CLUSTER_N = 256  #: kClusterN
SLICES_PER_BLOCK_M = 4  #: kSlicesPerBlockM: flags of an M block of sm90_mx_large_m
MEDIUM_M_BLOCK_K = 128  #: kMediumMBlockK: with the factors of their scales
WIDE, FLAG, TILE, FACTOR = 2, 4, 16, 4  #: bytes


@dataclass(frozen=True)
class MxGemm:
    """One grouped GEMM with MX weights on SM90.

    Attributes:
        masked: whether its rows stand in slabs.
        experts: of this rank.
        m: rows of a slab, or of all segments.
        n, k: of the weight, in values.
        expected_m: the hint of a masked call; the contiguous one has none.
        group_size: columns of a row that share a scale, 32 or 128.
    """

    masked: bool
    experts: int
    m: int
    n: int
    k: int
    expected_m: int
    group_size: int

    @property
    def expected_rows(self) -> int:
        """Rows of one of the experts, of which there must be some, as the kernels are chosen by:
        `expected_rows` in mx_grouped_gemm.cu."""
        if self.masked:
            return self.expected_m
        more = ceil_div(self.m, CONTIG_ALIGNMENT) - self.experts
        if more < 0:
            return 1
        if more == 0:
            return SMALL_M_MAX_ROWS + 1
        return more * CONTIG_ALIGNMENT // self.experts + 1

    @property
    def batch_m_blocks(self) -> int:
        """M blocks (kBlockM rows) of a slab, or of all segments."""
        return ceil_div(self.m, TILE_ROWS)

    @property
    def max_m_blocks(self) -> int:
        """M blocks that one launch takes, at most."""
        weight_tiles = ceil_div(self.n, CLUSTER_N)
        return min(MAX_WORKSPACE_BYTES // self._m_block_bytes, INT32_MAX // 2 // weight_tiles)

    @property
    def m_blocks(self) -> int:
        """M blocks of one launch: all, or those of slabs of equal parts."""
        if not self.masked:
            return self.batch_m_blocks
        parts = ceil_div(
            self.experts, min(MAX_EXPERTS_PER_LAUNCH, self.max_m_blocks // self.batch_m_blocks)
        )
        return ceil_div(self.experts, parts) * self.batch_m_blocks

    @property
    def kernel(self) -> str | None:
        """The kernel that runs: "sm90_mx_small_m", "sm90_mx_medium_m", "sm90_mx_large_m" or
        "Triton"; None where none does."""
        if 0 in (self.m, self.n, self.experts, self.k):
            return None
        if self._small_m():
            return "sm90_mx_small_m"
        if not self._cluster():
            return "Triton"
        return "sm90_mx_medium_m" if self._medium_m else "sm90_mx_large_m"

    def _small_m(self) -> bool:
        items = self.experts if self.masked else ceil_div(self.m, CONTIG_ALIGNMENT)
        return (
            self.expected_rows <= SMALL_M_MAX_ROWS
            and self.k % K_MULTIPLE == 0
            and self.k <= INT32_MAX
            and self.n <= INT32_MAX - SMALL_M_BLOCK_N
            and self.m <= INT32_MAX
            and self.experts <= SMALL_M_MAX_EXPERTS
            and items <= SMALL_M_MAX_SEGMENTS
        )

    def _cluster(self) -> bool:
        """`run_cluster_kernels` in mx_launch.cuh."""
        return (
            self.k % K_MULTIPLE == 0
            and self.n % 8 == 0
            and (self.masked or self.m % TILE_ROWS == 0)
            and self.n * self.k <= INT32_MAX
            and self.k <= INT32_MAX // TILE_ROWS
            and self.m <= INT32_MAX
            and self.batch_m_blocks <= self.max_m_blocks
        )

    @property
    def _medium_m(self) -> bool:
        return self.expected_rows <= MEDIUM_M_MAX_ROWS

    @property
    def _m_block_bytes(self) -> int:
        if not self._medium_m:
            return TILE_ROWS * self.k * WIDE
        factors = 4 if self.group_size == 32 else 1
        return self.k // MEDIUM_M_BLOCK_K * TILE_ROWS * (MEDIUM_M_BLOCK_K + FACTOR * factors)

    def workspace(self) -> dict[str, int]:
        """Bytes of what the kernel allocates and drops, by name."""
        if self.kernel not in ("sm90_mx_medium_m", "sm90_mx_large_m"):
            return {}
        rows, tiles = self.m_blocks * self._m_block_bytes, (self.m_blocks + 1) * TILE
        if self._medium_m:
            return {"prepared rows": rows, "tiles": tiles}
        return {
            "bf16 rows": rows,
            "flags": self.m_blocks * SLICES_PER_BLOCK_M * FLAG,
            "tiles": tiles,
        }
