"""The workspace of a grouped GEMM with MX weights on SM90: which kernel takes it, and what that
allocates.

Mirrors `run_mx_product` (csrc/gemm/sm90/mx_product_cuda.cu) and those it asks: `run_few_rows`,
which allocates nothing, `run_some_rows` and `run_many_rows`, in the `_cuda.cu` of those names; for
operands on 16 bytes and without `DGMOE_SANITY_CHECK`. Triton takes what all refuse, and allocates
nothing either. A test holds the numbers against those sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..formats.layouts import CONTIG_ALIGNMENT, TILE_ROWS, ceil_div

ARCH = 90
K_MULTIPLE = 128
INT32_MAX = 2**31 - 1

FEW_ROWS = 14  #: kFewRowsMost
SOME_ROWS = 72  #: kSomeRowsMost
FEW_EXPERTS = 65535  #: kFewRowsExperts
FEW_ITEMS = 1024  #: kFewRowsItems: experts, or segments
FEW_WEIGHTS = 64  #: kFewRowsWeights

PAIR_EXPERTS = 2048  #: kPairMostExperts: of slabs, multiplied at once
PAIR_ROW_BYTES = 8 << 30  #: kPairMostBytes
PAIR_WEIGHTS = 256  #: kPairWeights
PAIR_SLICES = 4  #: kPairSlices: flags of a unit of many rows
SOME_COLUMNS = 128  #: kSomeRowsColumns: with the factors of their scales
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
        `expected_rows` in mx_product_cuda.cu."""
        if self.masked:
            return self.expected_m
        more = ceil_div(self.m, CONTIG_ALIGNMENT) - self.experts
        if more < 0:
            return 1
        if more == 0:
            return FEW_ROWS + 1
        return more * CONTIG_ALIGNMENT // self.experts + 1

    @property
    def batch_units(self) -> int:
        """Units of rows (kPairUnit) of a slab, or of all segments."""
        return ceil_div(self.m, TILE_ROWS)

    @property
    def most_units(self) -> int:
        """Units of rows that are multiplied at once, at most."""
        weight_tiles = ceil_div(self.n, PAIR_WEIGHTS)
        return min(PAIR_ROW_BYTES // self._unit_bytes, INT32_MAX // 2 // weight_tiles)

    @property
    def units(self) -> int:
        """Units of rows that are multiplied at once: all, or those of slabs of equal parts."""
        if not self.masked:
            return self.batch_units
        parts = ceil_div(self.experts, min(PAIR_EXPERTS, self.most_units // self.batch_units))
        return ceil_div(self.experts, parts) * self.batch_units

    @property
    def kernel(self) -> str | None:
        """Who multiplies: "few rows", "some rows", "many rows" or "Triton"; None where nothing is
        multiplied."""
        if 0 in (self.m, self.n, self.experts, self.k):
            return None
        if self._few_rows():
            return "few rows"
        if not self._pairs():
            return "Triton"
        return "some rows" if self._some else "many rows"

    def _few_rows(self) -> bool:
        items = self.experts if self.masked else ceil_div(self.m, CONTIG_ALIGNMENT)
        return (
            self.expected_rows <= FEW_ROWS
            and self.k % K_MULTIPLE == 0
            and self.k <= INT32_MAX
            and self.n <= INT32_MAX - FEW_WEIGHTS
            and self.m <= INT32_MAX
            and self.experts <= FEW_EXPERTS
            and items <= FEW_ITEMS
        )

    def _pairs(self) -> bool:
        """`run_pairs` in pair_cuda.cuh."""
        return (
            self.k % K_MULTIPLE == 0
            and self.n % 8 == 0
            and (self.masked or self.m % TILE_ROWS == 0)
            and self.n * self.k <= INT32_MAX
            and self.k <= INT32_MAX // TILE_ROWS
            and self.m <= INT32_MAX
            and self.batch_units <= self.most_units
        )

    @property
    def _some(self) -> bool:
        return self.expected_rows <= SOME_ROWS

    @property
    def _unit_bytes(self) -> int:
        if not self._some:
            return TILE_ROWS * self.k * WIDE
        factors = 4 if self.group_size == 32 else 1
        return self.k // SOME_COLUMNS * TILE_ROWS * (SOME_COLUMNS + FACTOR * factors)

    def workspace(self) -> dict[str, int]:
        """Bytes of what the kernel allocates and drops, by name."""
        if self.kernel not in ("some rows", "many rows"):
            return {}
        rows, tiles = self.units * self._unit_bytes, (self.units + 1) * TILE
        if self._some:
            return {"prepared rows": rows, "tiles": tiles}
        return {"bf16 rows": rows, "flags": self.units * PAIR_SLICES * FLAG, "tiles": tiles}
