"""Conversions of expert weights, an expert at a time: beyond the result, the memory of one expert.

Every conversion pads rows and columns with zeros; gate and up rows are padded apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ._checkpoint import E8M0, F8, Form
from .layouts import MX_GROUP, WEIGHT_BLOCK, ScaleForm, ceil_div, scale_sizes_and_strides
from .ops.scale import pack_ue8m0
from .ops.weights import (
    dequant_mxfp4_to_fp8,
    quant_block_fp8,
    quant_mxfp4,
    quant_mxfp8,
    requant_block_ue8m0,
)
from .recipes import BF16, FP8_BLOCK, MXFP4, MXFP8, Recipe

_UNIT = 127  # the exponent byte of scale 1


@dataclass(frozen=True)
class Goal:
    """What one weight tensor becomes.

    Attributes:
        arg: its name in errors.
        recipe, packed: the recipe, and whether scales are packed UE8M0.
        halves: 2 where rows are gate rows, then up rows.
        rows: of a half, after padding.
        columns: values of a row, after padding.
        search: choose FP4 exponents by least squared error.
    """

    arg: str
    recipe: Recipe
    packed: bool
    halves: int
    rows: int
    columns: int
    search: bool

    @property
    def n(self) -> int:
        return self.halves * self.rows

    def pad(self, matrix: torch.Tensor, columns: int, fill: int = 0) -> torch.Tensor:
        """Pad one expert's matrix; fp8 is padded as bytes, of which zero is a zero."""
        if matrix.dtype == F8:
            return self.pad(matrix.view(torch.uint8), columns).view(F8)
        if matrix.numel() == 0:
            return matrix.new_full((self.n, columns), fill)
        halves = matrix.reshape(self.halves, -1, matrix.shape[-1])
        extra = (0, columns - matrix.shape[-1], 0, self.rows - halves.shape[1])
        padded = torch.nn.functional.pad(halves, extra, value=fill) if any(extra) else halves
        return padded.reshape(self.n, columns)


def exponent_bytes(arg: str, scale: torch.Tensor, expert: int) -> torch.Tensor:
    """UE8M0 bytes of one expert's scales, exact: float32 must be powers of two, +0 is byte 0."""
    if scale.dtype != torch.float32:
        return scale.contiguous().view(torch.uint8)
    bits = scale.contiguous().view(torch.int32)
    byte = torch.where(bits == 0x00400000, 0, bits >> 23)
    byte = torch.where(scale.isnan(), 255, byte)
    legal = (bits & 0x7FFFFF == 0) & (bits >= 0) & ~scale.isinf()
    wrong = ~(legal | (bits == 0x00400000) | scale.isnan())
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"dgmoe_ops.prepare_weights: {arg}_scale must hold powers of two from 2^-127 to 2^127"
            f" (UE8M0), got {float(scale[at])} in expert {expert} at {at}"
        )
    return byte.to(torch.uint8)


