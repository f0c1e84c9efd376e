"""Conversions of expert weights, an expert at a time: beyond the result, the memory of one expert.

Gate and up are converted apart. Rows and columns are padded with zeros where they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .._sanity import first_where
from ..formats.layouts import WEIGHT_BLOCK, ScaleLayout, ceil_div, scale_sizes_and_strides
from ..formats.recipes import BF16, FP8_BLOCK, MXFP4, MXFP8, Recipe
from ..formats.weights import E8M0, WeightFormat
from ..ops.scale import pack_ue8m0
from ..ops.weights import (
    dequant_mxfp4_to_fp8,
    quant_block_fp8,
    quant_mxfp4,
    quant_mxfp8,
    requant_block_ue8m0,
)

_UNIT = 127  # the exponent byte of scale 1
Halves = tuple[torch.Tensor, ...]  #: matrices of gate and of up, or the one of w2


def halves_of(rows: torch.Tensor, halves: int, gate_up_interleave: int = 0) -> Halves:
    """Gate rows and up rows of one expert: views, but for copies where chunks of rows take turns.

    Args:
        rows: (n, ..).
        halves: 2, or 1 for w2, which comes back as it is.
        gate_up_interleave: rows of gate, then of up, in turn; 0: all of gate, then all of up.
    """
    if halves == 1:
        return (rows,)
    size = rows.shape[0] // 2
    if not gate_up_interleave:
        return rows[:size], rows[size:]
    turns = rows.unflatten(0, (size // gate_up_interleave, 2, gate_up_interleave))
    return turns[:, 0].flatten(0, 1), turns[:, 1].flatten(0, 1)


def row_of_half(half: int, row: int, size: int, gate_up_interleave: int) -> int:
    """Where row `row` of a half of `size` rows stands in `halves_of`'s argument."""
    if not gate_up_interleave:
        return half * size + row
    turn, rest = divmod(row, gate_up_interleave)
    return (2 * turn + half) * gate_up_interleave + rest


