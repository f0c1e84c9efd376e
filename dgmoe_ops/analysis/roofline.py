"""What a call must move and compute at least, and the time that a GPU on paper needs for it."""

from __future__ import annotations

from dataclasses import dataclass

from ..formats.layouts import Layout
from .gpus import Gpu
from .memory import BF16, WORD, Call


@dataclass(frozen=True)
class Work:
    """Bytes moved and operations of one stage.

    Attributes:
        name: as in the table of stages.
        moved: bytes read and written, every operand once.
        flops: floating-point operations of the matrix products; others are not counted.
    """

    name: str
    moved: int
    flops: int

    def seconds(self, gpu: Gpu, quantized: bool) -> float:
        """Time below which no GPU of this kind runs the stage: the longer of moving and
        computing."""
        return max(self.moved / gpu.hbm_bytes_per_s, self.flops / gpu.flops(quantized))


def work(call: Call, layout: Layout, counts: list[int]) -> tuple[Work, ...]:
    """List the work of each stage for experts with these row counts.

    Only valid rows count, padded columns do: what no kernel could leave out. The contiguous fp8
    path quantises before it places, and so moves the quantised tokens once more.
    """
    rows, used = sum(counts), sum(count > 0 for count in counts)
    tokens = call.tokens

    def operand(columns: int) -> int:
        return columns * call.value_bytes + call.scale_bytes(None, 4, columns, call.form) // 4

    x, act = operand(call.padded_hidden), operand(call.padded_inter)
    gate_up, y = 2 * call.padded_inter * BF16, call.out_columns * BF16
    w13, w2 = call.weight_bytes_per_expert()
    index = WORD * tokens * call.top_k
    place = tokens * call.hidden * BF16 + rows * x + 2 * index
    if layout == Layout.CONTIG and call.recipe.quantized:
        place += 2 * tokens * x
    per_row = 2 * call.padded_inter
    return (
        Work("place", place, 0),
        Work("gemm1", rows * (x + gate_up) + used * w13, 2 * rows * per_row * call.padded_hidden),
        Work("activation", rows * (gate_up + act), 0),
        Work(
            "gemm2", rows * (act + y) + used * w2, 2 * rows * call.padded_inter * call.out_columns
        ),
        Work("combine", rows * y + 2 * index + tokens * call.hidden * BF16, 0),
    )


def floor_seconds(call: Call, counts: list[int], gpu: Gpu) -> float:
    """Time below which no layer of this shape runs: the weights of the used experts read once, or
    the matrix products of the routed rows, whichever takes longer. Unpadded, scales left out."""
    weights = 3 * call.hidden * call.intermediate
    used, rows = sum(count > 0 for count in counts), sum(counts)
    read = used * call.recipe.row_bytes(weights) / gpu.hbm_bytes_per_s
    return max(read, 2 * rows * weights / gpu.flops(call.recipe.quantized))
