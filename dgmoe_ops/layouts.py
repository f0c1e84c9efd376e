"""Row counts, paddings and scale strides of the MoE layouts, for ints and SymInts alike.

The same formulas stand in `csrc/common/layout.h`; the contract test holds the two together through
fake and real ops.
"""

from __future__ import annotations

import enum

import torch

TILE_ROWS = 128  #: rows of the tile within which a GEMM may read past an expert's valid rows
SLAB_ROWS = 256  #: an expert's slab grows in these steps
CONTIG_ALIGNMENT = 128  #: rows to which a segment of the contiguous layout is padded
TMA_ELEMENTS = 4  #: fp32 or int32 elements in the 16 bytes that TMA aligns a leading dimension to
GROUPS_PER_WORD = 4  #: UE8M0 bytes in an int32
WEIGHT_BLOCK = 128


class ScaleForm(enum.IntEnum):
    """How a scale tensor stands in memory."""

    ROW_MAJOR = 0  #: float32 (.., mn, groups), contiguous: exchange between ranks
    MN_MAJOR = 1  #: float32 (.., mn, groups), strides (1, round_up(mn, 4)): SM90
    #: int32 (.., mn, ceil(groups / 4)), four exponent bytes a word, MN-major: SM100, SM120
    PACKED_UE8M0 = 2


def ceil_div(a, b):
    return (a + b - 1) // b


def round_up(a, b):
    return ceil_div(a, b) * b


def slab_rows(tokens):
    """Rows an expert's slab has for `tokens` tokens: no expert can get more rows than there are
    tokens."""
    return round_up(tokens, SLAB_ROWS)


def contig_rows(assignments, experts, alignment=CONTIG_ALIGNMENT):
    """The most rows that any routing of `assignments` over `experts` needs, each segment padded to
    `alignment`."""
    if experts == 0:
        return 0
    used = torch.sym_min(assignments, experts)
    return alignment * (used + (assignments - used) // alignment)


def expected_rows(tokens, top_k: int, num_experts: int):
    """Rows an expert has under even routing: the hint that DeepGEMM picks its tile by. At least
    1."""
    return torch.sym_max(1, ceil_div(tokens * top_k, max(1, num_experts)))


def scale_sizes_and_strides(batch, mn, groups, form: int):
    """Sizes and strides of the scales of `mn` rows in `groups` groups; `batch` None makes two
    dimensions."""
    columns = ceil_div(groups, GROUPS_PER_WORD) if form == ScaleForm.PACKED_UE8M0 else groups
    leading = round_up(mn, TMA_ELEMENTS)
    if form == ScaleForm.ROW_MAJOR:
        strides, batch_stride = (columns, 1), mn * columns
    else:
        strides, batch_stride = (1, leading), leading * columns
    if batch is None:
        return (mn, columns), strides
    return (batch, mn, columns), (batch_stride, *strides)


def masked_bytes(tokens, experts: int, hidden: int, inter: int, quantized: bool):
    """Peak bytes of the masked layout: one GEMM's input and output, for the larger of the two GEMMs
    and the step between.

    `hidden` and `inter` are the padded sizes that the weights have.
    """
    value, scale = (1, 4) if quantized else (2, 0)

    def operand(k):
        return k * value + (ceil_div(k, WEIGHT_BLOCK) * scale)

    gemm1 = operand(hidden) + 2 * inter * 2
    between = 2 * inter * 2 + operand(inter)
    gemm2 = operand(inter) + hidden * 2
    return experts * slab_rows(tokens) * max(gemm1, between, gemm2)


def choose_layout(tokens, top_k: int, experts: int, peak_bytes, budget_bytes: int | None) -> str:
    """Choose between the masked and the contiguous layout from static facts alone.

    `budget_bytes` None means a device on which the slab buys nothing (CPU): contiguous. With fewer
    rows than an eighth
    of the experts a masked GEMM spends its time walking empty experts: contiguous. Otherwise
        masked, where the slab
    fits the budget: it pads no expert to the alignment.
    """
    if budget_bytes is None or tokens * top_k * 8 <= experts or peak_bytes > budget_bytes:
        return "contig"
    return "masked"
