"""One grouped GEMM by its sizes and formats: `d[rows of e] = a[rows of e] @ b[e]^T`.

Whoever plans, compiles or runs one describes it so. The same fields stand in
`csrc/gemm/heuristics.h`, which says which kernel runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import Layout
from .recipes import Granularity


@dataclass(frozen=True)
class GroupedGemmSpec:
    """One grouped GEMM; a dense one is one expert that owns every row.

    Attributes:
        layout: of its rows; None for a dense GEMM.
        experts: of this rank.
        m: rows of an expert's slab, or of all segments.
        n, k: of the weight, in values.
        expected_m: rows that an expert is expected to have, the hint of a masked GEMM, at least 1;
            0 for the others, which have none.
        granularity_a, granularity_b: of the scales; None for bf16, and where the default of the
            architecture is meant.
        fp4: whether a weight holds two e2m1 codes a byte.
    """

    layout: Layout | None
    experts: int
    m: int
    n: int
    k: int
    expected_m: int = 0
    granularity_a: Granularity | None = None
    granularity_b: Granularity | None = None
    fp4: bool = False

    @property
    def masked(self) -> bool:
        return self.layout == Layout.MASKED

    @property
    def grouped(self) -> bool:
        return self.layout is not None

    @property
    def rows(self) -> tuple[int, ...]:
        """Sizes of a without its columns."""
        return (self.experts, self.m) if self.masked else (self.m,)