class Source(Protocol):
    """Expert weights of one form that are read an expert at a time."""

    form: WeightFormat
    experts: int
    device: torch.device  #: of what is made of them

    @property
    def whole(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """(experts, n, k) values, and scales, where they lie in memory in the order of the result:
        it may share them."""

    def weight(self, expert: int) -> Halves:
        """(rows, columns) of each half."""

    def scale(self, expert: int) -> Halves | None:
        """Of each half a scale a block, a tensor (no dimensions) or a row and 32 columns."""

    def scale_place(self, expert: int, half: int, at: tuple[int, ...]) -> tuple[str, tuple]:
        """Where element `at` of the scales of a half stands: who complains and the name of the
        tensor, and the index there."""


class Stacked:
    """The `Source` of tensors that hold all experts, as `prepare_weights` takes them."""

    def __init__(
        self,
        arg: str,
        form: WeightFormat,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        halves: int,
        gate_up_interleave: int = 0,
    ) -> None:
        self._arg, self.form, self._halves = arg, form, halves
        self._weight, self._scale, self._gate_up_interleave = weight, scale, gate_up_interleave
        self.experts, self.device = weight.shape[0], weight.device

    @property
    def whole(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return None if self._gate_up_interleave else (self._weight, self._scale)

    def weight(self, expert: int) -> Halves:
        return halves_of(self._weight[expert], self._halves, self._gate_up_interleave)

    def scale(self, expert: int) -> Halves | None:
        scale = self._scale
        if scale is None:
            return None
        if self.form is WeightFormat.FP8_TENSOR:
            each = scale[expert] if scale.dim() else scale
            return each.expand(self._halves).unbind()
        # Blocks do not take turns.
        gate_up_interleave = 0 if self.form is WeightFormat.FP8_BLOCK else self._gate_up_interleave
        return halves_of(scale[expert], self._halves, gate_up_interleave)

    def scale_place(self, expert: int, half: int, at: tuple[int, ...]) -> tuple[str, tuple]:
        name = f"dgmoe_ops.prepare_weights: {self._arg}_scale"
        dim = self._scale.dim()
        if self.form is WeightFormat.FP8_TENSOR:
            pair = dim == 2 and self._scale.shape[1] == 2
            return name, (expert, half if pair else 0)[:dim]
        interleave = 0 if self.form is WeightFormat.FP8_BLOCK else self._gate_up_interleave
        size = self._scale.shape[1] // self._halves
        return name, (expert, row_of_half(half, at[0], size, interleave), *at[1:])


@dataclass(frozen=True)
class Goal:
    """What one weight tensor becomes.

    Attributes:
        recipe, packed: the recipe, and whether scales are packed UE8M0.
        halves: 2 where rows are gate rows, then up rows.
        rows: of a half, after padding.
        columns: values of a row, after padding.
        search: choose FP4 exponents by least squared error.
    """

    recipe: Recipe
    packed: bool
    halves: int
    rows: int
    columns: int
    search: bool

    @property
    def n(self) -> int:
        return self.halves * self.rows

    @property
    def stored_columns(self) -> int:
        """Elements of a row of the result."""
        return self.columns // self.recipe.values_per_element

    def apart(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The halves of (n, ..)."""
        return [rows[h * self.rows : (h + 1) * self.rows] for h in range(self.halves)]


def write_padded(out: torch.Tensor, matrix: torch.Tensor, fill: int = 0) -> None:
    """Write a matrix into the corner of `out` and `fill` elsewhere; bytes stay bytes."""
    rows, columns = matrix.shape
    if matrix.element_size() == 1:  # fp8 knows neither fill nor, on some devices, copies
        matrix, out = matrix.view(torch.uint8), out.view(torch.uint8)
    out[:rows, :columns].copy_(matrix)
    out[rows:].fill_(fill)
    out[:rows, columns:].fill_(fill)


def check_scale(source: Source, expert: int, half: int, scale: torch.Tensor) -> None:
    """Refuse what cannot be the scale of a weight, by the tensor's name and the first index.

    Bytes must not be 255, which is NaN; byte 0 is 2^-127. Floats must be positive and finite, and
    powers of two from 2^-127 on where the form has UE8M0 scales.
    """
    if scale.device.type == "meta":
        return
    if scale.element_size() == 1:
        byte = scale.view(torch.uint8)
        wrong, must = byte == 255, "hold no exponent byte 255 (NaN)"
    elif source.form in (WeightFormat.MXFP4, WeightFormat.MXFP8):
        bits = scale.contiguous().view(torch.int32)
        power = (bits & 0x7FFFFF == 0) & (bits > 0) & (bits != 0x7F800000)
        wrong = ~(power | (bits == 0x00400000))
        must = "hold powers of two from 2^-127 to 2^127 (UE8M0)"
    else:
        wrong, must = ~((scale > 0) & scale.isfinite()), "hold positive and finite scales"
    if not wrong.any():
        return
    at = first_where(wrong)
    got = int(byte[at]) if scale.element_size() == 1 else float(scale[at])
    name, index = source.scale_place(expert, half, at)
    place = f" at {list(index)}" if index else ""
    raise ValueError(f"{name} must {must}, got {got}{place}")


def exponent_bytes(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes of scales that `check_scale` has passed."""
    if scale.dtype != torch.float32:
        return scale.contiguous().view(torch.uint8)
    bits = scale.contiguous().view(torch.int32)
    return torch.where(bits == 0x00400000, 0, bits >> 23).to(torch.uint8)


def _to_block(goal: Goal, form: WeightFormat, weight, scale):
    """A half to e4m3 and its block scales, as fp32 or as exponent bytes."""
    if form is WeightFormat.FLOAT:
        return quant_block_fp8(weight, goal.packed)
    if form is WeightFormat.MXFP4:
        return dequant_mxfp4_to_fp8(weight, exponent_bytes(scale))
    if form is WeightFormat.FP8_TENSOR:
        blocks = [ceil_div(size, WEIGHT_BLOCK) for size in weight.shape]
        scale = scale.expand(blocks)
    return requant_block_ue8m0(weight, scale) if goal.packed else (weight, scale)


def _to_mx(goal: Goal, form: WeightFormat, weight, scale):
    """A half to MXFP8 or MXFP4 and its exponent bytes."""
    if form is not WeightFormat.FLOAT:
        return weight, exponent_bytes(scale)
    if goal.recipe is MXFP8:
        return quant_mxfp8(weight)
    even = torch.nn.functional.pad(weight, (0, 1)) if weight.shape[-1] % 2 else weight
    return quant_mxfp4(even, goal.search)


def _to_bf16(goal: Goal, form: WeightFormat, weight, scale):
    return weight, None


_STEPS = {BF16.name: _to_bf16, FP8_BLOCK.name: _to_block, MXFP8.name: _to_mx, MXFP4.name: _to_mx}


class _Scales:
    """The scales of all experts, filled an expert at a time."""

    def __init__(self, goal: Goal, experts: int, device: torch.device) -> None:
        self.goal = goal
        _, columns = goal.recipe.weight_block
        self.groups = ceil_div(goal.columns, columns)
        if not goal.packed:
            shape = (experts, ceil_div(goal.n, WEIGHT_BLOCK), self.groups)
            self.tensor = torch.empty(shape, dtype=torch.float32, device=device)
            return
        sizes, strides = scale_sizes_and_strides(
            experts, goal.n, self.groups, ScaleLayout.PACKED_UE8M0
        )
        # Rows of alignment slack are copied along, so the allocation covers them.
        self.lines = torch.empty((experts, strides[0]), dtype=torch.int32, device=device)
        self.tensor = self.lines.as_strided(sizes, strides)

    def put(self, expert: int, halves: list[torch.Tensor]) -> None:
        if not self.goal.packed:
            scale = torch.cat(
                [s.view(E8M0).float() if s.element_size() == 1 else s for s in halves]
            )
            self.tensor[expert] = scale
            return
        if self.goal.recipe is FP8_BLOCK:
            byte = torch.cat(halves).repeat_interleave(WEIGHT_BLOCK, 0)[: self.goal.n]
        else:
            size = (self.goal.n, self.groups)
            byte = torch.empty(size, dtype=torch.uint8, device=self.tensor.device)
            for out, scale in zip(self.goal.apart(byte), halves, strict=True):
                write_padded(out, scale, _UNIT)
        words = self.lines.shape[1]
        self.lines[expert] = pack_ue8m0(byte).as_strided((words,), (1,))


def _shared(goal: Goal, source: Source) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Values in memory that stay as they are, so that the result shares them, and their scales."""
    native = {
        BF16.name: WeightFormat.FLOAT,
        MXFP8.name: WeightFormat.MXFP8,
        MXFP4.name: WeightFormat.MXFP4,
    }
    same_form = source.form is native.get(goal.recipe.name)
    if goal.recipe is FP8_BLOCK and not goal.packed:
        same_form = source.form in (WeightFormat.FP8_BLOCK, WeightFormat.FP8_TENSOR)
    if source.whole is None or not same_form:
        return None
    weight, scale = source.whole
    dtypes = (torch.int8, torch.uint8) if goal.recipe is MXFP4 else (goal.recipe.weight_dtype,)
    if tuple(weight.shape[1:]) != (goal.n, goal.stored_columns) or weight.dtype not in dtypes:
        return None
    return weight.contiguous().view(goal.recipe.weight_dtype), scale


def convert(
    goal: Goal, source: Source, advance: Callable[[], object]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convert the weights of a source; returns (experts, n, k) values and their scales."""
    shared = _shared(goal, source)
    if shared is None:
        shape = (source.experts, goal.n, goal.stored_columns)
        q = torch.empty(shape, dtype=goal.recipe.weight_dtype, device=source.device)
    else:
        q, scale = shared
        blocks = source.form is WeightFormat.FP8_BLOCK and not goal.packed
        if scale is None:
            return q, None
        if blocks and scale.dtype == torch.float32:
            for e in range(source.experts):
                for half, its_scale in enumerate(source.scale(e)):
                    check_scale(source, e, half, its_scale)
            return q, scale.contiguous()
    scales = _Scales(goal, source.experts, source.device) if goal.recipe.quantized else None
    step = _STEPS[goal.recipe.name]
    for e in range(source.experts):
        given = source.scale(e) or (None,) * goal.halves
        for half, its_scale in enumerate(given):
            if its_scale is not None:
                check_scale(source, e, half, its_scale)
        made = []
        for out, half, its_scale in zip(goal.apart(q[e]), source.weight(e), given, strict=True):
            values, one = step(goal, source.form, half, its_scale)
            if shared is None:
                write_padded(out, values)
            made.append(one)
        if scales is not None:
            scales.put(e, made)
        advance()
    return q, None if scales is None else scales.tensor