def tensor_blocks(scale: torch.Tensor, like: torch.Tensor, halves: int) -> torch.Tensor:
    """A scale a tensor, an expert or a half of an expert as a scale a 128x128 block."""
    experts, n, k = like.shape
    rows = ceil_div(n // halves, WEIGHT_BLOCK)
    scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    each = scale.expand(experts, halves).view(experts, halves, 1, 1)
    whole = each.expand(experts, halves, rows, ceil_div(k, WEIGHT_BLOCK))
    return whole.reshape(experts, halves * rows, ceil_div(k, WEIGHT_BLOCK))


def _to_block(goal: Goal, form: Form, weight, scale, expert: int):
    """One expert to e4m3 and its block scales, as fp32 or as exponent bytes."""
    if form is Form.FLOAT:
        return quant_block_fp8(goal.pad(weight, goal.columns), goal.packed)
    if form is Form.MXFP4:
        # Scales of the padding must not count in the largest one of a block.
        byte = goal.pad(exponent_bytes(goal.arg, scale, expert), goal.columns // MX_GROUP)
        return dequant_mxfp4_to_fp8(goal.pad(weight, goal.columns // 2), byte)
    q = goal.pad(weight, goal.columns)
    return requant_block_ue8m0(q, scale) if goal.packed else (q, scale)


def _to_mx(goal: Goal, form: Form, weight, scale, expert: int):
    """One expert to MXFP8 or MXFP4 and its exponent bytes."""
    if form is not Form.FLOAT:
        byte = exponent_bytes(goal.arg, scale, expert)
    elif goal.recipe is MXFP8:
        weight, byte = quant_mxfp8(weight)
    else:
        even = torch.nn.functional.pad(weight, (0, weight.shape[-1] % 2))
        weight, byte = quant_mxfp4(even, goal.search)
    columns = goal.columns // goal.recipe.values_per_element
    return goal.pad(weight, columns), goal.pad(byte, ceil_div(goal.columns, MX_GROUP), _UNIT)


def _to_bf16(goal: Goal, form: Form, weight, scale, expert: int):
    return goal.pad(weight, goal.columns).to(torch.bfloat16), None


_STEPS = {BF16.name: _to_bf16, FP8_BLOCK.name: _to_block, MXFP8.name: _to_mx, MXFP4.name: _to_mx}


class _Scales:
    """The scales of all experts, filled an expert at a time."""

    def __init__(self, goal: Goal, experts: int, device: torch.device) -> None:
        self.goal = goal
        _, columns = goal.recipe.weight_block
        groups = ceil_div(goal.columns, columns)
        if not goal.packed:
            shape = (experts, ceil_div(goal.n, WEIGHT_BLOCK), groups)
            self.tensor = torch.empty(shape, dtype=torch.float32, device=device)
            return
        sizes, strides = scale_sizes_and_strides(experts, goal.n, groups, ScaleForm.PACKED_UE8M0)
        # Rows of alignment slack are copied along, so the allocation covers them.
        self.lines = torch.empty((experts, strides[0]), dtype=torch.int32, device=device)
        self.tensor = self.lines.as_strided(sizes, strides)

    def put(self, expert: int, scale: torch.Tensor) -> None:
        if not self.goal.packed:
            self.tensor[expert] = scale.view(E8M0) if scale.dtype == torch.uint8 else scale
            return
        if self.goal.recipe is FP8_BLOCK:
            scale = scale.repeat_interleave(WEIGHT_BLOCK, 0)[: self.goal.n]
        words = self.lines.shape[1]
        self.lines[expert] = pack_ue8m0(scale).as_strided((words,), (1,))


def _keeps(goal: Goal, form: Form, weight: torch.Tensor) -> bool:
    """Whether the values stay as they are, so that the result shares their memory."""
    native = {BF16.name: Form.FLOAT, MXFP8.name: Form.MXFP8, MXFP4.name: Form.MXFP4}
    same_form = form is native.get(goal.recipe.name)
    if goal.recipe is FP8_BLOCK:
        same_form = form is Form.FP8_BLOCK and not goal.packed
    columns = goal.columns // goal.recipe.values_per_element
    same_shape = tuple(weight.shape[1:]) == (goal.n, columns)
    dtypes = (torch.int8, torch.uint8) if goal.recipe is MXFP4 else (goal.recipe.weight_dtype,)
    return same_form and same_shape and weight.dtype in dtypes


def convert(
    goal: Goal,
    form: Form,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    advance: Callable[[], object],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convert (experts, n, k) weights of a form; returns values and scales."""
    if form is Form.FP8_TENSOR:
        scale, form = tensor_blocks(scale, weight, goal.halves), Form.FP8_BLOCK
    experts = weight.shape[0]
    keep = _keeps(goal, form, weight)
    if keep:
        q = weight.contiguous().view(goal.recipe.weight_dtype)
        if scale is None or (not goal.packed and scale.dtype == torch.float32):
            return q, None if scale is None else scale.contiguous()
    else:
        columns = goal.columns // goal.recipe.values_per_element
        dtype = goal.recipe.weight_dtype
        q = torch.empty((experts, goal.n, columns), dtype=dtype, device=weight.device)
    scales = _Scales(goal, experts, weight.device) if goal.recipe.quantized else None
    step = _STEPS[goal.recipe.name]
    for e in range(experts):
        values, one = step(goal, form, weight[e], None if scale is None else scale[e], e)
        if not keep:
            q[e] = values.view(q.dtype)
        if scales is not None:
            scales.put(e, one)
        advance()
    return q, None if scales is None else scales.tensor
