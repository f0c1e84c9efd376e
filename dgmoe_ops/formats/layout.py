"""The layouts in which the grouped GEMMs take rows, and what goes with each by name.

What goes with a layout by number is in `layouts`. The ops and `csrc/gemm/grouped_gemm.h` use the
same names.
"""

from __future__ import annotations

import enum


class Layout(str, enum.Enum):
    """Where the rows of an expert are.

    A member equals its name as a string, which is what public arguments take.
    """

    MASKED = "masked"  #: (experts, m, k): a slab an expert, of which masked_m[e] rows are valid
    CONTIG = "contig"  #: (m, k): a segment an expert; m_indices has the expert of each row, or -1

    def __str__(self) -> str:
        return self.value

    @property
    def has_slabs(self) -> bool:
        """Whether rows have a leading dimension of experts; the GEMMs then take expected_m."""
        return self is Layout.MASKED

    @property
    def index_name(self) -> str:
        """The tensor that tells the GEMMs and activations whose rows are valid."""
        return _INDEX_NAMES[self]

    def op(self, family: str) -> str:
        """The name of an op of a family that has one for each layout."""
        return f"{family}_{self.value}"


#: what `layout=` takes: a layout by name, or "auto" to have one chosen
LAYOUT_ARGUMENTS = ("auto", *(layout.value for layout in Layout))
_INDEX_NAMES = {Layout.MASKED: "masked_m", Layout.CONTIG: "m_indices"}
