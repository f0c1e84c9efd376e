"""One call of a warm-up: its bytes, and the op with operands made for it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch

from ..backends.scopes import contiguous_alignment
from ..formats.layouts import (
    CONTIG_ALIGNMENT,
    ScaleLayout,
    ceil_div,
    round_up,
    scale_sizes_and_strides,
)
from ..formats.recipes import RECIPES
from .plan import KernelCall

_ONE = {torch.float32: 1.0, torch.int32: 0x7F7F7F7F}  # as a scale, by its dtype


def weight_scale_sizes(call: KernelCall, packed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a weight's scales."""
    recipe = RECIPES[call.recipe]
    rows, columns = recipe.weight_block
    groups = ceil_div(call.spec.k, columns)
    if packed or recipe.mx:
        form = ScaleLayout.PACKED_UE8M0
        return scale_sizes_and_strides(call.spec.experts, call.spec.n, groups, form)
    blocks = ceil_div(call.spec.n, rows)
    return scale_sizes_and_strides(call.spec.experts, blocks, groups, ScaleLayout.ROW_MAJOR)


def weight_bytes(call: KernelCall, packed: bool) -> int:
    """Bytes of a call's weight and its scales."""
    recipe = RECIPES[call.recipe]
    values = call.spec.experts * call.spec.n * recipe.row_bytes(call.spec.k)
    if not recipe.quantized:
        return values
    (experts, _, columns), (stride, rows, _) = weight_scale_sizes(call, packed)
    return values + experts * stride * 4


def operand_bytes(call: KernelCall, packed: bool) -> int:
    """Bytes of everything else that a call reads and writes."""
    recipe, masked = RECIPES[call.recipe], call.spec.masked
    rows = call.spec.experts * call.spec.m if masked else call.spec.m
    total = rows * call.spec.k * recipe.activation_dtype.itemsize + rows * call.spec.n * 2
    total += 4 * (call.spec.experts if masked else rows)
    if recipe.quantized:
        groups = ceil_div(call.spec.k, recipe.group_size)
        columns = ceil_div(groups, 4) if packed or recipe.mx else groups
        slabs = call.spec.experts if masked else 1
        total += slabs * round_up(call.spec.m, 4) * columns * 4
    return total


def alignment_scope(call: KernelCall) -> contextlib.AbstractContextManager:
    """The scope in which a caller with such segments calls; the library's tile follows from it."""
    if call.alignment in (None, CONTIG_ALIGNMENT):
        return contextlib.nullcontext()
    return contiguous_alignment(call.alignment)


@dataclass
class OpRunner:
    """Runs a call as the layer would, through torch.ops.dgmoe.

    Values are zeros and scales ones, and no row belongs to an expert. A weight is the layer's own
    where there is one; else it is allocated once, and let go when a call needs another.

    Attributes:
        device: where.
        packed: whether the scales are packed UE8M0, where no weight says it.
        own: weights and scales by `KernelCall.weight`.
    """

    device: torch.device
    packed: bool = False
    own: dict[tuple, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    _made: dict[tuple, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)

    def _scales(self, sizes_and_strides, packed: bool) -> torch.Tensor:
        dtype = torch.int32 if packed else torch.float32
        scale = torch.empty_strided(*sizes_and_strides, dtype=dtype, device=self.device)
        return scale.fill_(_ONE[dtype])

    def _weight(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        if call.weight in self.own:
            return self.own[call.weight]
        if call.weight not in self._made:
            self._made.clear()
            recipe = RECIPES[call.recipe]
            size = (call.spec.experts, call.spec.n, call.spec.k // recipe.values_per_element)
            weight = torch.zeros(size, dtype=recipe.weight_dtype, device=self.device)
            scale = None
            if recipe.quantized:
                packed = self.packed or recipe.mx
                scale = self._scales(weight_scale_sizes(call, packed), packed)
            self._made[call.weight] = weight, scale
        return self._made[call.weight]

    def __call__(self, call: KernelCall) -> None:
        recipe = RECIPES[call.recipe]
        b, b_scale = self._weight(call)
        a = torch.zeros(
            (*call.spec.rows, call.spec.k), dtype=recipe.activation_dtype, device=self.device
        )
        size, value = (call.spec.experts, 0) if call.spec.masked else (call.spec.m, -1)
        where = torch.full((size,), value, dtype=torch.int32, device=self.device)
        arguments = [a, b, where]
        if recipe.quantized:
            packed = b_scale.dtype == torch.int32
            form = ScaleLayout.PACKED_UE8M0 if packed else ScaleLayout.MN_MAJOR
            batch = call.spec.experts if call.spec.masked else None
            groups = ceil_div(call.spec.k, recipe.group_size)
            sizes = scale_sizes_and_strides(batch, call.spec.m, groups, form)
            arguments = [a, self._scales(sizes, packed), b, b_scale, where]
        if call.spec.masked:
            arguments.append(call.spec.expected_m)
        named = {"recipe_a": call.spec.granularity_a, "recipe_b": call.spec.granularity_b}
        given = named if recipe.mx else {}
        with alignment_scope(call):
            getattr(torch.ops.dgmoe, call.op)(*arguments, **given)

    def release(self) -> None:
        """Let go of the weights that it allocated."""
        self._made.clear()
